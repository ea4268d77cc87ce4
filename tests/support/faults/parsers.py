"""All readers of files that somebody else may have written or damaged."""

import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from faults.runs import Run, training_file
from hybridtrain.checkpoint.generations import generations
from hybridtrain.checkpoint.manifest import MANIFEST, read_generation, verify
from hybridtrain.config.decode import load_toml
from hybridtrain.config.encode import to_json
from hybridtrain.data.chat import BUILTIN_TEMPLATES, ChatTemplate
from hybridtrain.data.corpus import text_corpus
from hybridtrain.data.documents import open_source, read_documents
from hybridtrain.data.token_file import TokenFormat, open_token_file, write_token_file
from hybridtrain.data.tokenizer import open_tokenizer
from hybridtrain.diagnoses import diagnose, diagnosis_text, read_log
from hybridtrain.errors import ConfigError
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.find_model import find_model
from hybridtrain.models.hf_config import hf_config_of, model_config_from_hf, read_json
from hybridtrain.models.model_config import PRESETS
from hybridtrain.optimizations.lora import Lora
from hybridtrain.run.run_folder import read_run_files
from hybridtrain.run.train import open_trainer
from hybridtrain.stacks import default_folder
from hybridtrain.tensor_file import open_tensor_file
from hybridtrain.training_file import load_config
from hybridtrain.virtual_gpu.cards.card import Card
from hybridtrain.weights.adapters import export_adapter, load_adapter
from hybridtrain.weights.hf_source import INDEX, _read_index
from hybridvalidation.experiments.executed import ExecutedRun
from hybridvalidation.experiments.peers import PeerFile
from hybridvalidation.experiments.recorded import Source
from hybridvalidation.experiments.snapshots import PublicSnapshots, _replay_file
from hybridvalidation.gate.baseline_file import read_baseline
from hybridvalidation.gate.memory_baseline import MemoryBaseline, PlanFigures
from hybridvalidation.records.stack_run import StackRun
from hybridvalidation.records.store import read_lines
from hybridvalidation.scenario import Scenario, TargetFile
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.protocol import UNIONS, LadderFile, LadderRecord, StudyFile

