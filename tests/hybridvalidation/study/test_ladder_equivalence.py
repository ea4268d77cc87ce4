import re
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

import pytest

from hybridtrain.reports.tables import MARKDOWN
from hybridtrain.units import format_count
from hybridvalidation.judge.verdict import Status, Verdict
from hybridvalidation.scenario import Target
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.pages.targets import _with_quality
from hybridvalidation.study import quality as quality_module
from hybridvalidation.study.equivalence import (
    Comparison,
    Finding,
    extrapolate,
    holm,
    judge_size,
    largest_deviation,
    last_analysis,
    t_test,
    tost,
)
from hybridvalidation.study.order import next_runs
from hybridvalidation.study.protocol import LadderFile, LadderMade, LadderRun
from hybridvalidation.study.quality import judge_ladder, stack_quality
from hybridvalidation.study.report import study_text
from tiny_ladders import ARMS, RUNG, finished, ladder_of

SEEDS = list(range(10))


def arm(name: str, chunk: int) -> dict[str, Any]:
    """Return an arm that is another one by the slices of its loss: two that compute the same share their runs."""
    return {"name": name, "description": "-", "optimizations": [{"kind": "chunked_loss", "loss_chunk_tokens": chunk}]}


CONTROL = ARMS[3]
MORE: dict[str, Any] = {
    "rungs": [RUNG | {"seeds": SEEDS, "more_seeds": list(range(10, 40))}],
    "arms": [ARMS[0], arm("near", 1), arm("far", 2), arm("noisy", 3), CONTROL],
}  # fmt: skip
"""Near and far: a deviation of 0.001; noisy: one of 0.01, which ten seeds cannot put within 0.005."""
SHIFTS = {"vanilla": 0.0, "near": 0.001, "far": 0.02, "noisy": 0.0, "nearest": 0.3}


def wave(seed: int, phase: float) -> float:
    """Return normal quantiles in a fixed order: means of ten that follow each other are zero."""
    return NormalDist().inv_cdf(((seed * 3 + phase) % 10 + 0.5) / 10)


def loss_of(run: LadderRun) -> float:
    spread = {"vanilla": 0.0, "noisy": 0.01}.get(run.arm, 0.001)
    return 2.0 + 0.1 * wave(run.seed, 0) + SHIFTS[run.arm] + spread * wave(run.seed, 1)


def judged(ladder: LadderFile, made: LadderMade) -> dict[str, Comparison]:
    return {one.configuration.name: one for one in judge_size(ladder, made, ladder.rungs[0])}


def test_tost_is_the_larger_of_two_one_sided_tests() -> None:
    # By hand: mean 0.001, standard error 0.001 / sqrt(5 / 2.5) = 0.000707; t = 0.004 / 0.000707 = 5.657 with 4 degrees.
    values = [-0.001, 0.0, 0.001, 0.002, 0.003]
    assert tost(values, 0.005) == pytest.approx(0.00241, abs=1e-5)
    assert tost([-value for value in values], 0.005) == pytest.approx(tost(values, 0.005))
    assert tost(values, 0.001) == pytest.approx(0.5), "a mean at the margin"
    assert t_test(values) == pytest.approx(0.2302, abs=1e-4), "t = 1.414 with 4 degrees"


def test_equal_runs_are_equivalent_and_not_different() -> None:
    assert (tost([0.0] * 3, 0.005), t_test([0.0] * 3)) == (0.0, 1.0)
    assert (tost([0.006] * 3, 0.005), t_test([0.006] * 3)) == (1.0, 0.0)


def test_holms_odds_are_those_of_his_paper() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_verdicts_come_with_the_last_seed_and_not_before() -> None:
    ladder = ladder_of(**MORE)
    for count in (5, 49):
        made = finished(ladder, loss_of, max_runs=count)
        missing = [one for one in judged(ladder, made).values() if not one.is_finished]
        assert missing
        assert {one.finding for one in missing} == {Finding.UNFINISHED}
    first = judged(ladder, finished(ladder, loss_of, max_runs=50))
    findings = {name: one.finding for name, one in first.items()}
    assert findings == {
        "near": Finding.EQUIVALENT, "far": Finding.WORSE, "noisy": Finding.INCONCLUSIVE, "nearest": Finding.WORSE
    }  # fmt: skip


