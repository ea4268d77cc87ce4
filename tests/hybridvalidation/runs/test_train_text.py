"""``hybridtrain train`` with a [data] table: any tokens, packed documents, loss on answers, a validation loss."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch

from hybridtrain.data.data_config import DataConfig
from hybridtrain.training_file import load_config
from hybridvalidation.cli.main import main
from tiny_tokenizers import SENTENCES, chat, save_tokenizer, write_lines

ROOT = Path(__file__).parents[3]
TRAIN = """\
num_steps = 4
save_every = 2
eval_every = 2
sample_tokens = 3
sample_prompt = "The sky"
[data]
path = "chats.jsonl"
tokenizer = "tok"
[model.shape]
family = "llama"
vocab_size = 300
max_seq_len = 64
num_blocks = 1
width = 32
num_heads = 2
num_kv_heads = 2
ffn_width = 64
[workload]
batch_size = 4
seq_len = 64
[schedule]
warmup_steps = 1
"""
ACCUMULATION = '[[optimizations]]\nkind = "grad_accumulation"\ngrad_accum_steps = 2\n'


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the same runs with a card and without
    save_tokenizer(Path("tok"))
    write_lines(Path("chats.jsonl"), *[chat(f"{n} {SENTENCES[n % 6]}", SENTENCES[n % 5]) for n in range(30)])
    Path("train.toml").write_text(TRAIN)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def change(old: str, new: str) -> None:
    text = Path("train.toml").read_text()
    assert old in text
    Path("train.toml").write_text(text.replace(old, new))


def lines(out: str) -> list[dict[str, float]]:
    found = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in found]


def test_chats_are_trained_on_and_validated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "train.toml"]) == 0
    log = lines("run")
    assert [(line["step"], min(line)) for line in log] == [
        (0, "data"), (1, "grad_norm"), (2, "grad_norm"), (2, "num_targets"), (3, "grad_norm"), (4, "grad_norm"),
        (4, "num_targets"),
    ]  # fmt: skip
    assert log[0]["packing"] == "documents"
    assert 50 < log[0]["fill_percent"] < 100
    assert log[-1]["perplexity"] == pytest.approx(math.exp(log[-1]["validation_loss"]), rel=1e-12)
    told = capsys.readouterr().out
    assert f"{log[0]['fill_percent']:.1f} % filled" in told
    assert f"validation loss {log[-1]['validation_loss']:.4f}, perplexity {log[-1]['perplexity']:,.3f}" in told
    assert "\nThe sky" in told


def test_a_resumed_run_repeats_the_whole_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "train.toml", "--out", "whole"]) == 0
    change("num_steps = 4", "num_steps = 2")
    assert main(["train", "train.toml"]) == 0
    change("num_steps = 2", "num_steps = 4")
    capsys.readouterr()
    assert main(["train", "train.toml", "--resume"]) == 0
    assert "encoding" not in capsys.readouterr().out
    assert lines("run") == lines("whole")


def test_evaluations_change_no_step() -> None:
    assert main(["train", "train.toml", "--out", "often"]) == 0
    change("eval_every = 2\n", "")
    assert main(["train", "train.toml", "--out", "seldom"]) == 0
    steps = [[line for line in lines(out) if "loss" in line] for out in ("often", "seldom")]
    assert steps[0] == steps[1]
    assert lines("often")[-1] == lines("seldom")[-1]


def test_micro_batches_hold_the_rows_of_the_batch() -> None:
    assert main(["train", "train.toml", "--out", "whole"]) == 0
    Path("train.toml").write_text(TRAIN + ACCUMULATION)
    assert main(["train", "train.toml", "--out", "split"]) == 0
    for whole, split in zip(lines("whole")[1:], lines("split")[1:], strict=True):
        name = "loss" if "loss" in whole else "validation_loss"
        # The same sums of float32 in another order, through four steps.
        assert split[name] == pytest.approx(whole[name], rel=1e-5)


def test_other_text_is_not_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    change("num_steps = 4", "num_steps = 2")
    assert main(["train", "train.toml"]) == 0
    change('tokenizer = "tok"', 'tokenizer = "tok"\npacking = "none"\nloss_on = "all"')
    assert main(["train", "train.toml", "--resume"]) == 2
    told = capsys.readouterr().err
    assert 'data.packing: "documents" in the run that was saved, "none" now' in told
    assert "data.digest: " in told


def test_the_table_and_the_option_train_alike_on_bytes() -> None:
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    change('path = "chats.jsonl"\ntokenizer = "tok"', 'path = "text.txt"')
    assert main(["train", "train.toml", "--out", "table"]) == 0
    change('[data]\npath = "text.txt"\n', "")
    assert main(["train", "train.toml", "--data", "text.txt", "--out", "option"]) == 0
    assert lines("table")[1:] == lines("option")
    assert "validation_loss" in lines("option")[-1]
    change("eval_every = 2\n", "")
    assert main(["train", "train.toml", "--data", "text.txt", "--out", "plain"]) == 0
    assert lines("plain") == [line for line in lines("option") if "loss" in line]


def test_hybrid_training_keeps_rows_apart_as_a_probe(capsys: pytest.CaptureFixture[str]) -> None:
    hybrid = (
        '[hybrid]\nwarmup_steps = 1\nfull_steps = 1\nmonitor = "probe"\n[[optimizations]]\nkind = "predictor_state"\n'
    )
    Path("train.toml").write_text(TRAIN + hybrid + 'predictor = "slow_gradient"\n')
    assert main(["train", "train.toml"]) == 0
    assert "rows are the probe split" in capsys.readouterr().out
    assert "validation_loss" in lines("run")[-1]


@pytest.mark.parametrize(
    ("old", "new", "arguments", "words"),
    [
        ("", "", ["--data", "text.txt"], "[data] names chats.jsonl and --data text.txt; give one of them"),
        ("eval_every = 2", "eval_every = -1", [], "eval_every: -1 must be at least 0"),
        ('"tok"', '"tok"\nvalidation_percent = 0', [], "eval_every: 2 needs something to validate on"),
        ('"tok"', '"tok"\nvalidation_percent = 95', [], "validation_percent: 95 must be in 0 to 90"),
        ('"tok"', '"tok"\npackign = "none"', [], "did you mean 'packing'?"),
        ("vocab_size = 300", "vocab_size = 200", [], "the model's vocabulary has 200"),
    ],
)
def test_faults_of_the_file(
    capsys: pytest.CaptureFixture[str], old: str, new: str, arguments: list[str], words: str
) -> None:
    change(old, new)
    assert main(["train", "train.toml", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_exported_model_takes_its_tokenizer_along() -> None:
    assert main(["train", "train.toml"]) == 0
    assert main(["export", "run", "out"]) == 0
    copied = {path.name for path in Path("out").iterdir()} - {"config.json", "model.safetensors"}
    assert copied == {path.name for path in Path("tok").iterdir()}
    assert all(Path("out", name).read_bytes() == Path("tok", name).read_bytes() for name in copied)


def test_the_tokenizer_is_the_models_own_unless_another_is_named() -> None:
    shape = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
             "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}  # fmt: skip
    Path("tok/config.json").write_text(json.dumps(shape))
    head, _, tail = TRAIN.partition("[model.shape]")
    Path("train.toml").write_text(
        head.replace('tokenizer = "tok"\n', "") + '[model]\nfolder = "tok"\n' + tail[tail.index("[workload]") :]
    )
    assert main(["train", "train.toml"]) == 0
    Path("train.toml").write_text(TRAIN)
    assert main(["train", "train.toml", "--out", "named"]) == 0
    assert lines("run")[0] == lines("named")[0]


def test_the_example_is_sound() -> None:
    example = load_config(ROOT / "examples" / "train-chat.toml")
    assert example.data is not None
    assert (ROOT / example.data.path).is_file()


def test_the_guide_tells_every_option_and_its_default() -> None:
    guide = (ROOT / "docs" / "data.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]*) \|", guide, re.MULTILINE))
    for field in fields(DataConfig):
        assert field.name in rows
        if field.default is not MISSING and field.default not in {None, ""}:
            assert rows[field.name].strip("`") == json.dumps(field.default)
