import json
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.cli.main import main
from hybridtrain.config.decode import decode, load_toml
from hybridtrain.errors import ConfigError
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.protocol import StudyFile, check_targets
from tiny_studies import METHOD, STUDY

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "scenarios/studies").glob("*.toml"))
CONSTANT = {"kind": "constant", "warmup_steps": 2, "total_steps": 12}


def faults_of(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        decode(StudyFile, STUDY | changes, source="tiny")
    return error.value.faults


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_study_is_sound(path: Path) -> None:
    study = load_toml(StudyFile, path)
    assert study.name == path.stem
    assert study.schedule.total_steps == study.num_steps
    check_targets(study, ScenarioFiles(ROOT / "scenarios").targets())


def test_there_are_studies() -> None:
    assert {path.stem for path in SHIPPED} >= {"harm-0.1m", "tuned-0.1m", "tuned-0.8m", "undertuned-0.1m"}


def test_faults_of_types_come_at_once_with_their_paths() -> None:
    faults = faults_of(
        seq_len="long", seeds=[0, 1.5, 2], bogus=1,
        methods=[{"name": "a b", "description": "-"}, METHOD | {"role": "boss"}, METHOD | {"hybrid": {"strength": -1}}],
    )  # fmt: skip
    assert [fault.split(": ")[0] for fault in faults] == [
        "$.bogus", "$.seq_len", "$.seeds[1]", "$.methods[0]", "$.methods[1].role", "$.methods[2].hybrid"
    ]  # fmt: skip


def test_faults_of_values_come_at_once() -> None:
    faults = faults_of(
        seeds=[1, 2], tuning_seed=0, lrs=[], horizons=[8], seq_len=17, batch_size=0,
        methods=[METHOD, METHOD | {"against": "nobody"}],
    )  # fmt: skip
    for start in (
        "$: batch_size: 0", "$: seeds: [1, 2] must be at least 3 seeds", "$: tuning_seed: 0", "$: lrs: empty",
        "$: horizons: [8] must contain num_steps (12)", "$: methods: 'slow_gradient' appears twice",
        "$: methods: 'slow_gradient' is compared with 'nobody'", "$: seq_len: 17 is above model.max_seq_len (16)",
    ):  # fmt: skip
        assert any(fault.startswith(start) for fault in faults), start


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"seeds": [0, 1, 2, 2]}, "seeds: [0, 1, 2, 2] must be at least 3 seeds, without repeats"),
        ({"horizons": []}, "horizons: empty"),
        ({"horizons": [12]}, "horizons: [12] needs"),
        ({"schedule": CONSTANT}, "validate_every: 0 must divide num_steps (12)"),
        ({"schedule": CONSTANT, "validate_every": 5}, "validate_every: 5 must divide"),
        ({"schedule": CONSTANT, "validate_every": 4, "horizons": [8]}, "horizons: [8] must reach num_steps (12)"),
        ({"methods": [METHOD | {"name": "other"}]}, "methods: 'slow_gradient' is missing; the claims are about it"),
        ({"methods": [METHOD | {"seeds": [0, 7]}]}, "methods: 'slow_gradient' has seeds [7], which 'adamw' lacks"),
        ({"methods": [METHOD | {"disturbance": "data_shift"}]}, "methods: 'slow_gradient' has another disturbance"),
    ],
)
def test_a_study_that_could_judge_nothing_is_refused(changes: dict[str, Any], start: str) -> None:
    assert [fault.removeprefix("$: ")[: len(start)] for fault in faults_of(**changes)] == [start]


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"seeds": [0, 1, 1]}, "seeds: [0, 1, 1] names a seed twice"),
        ({"name": "adamw"}, "name: 'adamw' is the baseline"),
        ({"control": "random", "hybrid": None}, "control: 'random' takes the size of its jumps"),
        ({"control": "random", "hybrid": {"predictor": "linear"}}, "control: 'random' takes the size of its jumps"),
    ],
)
def test_a_method_that_is_none_is_refused(changes: dict[str, Any], start: str) -> None:
    faults = faults_of(methods=[METHOD | changes])
    assert [fault.removeprefix("$.methods[0]: ")[: len(start)] for fault in faults] == [start]


def test_an_unknown_study_is_told_with_those_there_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = main(["study", "tuned-0.1", "--results", str(tmp_path), "--scenarios", str(ROOT / "scenarios")])
    error = capsys.readouterr().err
    assert code == 2
    assert "study 'tuned-0.1' is unknown; did you mean 'tuned-0.1m'? Known: harm-0.1m, " in error
    assert len(error.splitlines()) == 2
    assert not list(tmp_path.iterdir())


def test_an_unknown_study_is_told_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["study", "nonsense", "--json", "--results", str(tmp_path), "--scenarios", str(ROOT / "scenarios")]
    assert main(arguments) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["error"] == "ConfigError"
    assert len(told["faults"]) == 1
    assert "Known: harm-0.1m" in told["faults"][0]


def test_a_missing_file_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["study", str(tmp_path / "mine.toml"), "--results", str(tmp_path)]) == 2
    assert "mine.toml: 1 fault" in capsys.readouterr().err
