import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridtrain.cli.main import main
from hybridtrain.data.pinned_corpus import pinned_corpus
from hybridtrain.errors import RecordError
from hybridtrain.optimizations import FusedUpdate
from hybridtrain.run.environment import read_environment
from hybridvalidation import experiment
from hybridvalidation.records.store import append_line
from hybridvalidation.study import protocol, runner
from hybridvalidation.study.controls import nearest_rounding
from hybridvalidation.study.order import next_runs
from hybridvalidation.study.protocol import LadderFile, LadderRecord, LadderRun, read_study, record_path
from hybridvalidation.study.runner import _replayed, holds, replay, replay_sentence, run_study
from hybridvalidation.study.trials import (
    LOSSES_BEFORE_JUMP,
    FinalWeights,
    LadderJob,
    LadderTrial,
    recipe_of,
    run_ladder_job,
)
from inline_child import InlineChild
from tiny_ladders import ladder_of, record_of

TOML = Path(__file__).parents[3] / "scenarios"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ladder() -> LadderFile:
    return ladder_of()


@pytest.fixture(autouse=True)
def _bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave nothing where this is run, and find nothing that another test left."""
    monkeypatch.setattr(runner, "_BASES", tmp_path / "bases")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Child", InlineChild)


def make_run(ladder: LadderFile, run: LadderRun, bases: Path | None = None) -> LadderRecord:
    return run_ladder_job(LadderJob(ladder=ladder, run=run, bases=bases))


def run_of(arm: str, seed: int = 0) -> LadderRun:
    return LadderRun(rung="small", arm=arm, seed=seed, lr=0.01, base_lr=0.01)


def outcome(record: LadderRecord) -> tuple[object, ...]:
    return record.validation_loss, record.validation_accuracy, record.train_losses, record.probe, record.jumps


def trial_of(ladder: LadderFile, arm: str, source: FinalWeights | None = None) -> LadderTrial:
    recipe = recipe_of(ladder, ladder.configuration(arm), 0.01)
    return LadderTrial(ladder.rungs[0], recipe, 0, pinned_corpus(), source)


@pytest.mark.usefixtures("here")
def test_a_stopped_ladder_goes_on_where_it_was(ladder: LadderFile, tmp_path: Path) -> None:
    told: list[str] = []
    first = run_study(ladder, tmp_path, jobs=1, max_runs=4, say=told.append)
    before = record_path(tmp_path, "tiny").read_bytes()
    made = run_study(ladder, tmp_path, jobs=1, max_runs=None, say=told.append)
    assert record_path(tmp_path, "tiny").read_bytes().startswith(before), "records are only appended"
    assert first.items() <= made.items()
    assert next_runs(ladder, made) == []
    assert len(made) == len(ladder.arms) * 3 + 1, "the tuning seed is run where a rate is tried: of the fine-tuned arm"
    assert read_study(tmp_path, ladder) == made
    assert all(record.validation_loss is not None for record in made.values())
    assert {record.corpus for record in made.values()} == {"sympy-1.14.0", "networkx-3.6.1"}
    assert all((record.jumps > 0) is (record.run.arm == "jumps") for record in made.values())


@pytest.mark.every_case
def test_a_process_of_its_own_makes_the_same_run(ladder: LadderFile, tmp_path: Path) -> None:
    (made,) = run_study(ladder, tmp_path, jobs=1, max_runs=1, say=lambda _: None).values()
    assert outcome(made) == outcome(make_run(ladder, made.run))


@pytest.mark.usefixtures("here")
def test_runs_on_another_text_are_not_joined(ladder: LadderFile, tmp_path: Path) -> None:
    (record,) = run_study(ladder, tmp_path, jobs=1, max_runs=1, say=lambda _: None).values()
    append_line(record_path(tmp_path, "tiny"), replace(record, corpus_digest="0123456789"))
    with pytest.raises(RecordError, match="its runs used the text 01234567, this machine has"):
        run_study(ladder, tmp_path, jobs=1, max_runs=None, say=lambda _: None)


def test_a_fused_configuration_may_clip_by_the_previous_norm(ladder: LadderFile) -> None:
    own = replace(ladder.configuration("vanilla"), optimizations=(FusedUpdate(),))
    exact, previous = (recipe_of(ladder, replace(own, clip=clip), 0.01) for clip in ("exact", "previous"))
    assert previous == replace(exact, optimizer=replace(exact.optimizer, clip="previous"))
    losses = []
    for recipe in (exact, previous):
        clips_always = replace(recipe, optimizer=replace(recipe.optimizer, max_grad_norm=1e-3))
        trial = LadderTrial(ladder.rungs[0], clips_always, 0, pinned_corpus())
        trial.train(4)
        losses.append(trial.losses)
    assert losses[0][:2] == losses[1][:2], "the first step knows no norm before it"
    assert losses[0][2:] != losses[1][2:]


def test_the_control_loses_what_stochastic_rounding_keeps(ladder: LadderFile) -> None:
    """Weights near 1 (norms' scales) have bits of 2^-8 below them: Adam moves of 0.001 are below half of that."""
    small = replace(ladder, optimizer=replace(ladder.optimizer, weight_decay=0.0))

    def scales(arm_name: str) -> torch.Tensor:
        recipe = recipe_of(small, small.configuration(arm_name), 0.001)
        trial = LadderTrial(small.rungs[0], recipe, 0, pinned_corpus())
        trial.train(20)
        named = dict(trial.trainer.model.named_unit_parameters())
        return torch.cat([value.detach().float() for name, value in named.items() if value.ndim == 1 and "norm" in name
                          and float(value.detach().float().mean()) > 0.5])  # fmt: skip

    assert scales("nearest").unique().tolist() == [1.0]
    with_chance = replace(small.configuration("nearest"), name="chance", rounds_to_nearest=False)
    object.__setattr__(small, "arms", (*small.arms, with_chance))
    assert len(scales("chance").unique()) > 2


def test_rounding_is_by_chance_again_afterwards() -> None:
    from hybridtrain.memory import formats  # noqa: PLC0415  its function is replaced

    before = formats.round_stochastically
    with nearest_rounding():
        assert formats.round_stochastically is not before
    assert formats.round_stochastically is before


def test_fine_tuning_begins_where_the_baseline_ended(ladder: LadderFile) -> None:
    base = trial_of(ladder, "vanilla")
    base.train(6)
    on = trial_of(ladder, "tuned", FinalWeights.of(base))
    for (name, own), (other_name, other) in zip(
        on.trainer.model.named_unit_parameters(), base.trainer.model.named_unit_parameters(), strict=True
    ):
        assert name == other_name
        assert torch.equal(own, other)
    assert on.validate(2) == base.validate(2)


def test_fine_tuned_runs_of_a_seed_share_their_base_to_the_bit(
    ladder: LadderFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = replace(read_environment(), commit="0123456789", dirty=False)
    monkeypatch.setattr(experiment, "read_environment", lambda: place)
    alone = make_run(ladder, run_of("lora"))
    trained = make_run(ladder, run_of("lora"), bases=tmp_path)
    (kept,) = tmp_path.iterdir()
    baseline = make_run(ladder, run_of("vanilla"), bases=tmp_path)
    assert list(tmp_path.iterdir()) == [kept], "the baseline's own run ends with the same weights, and is kept too"
    begun, train = list[int](), LadderTrial.train
    monkeypatch.setattr(LadderTrial, "train", lambda trial, steps: begun.append(steps) or train(trial, steps))
    shared = make_run(ladder, run_of("lora"), bases=tmp_path)
    assert ladder.rungs[0].num_steps not in begun, "the base is not trained again"
    assert outcome(alone) == outcome(trained) == outcome(shared)
    assert shared.probe.first_losses == baseline.probe.first_losses
    make_run(ladder, run_of("lora", seed=1), bases=tmp_path)
    place = replace(place, commit="another")
    make_run(ladder, run_of("lora"), bases=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3, "another seed, another program"
    place = replace(place, dirty=True)
    make_run(ladder, run_of("tuned", seed=2), bases=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3, "of no commit"


def test_validation_is_the_same_for_all_and_of_many_documents(ladder: LadderFile) -> None:
    trial = trial_of(ladder, "vanilla")
    first, again = trial.validate(3), trial.validate(3)
    assert first == again
    assert np.isfinite(first).all()
    assert 0 <= first[1] <= 1


@pytest.mark.usefixtures("here")
def test_a_replay_holds_until_the_arithmetic_changes(
    ladder: LadderFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run_study(ladder, tmp_path, jobs=1, max_runs=8, say=lambda _: None)
    done = replay(ladder, made, tmp_path, jobs=1, say=lambda _: None)
    assert {found.run.arm for found in done} == {arm.name for arm in ladder.arms}
    assert all(found.is_equal and holds(found) for found in done)
    assert replay_sentence(done[0]) == "bit-equal"
    from hybridtrain.optim import adamw  # noqa: PLC0415  its function is replaced

    exact = adamw.fused_adamw

    def changed(*arguments: Any, **settings: Any) -> None:
        beta1, beta2 = settings.pop("betas")
        exact(*arguments, betas=(beta1, beta2 * (1 - 1e-6)), **settings)

    monkeypatch.setattr(adamw, "fused_adamw", changed)
    (plain, *_) = replay(ladder, made, tmp_path, jobs=1, say=lambda _: None)
    assert not plain.is_equal
    assert plain.same_machine
    assert not holds(plain)
    assert "on the same machine" in replay_sentence(plain)
    elsewhere = replace(plain, same_machine=False)
    assert holds(elsewhere), "a millionth of a decay is within the rounding of another processor"
    assert not holds(replace(elsewhere, largest_difference=0.1))


@pytest.mark.parametrize(("arm", "difference"), [("vanilla", 0.5), ("jumps", 0.0)])
def test_behind_a_jump_only_the_same_machine_is_compared(ladder: LadderFile, arm: str, difference: float) -> None:
    record = record_of(
        ladder, LadderRun(rung="small", arm=arm, seed=0, lr=0.01, base_lr=0.01), 2.0, products="processor"
    )
    record = replace(record, probe=replace(record.probe, losses=(5.0,) * 8))
    again = replace(record, probe=replace(record.probe, losses=(*(5.0,) * LOSSES_BEFORE_JUMP, *(5.5,) * 4)))
    assert _replayed(ladder, record, again).largest_difference == 0.5
    assert _replayed(ladder, replace(record, products="float32"), again).largest_difference == difference


@pytest.mark.usefixtures("here")
def test_the_command_runs_shows_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "scenarios"
    (folder / "ladders").mkdir(parents=True)
    (folder / "stacks").mkdir()
    for name in ("vanilla", "checkpointing", "mixed", "tight"):
        (folder / f"stacks/{name}.toml").write_text((TOML / f"stacks/{name}.toml").read_text())
    (folder / "targets.toml").write_text((TOML / "targets.toml").read_text())
    (folder / "ladders/tiny.toml").touch()
    found = ladder_of(targets=[{"id": "mixed-precision-accuracy-loss", "stacks": ["mixed"]}])
    monkeypatch.setattr(protocol, "load_toml", lambda *_, **__: found)
    common = ["--scenarios", str(folder), "--results", str(tmp_path / "results")]
    assert main(["study", "tiny", "--max-runs", "9", *common]) == 0
    assert "No model size is finished" in capsys.readouterr().out
    for words, fault in (
        (["tiny", "--rung", "smal"], "--rung: model size 'smal' is unknown; did you mean 'small'? Known: small."),
        (["tiny", "--forecasts"], "--forecasts: is for a study only, but"),
    ):
        assert main(["study", *words, *common]) == 2
        assert fault in capsys.readouterr().err
    assert main(["study", "tiny", "--json", "--rung", "small", *common]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"].startswith("small: ")
    files = {name: Path(name).read_bytes() for name in told["files"]}
    (table,) = [content.decode() for name, content in files.items() if name.endswith(".md")]
    for text in (
        "Registered: all are alike",
        "checkpointing",
        "SHA-256",
        "18 of 18",
        "Replays: no",
    ):
        assert text in table
    for name in files:
        Path(name).unlink()
    assert main(["report", "--json", *common]) == 0
    assert set(files) <= set(json.loads(capsys.readouterr().out)["files"])
    assert {name: Path(name).read_bytes() for name in files} == files, "report rebuilds the same bytes"
    assert main(["study", "tiny", "--verify", *common]) == 1
    out = capsys.readouterr().out
    assert "6 of 6 records are reproduced by this program. Stacks that differ from" in out
    assert "their configuration: tight." in out
    assert main(["report", "--json", *common]) == 0
    capsys.readouterr()
    assert "6 are equal to the bit; 6 hold" in Path(next(name for name in files if name.endswith(".md"))).read_text()
