import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.errors import ConfigError
from hybridtrain.reports.tables import MARKDOWN
from hybridvalidation.judge.verdict import Status, Verdict
from hybridvalidation.scenario import Target
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.factors import harms, judge_study
from hybridvalidation.study.order import next_runs
from hybridvalidation.study.protocol import BASELINE, Made, StudyFile, StudyRun, check_targets
from hybridvalidation.study.report import study_text, verdict_sentence, write_study
from tiny_studies import ENVIRONMENT, METHOD, finished, record_of, study_of

TARGETS = ScenarioFiles(Path(__file__).parents[3] / "scenarios").targets()
JUDGED_TARGETS = ["hybrid-speedup", "hybrid-quality"]
FIVE = [0, 1, 2, 3, 4]
WIDE = [6, 12, 48]
HARM: dict[str, Any] = {
    "largest_harm_pct": 2.0, "horizons": [12], "target": "no harm",
    "methods": [
        {"name": "adamw-nan", "description": "AdamW, a fault", "role": "control", "disturbance": "nan_gradients"},
        METHOD | {"name": "mild", "description": "as it is"},
        METHOD | {"name": "wild", "description": "much more", "lrs": [0.01, 0.02]},
        METHOD | {"name": "nan", "description": "a fault", "disturbance": "nan_gradients", "against": "adamw-nan"},
    ],
}  # fmt: skip


def reaching(*steps: float, noise: float = 0.3) -> Callable[[StudyRun], float | None]:
    """Return losses: slow_gradient's are those of AdamW of the same seed after so many steps; 0: it diverges."""

    def loss_of(run: StudyRun) -> float | None:
        at = run.num_steps if run.method == BASELINE else steps[run.seed]
        return 5.0 - 0.2 * math.log(at) + noise * run.seed if at else None

    return loss_of


def text_of(study: StudyFile, made: Made) -> str:
    return study_text(study, made, TARGETS, Path(), MARKDOWN)


def sentence(*steps: float, **changes: Any) -> str:
    study = study_of(**changes)
    return verdict_sentence(study, finished(study, reaching(*steps)))


def verdicts(*steps: float, seconds: float = 12.0, cost: float = 36.0, **changes: Any) -> list[Verdict]:
    study = study_of(targets=JUDGED_TARGETS, **changes)
    made = finished(study, reaching(*steps), cpu_seconds=seconds, cost=cost)
    return judge_study(study, made, TARGETS)


def test_a_gain_above_the_registered_one_is_a_met_claim() -> None:
    told = sentence(14.4, 14.5, 14.6)
    assert "compute factor of 1.21 [1.19, 1.23] over 3 seeds" in told
    assert told.endswith("a speed-up; the registered claim (at least 1.1, interval above 1.0) is met.")


def test_a_gain_below_the_registered_one_is_not() -> None:
    assert sentence(14.4, 14.5, 14.6, least_gain=1.3).endswith("below the registered 1.3; the claim is refuted.")
    told = sentence(13.6, 14.2, 14.9, least_gain=1.2)
    assert told.endswith("below the registered 1.2; the claim is not met."), "the interval holds 1.2"


def test_an_interval_with_one_in_it_is_no_speed_up() -> None:
    told = sentence(12, 14.5, 18)
    assert "compute factor of 1.24 [0.61, 1.86]" in told
    assert told.endswith("no speed-up, the interval includes 1.0; the registered claim is not met.")


def test_a_loss_is_told_as_one() -> None:
    assert sentence(9, 9.1, 9.2).endswith("it is slower than AdamW; the registered claim is refuted.")


def test_an_unfinished_study_proves_nothing() -> None:
    study = study_of(targets=JUDGED_TARGETS)
    made = finished(study, reaching(14.4, 14.5, 14.6))
    last = next(key for key, record in made.items() if (record.run.method, record.run.seed) == ("slow_gradient", 2))
    made.pop(last)
    assert verdict_sentence(study, made) == "Not finished: the registered claim (it gains) is unproven."
    assert [verdict.status for verdict in judge_study(study, made, TARGETS)] == [Status.UNPROVEN] * 2
    assert verdict_sentence(study, {}).startswith("Not finished")


def test_few_seeds_do_not_prove_a_small_gain() -> None:
    assert sentence(12.7, 12.8, 12.9, least_gain=1.0).endswith("needs 5 seeds by the protocol; the registered claim "
                                                               "is unproven.")  # fmt: skip
    told = sentence(12.7, 12.8, 12.9, 12.7, 12.8, least_gain=1.0, seeds=FIVE)
    assert told.endswith("the registered claim (at least 1, interval above 1.0) is met.")


