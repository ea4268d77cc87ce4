"""``hybridtrain train`` with a [data] table: any tokens, packed documents, loss on answers, a validation loss."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from hybridtrain.cli.main import main
from hybridtrain.data.byte_tokens import encode_bytes
from hybridtrain.data.chat import BUILTIN_TEMPLATES, ChatTemplate
from hybridtrain.data.data_config import DataConfig
from hybridtrain.data.text_data import open_text
from hybridtrain.data.token_file import TokenFormat, write_token_file
from hybridtrain.data.tokenizer import ByteTokenizer
from hybridtrain.training_file import load_config
from tiny_tokenizers import (
    END,
    END_TURN,
    MARKED_TEMPLATE,
    PREFIX_TEMPLATE,
    SENTENCES,
    chat,
    save_tokenizer,
    write_lines,
)

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
    kinds = [next(key for key in ("data", "grad_norm", "validation_loss") if key in line) for line in log]
    assert [(line["step"], kind) for line, kind in zip(log, kinds, strict=True)] == [
        (0, "data"), (1, "grad_norm"), (2, "grad_norm"), (2, "validation_loss"), (3, "grad_norm"), (4, "grad_norm"),
        (4, "validation_loss"),
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
    assert 'data.packing: "documents" in the checkpoint, "none" in this run' in told
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
    assert "rows are reserved as probe split" in capsys.readouterr().out
    assert "validation_loss" in lines("run")[-1]


@pytest.mark.parametrize(
    ("old", "new", "arguments", "words"),
    [
        ("", "", ["--data", "text.txt"], "[data] names chats.jsonl and --data text.txt; give one of them"),
        ("eval_every = 2", "eval_every = -1", [], "eval_every: -1 must be at least 0"),
        ('"tok"', '"tok"\nvalidation_percent = 0', [], "eval_every: 2 needs held-out text;"),
        ('"tok"', '"tok"\nvalidation_percent = 95', [], "validation_percent: 95 must be in 0 to 90"),
        ('"tok"', '"tok"\npackign = "none"', [], "did you mean 'packing'?"),
        ("vocab_size = 300", "vocab_size = 200", [], "the model's vocab_size is 200"),
    ],
)
def test_faults_of_the_file(
    capsys: pytest.CaptureFixture[str], old: str, new: str, arguments: list[str], words: str
) -> None:
    change(old, new)
    assert main(["train", "train.toml", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("seq_len", "packing", "count"), [(64, "documents", 0), (24, "documents", 4), (24, "none", 4)])
def test_answers_that_are_cut_off_their_question_are_told(
    capsys: pytest.CaptureFixture[str], seq_len: int, packing: str, count: int
) -> None:
    long = [chat("The sky", " ".join([SENTENCES[1], str(number)] * 2)) for number in range(4)]
    write_lines(Path("chats.jsonl"), *long, *[chat(str(number), "a") for number in range(4)])
    change('"tok"', f'"tok"\npacking = "{packing}"\nvalidation_percent = 0')
    change("eval_every = 2\n", "")
    change("seq_len = 64\n", f"seq_len = {seq_len}\n")
    assert main(["train", "train.toml"]) == 0
    told = f"{count} documents exceed workload.seq_len, so some answers"
    assert (told in capsys.readouterr().out) == (count > 0)
    assert lines("run")[0]["documents_cut"] == count


def test_a_message_of_weight_0_is_not_trained() -> None:
    chats = [chat(f"{n}", SENTENCES[n % 5], "more", SENTENCES[(n + 1) % 5]) for n in range(8)]
    for conversation in chats:
        conversation["messages"][1]["weight"] = 0  # type: ignore[index]
    write_lines(Path("chats.jsonl"), *chats)
    change('"tok"', '"tok"\nvalidation_percent = 0')
    change("eval_every = 2\n", "")
    text = open_text(load_config("train.toml").data, vocab_size=300, folder=Path("t"), say=lambda _: None)  # type: ignore[arg-type]
    assert text.train.counted is not None
    answers = text.tokenizer.decode(text.train.tokens[text.train.counted == 1].tolist())
    assert answers == "".join(f"{one['messages'][3]['content']}<|im_end|>\n" for one in chats)  # type: ignore[index]


@pytest.mark.parametrize(
    ("message", "loss_on", "words"),
    [
        ({"weight": 0.5}, "answers", "messages[1].weight: found 0.5; allowed: 1, or 0 to exclude it from the loss"),
        ({"weight": "0"}, "answers", 'messages[1].weight: found "0"; allowed: 1, or 0 to exclude it from the loss'),
        ({"weight": 0}, "all", "messages[1].weight: 0 contradicts loss_on = 'all', which trains on"),
    ],
)
def test_weights_that_cannot_be_heeded_are_refused(
    capsys: pytest.CaptureFixture[str], message: dict[str, object], loss_on: str, words: str
) -> None:
    wrong = chat("a", "b")
    wrong["messages"][1] |= message  # type: ignore[index]
    write_lines(Path("chats.jsonl"), chat("a", "b"), wrong)
    change('"tok"', f'"tok"\nloss_on = "{loss_on}"')
    assert main(["train", "train.toml"]) == 2
    assert f"chats.jsonl, line 2: {words}" in capsys.readouterr().err


def exported() -> dict[str, bytes]:
    assert main(["train", "train.toml"]) == 0
    shutil.rmtree("tok")  # what a run needs later lies in its folder
    assert main(["export", "run", "out"]) == 0
    return {path.name: path.read_bytes() for path in Path("out").iterdir()}


def test_an_exported_model_takes_its_tokenizer_along() -> None:
    expected = {path.name: path.read_bytes() for path in Path("tok").iterdir()}
    found = exported()
    assert found.keys() - expected.keys() == {"config.json", "model.safetensors", "generation_config.json"}
    assert {name: found[name] for name in expected} == expected
    config = json.loads(found["config.json"])
    assert (config["eos_token_id"], config["bos_token_id"]) == (0, 3)


@pytest.mark.parametrize(
    ("was", "template", "eos_token"),
    [
        (None, "chatml", ""), ("inline", "", ""), ("inline", "", END_TURN), ("inline", "mine.jinja", ""),
        ("named", "chatml", END_TURN), ("named", "", ""), ("jinja", "chatml", ""), ("jinja", "mine.jinja", END_TURN),
    ],
)  # fmt: skip
def test_an_exported_model_has_the_template_and_the_end_it_was_trained_with(
    was: str | None, template: str, eos_token: str
) -> None:
    settings = json.loads(Path("tok/tokenizer_config.json").read_text())
    if was != "inline":
        del settings["chat_template"]
    if was == "named":
        settings["chat_template"] = [{"name": "default", "template": MARKED_TEMPLATE}, {"name": "b", "template": "b"}]
    Path("tok/tokenizer_config.json").write_text(json.dumps(settings))
    Path("tok/special_tokens_map.json").write_text(json.dumps({"eos_token": END}))
    if was == "jinja":
        Path("tok/chat_template.jinja").write_text(MARKED_TEMPLATE)
    Path("mine.jinja").write_text("!" + PREFIX_TEMPLATE)
    change('"tok"', f'"tok"\nchat_template = "{template}"\neos_token = "{eos_token}"')
    ours = open_text(load_config("train.toml").data, vocab_size=300, folder=Path("t"), say=lambda _: None)  # type: ignore[arg-type]
    exported()
    theirs = AutoTokenizer.from_pretrained("out")
    messages = [{"role": "user", "content": "The sky"}, {"role": "assistant", "content": "is blue"}]
    text = ours.template or ours.tokenizer.templates["default"]
    expected = ChatTemplate(text, ours.tokenizer.special_tokens).text(messages)
    assert theirs.apply_chat_template(messages, tokenize=False) == expected
    assert theirs.eos_token == (eos_token or END)
    for name in ("config.json", "generation_config.json"):
        assert json.loads(Path("out", name).read_bytes())["eos_token_id"] == theirs.eos_token_id


def test_adapters_take_the_format_along_and_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    change('"tok"', '"tok"\nchat_template = "chatml"')
    Path("train.toml").write_text(Path("train.toml").read_text() + '[[optimizations]]\nkind = "lora"\nrank = 2\n')
    exported()
    assert "adapters on query, key, value, attention_out, ffn_gate, " in capsys.readouterr().out
    assert Path("out/adapter_config.json").is_file()
    assert Path("out/chat_template.jinja").read_text() == BUILTIN_TEMPLATES["chatml"]
    assert AutoTokenizer.from_pretrained("out").encode("The sky") == AutoTokenizer.from_pretrained(
        "run/tokenizer"
    ).encode("The sky")


def test_a_model_trained_on_bytes_is_exported_with_a_tokenizer_of_bytes() -> None:
    change('tokenizer = "tok"', 'tokenizer = "bytes"\nchat_template = "chatml"')
    exported()
    theirs, text = AutoTokenizer.from_pretrained("out"), "caf\u00e9 \u0100\0 <|im_end|>\r\n\U0001f600"
    assert theirs.encode(text) == encode_bytes(text.encode()).tolist()
    assert theirs.decode(theirs.encode(text)) == text
    assert theirs.eos_token == "\0"  # noqa: S105
    assert theirs.chat_template == BUILTIN_TEMPLATES["chatml"]
    assert AutoConfig.from_pretrained("out").eos_token_id == theirs.eos_token_id == ByteTokenizer().eos_ids[0]


def test_a_tokenizer_json_of_another_name_is_exported_as_what_it_is() -> None:
    Path("tok/tokenizer.json").rename("tok/mine.json")
    change('"tok"', '"tok/mine.json"')
    content = Path("tok/mine.json").read_bytes()
    assert exported()["tokenizer.json"] == content


def test_tokens_of_a_file_are_exported_without_a_tokenizer_where_none_is_named() -> None:
    write_token_file(Path("a.bin"), np.arange(3000) % 300, TokenFormat.RAW_UINT16)
    change('path = "chats.jsonl"\ntokenizer = "tok"', 'path = "a.bin"')
    change("sample_tokens = 3", "sample_tokens = 0")
    assert not {name for name in exported() if name.startswith("token")}


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
    change('[data]\npath = "chats.jsonl"\ntokenizer = "tok"\n[model.shape]', "[model.shape]")
    text = Path("train.toml").read_text()
    shape = text[text.index("[model.shape]") : text.index("[workload]")]
    change(shape, '[model]\nfolder = "tok"\n')
    Path("chats").mkdir()
    Path("chats.jsonl").rename("chats/a.JSONL")
    for number, data in enumerate(("chats", "chats/a.JSONL")):
        assert main(["train", "train.toml", "--data", data, "--out", str(number)]) == 0
        assert lines(str(number))[1:] == lines("run")[1:]


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
