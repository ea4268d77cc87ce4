from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.config.decode import load_toml
from hybridvalidation.records.store import read_lines
from hybridvalidation.study.order import next_runs
from hybridvalidation.study.protocol import BASELINE, StudyFile, StudyRecord, StudyRun, chosen, run_key
from tiny_studies import METHOD, STUDY, finished, record_of, study_of

ROOT = Path(__file__).parents[3]
OTHER = {"beta1": 0.9, "beta2": 0.95}
LAST = {"beta1": 0.95, "beta2": 0.99}
TUNED: dict[str, Any] = {
    "lrs": [0.01, 0.02, 0.04], "betas": [OTHER, LAST], "horizons": [8, 12, 18], "tuning_horizons": [24],
    "methods": [
        METHOD | {"lrs": [0.005, 0.01]}, {"name": "mean", "description": "-", "control": "average", "seeds": [0]},
    ],
}  # fmt: skip
RUN = StudyRun(method="slow_gradient", lr=0.01, beta1=0.9, beta2=0.99, seed=0, num_steps=12)


def made_of(study: StudyFile, runs: list[StudyRun], loss_of: Callable[[StudyRun], float | None]) -> dict[str, Any]:
    return {run_key(study, run): record_of(study, run, loss_of(run)) for run in runs}


def bowl(run: StudyRun) -> float | None:
    """AdamW does best at 0.02 and the other betas, and diverges at 0.04; the method does best at 0.005."""
    if run.method == BASELINE and run.lr == 0.04:
        return None
    return 2.0 + abs(run.lr - (0.02 if run.method == BASELINE else 0.005)) + run.beta2 + run.beta1


def test_learning_rates_come_first() -> None:
    runs = next_runs(study_of(**TUNED), {})
    assert [(run.method, run.lr, run.seed, run.num_steps) for run in runs] == [
        (BASELINE, lr, 0, 12) for lr in (0.01, 0.02, 0.04)
    ]
    assert {(run.beta1, run.beta2) for run in runs} == {(0.9, 0.99)}


def test_a_part_of_a_stage_is_all_that_is_next() -> None:
    study = study_of(**TUNED)
    first, *others = next_runs(study, {})
    assert next_runs(study, made_of(study, [first], bowl)) == others


def test_betas_come_next_at_the_best_rate() -> None:
    study = study_of(**TUNED)
    runs = next_runs(study, made_of(study, next_runs(study, {}), bowl))
    assert [(run.lr, run.beta1, run.beta2) for run in runs] == [(0.02, 0.9, 0.95), (0.02, 0.95, 0.99)]


def test_all_others_follow_at_the_best_of_both() -> None:
    study = study_of(**TUNED)
    made = made_of(study, next_runs(study, {}), bowl)
    made |= made_of(study, next_runs(study, made), bowl)
    runs = next_runs(study, made)
    assert {(run.beta1, run.beta2) for run in runs} == {(0.9, 0.95)}
    assert {(run.lr, run.seed, run.num_steps) for run in runs if run.method == BASELINE} == {
        *((0.02, seed, steps) for seed in (0, 1, 2) for steps in (8, 12, 18)), (0.02, 0, 24),
    } - {(0.02, 0, 12)}  # fmt: skip
    assert [(run.lr, run.seed) for run in runs if run.method == "slow_gradient"] == [(0.005, 0), (0.01, 0)]
    assert [(run.lr, run.seed) for run in runs if run.method == "mean"] == [(0.02, 0)]
    made |= made_of(study, runs, bowl)
    assert [(run.method, run.lr, run.seed) for run in next_runs(study, made)] == [
        ("slow_gradient", 0.005, 1), ("slow_gradient", 0.005, 2)
    ]  # fmt: skip


def test_a_complete_study_needs_nothing() -> None:
    study = study_of(**TUNED)
    made = finished(study, bowl)
    assert next_runs(study, made) == []
    best = StudyRun(method=BASELINE, lr=0.02, beta1=0.9, beta2=0.95, seed=0, num_steps=12)
    assert chosen(study, made, BASELINE) == best
    assert chosen(study, made, "slow_gradient") == replace(best, method="slow_gradient", lr=0.005)
    assert chosen(study, made, "mean") == replace(best, method="mean")