def test_a_second_look_is_for_what_the_first_leaves_open() -> None:
    ladder = ladder_of(**MORE)
    made = finished(ladder, loss_of, max_runs=50)
    assert {run.arm for run in next_runs(ladder, made)} == {"vanilla", "noisy"}
    assert {run.seed for run in next_runs(ladder, made)} == set(range(10, 40))
    done = finished(ladder, loss_of)
    assert next_runs(ladder, done) == []
    found = judged(ladder, done)
    assert found["noisy"].finding is Finding.EQUIVALENT
    assert len(found["noisy"].pairs) == 40
    assert len(found["near"].pairs) == 10


def test_a_second_look_begins_with_the_arms_that_figures_wait_for() -> None:
    arms = [*MORE["arms"][:4], arm("noisier", 4), CONTROL]
    ladder = ladder_of(**MORE | {"arms": arms, "first": ["noisier"]})

    def loss(run: LadderRun) -> float:
        return loss_of(replace(run, arm="noisy") if run.arm == "noisier" else run)

    made = finished(ladder, loss, max_runs=60)
    runs = next_runs(ladder, made)
    assert len(set(runs)) == len(runs) == 90
    assert {(run.arm, run.seed) for run in runs[:60]} == {
        (name, seed) for name in ("vanilla", "noisier") for seed in range(10, 40)
    }
    assert {run.arm for run in runs[60:]} == {"noisy"}


def test_a_rung_can_be_made_before_those_before_it() -> None:
    rungs = [RUNG | {"seeds": SEEDS}, RUNG | {"name": "next", "seeds": SEEDS}]
    ladder = ladder_of(**MORE | {"rungs": rungs})
    assert {run.rung for run in next_runs(ladder, {})} == {RUNG["name"]}
    assert {run.rung for run in next_runs(ladder, {}, "next")} == {"next"}
    made = finished(ladder, loss_of, max_runs=50)
    assert next_runs(ladder, made, str(RUNG["name"])) == []


def test_better_is_told_too_and_divergence_is_worse() -> None:
    ladder = ladder_of(**MORE | {"rungs": [RUNG | {"seeds": SEEDS}]})

    def loss(run: LadderRun) -> float | None:
        if run.arm == "near" and run.seed == 3:
            return None
        return loss_of(run) - (0.04 if run.arm == "far" else 0.0)

    found = judged(ladder, finished(ladder, loss))
    assert (found["far"].finding, found["near"].finding) == (Finding.BETTER, Finding.WORSE)
    assert found["near"].num_diverged == 1


def test_more_arms_need_more_certainty() -> None:
    few = ladder_of(rungs=[RUNG | {"seeds": SEEDS}], arms=[ARMS[0], arm("near", 1)])
    more = [arm(f"noisy{number}", 4 + number) for number in range(9)]
    many = ladder_of(rungs=[RUNG | {"seeds": SEEDS}], arms=[*MORE["arms"][:4], *more])

    def loss(run: LadderRun) -> float:
        return loss_of(replace(run, arm="noisy") if run.arm.startswith("noisy") else run)

    odds = [judged(ladder, finished(ladder, loss))["near"].p_equivalent for ladder in (few, many)]
    assert odds[1] == pytest.approx(12 * odds[0])


def test_the_largest_deviation_is_where_an_arm_of_no_difference_just_passes() -> None:
    ladder = ladder_of(**MORE)  # three arms of family stack, two looks
    for count in (10, 40):
        most = largest_deviation(ladder, ladder.rungs[0], count)
        unit = [1.0 if seed % 2 else -1.0 for seed in range(count)]
        for share, passes in ((0.999, True), (1.001, False)):
            differences = [share * most * value / stdev(unit) for value in unit]
            assert (3 * tost(differences, ladder.margin_nats) <= ladder.alpha / 2) is passes


def test_what_holds_says_that_its_stack_trains_worse() -> None:
    ladder = ladder_of(**MORE)
    found = judged(ladder, finished(ladder, loss_of, max_runs=50))
    row = Verdict(
        target="t",
        description="s",
        status=Status.HOLDS,
        evidence=None,
        value=None,
        stack="far",
        reason="It fits.",
        because="fits",
    )
    told = _with_quality(row, found["far"]).reason
    assert told.startswith("It fits. Executed at ")
    assert " it trains worse than vanilla: +0.0200 [" in told
    for other, judged_one in ((row, found["near"]), (row, None), (replace(row, status=Status.REFUTED), found["far"])):
        assert _with_quality(other, judged_one) is other


