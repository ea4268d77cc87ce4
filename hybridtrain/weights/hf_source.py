"""A model's first values from tensors under transformers' names. P elements of a flat slice."""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hybridtrain.errors import ConfigError
from hybridtrain.models.build import build_model
from hybridtrain.models.hf_config import read_json
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.tensor_file import DTYPES, FileTensor, TensorFile, open_tensor_file
from hybridtrain.units import format_bytes
from hybridtrain.weights.disk_names import DiskWeight, disk_weights, hf_text_name

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Tensors in older folders that are not weights: masks and angles, which are recomputed."""
_OUTPUT = "lm_head.weight"
_COMPARED_ELEMENTS = 1 << 23


class HfSource:
    """Weights by our parameter names, from ``tensors`` under transformers' names.

    Raises ``ConfigError``, headed by ``origin``, with each missing, misshapen or unexpected tensor. ``digest``
    identifies the weights.
    """

    def __init__(self, origin: str, tensors: Mapping[str, FileTensor], config: ModelConfig, digest: str = "") -> None:
        self.digest = digest
        self._whole: tuple[str, Tensor] | None = None
        self._weights = disk_weights(build_model(config, torch.float32, torch.device("meta")))
        self._left_out = {name: tensor for name, tensor in tensors.items() if hf_text_name(config.family, name) is None}
        self._tensors = self._with_prefix(_text_part(config, tensors))
        faults = [fault for weight in self._weights.values() for fault in self._weight_faults(weight)]
        faults += self._surplus_faults(is_tied=config.tied)
        if faults:
            raise ConfigError(origin, faults)

    @property
    def left_out(self) -> str:
        """A sentence on a multimodal model's ignored parts; empty: there are none."""
        if not self._left_out:
            return ""
        num_bytes = sum(tensor.num_bytes for tensor in self._left_out.values())
        parts = sorted({name.removeprefix("model.").partition(".")[0] for name in self._left_out})
        summary = f"{len(self._left_out)} tensors of {format_bytes(num_bytes)} ({', '.join(parts)})"
        return f"only the text model is read; ignored: {summary}"

    def read(self, name: str, part: slice) -> Tensor:
        """Return elements ``part`` of a parameter, flat, as ``WeightSource`` says.

        Only these are read; a transposed tensor is read whole and kept until another parameter is read.
        """
        weight = self._weights[name]
        if self._whole is not None and self._whole[0] != name:
            self._whole = None
        if weight.is_transposed:
            if self._whole is None:
                whole = self._tensors[weight.names[0]].read(slice(0, prod(weight.shape))).view(weight.shape)
                self._whole = (name, whole.t().reshape(-1))
            return self._whole[1][part]
        pieces = [self._tensors[disk_name].read(inner) for disk_name, inner in weight.pieces(part)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _with_prefix(self, tensors: Mapping[str, FileTensor]) -> Mapping[str, FileTensor]:
        """Return the tensors as a model with an output has them; one saved without has names without its prefix."""
        prefix = self._weights["embedding.token"].names[0].partition(".")[0] + "."
        if any(name.startswith(prefix) for name in tensors):
            return tensors
        return {name if name == _OUTPUT else prefix + name: tensor for name, tensor in tensors.items()}

    def _weight_faults(self, weight: DiskWeight) -> Iterator[str]:
        for name in weight.names:
            tensor = self._tensors.get(name)
            if tensor is None:
                tie = "; or set tie_word_embeddings where the embedding is the output" if name == _OUTPUT else ""
                yield f"{name}: missing; shape {weight.shape} is required: download the folder again{tie}"
            elif tensor.shape != weight.shape:
                yield f"{name}: {tensor.shape} must be {weight.shape}; use the config.json of these weights"
            elif tensor.dtype_name not in DTYPES:
                allowed = ", ".join(DTYPES)
                yield f"{name}: of type {tensor.dtype_name}, must be {allowed}; convert it, or use another version"

    def _surplus_faults(self, *, is_tied: bool) -> Iterator[str]:
        known = {name for weight in self._weights.values() for name in weight.names}
        for name, tensor in self._tensors.items():
            if name in known or name.endswith(_BUFFERS):
                continue
            if not (is_tied and name == _OUTPUT):
                yield f"{name}: not a weight of this model; check its config.json"
            elif not self._equals_embedding(tensor):
                yield f"{name}: differs from the embedding although tie_word_embeddings is true; set it to false"

    def _equals_embedding(self, output: FileTensor) -> bool:
        embedding = self._tensors.get(self._weights["embedding.token"].names[0])
        if embedding is None or embedding.dtype_name not in DTYPES:  # reported already
            return True
        if (output.shape, output.dtype_name) != (embedding.shape, embedding.dtype_name):
            return False
        size = prod(output.shape)
        parts = (slice(first, min(first + _COMPARED_ELEMENTS, size)) for first in range(0, size, _COMPARED_ELEMENTS))
        return all(torch.equal(output.read(part), embedding.read(part)) for part in parts)


def _text_part(config: ModelConfig, tensors: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Return the tensors of the text model, as a checkpoint of it alone names them."""
    text: dict[str, FileTensor] = {}
    for name, tensor in tensors.items():
        text_name = hf_text_name(config.family, name)
        if text_name is not None:
            text[name if text_name in text else text_name] = tensor  # of two, one stays and is surplus
    return text


def open_folder(path: Path, config: ModelConfig) -> HfSource:
    """Open a folder's safetensors files as initial values; only headers are read, values on demand.

    The folder has ``model.safetensors``, or shards with ``model.safetensors.index.json``. Nothing is unpickled.

    Raises:
        ConfigError: files are missing, damaged or pickled, or weights missing, misshapen or of another model.
    """
    if (path / ONE_FILE).is_file():
        files = {ONE_FILE: open_tensor_file(path / ONE_FILE)}
        tensors: dict[str, FileTensor] = dict(files[ONE_FILE].tensors)
    elif (path / INDEX).is_file():
        shards = _read_index(path)
        files = _open_shards(path, sorted(set(shards.values())))
        faults = [
            f"{name}: the index says {shard}, which does not contain it; use the index of these shards"
            for name, shard in shards.items()
            if name not in files[shard].tensors
        ]
        if faults:
            raise ConfigError(str(path / INDEX), faults)
        tensors = {name: files[shard].tensors[name] for name, shard in shards.items()}
    else:
        raise ConfigError(str(path), [_no_weights(path)])
    digest = sha256("\n".join(f"{name} {file.digest}" for name, file in files.items()).encode()).hexdigest()
    return HfSource(str(path), tensors, config, digest)


def _no_weights(path: Path) -> str:
    if not path.is_dir():
        return (
            "is not a folder; it must be one with config.json and safetensors files: check the path, or fetch a model "
            f"into it (hf download ORG/NAME --local-dir {path})"
        )
    pickled = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickled:
        return (
            f"{pickled[0]} is a pickle, which can run code and is never opened; weights must be safetensors: convert "
            f"them where you trust them, by transformers' save_pretrained"
        )
    return f"has neither {ONE_FILE} nor {INDEX}; check the path, or download it again"


def _read_index(path: Path) -> dict[str, str]:
    shards = read_json(path / INDEX, "copy or download it again").get("weight_map")
    if not isinstance(shards, dict) or any(not isinstance(x, str) or Path(x).name != x for x in shards.values()):
        raise ConfigError(str(path / INDEX), ["weight_map: shards must be files in this folder; download it again"])
    return {name: str(shard) for name, shard in shards.items()}


def _open_shards(path: Path, names: list[str]) -> dict[str, TensorFile]:
    shards, faults = {}, []
    for name in names:
        try:
            shards[name] = open_tensor_file(path / name)
        except ConfigError as error:
            faults += [f"{name}: {fault}" for fault in error.faults]
    if faults:
        raise ConfigError(str(path), faults)
    return shards