_ROOT: Final = Path(__file__).parents[3]
_LONGEST_SAMPLE: Final = 20_000
"""Bytes: what is longer is read line by line, and its first lines tell as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """A kind of file, a sound sample, and its reader."""

    name: str
    file: str
    """Name of the file that is damaged."""
    sample: bytes
    read: Callable[[Path], object]
    """Raises what it says to its user, and nothing else."""


def parsers(folder: Path) -> Iterator[Parser]:
    """Yield all parsers; samples are written to ``folder``."""
    yield from _tables()
    yield from _records()
    yield from _texts(folder)
    yield from _weights(folder)
    yield from _runs(folder)
    yield Parser(
        name="memory snapshot", file="snapshot.pickle", sample=_snapshot(), read=lambda path: _replay_file(path, None)
    )


def _tables() -> Iterator[Parser]:
    scenarios = default_folder()
    files = ScenarioFiles(scenarios)
    rows: tuple[tuple[str, Path, Callable[[Path], object]], ...] = (
        ("training file", _ROOT / "examples/train-hybrid.toml", load_config),
        ("training file, text", _ROOT / "examples/train-chat.toml", load_config),
        ("scenario", scenarios / "1b-16gb.toml", lambda path: load_toml(Scenario, path)),
        ("stack", scenarios / "stacks/maximum.toml", lambda path: files.stack(str(path))),
        ("stack, adapters", scenarios / "stacks/qlora.toml", lambda path: files.stack(str(path))),
        ("targets", scenarios / "targets.toml", lambda path: load_toml(TargetFile, path)),
        ("study", scenarios / "studies/tuned-0.1m.toml", lambda path: load_toml(StudyFile, path)),
        ("ladder", scenarios / "ladders/quality-ladder.toml", lambda path: load_toml(LadderFile, path, unions=UNIONS)),
        ("peers", scenarios / "peers/8b-qlora-16gb.toml", lambda path: load_toml(PeerFile, path)),
        ("public snapshots", scenarios / "snapshots/public.toml", lambda path: load_toml(PublicSnapshots, path)),
        ("recorded source", scenarios / "recorded/torchao.toml", lambda path: load_toml(Source, path)),
    )
    for name, path, read in rows:
        yield Parser(name=name, file="file.toml", sample=_part(path), read=read)
    yield Parser(name="card", file="card.toml", sample=_CARD, read=lambda path: load_toml(Card, path))
    yield Parser(name="model", file="model.toml", sample=_MODEL, read=lambda path: find_model(str(path)))


def _part(path: Path) -> bytes:
    """Return a file, or as many whole tables of a long one as fit."""
    content = path.read_bytes()
    return content if len(content) <= _LONGEST_SAMPLE else content[: content.rfind(b"\n[[", 0, _LONGEST_SAMPLE)]


def _records() -> Iterator[Parser]:
    records = _ROOT / "results/records"
    rows: tuple[tuple[str, str, type], ...] = (
        ("records of a scenario", "gpt2-small.jsonl", StackRun),
        ("records of the ladder", "studies/quality-ladder.jsonl", LadderRecord),
        ("records of executions", "executed.jsonl", ExecutedRun),
    )  # fmt: skip
    for name, file, cls in rows:
        shortest = min((records / file).read_bytes().splitlines(), key=len)
        yield Parser(name=name, file=Path(file).name, sample=shortest + b"\n", read=partial(read_lines, cls=cls))
    plan = PlanFigures(
        test="test_memory.py", card="L4", fits=True, peak_bytes=24, by_module={"grad/layers.{0..1}.mlp": 8},
        made_with="torch 2.13.0",
    )  # fmt: skip
    yield Parser(
        name="baseline",
        file="baseline.json",
        sample=to_json(MemoryBaseline(plans={"a step": plan})).encode(),
        read=lambda path: read_baseline(path, MemoryBaseline),
    )


def _texts(folder: Path) -> Iterator[Parser]:
    template = ChatTemplate(BUILTIN_TEMPLATES["chatml"], {})

    def read_lines_of_text(path: Path) -> None:
        for document in read_documents(open_source(path), lambda: template, counts_all=False):
            list(document)

    lines = (_ROOT / "examples/chat.jsonl").read_bytes()
    elements = b"[" + b",\n".join(lines.splitlines()) + b"]"
    for name, file, sample in (("lines of text", "text.jsonl", lines), ("list of texts", "text.json", elements)):
        yield Parser(name=name, file=file, sample=sample, read=read_lines_of_text)
    yield Parser(name="text", file="text.txt", sample=40 * b"The quick fox. \xc3\xa9\n", read=text_corpus)
    for token_format in (TokenFormat.RAW_UINT16, TokenFormat.LLMC_LLAMA3):
        made = folder / f"{token_format}.bin"
        write_token_file(made, np.arange(200), token_format)
        yield Parser(
            name=f"tokens, {token_format}", file="tokens.bin", sample=made.read_bytes(),
            read=lambda path: open_token_file(path, vocab_size=256).tokens[:],
        )  # fmt: skip
    settings = {"eos_token": {"content": "<e>"}, "chat_template": BUILTIN_TEMPLATES["chatml"], "bos_token": None}
    for file, sample in (("tokenizer.json", _tokenizer()), ("tokenizer_config.json", json.dumps(settings).encode())):
        place = folder / f"of-{file}"
        place.mkdir()
        (place / "tokenizer.json").write_bytes(_tokenizer())
        yield Parser(name=file, file=f"of-{file}/{file}", sample=sample, read=_read_tokenizer)
    yield Parser(
        name="chat template", file="chat.jinja", sample=BUILTIN_TEMPLATES["chatml"].encode(), read=_read_template
    )


def _read_tokenizer(path: Path) -> None:
    tokenizer = open_tokenizer(str(path.parent), vocab_size=2**16)
    tokenizer.decode(tokenizer.encode(["a fox"])[0].ids.tolist())


def _read_template(path: Path) -> None:
    text = path.read_text(encoding="utf-8", errors="replace")
    source = open_source(_ROOT / "examples/chat.jsonl")
    for document in read_documents(source, lambda: ChatTemplate(text, {}), counts_all=False):
        list(document)


def _weights(folder: Path) -> Iterator[Parser]:
    shape = PRESETS["llama-3.2-1b"]
    config = json.dumps(hf_config_of(shape), indent=1).encode()
    yield Parser(name="config.json", file="config.json", sample=config, read=model_config_from_hf)
    (folder / "shards").mkdir()
    (folder / "shards/one.safetensors").write_bytes(_tensors())
    index = {"metadata": {"total_size": 160}, "weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    yield Parser(
        name=INDEX, file=f"shards/{INDEX}", sample=json.dumps(index).encode(),
        read=lambda path: _read_index(path.parent),
    )  # fmt: skip
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": False, "target_modules": ["q_proj"]}
    yield Parser(
        name="adapter_config.json",
        file="adapter_config.json",
        sample=json.dumps(adapter).encode(),
        read=partial(read_json, remedy="save it again"),
    )
    yield Parser(
        name="safetensors", file="model.safetensors", sample=_tensors(),
        read=_read_tensors,
    )  # fmt: skip


def _runs(folder: Path) -> Iterator[Parser]:
    """Yield the readers of a run's folder, and of adapters' values."""
    run = Run("plain", folder / "run")
    run.go()
    state = generations(run.states)[-1].relative_to(run.folder)
    tensors = next((run.folder / state).glob("*.safetensors")).name
    rows: tuple[tuple[str, Path, Callable[[Path], object]], ...] = (
        ("training.toml of a run", Path("training.toml"), lambda path: read_run_files(path.parent)),
        ("data.json of a run", Path("data.json"), lambda path: read_run_files(path.parent)),
        ("log of a run", Path("log.jsonl"), lambda path: diagnosis_text(diagnose(read_log(path)), path)),
        ("manifest", state / MANIFEST, _read_state),
        ("checkpoint", state / tensors, _read_state),
    )
    for name, path, read in rows:
        shutil.copytree(run.folder, folder / f"of-{path.name}")  # one damaged file in each
        sample = (run.folder / path).read_bytes()
        yield Parser(name=name, file=f"of-{path.name}/{path}", sample=sample, read=read)
    file = replace(training_file("plain", 32), optimizations=(Lora(rank=2),))
    trainer = open_trainer(file, DirectTransfer(torch.device("cpu")))
    export_adapter(trainer, folder / "adapter", base="base")
    weights = folder / "adapter/adapter_model.safetensors"
    yield Parser(
        name="adapters", file="adapter/adapter_model.safetensors", sample=weights.read_bytes(),
        read=lambda path: load_adapter(trainer, path.parent),
    )  # fmt: skip


def _read_state(path: Path) -> None:
    try:
        verify(read_generation(path.parent))
    except ValueError as error:  # told by whoever looks for the newest whole one
        raise ConfigError(str(path), [str(error)]) from error


def _tensors() -> bytes:
    header = {
        "a": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
        "b": {"dtype": "BF16", "shape": [8], "data_offsets": [128, 144]},
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(144)


def _read_tensors(path: Path) -> None:
    for tensor in open_tensor_file(path).tensors.values():
        if tensor.dtype_name in {"F32", "F16", "BF16"}:
            tensor.read(slice(0, int(np.prod(tensor.shape))))


def _snapshot() -> bytes:
    """Return a segment with a block in use, and the events that led to it."""
    events = [
        {"action": "segment_alloc", "addr": 2**21, "size": 2**21, "stream": 0, "time_us": 1},
        {"action": "alloc", "addr": 2**21, "size": 600, "stream": 0, "time_us": 2},
    ]
    blocks = [
        {"size": 1024, "requested_size": 600, "state": "active_allocated"},
        {"size": 2**21 - 1024, "requested_size": 0, "state": "inactive"},
    ]
    segment = {
        "device": 0, "address": 2**21, "total_size": 2**21, "stream": 0, "segment_type": "small", "blocks": blocks,
    }  # fmt: skip
    file = io.BytesIO()
    pickle.dump({"segments": [segment], "device_traces": [events], "allocator_settings": {}}, file, protocol=4)
    return file.getvalue()


def _tokenizer() -> bytes:
    tokens = ["<e>", *"abcdefghijklmnopqrstuvwxyz", "\u0120", "fo", "fox"]
    vocab = {token: number for number, token in enumerate(tokens)}
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": 0, "content": "<e>", "special": True, **off}]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": level, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
                  "merges": ["f o", "fo x"]},
    }  # fmt: skip
    return json.dumps(content, indent=1).encode()


_CARD: Final = b"""\
name = "Tiny card"
memory_mib = 64
compute_capability = "8.9"
tflops_bf16 = 100.0
tflops_fp32 = 50.0
memory_gbps = 500.0
pcie_gbps = 30.0
context_mib = 1
"""
_MODEL: Final = b"""\
family = "llama"
vocab_size = 256
max_seq_len = 16
num_blocks = 2
width = 32
num_heads = 2
num_kv_heads = 2
ffn_width = 64
tied = true
rope_theta = 500000.0
sliding_window = 8
window_pattern = [true, false]

[rope_scaling]
method = "llama3"
factor = 8.0
original_max_seq_len = 8
"""