def test_a_factor_beyond_the_longest_horizon_may_meet_a_claim_but_not_refute_it() -> None:
    met = sentence(16, 17, 30)  # 1.33, 1.42, >1.50
    assert "(beyond AdamW's horizons where marked: 1.33 1.42 >1.50; the interval is open there)" in met
    assert met.endswith("is met.")
    assert sentence(30, 30, 30, least_gain=1.6).endswith("the claim is not met."), "it may well be more than 1.6"
    slow = study_of(horizons=[8, 12])
    made = finished(slow, reaching(30, 30, 30), cost=60.0)  # at least 12 / 20
    assert verdict_sentence(slow, made).endswith("the registered claim is not met.")


def test_a_factor_below_the_shortest_horizon_may_not_meet_a_claim_but_refute_it() -> None:
    seeds, horizons = FIVE, [11, 12, 48]
    assert sentence(30, 30, 30, 30, 30, seeds=seeds, horizons=horizons).endswith("is met.")
    told = sentence(30, 30, 30, 30, 5, seeds=seeds, horizons=horizons)
    assert "<0.92" in told
    assert told.endswith("the interval includes 1.0; the registered claim is not met.")
    assert sentence(5, 5, 5, horizons=[8, 12]).endswith("it is slower than AdamW; the registered claim is refuted.")


def test_equal_bounds_are_no_narrow_interval() -> None:
    # every seed at "<0.92": counted as values they would say that AdamW is 8 % better, to the digit
    told = sentence(5, 5, 5, horizons=[11, 12])
    assert "0.92 [0.00, 0.92]" in told


def test_a_diverged_seed_is_not_left_out_of_a_claim() -> None:
    told = sentence(14.4, 14.5, 0)
    assert told == "slow_gradient or AdamW diverged with seed 2: the registered claim (it gains) is not met."
    assert "with seed 0, 1, 2" in sentence(0, 0, 0)
    study = study_of()
    assert "diverged" in text_of(study, finished(study, reaching(0, 0, 0)))


def test_stated_figures_of_a_gain() -> None:
    speedup, quality = verdicts(20.4, 20.6, 20.8, horizons=WIDE)
    assert (speedup.status, quality.status) == (Status.HOLDS, Status.HOLDS)
    assert speedup.value == pytest.approx(100 * (20.6 / 12 - 1), rel=1e-9)
    assert quality.value is not None
    assert quality.value < 0


def test_a_loss_without_skipped_steps_is_not_the_loss_at_the_stated_speed() -> None:
    quality = verdicts(12.4, 12.5, 12.6, horizons=[9, 12, 48])[1]
    assert quality.status is Status.MISLEADING
    assert quality.decider is not None
    assert quality.decider.value == pytest.approx(
        100 * ((12 / 9) ** 0.2 - 1), rel=1e-2
    )  # the curve falls as steps^-0.2
    assert "worth 8 of AdamW's steps" in quality.reason  # 12.5 / 1.6
    enough = verdicts(19.2, 19.3, 19.4, horizons=[11, 12, 48])[1]  # 19.3 / 1.6 is what AdamW has at 12
    assert (enough.status, enough.decider) == (Status.HOLDS, None)
    unknown = verdicts(12.4, 12.5, 12.6, horizons=[6, 12, 48])[1]
    assert unknown.status is Status.UNPROVEN
    assert "no run measures the loss at 1.6 times the speed" in unknown.reason


def test_stated_figures_of_a_loss() -> None:
    speedup, quality = verdicts(9, 9.1, 9.2, horizons=WIDE)
    assert (speedup.status, quality.status) == (Status.REFUTED, Status.REFUTED)
    assert quality.value == pytest.approx(100 * ((12 / 9.1) ** 0.2 - 1), rel=1e-2)


def test_a_stated_figure_inside_the_interval_is_unproven() -> None:
    assert verdicts(18, 20, 22, horizons=WIDE)[0].status is Status.UNPROVEN
    assert verdicts(10, 12, 14, horizons=WIDE)[1].status is Status.UNPROVEN


def test_a_step_that_takes_longer_lowers_the_speedup() -> None:
    speedup = verdicts(20.4, 20.6, 20.8, seconds=24.0, horizons=WIDE)[0]
    assert speedup.value == pytest.approx(100 * (20.6 / 24 - 1), rel=1e-9)