def test_the_table_tells_tried_rates_and_the_second_look(tmp_path: Path) -> None:
    rung = MORE["rungs"][0] | {"lrs": [0.1, 0.2, 0.3]}
    ladder = ladder_of(**(MORE | {"rungs": [rung]}))
    losses = {0.1: 2.3, 0.2: 2.2, 0.3: 2.1}
    made = finished(ladder, lambda run: losses[run.lr] if run.seed == ladder.tuning_seed else loss_of(run), max_runs=53)
    text = study_text(ladder, made, {}, tmp_path, MARKDOWN)
    assert (
        "vanilla 0.1: 2.3000, 0.2: 2.2000, 0.3: 2.1000; chosen 0.3, an end of the range tried: another may be better"
        in text
    )
    assert "| 0 of 60 " in text  # vanilla and noisy, thirty seeds each
    made = finished(ladder, lambda run: abs(run.lr - 0.2) if run.seed == ladder.tuning_seed else 2.0, max_runs=52)
    text = study_text(ladder, made, {}, tmp_path, MARKDOWN)
    assert "chosen 0.2." in text
    assert " of 60 " not in text


def test_seeds_that_cannot_settle_it_are_told(tmp_path: Path) -> None:
    texts = []
    for more in (range(10, 40), [10]):
        ladder = ladder_of(**(MORE | {"rungs": [RUNG | {"seeds": SEEDS, "more_seeds": list(more)}]}))
        texts.append(study_text(ladder, finished(ladder, loss_of, max_runs=50), {}, tmp_path, MARKDOWN))
    assert "too few at their present" not in texts[0]
    assert re.search(r"with 11 seeds, too few at their present deviation for noisy \(0\.\d{4}\)\.", texts[1])


def test_a_line_is_followed_and_its_interval_grows_with_the_distance() -> None:
    models = [RUNG["model"] | {"width": width, "ffn_width": 2 * width} for width in (16, 32, 64)]
    rungs = [RUNG | {"name": f"w{index}", "model": model} for index, model in enumerate(models)]
    rungs.append(rungs[0] | {"name": "long", "num_steps": 240})
    ladder = ladder_of(rungs=rungs, arms=[ARMS[0], ARMS[1]])
    sizes = {rung.name: rung for rung in ladder.rungs}

    def loss(run: LadderRun) -> float:
        rung = sizes[run.rung]
        exact = 0.01 - 0.002 * (rung.model.num_params / 1e5) if run.arm == "mixed" else 0.0
        return 2.0 + exact + (0.0005 * wave(run.seed, 2) if run.arm == "mixed" else 0.0)

    made = finished(ladder, loss)
    found = [last_analysis(ladder, made, rung, ladder.configuration("mixed"), ladder.baseline) for rung in ladder.rungs]
    near, far = extrapolate(found, 1e5, 20.0), extrapolate(found, 1e10, 20.0)
    assert near is not None
    assert far is not None
    assert near[1] == "parameters and tokens per parameter"
    assert far[0].high - far[0].low > 3 * (near[0].high - near[0].low)
    assert extrapolate(found[:2], 1e10, 20.0) is None, "a line through two points has no interval"
    assert near[0].low < fmean(found[0].differences) + 0.01


@pytest.mark.parametrize(
    ("lost", "spread", "told"),
    [(0.001, 0, "meets the bound too,"), (0.08, 0.01, "does not clearly miss the bound either"), (0.1, 0, "")],
)
def test_a_stated_figure_is_told_beside_what_the_control_loses(lost: float, spread: float, told: str) -> None:
    target = Target(
        id="kept", source=("0",), description="kept", metric="accuracy_retention_pct", direction="min", value=99.0
    )
    stated = [{"id": "kept", "stacks": ["mixed"], "baseline": "vanilla"}]
    ladder = ladder_of(rungs=[RUNG], arms=[*ARMS[:2], CONTROL], targets=stated)
    shifts = {"vanilla": 0.0, "mixed": 0.0, CONTROL["name"]: lost}
    spreads = {"vanilla": 0.0001, "mixed": 0.0001, CONTROL["name"]: spread}
    made = finished(ladder, lambda run: 2.0 + spreads[run.arm] * wave(run.seed, 1) + shifts[run.arm])
    (found,) = judge_ladder(ladder, made, {"kept": target})
    assert f"the control {CONTROL['name']}: " in found.reason
    assert found.is_blunt is bool(told)
    assert found.reason.count("a harmful control,") == bool(told)
    assert f"{CONTROL['name']}, a harmful control, {told}" in found.reason or not told