def test_a_diverged_run_is_never_the_best_and_never_repeated() -> None:
    study = study_of(**TUNED)
    made = finished(study, lambda run: None if run.lr in {0.01, 0.02} and run.method == BASELINE else 2.0)
    assert chosen(study, made, BASELINE).lr == 0.04
    assert next_runs(study, made) == []


def test_the_best_is_chosen_by_validation_and_not_by_the_test() -> None:
    study = study_of(lrs=[0.01, 0.02])
    made = made_of(study, next_runs(study, {}), lambda run: 2.0 + run.lr)
    made = {key: replace(record, test_loss=-record.run.lr) for key, record in made.items()}
    assert chosen(study, made, BASELINE).lr == 0.01


def test_a_run_of_two_roles_is_made_once() -> None:
    runs = next_runs(study_of(tuning_horizons=[18]), finished(study_of(lrs=[0.01]), lambda _: 2.0))
    assert runs == []
    study = study_of(tuning_horizons=[18])
    made = made_of(study, next_runs(study, {}), lambda _: 2.0)
    assert len(next_runs(study, made)) == len(set(next_runs(study, made)))


def key_of(**changes: Any) -> str:
    return run_key(study_of(**changes), RUN)


def method_key(**changes: Any) -> str:
    return key_of(methods=[METHOD | changes])


def test_what_is_only_said_does_not_change_a_key() -> None:
    same = key_of()
    assert method_key(description="otherwise", role="upper bound", lrs=[0.5], seeds=[0, 1]) == same
    assert (
        key_of(name="other", description="x", target="y", stop_rule="z", remarks="r", least_gain=2.0, seeds=[0, 3, 4])
        == same
    )
    assert key_of(lrs=[0.01, 0.02], horizons=[10, 12], betas=[OTHER], tuning_horizons=[40]) == same


def test_a_setting_at_its_default_does_not_change_a_key() -> None:
    # as if an option with a default had been added: told or not, it is the same run
    hybrid = METHOD["hybrid"] | {"guard": True, "monitor": "off", "max_move": 2.0}  # type: ignore[operator]
    assert method_key(hybrid=hybrid, lr_factor=1.0) == key_of()
    assert key_of(optimizer=STUDY["optimizer"] | {"weight_decay": 0.0}) != key_of(
        optimizer=STUDY["optimizer"] | {"weight_decay": 0.1}
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_len": 8}, {"batch_size": 4}, {"corpus_mib": 2}, {"validation_batches": 3}, {"validate_every": 4},
        {"model": STUDY["model"] | {"width": 32}}, {"schedule": STUDY["schedule"] | {"final_fraction": 0.5}},
        {"optimizer": STUDY["optimizer"] | {"max_grad_norm": 0.5}},
    ],
)  # fmt: skip
def test_what_decides_how_a_run_goes_changes_its_key(changes: dict[str, Any]) -> None:
    assert key_of(**changes) != key_of()


@pytest.mark.parametrize(
    "changes",
    [
        {"lr_factor": 2.0}, {"control": "random"}, {"disturbance": "data_shift", "role": "control"},
        {"hybrid": {"full_steps": 3, "slow": {"beta": 0.9}}}, {"hybrid": {"full_steps": 2, "slow": {"beta": 0.8}}},
        {"slow": {"beta": 0.9}},
    ],
)  # fmt: skip
def test_what_a_method_does_changes_its_keys(changes: dict[str, Any]) -> None:
    assert method_key(**changes) != key_of()


def test_every_part_of_a_run_changes_its_key() -> None:
    study = study_of()
    others = [
        replace(RUN, method=BASELINE), replace(RUN, lr=0.02), replace(RUN, beta1=0.8), replace(RUN, beta2=0.9),
        replace(RUN, seed=1), replace(RUN, num_steps=18),
    ]  # fmt: skip
    assert len({run_key(study, run) for run in (RUN, *others)}) == 1 + len(others)


def test_committed_records_keep_their_keys() -> None:
    recorded = 0
    for path in sorted((ROOT / "scenarios/studies").glob("*.toml")):
        records = read_lines(ROOT / f"results/records/studies/{path.stem}.jsonl", StudyRecord)
        study = load_toml(StudyFile, path)
        assert all(record.key == run_key(study, record.run) for record in records), path.name
        recorded += bool(records)
    assert recorded >= 2
