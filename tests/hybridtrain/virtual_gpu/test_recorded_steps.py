"""benchmarks/recorded_steps.toml, the register of published training steps, and what its loader refuses."""

import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hybridtrain.errors import ConfigError

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
REGISTER = BENCHMARKS / "recorded_steps.toml"


@pytest.fixture(scope="module")
def recorded() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("recorded_steps")


@pytest.fixture(scope="module")
def register(recorded: ModuleType) -> Any:
    return recorded.load_register(REGISTER)


def test_counts_are_those_that_were_registered(register: Any) -> None:
    """A row that is added or goes after the first plan is seen."""
    sources, steps = zip(*register.steps(), strict=True)
    assert len(steps) == 966
    assert len({source.repository for source in sources}) == 29
    assert len({step.card for step in steps}) == 26
    assert len({step.kind for step in steps}) == 17
    assert Counter(source.role for source in sources) == {"fit": 559, "predict": 334, "held": 73}
    assert Counter(step.confidence for step in steps) == {"high": 471, "medium": 363, "low": 132}


def test_no_row_is_doubled(register: Any) -> None:
    """Not at its place, nor as the same recipe of one repository with another figure."""
    recipes = Counter(
        (source.repository, replace(step, value=1.0, at="", confidence="high", assumed=""))
        for source, step in register.steps()
    )
    assert [recipe for recipe, count in recipes.items() if count > 1] == []
    assert len({source.id for source in register.source}) == len(register.source)


def test_a_repository_has_one_role_and_three_are_held_in_part(register: Any) -> None:
    roles = defaultdict(set)
    for source in register.source:
        roles[source.repository].add(source.role)
    assert all(len(found - {"held"}) <= 1 for found in roles.values())
    held = {source.id for source in register.source if source.role == "held"}
    assert held == {"llm-foundry-h100", "fms-acceleration-granite", "tinyllama"}


def test_fit_and_predict_both_have_most_kinds_of_trainer(register: Any) -> None:
    kinds = {role: {step.kind for _, step in register.steps(role)} for role in ("fit", "predict")}
    assert len(kinds["fit"]) >= 6
    assert len(kinds["predict"]) >= 6


def test_every_commit_is_whole_and_every_entry_is_used(register: Any) -> None:
    assert all(re.fullmatch("[0-9a-f]{40}", source.commit) for source in register.source)
    steps = [step for _, step in register.steps()]
    used = {step.model.partition(":")[0] for step in steps} | {step.card for step in steps}
    assert {*register.shapes, *register.foreign, *register.absent_cards} <= used


@pytest.mark.parametrize(
    ("shape", "published"), [("mpt-125m", 125311488), ("mpt-1b", 1315950592), ("mpt-30b", 29975214080)]
)
def test_shapes_have_the_published_parameters(register: Any, shape: str, published: int) -> None:
    """The NumParams column of llm-foundry's tables, at 2,048 tokens."""
    assert register.shapes[shape].num_params == published


@pytest.mark.parametrize(
    ("found", "put", "fault"),
    [
        ('["mpt-30b", 1, 21, 8192,', '["mpt-31b", 1, 21, 8192,', "source[0].rows[0].model: 'mpt-31b' is no preset"),
        ('card = "a100-80gb"', 'card = "a100-81gb"', "source[0].rows[0].card: 'a100-81gb' is neither"),
        ('["mpt-30b", 1, 21, 8192,', '["mpt-30b", 1, 21,', "$.source[0].rows[0]: found 6 values; 7 are required"),
        ('["mpt-30b", 1, 21, 8192,', '["mpt-30b", 1, 0, 8192,', "$.source[0].rows[0]: accumulation: 0 must be"),
        (
            'quantity = "tokens_s_card"',
            'quantity = "tokens_h"',
            "$.source[0].rows[0].quantity: 'tokens_h' is not one of",
        ),
        ('confidence = "high"', 'confidence = "low"', "$.source[0].rows[0]: assumed: '' does not fit low"),
        ('quantity = "tokens_s_card"', 'quantity = "run_s"', "$.source[0].rows[0]: steps: 0 does not fit run_s"),
        ("cards = 8,", "cards = 1,", "$.source[0].rows[0]: sharding: zero3 does not fit 1 cards"),
    ],
)
def test_a_faulty_row_is_named(recorded: ModuleType, tmp_path: Path, found: str, put: str, fault: str) -> None:
    text = REGISTER.read_text(encoding="utf-8")
    assert found in text
    path = tmp_path / "steps.toml"
    path.write_text(text.replace(found, put, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(fault)):
        recorded.load_register(path)
