"""``[model] init_from`` and ``hybridtrain export``: a folder of transformers, trained, and back."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_folders import save_model, transformers_model
from hybridtrain.cli.main import main
from hybridtrain.data.byte_tokens import encode_bytes
from hybridtrain.data.corpus import open_corpus
from hybridtrain.memory.group import DirectGroup, Group
from hybridtrain.run.train import train as train_model
from hybridtrain.training_file import load_config
from ranks import on_ranks
from tiny_models import FAMILIES, LLAMA_GROUPED
from tiny_tokenizers import save_tokenizer

SHAPE = replace(LLAMA_GROUPED, vocab_size=256, num_blocks=2)
TRAIN = """\
num_steps = 3
save_every = 2
sample_tokens = 0
[model]
init_from = "source"
[workload]
batch_size = 2
seq_len = 8
[optimizer]
lr = {lr}
weight_decay = 0.0
[schedule]
warmup_steps = 0
[[optimizations]]
kind = "mixed_precision"
"""
MIXED = TRAIN[TRAIN.index("[[optimizations]]") :]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the same runs with a card and without
    save_model(transformers_model(SHAPE), Path("source"), max_shard_size="20KB")
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    Path("train.toml").write_text(TRAIN.format(lr="1e-3"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(*arguments: str) -> int:
    return main(["train", "train.toml", "--data", "text.txt", *arguments])


def test_a_run_starts_from_the_folder_and_ends_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.toml").write_text(TRAIN.format(lr="1e-30"))  # nothing of float32 moves
    assert train() == 0
    assert main(["export", "run", "same"]) == 0
    assert "the model after 3 steps" in capsys.readouterr().out
    same, source = load_file("same/model.safetensors"), AutoModelForCausalLM.from_pretrained("source")
    assert all(torch.equal(same[name], values) for name, values in source.state_dict().items())
    encoded = AutoTokenizer.from_pretrained("same")("the quick \u0100\0").input_ids
    assert encoded == encode_bytes("the quick \u0100\0".encode()).tolist()  # what it was trained in
    assert json.loads(Path("same/config.json").read_text())["dtype"] == "float32"


def test_text_is_read_by_the_tokenizer_beside_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    save_model(transformers_model(replace(SHAPE, vocab_size=300)), Path("source"))
    save_tokenizer(Path("source"))
    num_bytes = Path("text.txt").stat().st_size
    assert train() == 0
    found = re.search(r"text.txt: ([\d,]+) tokens of 1 training documents, packing 'stream'", capsys.readouterr().out)
    assert int(found[1].replace(",", "")) < 0.6 * num_bytes, "words that the tokenizer knows; bytes would be 0.9 of it"
    assert main(["export", "run", "same"]) == 0
    same, source = (json.loads(Path(name, "tokenizer.json").read_text()) for name in ("same", "source"))
    assert same == source
    assert main(["train", "train.toml", "--out", "bare"]) == 0
    assert (
        "warning: the built-in text is read as bytes, not by the model's tokenizer source;" in capsys.readouterr().out
    )


def test_a_trained_model_is_exported_with_its_master_values() -> None:
    assert train() == 0
    for dtype in ("float32", "bfloat16"):
        assert main(["export", "run", dtype, "--dtype", dtype]) == 0
    exact, rounded = (load_file(f"{dtype}/model.safetensors") for dtype in ("float32", "bfloat16"))
    state = load_file("run/checkpoints/step-00000003/tensors-00000.safetensors")["embedding.token"]
    assert torch.equal(exact["model.embed_tokens.weight"], state)
    assert torch.equal(rounded["model.embed_tokens.weight"], state.bfloat16())
    assert not torch.equal(exact["model.norm.weight"], rounded["model.norm.weight"].float())
    for dtype in ("float32", "bfloat16"):
        theirs = AutoModelForCausalLM.from_pretrained(dtype, dtype="auto")
        assert theirs.dtype == getattr(torch, dtype)


def test_a_resumed_run_needs_the_folder_that_it_began_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    more = Path("train.toml").read_text().replace("num_steps = 3", "num_steps = 4")
    Path("train.toml").write_text(more)
    tensors = load_folder("source")
    for path in Path("source").glob("model*"):
        path.unlink()
    save_file(tensors, "source/model.safetensors")
    assert train("--resume") == 2
    assert "model.init_from: " in capsys.readouterr().err


def test_a_wrong_folder_is_told_before_anything_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    for path in Path("source").glob("*.safetensors"):
        path.unlink()
    assert train() == 2
    assert "No such file or directory" in capsys.readouterr().err
    assert not Path("run", "checkpoints").exists()


def test_a_run_can_be_exported_without_its_first_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    Path("source").rename("elsewhere")
    assert main(["export", "run", "out"]) == 0
    assert "source is missing, so config.json is written from the model's shape" in capsys.readouterr().out
    theirs = AutoModelForCausalLM.from_pretrained("out")
    assert theirs.config.num_key_value_heads == SHAPE.num_kv_heads


@pytest.mark.parametrize("ends", [7, [7, 8], [7, 2], None])
@pytest.mark.parametrize("eos_token", ["", "<|im_end|>"])
def test_the_ends_that_a_model_came_with_stay_unless_another_one_was_trained(
    ends: int | list[int] | None, eos_token: str
) -> None:
    save_tokenizer(Path("source"))
    for name in ("config.json", "generation_config.json"):
        found = json.loads(Path("source", name).read_bytes()) if Path("source", name).is_file() else {}
        Path("source", name).write_text(json.dumps(found | {"eos_token_id": ends}))
    Path("text.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    data = f'[data]\npath = "text.jsonl"\neos_token = "{eos_token}"\n[model]'
    Path("train.toml").write_text(TRAIN.format(lr="1e-3").replace("[model]", data))
    assert main(["train", "train.toml"]) == 0
    assert main(["export", "run", "out"]) == 0
    expected = (2 if eos_token else 0) if ends is None else ends
    if eos_token and ends in (7, [7, 8]):
        expected = 2
    for name in ("config.json", "generation_config.json"):
        assert json.loads(Path("out", name).read_bytes())["eos_token_id"] == expected


@pytest.mark.parametrize(("run", "words"), [("absent", "has no training.toml"), ("text.txt", "has no training.toml")])
def test_a_folder_that_is_no_run_is_told(run: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", run, "out"]) == 2
    assert words in capsys.readouterr().err


def test_an_export_never_replaces_and_leaves_nothing_half_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    Path("full").mkdir()
    Path("full", "file").write_text("mine")
    assert main(["export", "run", "full"]) == 2
    assert "full: 1 fault\n  exists already" in capsys.readouterr().err
    for path in Path("run", "checkpoints").rglob("*.json"):
        path.write_bytes(b"no state")
    assert main(["export", "run", "out"]) == 2
    assert not Path("out").exists()
    assert not list(Path().glob(".*partial"))


ACCUMULATED = """
[[optimizations]]
kind = "grad_accumulation"
grad_accum_steps = 2
"""
RANKS = {
    "zero 1": '[[optimizations]]\nkind = "zero"\nstage = 1\n',
    "zero 2": '[[optimizations]]\nkind = "zero"\nstage = 2\n',
    "zero 3": '[[optimizations]]\nkind = "zero"\nstage = 3\n[[optimizations]]\nkind = "weight_streaming"\n',
    "stages": '[[optimizations]]\nkind = "pipeline"\nstages = 2\n',
}


@pytest.mark.parametrize("name", RANKS)
def test_ranks_train_the_folder_that_one_process_trains_and_exports(name: str) -> None:
    Path("train.toml").write_text(TRAIN.format(lr="1e-3") + ACCUMULATED + RANKS[name])

    def run(group: Group, out: str) -> None:
        corpus = open_corpus(Path("text.txt"), vocab_size=SHAPE.vocab_size)
        file = load_config(Path("train.toml"))
        train_model(file, corpus, Path(out), resume=False, say=lambda _: None, progress=False, group=group)

    on_ranks(2, lambda group: run(group, "ranks"))
    run(DirectGroup(1 if name == "stages" else 2), "alone")
    for out in ("ranks", "alone"):
        assert main(["export", out, f"{out}-exported"]) == 0
    exported, alone, source = (load_folder(f) for f in ("ranks-exported", "alone-exported", "source"))
    assert exported.keys() == alone.keys() == source.keys()
    assert all(torch.equal(exported[name], values) for name, values in alone.items())
    assert not all(torch.equal(exported[name], values) for name, values in source.items())


def load_folder(folder: str) -> dict[str, torch.Tensor]:
    return {name: values for path in Path(folder).glob("*.safetensors") for name, values in load_file(path).items()}


LORA = """
[[optimizations]]
kind = "lora"
rank = 2
"""


@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_what_has_adapters_is_told_at_the_start(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = SHAPE if name == "llama" else replace(FAMILIES["mixtral"], vocab_size=256, num_blocks=1)
    save_model(transformers_model(shape), Path("base"))
    lora = LORA + 'targets = ["query", "value"]\n' * (name == "llama")
    Path("train.toml").write_text(TRAIN.format(lr="1e-2").replace(MIXED, lora).replace('"source"', '"base"'))
    assert train() == 0
    told = capsys.readouterr().out
    if name == "llama":
        assert (
            "adapters on query, value of every block; without adapters: key, attention_out, ffn_gate, ffn_up, ffn_out\n"
            in told
        )
    else:
        assert (
            "adapters on query, key, value, attention_out of every block; without adapters: router, experts_gate"
            in told
        )
    assert ("warning: experts and their router have no adapters" in told) == (name == "mixtral")


def test_adapters_are_exported_alone_or_merged_and_a_resumed_run_has_its_base() -> None:
    plain = TRAIN.format(lr="1e-2").replace(MIXED, LORA)
    Path("train.toml").write_text(plain)
    assert train("--out", "through") == 0
    Path("train.toml").write_text(plain.replace("num_steps = 3", "num_steps = 2"))
    assert train() == 0
    Path("train.toml").write_text(plain)
    assert train("--resume") == 0
    for run in ("run", "through"):
        assert main(["export", run, f"{run}-adapter"]) == 0
        assert main(["export", run, f"{run}-merged", "--merge"]) == 0
    for file in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        ours, expected = load_file(f"run-{file}"), load_file(f"through-{file}")
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[name], values) for name, values in expected.items())
    merged, source = (
        load_file("run-merged/model.safetensors"),
        AutoModelForCausalLM.from_pretrained("source").state_dict(),
    )
    changed = {name for name, values in merged.items() if not torch.equal(values, source[name])}
    assert changed == {name for name in merged if "_proj" in name}
    assert json.loads(Path("run-adapter/adapter_config.json").read_text())["base_model_name_or_path"].endswith(
        "/source"
    )


def test_adapters_are_not_merged_into_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.toml").write_text(TRAIN.format(lr="1e-2").replace(MIXED, LORA))
    assert train() == 0
    save_model(transformers_model(SHAPE), Path("other"))
    Path("source").rename("elsewhere")
    Path("other").rename("source")
    assert main(["export", "run", "out", "--merge"]) == 2
    assert "model.init_from: " in capsys.readouterr().err


def test_adapters_beside_the_text_part_of_a_multimodal_model_leave_merged_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = replace(FAMILIES["gemma3"], vocab_size=256)
    folder = save_model(transformers_model(shape), Path("gemma"))
    tensors = {f"language_model.{name}": values for name, values in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"vision_tower.a": torch.ones(256)}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    content = (
        TRAIN.format(lr="1e-3").replace('"source"', '"gemma"').replace(MIXED, '[[optimizations]]\nkind = "lora"\n')
    )
    Path("train.toml").write_text(content)
    assert train() == 0
    said = "gemma: only the text model is read; ignored: 1 tensors of 1.00 KiB (vision_tower)"
    assert capsys.readouterr().out.count(said) == 1
    assert main(["export", "run", "adapter"]) == 2
    assert "adapters of its text model alone do not fit; add --merge" in capsys.readouterr().err
    assert main(["export", "run", "merged", "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained("merged")
    assert type(merged).__name__ == "Gemma3ForCausalLM"
    moved = merged.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(moved, tensors["language_model.model.layers.0.self_attn.q_proj.weight"])
