"""Two methods at equal time: what is run, and the verdicts on the claim that the first is better."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridtrain.errors import ConfigError
from hybridtrain.reports.tables import MARKDOWN
from hybridvalidation.study.duel import duel_figures, duel_words
from hybridvalidation.study.order import next_runs
from hybridvalidation.study.protocol import Made, StudyFile, StudyRun, read_study_file
from hybridvalidation.study.report import study_text, verdict_sentence
from tiny_studies import METHOD, finished, study_of

SEEDS = list(range(10, 30))
SLOW = {"beta": 0.9, "alpha": 1.0}
DUEL: dict[str, Any] = {
    "tuning_seed": 0, "seeds": SEEDS, "horizons": [12],
    "methods": [METHOD, {"name": "ademamix", "description": "every step", "slow": SLOW}],
    "duel": {
        "first": {"method": "slow_gradient", "lr": 0.01, "num_steps": 13},
        "second": {"method": "ademamix", "lr": 0.02, "num_steps": 12},
    },
}  # fmt: skip


def made_with(study: StudyFile, gap: float, noise: float = 0.01, *, diverges: int | None = None) -> Made:
    """Return all runs; the first side ends ``gap`` nats above the second, give or take the noise."""

    def loss_of(run: StudyRun) -> float | None:
        if run.method == "ademamix":
            return 3.0
        return None if run.seed == diverges else 3.0 + gap + noise * float(np.random.default_rng(run.seed).normal())

    return finished(study, loss_of)


def test_only_both_sides_are_run_at_their_own_lengths_and_rates() -> None:
    study = study_of(**DUEL)
    runs = next_runs(study, {})
    assert {(run.method, run.lr, run.num_steps) for run in runs} == {
        ("slow_gradient", 0.01, 13),
        ("ademamix", 0.02, 12),
    }
    assert [run.seed for run in runs[::2]] == SEEDS
    assert not next_runs(study, made_with(study, 0.0))


@pytest.mark.parametrize(("gap", "word", "short"), [
    (-0.02, "claim is met", "better than AdEMAMix at equal time: -0.0"),
    (0.02, "refuted", "worse than AdEMAMix"),
    (0.0005, "claim is not met", "not significantly different from AdEMAMix"),
])  # fmt: skip
def test_the_verdict_follows_the_interval(gap: float, word: str, short: str) -> None:
    study, made = study_of(**DUEL), made_with(study_of(**DUEL), gap)
    assert study.duel is not None
    assert word in verdict_sentence(study, made)
    assert duel_words(study, study.duel, made).startswith(short)
    assert duel_words(study, study.duel, {}) == "not yet compared with AdEMAMix at equal time"


def test_an_open_answer_tells_the_seeds_that_would_decide_it() -> None:
    study = study_of(**DUEL)
    made = made_with(study, 0.003)
    assert study.duel is not None
    figures = duel_figures(study, study.duel, made)
    assert f"{figures.deciding_seeds:,} seeds would decide" in verdict_sentence(study, made)
    shift, spread = abs(sum(figures.differences) / 20), 0.01
    assert figures.deciding_seeds == pytest.approx((2.8 * spread / shift) ** 2, rel=0.5)
    text = study_text(study, made, {}, Path(), MARKDOWN)
    assert "| slow_gradient" in text
    assert "| ademamix" in text


def test_no_verdict_before_the_last_seed_nor_beside_a_run_that_diverged() -> None:
    study = study_of(**DUEL)
    made = dict(made_with(study, -0.02))
    last = next(key for key, record in made.items() if record.run.seed == SEEDS[-1])
    del made[last]
    assert verdict_sentence(study, made).startswith("Not finished: slow_gradient ends -0.0")
    assert verdict_sentence(study, {}).startswith("Not finished: the registered claim")
    assert verdict_sentence(study, made_with(study, 0.0, noise=0.0)).endswith("the registered claim is not met.")
    diverged = made_with(study, -0.02, diverges=12)
    assert "1 pairs diverged" in verdict_sentence(study, diverged)
    assert study.duel is not None
    assert duel_words(study, study.duel, diverged) == "not better than AdEMAMix at equal time: 1 pairs diverged"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [1, 2]}, "seeds: [1, 2] must be 5 or more, without tuning_seed (0)"),
        ({"seeds": [0, 1, 2, 3, 4]}, "without tuning_seed (0)"),
        (
            {"duel": DUEL["duel"] | {"second": {"method": "ademamics", "lr": 0.1, "num_steps": 3}}},
            "did you mean 'adema",
        ),
        ({"duel": DUEL["duel"] | {"second": {"method": "ademamix", "lr": 0.1, "num_steps": 0}}}, "has 0 steps"),
    ],
)
def test_a_faulty_comparison_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, ConfigError)) as raised:
        study_of(**(DUEL | changes))
    assert message in str(raised.value)


def test_the_registered_comparison_has_twenty_fresh_seeds() -> None:
    study = read_study_file(Path("scenarios"), "predict-ademamix-0.1m")
    tuned = read_study_file(Path("scenarios"), "tuned-0.1m")
    assert isinstance(study, StudyFile)
    assert isinstance(tuned, StudyFile)
    assert len(study.seeds) == 20
    assert not set(study.seeds) & {*tuned.seeds, study.tuning_seed}