def test_probes_do_not_count_twice() -> None:
    # a quarter more work in a quarter more time: AdamW needs 20.6 steps where the method needs the time of 15
    speedup = verdicts(20.4, 20.6, 20.8, seconds=15.0, cost=45.0, horizons=WIDE)[0]
    assert speedup.value == pytest.approx(100 * (20.6 / 15 - 1), rel=1e-9)


def test_a_ratio_of_times_below_one_is_noise() -> None:
    assert verdicts(20.4, 20.6, 20.8, seconds=6.0, horizons=WIDE)[0].value == pytest.approx(100 * (20.6 / 12 - 1))


def test_noise_of_the_times_is_in_the_interval() -> None:
    study = study_of(targets=JUDGED_TARGETS, horizons=WIDE)
    made = finished(study, reaching(20.4, 20.6, 20.8))
    uneven = {
        key: record
        if record.run.method == BASELINE
        else replace(record, cpu_seconds=record.cpu_seconds * (0.8, 1.0, 1.2)[record.run.seed])
        for key, record in made.items()
    }
    calm, noisy = (judge_study(study, records, TARGETS)[0].reason for records in (made, uneven))
    assert calm.endswith("by seed 1.00, 1.00, 1.00.")
    assert noisy.endswith("by seed 0.80, 1.00, 1.20.")
    widths = []
    for reason in (calm, noisy):
        low, high = re.findall(r"interval (\S+) to (\S+)\)", reason)[0]
        widths.append(float(high) - float(low))
    assert widths[1] > 10 * widths[0]


def test_a_speedup_beyond_the_longest_horizon_is_not_refuted() -> None:
    speedup = verdicts(30, 30, 30)[0]  # 50 % at least, as no AdamW ran for longer
    assert speedup.status is Status.UNPROVEN
    assert "50.00 to inf" in speedup.reason
    assert "3 seeds beyond AdamW's horizons" in speedup.reason
    assert verdicts(60, 60, 60, horizons=WIDE)[0].status is Status.HOLDS, "300 % at least"


def test_a_speedup_with_a_seed_below_the_shortest_horizon_does_not_hold() -> None:
    assert verdicts(47, 47, 47, 47, 47, horizons=WIDE, seeds=FIVE)[0].status is Status.HOLDS
    assert verdicts(47, 47, 47, 47, 5, horizons=[11, 12, 48], seeds=FIVE)[0].status is Status.UNPROVEN
    assert verdicts(5, 5, 5, horizons=[11, 12])[0].status is Status.REFUTED


def test_a_diverged_seed_leaves_stated_figures_unproven() -> None:
    for verdict in verdicts(20.4, 20.6, 0, horizons=WIDE):
        assert verdict.status is Status.UNPROVEN
        assert "a run diverged with seed 2" in verdict.reason


def test_targets_that_no_study_can_judge_are_refused_together() -> None:
    with pytest.raises(ConfigError) as error:
        check_targets(study_of(targets=["hybrid-sped", "predict-phase-free-memory"]), TARGETS)
    assert len(error.value.faults) == 2
    assert "did you mean 'hybrid-speedup'?" in error.value.faults[0]
    assert "this study judges accuracy_loss_pct, time_to_loss_speedup_pct" in error.value.faults[1]


def test_a_target_of_another_metric_never_counts_as_judged() -> None:
    other = {"x": Target(id="x", source=("000",), description="-", metric="peak_vram_gib", direction="max", value=1.0)}
    with pytest.raises(ConfigError):
        judge_study(study_of(targets=["x"]), {}, other)


def test_the_best_rate_at_an_end_is_told() -> None:
    study = study_of(lrs=[0.005, 0.01, 0.02], methods=[METHOD | {"lrs": [0.01, 0.02, 0.03]}])
    text = text_of(study, finished(study, lambda run: 2.0 + abs(run.lr - 0.01)))
    assert "The best rate of slow_gradient (0.01) is the lowest tried" in text
    assert "The best rate of adamw" not in text


def test_a_study_just_begun_tells_what_was_tried_and_draws_nothing_else(tmp_path: Path) -> None:
    study = study_of(lrs=[0.005, 0.01, 0.02], methods=[METHOD | {"lrs": [0.01, 0.02, 0.03]}])
    run = next_runs(study, {})[0]
    record = record_of(study, run, 2.0)
    page, *pictures = write_study(study, {record.key: record}, TARGETS, tmp_path)
    text = page.read_text()
    assert "Not finished: 1 of 3 rates of adamw are tried. Not finished: 0 of 3 rates of slow_gradient are" in text
    assert "its optimum may lie beyond" not in text
    assert "compute factor   |" not in text
    assert [path.name for path in pictures] == [f"study-{study.name}-lr.png"]


