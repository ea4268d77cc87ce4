"""The documents' names of options are read as ours, told once; two names of one option are a fault."""

import logging
from dataclasses import dataclass, fields

import pytest

from hybridtrain.config.aliases import KINDS, OPTIONS, log_alias
from hybridtrain.config.decode import decode
from hybridtrain.errors import ConfigError
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.optimizations import OPTIMIZATIONS, GradAccumulation
from hybridtrain.plan.compose import Optimization
from hybridtrain.stacks import STACK_UNIONS, Stack

UNIONS = {Optimization: OPTIMIZATIONS}
CLASSES = {cls.__name__: cls for cls in (*OPTIMIZATIONS.values(), HybridConfig)}
PAIRS = [(owner, alias, name) for owner, names in OPTIONS.items() for alias, name in names.items()]


@dataclass(frozen=True)
class File:
    optimization: Optimization


def read(**table: object) -> Optimization:
    return decode(File, {"optimization": table}, source="file", unions=UNIONS).optimization


@pytest.fixture(autouse=True)
def _nothing_was_told() -> None:
    log_alias.cache_clear()


@pytest.mark.parametrize(("owner", "alias", "name"), PAIRS)
def test_an_alias_gives_what_its_option_gives_and_is_told(
    owner: str, alias: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    cls = CLASSES[owner]
    assert alias not in {field.name for field in fields(cls)}
    value = next(field.default for field in fields(cls) if field.name == name) + 1
    assert decode(cls, {alias: value}, source="mine.toml") == decode(cls, {name: value}, source="mine.toml")
    assert [record.message for record in caplog.records] == [
        f"mine.toml: {alias} is read as {name}; both names are allowed"
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_an_alias_is_told_once_however_often_it_stands_there(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        read(kind="grad_accumulation", accumulation_steps=8)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("owner", "alias", "name"), PAIRS)
def test_two_names_of_one_option_are_refused(owner: str, alias: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"\$\.{name}: is given 2 times, as {alias}, {name}; keep one of them"):
        decode(CLASSES[owner], {alias: 8, name: 8}, source="file")


def test_two_aliases_of_one_option_are_refused_too() -> None:
    with pytest.raises(ConfigError, match="as interval, checkpoint_interval; keep one"):
        read(kind="gradient_checkpointing", interval=8, checkpoint_interval=8)


def test_an_alias_wins_over_a_preset_as_its_option_does() -> None:
    found = read(kind="grad_accumulation", preset="aggressive", accumulation_steps=32)
    assert isinstance(found, GradAccumulation)
    assert (found.grad_accum_steps, found.schedule) == (32, "vertical")


@pytest.mark.parametrize("alias", KINDS)
def test_a_kind_has_the_documents_name_as_well(alias: str, caplog: pytest.LogCaptureFixture) -> None:
    assert alias not in OPTIMIZATIONS
    assert read(kind=alias) == read(kind=KINDS[alias])
    assert f"{alias} is read as {KINDS[alias]}" in caplog.text


def test_a_wrong_value_of_an_alias_is_told_by_the_name_of_its_option() -> None:
    with pytest.raises(ConfigError, match="recompute_every: 0 must be at least 1"):
        read(kind="gradient_checkpointing", interval=0)
    with pytest.raises(ConfigError, match=r"recompute_every: found 'eight' \(a string\); an integer is required"):
        read(kind="gradient_checkpointing", interval="eight")


def test_a_file_of_before_may_call_its_description_says() -> None:
    stack = decode(Stack, {"name": "mine", "says": "as it was"}, source="stack", unions=STACK_UNIONS)
    assert stack.description == "as it was"
    with pytest.raises(ConfigError, match=r"description: is given 2 times, as says, description|description, says"):
        decode(Stack, {"name": "mine", "says": "a", "description": "b"}, source="stack", unions=STACK_UNIONS)
