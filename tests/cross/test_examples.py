"""The examples run as they stand, and every public name has one."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

import hybridtrain
from hybridtrain.cli.main import main
from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.optim import AdamWConfig
from hybridtrain.planning import fitting
from hybridtrain.run.export import export_run
from hybridtrain.run.train import train
from hybridtrain.training_file import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "dry_run": "fits: True",
    "train": "step 3: loss",
    "virtual_gpu": "NVIDIA GeForce RTX 4090: fits",
    "estimate_memory": "largest batch: ",
    "load_config": "did you mean 'gpt2-small'?",
    "recommend": "tokens/s",
    "profile_memory": "executed peak",
}


def test_every_script_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAYS, "finetune"}


@pytest.mark.parametrize("name", SAYS)
def test_an_example_says_what_it_promises(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fitting, "LEVELS", fitting.LEVELS[:1])  # the search itself is tested elsewhere
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # transformers renames it
def test_the_script_that_the_readme_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The README's answer is this one, but for what other versions of transformers take."""
    pytest.importorskip("transformers")
    told = (EXAMPLES.parent / "README.md").read_text().partition("examples/finetune.py")[2]
    monkeypatch.chdir(tmp_path)
    assert main(["dummy-weights", "models/llama-3.2-1b"]) == 0
    command = ["virtual", "--card", "rtx-4060-ti-16gb", "--steps", "2", "--", str(EXAMPLES / "finetune.py")]
    assert main([*command, "--batch-size", "4"]) == 1
    now = capsys.readouterr().out
    for pattern in (
        r"needs ([\d.]+) GiB of 15.57 GiB and runs out of memory on .*, at step 2, forward",
        r"\n *missing +([\d.]+) GiB",
        r"half the batch ([\d.]+) GiB",
    ):
        (before,), (after,) = re.findall(pattern, told), re.findall(pattern, now)
        assert float(before) == pytest.approx(float(after), rel=0.02)


def test_the_adapter_example_trains_and_goes_on_from_what_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = replace(load_config("examples/train-lora.toml"), num_steps=1, sample_tokens=0)
    # Nothing of float32 moves in the second run: what it leaves is what it read.
    again = replace(file, adapter_from=tmp_path / "adapter0", seed=5, optimizer=AdamWConfig(lr=1e-30, weight_decay=0.0))
    for number, each in enumerate((file, again)):
        run, adapter = tmp_path / f"run{number}", tmp_path / f"adapter{number}"
        assert train(each, None, run, resume=False, say=lambda _: None, progress=False).steps_done == 1
        export_run(run, adapter, dtype="float32", merge=False, say=lambda _: None)
    first, second = (tmp_path / f"adapter{number}" / "adapter_model.safetensors" for number in (0, 1))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", ["train-1b-16gb", "train-7b-24gb"])
def test_an_example_of_a_large_model_trains_in_little(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = load_config(EXAMPLES / f"{name}.toml")
    shape = replace(
        file.model.resolve(), vocab_size=256, max_seq_len=16, num_blocks=3, width=16, num_heads=2, num_kv_heads=2,
        ffn_width=32,
    )  # fmt: skip
    few = replace(
        file, model=ModelSpec(shape=shape), workload=replace(file.workload, seq_len=16), num_steps=2, sample_tokens=0,
        eval_every=0,
    )  # fmt: skip
    corpus = embedded_corpus(1 << 16)
    done = train(few, corpus, tmp_path / "run", resume=False, say=lambda _: None, progress=False)
    assert done.steps_done == 2
    assert done.last is not None
    assert done.last.loss is not None
    assert 0 < done.last.loss < 8


def test_every_training_file_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    for path in EXAMPLES.glob("train-*.toml"):
        assert load_config(path).num_steps > 0


def test_every_public_name_is_there_and_documented() -> None:
    for name in dir(hybridtrain):
        assert getattr(hybridtrain, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'train_all'"):
        _ = hybridtrain.train_all
