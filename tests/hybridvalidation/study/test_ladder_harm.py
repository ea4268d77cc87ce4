"""One-sided tests of harm at several numbers of seeds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridvalidation.judge.statistics import power_below, spent_levels
from hybridvalidation.study.equivalence import Comparison, Finding, judge_size, last_analysis
from hybridvalidation.study.order import next_runs, of_one_processor
from hybridvalidation.study.protocol import LadderFile, LadderRecord, LadderRun
from hybridvalidation.study.report import study_text
from tiny_ladders import ARMS, RUNG, finished, ladder_of

NOWHERE = Path("nowhere")
SEEDS = list(range(20))
HARM_RUNG = RUNG | {"seeds": SEEDS, "analyses": [10, 20], "deviation_nats": 0.004}
THREE = [ARMS[0], ARMS[1], ARMS[3]]
"""vanilla, mixed and the control."""


def ladder(**changes: Any) -> LadderFile:
    return ladder_of(rungs=[HARM_RUNG, HARM_RUNG | {"name": "large"}], arms=THREE, margin_nats=0.0075, **changes)


def losses(mixed: float, deviation: float) -> Any:
    """Return losses: mixed deviates from vanilla by a mean and a fixed pattern, the control by 0.05 more."""

    def loss(run: LadderRun) -> float:
        wave = deviation * (1 if run.seed % 2 else -1)
        return {"vanilla": 3.0, "mixed": 3.0 + mixed + wave, "nearest": 3.05 + wave}[run.arm] + run.seed / 100

    return loss


def judged(study: LadderFile, made: dict[str, LadderRecord]) -> dict[str, Comparison]:
    return {one.configuration.name: one for one in judge_size(study, made, study.rungs[0])}


def test_what_shows_no_harm_gets_no_more_seeds_and_goes_on_to_the_next_size() -> None:
    study = ladder()
    made = finished(study, losses(0.001, 0.002))
    small = judged(study, made)
    assert (small["mixed"].finding, small["nearest"].finding) == (Finding.NO_HARM, Finding.WORSE)
    assert {len(one.seeds) for one in small.values()} == {10}
    assert sum(record.run.rung == "small" for record in made.values()) == 3 * 10
    assert {record.run.arm for record in made.values() if record.run.rung == "large"} == {"vanilla", "mixed", "nearest"}


def test_what_is_undecided_gets_all_seeds_and_does_not_go_on() -> None:
    study = ladder()
    made = finished(study, losses(0.007, 0.02))
    small = judged(study, made)
    assert small["mixed"].finding is Finding.INCONCLUSIVE
    assert len(small["mixed"].seeds) == 20
    assert {record.run.arm for record in made.values() if record.run.rung == "large"} == {"vanilla", "nearest"}
    bound = small["mixed"].largest_harm
    assert bound is not None
    assert bound > study.margin_nats
    assert f"| {bound:.4f}" in study_text(study, made, {}, NOWHERE, "github")


def test_pairs_of_two_processors_do_not_count_and_their_seed_is_made_again() -> None:
    study = ladder()
    made = {
        key: replace(record, processor="b" if (record.run.seed, record.run.arm) == (3, "mixed") else "a")
        for key, record in finished(study, losses(0.001, 0.002)).items()
        if record.run.rung == "small"
    }
    assert judged(study, made)["mixed"].finding is Finding.UNFINISHED
    kept = of_one_processor(study, made, "c")
    assert {run.seed for run in next_runs(study, kept)} == {3}
    assert {run.arm for run in next_runs(study, kept)} == {"vanilla", "mixed", "nearest"}
    assert {run.arm for run in next_runs(study, of_one_processor(study, made, "a"))} == {"mixed"}


def test_a_seed_that_is_complete_elsewhere_stays() -> None:
    study = ladder()
    made = {key: replace(record, processor="a") for key, record in finished(study, losses(0.0, 0.002), 14).items()}
    kept = of_one_processor(study, made, "b")
    assert {record.run.seed for record in kept.values()} == {0, 1, 2, 3}  # of seed 4 two runs of three were made
    assert {run.seed for run in next_runs(study, kept)} == {4, 5, 6, 7, 8, 9}


def test_a_closed_ladder_makes_no_runs_and_says_why() -> None:
    study = ladder(closed="too few seeds.")
    assert next_runs(study, {}) == []
    assert "Closed: too few seeds." in study_text(study, {}, {}, NOWHERE, "github")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"analyses": [10, 15]}, "analyses: [10, 15] must rise to the number of seeds (20)"),
        ({"analyses": [2, 20]}, "analyses: [2, 20] must begin with 5 or more"),
        ({"deviation_nats": 0.0}, "deviation_nats: 0.0 must be above 0"),
    ],
)
def test_analyses_that_decide_nothing_are_refused(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(Exception, match=r"analyses|deviation") as error:
        ladder_of(rungs=[HARM_RUNG | changes])
    assert fault in str(error.value)


def test_sizes_of_one_ladder_test_alike() -> None:
    with pytest.raises(Exception, match="rungs: analyses must be in all of them, or in none"):
        ladder_of(rungs=[RUNG, HARM_RUNG | {"name": "large"}])


def test_a_decided_comparison_keeps_its_seeds_wherever_it_is_asked_for() -> None:
    study = ladder()
    made = finished(study, losses(0.001, 0.002))
    own, reference = study.configuration("mixed"), study.baseline
    assert last_analysis(study, made, study.rungs[0], own, reference) == judged(study, made)["mixed"]


def test_all_analyses_together_spend_the_error_rate() -> None:
    """At a true difference of the margin, some analysis shows no harm at most as often as stated."""
    counts, alpha, generator = [10, 20, 30], 0.05, np.random.default_rng(0)
    levels = spent_levels(counts, alpha)
    assert sum(levels) == pytest.approx(alpha)
    study = ladder_of(
        rungs=[HARM_RUNG | {"seeds": list(range(30)), "analyses": counts}], arms=ARMS[:2], margin_nats=0.0075
    )
    found = []
    for _ in range(100):
        harm = dict(enumerate(generator.normal(0.0075, 0.008, 30)))
        made = finished(study, lambda run, harm=harm: 3.0 + (harm[run.seed] if run.arm == "mixed" else 0.0))  # type: ignore[misc]
        found.append(judge_size(study, made, study.rungs[0])[0].finding)
    assert found.count(Finding.NO_HARM) <= 100 * alpha + 3 * (100 * alpha) ** 0.5
    assert found.count(Finding.WORSE) <= 100 * alpha + 3 * (100 * alpha) ** 0.5


def test_the_power_is_how_often_a_test_passes() -> None:
    generator, count, level = np.random.default_rng(1), 15, 0.0125
    samples = generator.normal(0.002, 0.0075, (4000, count))
    distance = (0.0075 - samples.mean(axis=1)) / (samples.std(axis=1, ddof=1) / count**0.5)
    passed = float((distance >= 2.5096).mean())  # Student's t of 14 degrees at 1 - 0.0125
    assert power_below(0.0075, 0.0075, count, level, 0.002) == pytest.approx(passed, abs=0.03)
