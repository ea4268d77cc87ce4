"""``hybridtrain quantize``: what a trained model loses by its format, plain and trained with BitNet."""

import argparse
import inspect
import json
import math
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridtrain.cli.main import main
from hybridtrain.data.corpus import open_corpus
from hybridtrain.models.model_config import BatchWorkload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations.bitnet import Bitnet
from hybridtrain.plan.compose import Optimization
from hybridtrain.run.quantize import FORMATS, QuantizedFigures, quantize
from hybridtrain.run.train import train
from hybridtrain.trainer_config import LrSchedule
from hybridtrain.training_file import TrainFile
from tiny_models import FAMILIES, LLAMA_GROUPED

SHAPE = {"vocab_size": 256, "num_blocks": 2, "width": 64, "ffn_width": 96, "max_seq_len": 32}
STEPS = 100


def say_nothing(_text: str) -> None:
    """Take what a user would read."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with two trained runs, ``plain`` and ``bitnet``, of the same batches."""
    place = tmp_path_factory.mktemp("runs")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with chdir(place), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        Path("text.txt").write_text(inspect.getsource(argparse)[:50_000])
        stacks: dict[str, tuple[Optimization, ...]] = {"plain": (), "bitnet": (Bitnet(),)}
        for name, stack in stacks.items():
            train(
                training_file(stack, STEPS), open_corpus(Path("text.txt"), vocab_size=256), Path(name),
                resume=False, say=say_nothing, progress=False,
            )  # fmt: skip
        yield place
    torch.set_num_threads(threads)


def training_file(stack: tuple[Optimization, ...], num_steps: int) -> TrainFile:
    return TrainFile(
        model=ModelSpec(shape=replace(LLAMA_GROUPED, **SHAPE)), workload=BatchWorkload(batch_size=4, seq_len=32),
        optimizations=stack, optimizer=AdamWConfig(lr=1e-2), num_steps=num_steps, sample_tokens=0,
        schedule=LrSchedule(warmup_steps=10, total_steps=num_steps),
    )  # fmt: skip


def rows_of(path: Path | str, **options: object) -> dict[str, QuantizedFigures]:
    settings = {"formats": (), "data": Path("text.txt"), "seq_len": None, "say": say_nothing} | options
    report = quantize(Path(path), **settings)  # type: ignore[arg-type]
    return {row.format: row for row in report.rows}


def test_fewer_bits_lose_more_and_bitnet_loses_nothing_in_three_values(runs: Path) -> None:  # noqa: ARG001
    plain, bitnet = rows_of("plain"), rows_of("bitnet", formats=("ternary",))
    for found in (plain, bitnet):
        assert found["as stored"].loss < 0.5 * math.log(256)  # far from uniform: there is something to lose
    lost = {name: row.loss_difference for name, row in plain.items()}
    assert abs(lost["bfloat16"]) < 2e-4
    assert abs(lost["int8"]) < 2e-4
    # Four bits may gain on one text by chance: weights trained on another processor, by other sums, lost -1e-4.
    assert -2e-3 < lost["nf4"] < 2e-2 < lost["ternary"]
    assert bitnet["ternary"].loss == bitnet["as stored"].loss  # to the bit: those values are what is multiplied with
    assert bitnet["ternary"].loss < plain["ternary"].loss


def test_fewer_bits_keep_weights_less_exactly() -> None:
    weights = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    error = {name: float((each.rounded(weights) - weights).square().mean().sqrt()) for name, each in FORMATS.items()}
    step = float(weights.view(-1, 256).abs().amax(1).mean()) / 127
    scale = math.sqrt(2 / math.pi)  # mean magnitude; beyond half of it a value is 1, below it 0
    density, beyond = math.exp(-(scale**2) / 8) / math.sqrt(2 * math.pi), math.erfc(scale / math.sqrt(8))
    assert error["int8"] == pytest.approx(step / math.sqrt(12), rel=0.02)  # even steps, an even error
    assert error["ternary"] == pytest.approx(math.sqrt(1 - 4 * scale * density + scale**2 * beyond), rel=0.01)
    assert 0 < error["bfloat16"] < error["int8"] < error["nf4"] / 8 < error["ternary"] / 16


