"""What is wrong with a folder is said in one error, before anything is loaded; nothing is unpickled."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_folders import save_model, transformers_model
from hybridtrain.errors import ConfigError
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.tensor_file import open_tensor_file
from hybridtrain.weights.hf_source import INDEX, ONE_FILE, open_folder
from tiny_models import GPT2_ODD, LLAMA_ODD

TIED = replace(LLAMA_ODD, tied=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(transformers_model(LLAMA_ODD), folder / "one")
    save_model(transformers_model(LLAMA_ODD), folder / "shards", max_shard_size="20KB")
    return folder


def copy_of(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "model")
    return tmp_path / "model"


def faults_of(folder: Path, config: ModelConfig = LLAMA_ODD) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        open_folder(folder, config)
    return raised.value.faults


def rewrite(change: Callable[[dict[str, Tensor]], None], tmp_path: Path, config: ModelConfig = LLAMA_ODD) -> Path:
    folder = save_model(transformers_model(config), tmp_path / "model")
    tensors = load_file(folder / ONE_FILE)
    change(tensors)
    save_file(tensors, folder / ONE_FILE)
    return folder


# ---- files


@pytest.mark.parametrize(
    "content",
    [
        b"", b"PK\x03\x04", b"PK\x03\x04" * 20, b"\x0a" + b"\0" * 7 + b"no header!", b"\x02" + b"\0" * 7 + b"[]",
        b"\x07" + b"\0" * 7 + b'{"a":1}',
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_safetensors(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ONE_FILE).write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        open_folder(tmp_path, LLAMA_ODD)
    (fault,) = raised.value.faults
    assert fault.startswith(f"{len(content)} bytes that are not a complete safetensors file (")
    assert fault.endswith("copy or download it again")
    assert str(tmp_path / ONE_FILE) in str(raised.value)


@pytest.mark.parametrize("offsets", [(0, 5), (4, 0), (-4, 0), (0, 4.0)])
def test_a_tensor_whose_bytes_are_not_its_own(offsets: tuple[float, float], tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    (tmp_path / ONE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (fault,) = faults_of(tmp_path)
    assert "not a complete safetensors file" in fault


def test_a_file_cut_short_is_told_before_anything_is_read(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved / "one", tmp_path)
    path = folder / ONE_FILE
    size = path.stat().st_size
    for length, content in ((size - 1, b""), (size, b"12")):
        os.truncate(path, length)
        path.write_bytes(path.read_bytes() + content)
        (fault,) = faults_of(folder)
        assert fault.startswith(f"{length + len(content)} bytes that are not a complete safetensors file (incomplete")


def test_a_file_cut_short_while_it_is_read_is_an_error(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved / "one", tmp_path)
    source = open_folder(folder, LLAMA_ODD)
    os.truncate(folder / ONE_FILE, 5000)
    with pytest.raises(ConfigError, match="the file became shorter"):
        source.read("embedding.token", slice(0, 101 * 36))


def test_every_shard_that_is_missing_or_damaged_is_told(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved / "shards", tmp_path)
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    first.unlink()
    second.write_bytes(b"")
    faults = faults_of(folder)
    assert [fault.partition(":")[0] for fault in faults] == [first.name, second.name]
    assert "No such file or directory" in faults[0]


def test_an_index_that_names_what_is_not_there(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved / "shards", tmp_path)
    index = json.loads((folder / INDEX).read_text())
    shard = index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.norm.bias"] = shard
    (folder / INDEX).write_text(json.dumps(index))
    assert faults_of(folder) == (
        f"model.norm.bias: the index says {shard}, which does not contain it; use the index of these shards",
    )


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}'])
def test_an_index_that_is_none(content: str, saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved / "shards", tmp_path)
    (folder / INDEX).write_text(content)
    assert len(faults_of(folder)) == 1


# ---- tensors


def test_missing_misshapen_and_surplus_tensors_are_told_together(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = torch.zeros(35)
        tensors["model.norm.bias"] = torch.zeros(36)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(50, 36, dtype=torch.float64)

    faults = faults_of(rewrite(change, tmp_path))
    assert faults == (
        "model.layers.0.mlp.up_proj.weight: of type F64, must be F32, F16, BF16; convert it, or use another version",
        "model.layers.1.mlp.up_proj.weight: missing; shape (50, 36) is required: download the folder again",
        "model.norm.weight: (35,) must be (36,); use the config.json of these weights",
        "model.norm.bias: not a weight of this model; check its config.json",
    )


def test_weights_of_another_shape_are_told(saved: Path) -> None:
    faults = faults_of(saved / "one", replace(LLAMA_ODD, num_blocks=1, ffn_width=51))
    assert (
        "model.layers.0.mlp.up_proj.weight: (50, 36) must be (51, 36); use the config.json of these weights" in faults
    )
    assert sum("not a weight of this model" in fault for fault in faults) == 9


def test_a_tied_output_may_be_absent_or_equal_and_nothing_else(tmp_path: Path) -> None:
    folder = rewrite(
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 0}), tmp_path, TIED
    )
    open_folder(folder, TIED)
    tensors = load_file(folder / ONE_FILE)
    tensors["lm_head.weight"][100, 35] += 1
    save_file(tensors, folder / ONE_FILE)
    assert faults_of(folder, TIED) == (
        "lm_head.weight: differs from the embedding although tie_word_embeddings is true; set it to false",
    )


def test_an_untied_output_must_be_there(tmp_path: Path) -> None:
    folder = save_model(transformers_model(TIED), tmp_path / "tied")
    (fault,) = faults_of(folder, LLAMA_ODD)
    assert fault.startswith("lm_head.weight: missing")
    assert "set tie_word_embeddings" in fault


def test_old_names_and_old_buffers_are_known(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 17, 17, dtype=torch.bool)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    new = open_folder(save_model(transformers_model(GPT2_ODD), tmp_path / "new"), GPT2_ODD)
    torch.manual_seed(0)
    old = open_folder(rewrite(change, tmp_path, GPT2_ODD), GPT2_ODD)
    part = slice(3, 50)
    assert old.read("block.1.qkv.weight", part).shape == new.read("block.1.qkv.weight", part).shape
    assert old.read("embedding.token", part).abs().sum() > 0


# ---- pickles


class _Poison:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_nothing_is_unpickled(name: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(_Poison(trace)))
    (fault,) = faults_of(folder)
    assert fault.startswith(f"{name} is a pickle, which can run code and is never opened")
    (folder / ONE_FILE).write_bytes((folder / name).read_bytes())  # nor under another name
    assert len(faults_of(folder)) == 1
    assert not trace.exists()
    pickle.loads((folder / name).read_bytes())  # noqa: S301  the poison works
    assert trace.exists()


def test_a_folder_without_weights_and_no_folder(tmp_path: Path) -> None:
    assert faults_of(tmp_path)[0].startswith("has neither model.safetensors nor model.safetensors.index.json")
    assert faults_of(tmp_path / "absent")[0].startswith("is not a folder")


# ---- what tells folders apart


def test_the_digest_is_of_headers_and_sizes(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved / "one", tmp_path)
    before = open_folder(folder, LLAMA_ODD).digest
    assert before == open_folder(saved / "one", LLAMA_ODD).digest != open_folder(saved / "shards", LLAMA_ODD).digest
    end = open_tensor_file(folder / ONE_FILE)
    assert end.digest == open_tensor_file(saved / "one" / ONE_FILE).digest