def test_versions_of_the_program_are_told() -> None:
    study = study_of()
    made = finished(study, reaching(14, 14, 14), environment=replace(ENVIRONMENT, commit="0123456789"))
    others = sorted(["01234567", ENVIRONMENT.commit[:8]])
    assert f"made by 2 versions of the program: {', '.join(others)}." in study_text(
        study, made, TARGETS, Path(), MARKDOWN
    )
    assert "versions of" not in text_of(study, finished(study, reaching(14, 14, 14)))


def harm_losses(percents: dict[str, tuple[float | None, ...]]) -> Callable[[StudyRun], float | None]:
    def loss_of(run: StudyRun) -> float | None:
        percent = percents.get(run.method, (0.0, 0.0, 0.0))[run.seed]
        if percent is None:
            return None
        return (2.0 + run.seed) * (1 + percent / 100) - 1e-9 * (run.lr == 0.02)

    return loss_of


STOPPED = (None, None, None)


def harm_of(percents: dict[str, tuple[float | None, ...]]) -> str:
    study = study_of(**HARM)
    return verdict_sentence(study, finished(study, harm_losses(percents)))


def test_a_kept_bound_names_the_worst_setting_and_the_worst_seed() -> None:
    told = harm_of({"mild": (1.0, 1.5, 1.7), "wild": (-3.0, 1.9, 1.0), "adamw-nan": STOPPED, "nan": STOPPED})
    assert told == (
        "The registered bound of 2 % is kept by every setting: worst mean harm 1.40 % (mild), worst single seed 1.90 % "
        "(wild), over 3 settings, 3 seeds."
    )


def test_a_broken_bound_names_every_setting_that_broke_it() -> None:
    told = harm_of({"mild": (2.0, 2.1, 2.2), "wild": (0.0, 0.0, 9.0), "adamw-nan": STOPPED, "nan": STOPPED})
    assert told.startswith("The registered bound of 2 % is broken by mild, wild; worst mean harm 3.00 % (wild)")


def test_stopping_alone_breaks_the_bound_and_stopping_with_adamw_does_not() -> None:
    assert "kept by every setting" in harm_of({"adamw-nan": STOPPED, "nan": STOPPED})
    assert "kept by every setting" in harm_of({"adamw-nan": STOPPED, "nan": (0.0, 0.0, 0.0)})
    assert "broken by nan" in harm_of({"nan": (0.0, None, 0.0)})
    assert "broken by mild" in harm_of({"mild": STOPPED})


def test_a_study_in_which_everything_stops_proves_nothing() -> None:
    everything = dict.fromkeys((BASELINE, "mild", "wild", "nan", "adamw-nan"), STOPPED)
    assert harm_of(everything) == "No setting ended beside AdamW: the registered claim (no harm) is unproven."


def test_a_setting_with_rates_of_its_own_is_judged_at_its_best() -> None:
    study = study_of(**HARM)
    made = finished(study, harm_losses({"wild": (5.0, 5.0, 5.0)}))
    assert [harm.method.name for harm in harms(study, made)] == ["mild", "wild", "nan"]
    assert {record.run.lr for record in made.values() if record.run.method == "wild" and record.run.seed} == {0.02}
    assert "broken by wild" in verdict_sentence(study, made)


def test_an_unfinished_study_of_harm_keeps_no_bound() -> None:
    study = study_of(**HARM)
    run = next_runs(study, {})[0]
    record = record_of(study, run, 2.0)
    assert verdict_sentence(study, {record.key: record}) == "Not finished: the registered claim (no harm) is unproven."


def test_the_table_of_harm_shows_bound_and_seeds() -> None:
    study = study_of(**HARM)
    losses = harm_losses({"mild": (1.0, 1.5, 3.2), "adamw-nan": STOPPED})
    rows = [line for line in text_of(study, finished(study, losses)).splitlines() if line.startswith("|")]
    cells: dict[str, list[str]] = {}
    for row in rows:  # of two tables
        name, *others = (cell.strip() for cell in row.split("|")[1:-1])
        cells.setdefault(name, []).extend(others)
    assert cells["mild"] == ["adamw", "+1.90", "+3.20", "yes", "3.0643", "3.0000", "0", "0", "as it is"]
    assert cells["nan"] == ["adamw-nan", "-", "-", "yes", "3.0000", "stopped", "0", "0", "a fault"]