@pytest.mark.parametrize(("more_seeds", "level"), [([], "95 %"), ([20, 21, 22], "97.5 %")])
def test_a_stated_figure_takes_half_of_the_odds_where_there_is_a_second_look(more_seeds: list[int], level: str) -> None:
    target = Target(
        id="kept", source=("0",), description="kept", metric="accuracy_retention_pct", direction="min", value=99.0
    )
    stated = [{"id": "kept", "stacks": ["mixed"], "baseline": "vanilla"}]
    ladder = ladder_of(rungs=[RUNG | {"more_seeds": more_seeds}], arms=[*ARMS[:2], CONTROL], targets=stated)
    made = finished(ladder, lambda run: 2.0 + 0.01 * wave(run.seed, len(run.arm)))
    (found,) = judge_ladder(ladder, made, {"kept": target})
    assert f"({level} interval " in found.reason


def test_stated_figures_are_judged_on_the_largest_finished_rung() -> None:
    target = Target(
        id="kept", source=("0",), description="kept", metric="accuracy_retention_pct", direction="min", value=99.5
    )
    rungs = [RUNG, RUNG | {"name": "larger", "model": RUNG["model"] | {"width": 32, "ffn_width": 64}}]
    ladder = ladder_of(rungs=rungs, arms=ARMS[:2], targets=[{"id": "kept", "stacks": ["mixed"], "baseline": "vanilla"}])

    def loss(run: LadderRun) -> float:
        return 2.0 + 0.001 * wave(run.seed, 1) + (0.1 if run.arm == "mixed" and run.rung == "larger" else 0.0)

    runs = len([*ladder.arms]) * 3
    (begun,) = judge_ladder(ladder, finished(ladder, loss, max_runs=runs - 1), {"kept": target})
    (small,) = judge_ladder(ladder, finished(ladder, loss, max_runs=runs), {"kept": target})
    (large,) = judge_ladder(ladder, finished(ladder, loss), {"kept": target})
    assert (begun.status, small.status, large.status) == ("unproven", "holds", "refuted")
    assert "0.03M parameters and 0 tokens per parameter, 3 seeds, not the stated size" in large.reason
    assert "smaller ones: 0.01M parameters" in large.reason
    assert large.value == pytest.approx(100 * (0.8 - 0.01) / 0.8, abs=0.01)


def test_a_stack_is_told_by_the_rung_that_tells_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rungs = [RUNG, RUNG | {"name": "larger", "model": RUNG["model"] | {"width": 32, "ffn_width": 64}}]
    ladder = ladder_of(rungs=rungs, arms=ARMS[:2])
    files = ScenarioFiles(tmp_path)
    monkeypatch.setattr(quality_module, "ladders", lambda _folder: [ladder])
    found = {}
    for runs in (0, 4, 6, 10, 12):  # of two arms and three seeds on each rung
        made = finished(ladder, lambda run: 2.0 + 0.001 * wave(run.seed, 1), max_runs=runs)
        monkeypatch.setattr(quality_module, "read_study", lambda _results, _ladder, made=made: made)
        found[runs] = stack_quality(files, tmp_path).get("mixed")
    assert found[0] is None  # nothing was run
    sizes = {runs: (cells[1], cells[3], cells[-1]) for runs, cells in found.items() if cells is not None}
    small = format_count(ladder.rungs[0].model.num_params)
    assert sizes[4] == (small, "2 of 3", "unfinished")
    assert sizes[6] == sizes[10]  # finished on the small one; the larger is not
    assert (sizes[6][:2], sizes[12][1]) == ((small, "3 of 3"), "3 of 3")
    assert sizes[12][0] == format_count(ladder.rungs[1].model.num_params)
    made = finished(ladder, lambda run: None if run.arm == "mixed" and run.rung == "larger" else 2.0)
    monkeypatch.setattr(quality_module, "read_study", lambda _results, _ladder: made)
    told = stack_quality(files, tmp_path)["mixed"]
    assert told[-3:] == ("-", "-", "worse, 3 diverged")  # no smaller rung is told in its place