def test_sizes_are_those_of_codes_and_scales(runs: Path) -> None:  # noqa: ARG001
    found = rows_of("plain", formats=("ternary", "nf4", "int8"))
    assert list(found) == ["as stored", "ternary", "nf4", "int8"]
    assert found["int8"].matrix_bits == 8 + 32 / 256  # all matrices are whole groups of 256
    assert 4 + 8 / 64 < found["nf4"].matrix_bits < 4.2
    assert 1.6 < found["ternary"].matrix_bits < 1.62
    assert found["as stored"].matrix_bits == found["as stored"].param_bits == 32
    stored = sum(path.stat().st_size for path in Path("plain").rglob("*.safetensors"))
    assert found["as stored"].model_bytes < stored


def test_a_folder_says_what_the_run_does(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    # A run on a corpus and a folder on the same text hold out the same tail of it.
    assert main(["export", "plain", "folder"]) == 0
    assert main(["export", "plain", "rounded", "--dtype", "bfloat16"]) == 0
    capsys.readouterr()
    answers = []
    for path in ("plain", "folder", "rounded"):
        assert main(["quantize", path, "--data", "text.txt", "--seq", "32", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    run, folder, rounded = ({row["format"]: row for row in answer["formats"]} for answer in answers)
    assert answers[1]["num_targets"] > 1000
    for name in FORMATS:
        assert folder[name]["loss"] == pytest.approx(run[name]["loss"], rel=0.1)
        assert folder[name]["model_bytes"] == run[name]["model_bytes"]
    assert answers[2]["stored_dtypes"] == ["bfloat16"]
    assert "bfloat16" not in rounded  # it is what is stored
    assert rounded["as stored"]["matrix_bits"] == 16
    assert rounded["as stored"]["loss"] == pytest.approx(run["bfloat16"]["loss"], abs=1e-2)


def test_text_says_what_was_rounded(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    assert main(["quantize", "bitnet", "--data", "text.txt", "--formats", "ternary"]) == 0
    told = capsys.readouterr()
    assert "Only matrices" in told.out
    assert "Trained with BitNet" in told.out
    assert "as stored" in told.out
    assert told.err == "as stored ...\nternary ...\n"


def test_adapters_are_merged(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    assert main(["export", "plain", "base"]) == 0
    Path("lora.toml").write_text(
        "num_steps = 2\nsample_tokens = 0\n[model]\ninit_from = 'base'\n[workload]\nbatch_size = 2\nseq_len = 32\n"
        "[optimizer]\nlr = 0.5\n[[optimizations]]\nkind = 'lora'\nrank = 2\n"
    )
    assert main(["train", "lora.toml", "--data", "text.txt", "--out", "lora"]) == 0
    tuned, plain = (rows_of(path, formats=("int8",)) for path in ("lora", "plain"))
    assert tuned["as stored"].loss != plain["as stored"].loss
    assert tuned["as stored"].model_bytes == plain["as stored"].model_bytes
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plain", "--formats", "int3"], "format 'int3' is unknown; did you mean 'int8'?"),
        (["absent"], "is not a folder; give"),
        (["plain"], "was trained on text.txt, which its training file does not state; give --data"),
        (["."], "does not exist"),
    ],
)
def test_faults_are_told(
    runs: Path,  # noqa: ARG001
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["quantize", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_experts_are_rounded_one_by_one() -> None:
    shape = (FAMILIES["mixtral"].experts.count, 6, 8)  # type: ignore[union-attr]
    values = torch.randn(shape) * torch.arange(1, shape[0] + 1).view(-1, 1, 1)
    found = FORMATS["ternary"].rounded(values)
    for rounded, given in zip(found, values, strict=True):
        assert set(rounded.unique().tolist()) <= {0.0, *(sign * float(given.abs().mean()) for sign in (-1, 1))}
    assert FORMATS["ternary"].num_bytes(shape) == math.ceil(found.numel() / 5) + 4 * shape[0]
