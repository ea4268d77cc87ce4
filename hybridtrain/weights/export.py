"""A trained model as a folder that transformers' ``from_pretrained`` loads. P elements of a flat slice."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hybridtrain.atomic_write import new_folder
from hybridtrain.config.encode import JsonMapping
from hybridtrain.data.tokenizer_files import copy_tokenizer, with_token_ids
from hybridtrain.errors import DiskSpaceError, DivergenceError
from hybridtrain.models.hf_config import hf_config_of, hf_text_config
from hybridtrain.tensor_file import TensorFileWriter
from hybridtrain.trainer import Trainer
from hybridtrain.units import GB, format_bytes
from hybridtrain.weights.adapters import has_adapters, merged_values, require_free
from hybridtrain.weights.disk_names import DiskWeight, disk_weights
from hybridtrain.weights.exact_values import exact_values
from hybridtrain.weights.hf_source import INDEX, ONE_FILE

_CONFIG = "config.json"
_GENERATION = "generation_config.json"

Shard = list[tuple[str, tuple[int, ...]]]
"""Names and shapes of a file's tensors."""
Values = Iterator[tuple[str, slice, Tensor]]


def export_folder(
    trainer: Trainer,
    folder: Path,
    *,
    dtype: torch.dtype,
    source_folder: Path | None = None,
    tokenizer_folder: Path | None = None,
    max_shard_bytes: int = 5 * GB,
) -> list[Path]:
    """Write a model's exact values as safetensors with config.json and tokenizer, and return the files.

    Values are written slice by slice; only a transposed tensor is in memory whole. The folder appears when it is
    complete.

    Args:
        trainer: The trainer; master weights are exported if there are any, adapters merged. Its phase becomes FULL.
        folder: Absent or empty.
        dtype: float32, which is exact, or float16 or bfloat16, rounded to nearest.
        source_folder: Folder of the initial weights, whose config.json and tokenizer are copied.
        tokenizer_folder: Folder of the tokenizer and of overridden special tokens, if it is another one.
        max_shard_bytes: Largest file, unless a single tensor is larger.

    Raises:
        ConfigError: the folder is not empty. DiskSpaceError: the disk has too little space. DivergenceError: a value is
        not finite in this dtype.
    """
    require_free(folder)
    weights = disk_weights(trainer.model)
    shards = _plan_shards([(n, w.shape) for w in weights.values() for n in w.names], dtype.itemsize, max_shard_bytes)
    num_bytes = sum(prod(shape) for shard in shards for _, shape in shard) * dtype.itemsize
    _require_space(folder, num_bytes)
    with new_folder(folder) as partial:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        names = names if len(shards) > 1 else [ONE_FILE]
        with ExitStack() as stack:
            writers: dict[str, TensorFileWriter] = {}
            for name, shard in zip(names, shards, strict=True):
                heads = [(*head, dtype) for head in shard]
                writer = stack.enter_context(closing(TensorFileWriter(partial / name, heads)))
                writers |= dict.fromkeys((tensor for tensor, _ in shard), writer)
            values = merged_values(trainer) if has_adapters(trainer) else exact_values(trainer)
            _write_values(values, weights, writers, dtype)
        if len(shards) > 1:
            places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor, _ in shard}
            _write_json(partial / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": {**places}})
        config = _config(trainer, source_folder, dtype)
        generation: JsonMapping = {}
        if source_folder is not None and (source_folder / _GENERATION).is_file():
            generation = json.loads((source_folder / _GENERATION).read_bytes())
        if tokenizer := tokenizer_folder or source_folder:
            config, generation = (with_token_ids(table, tokenizer) for table in (config, generation))
            copy_tokenizer(tokenizer, partial)
        _write_json(partial / _CONFIG, config)
        if generation:
            _write_json(partial / _GENERATION, generation)
    return sorted(folder.iterdir())


def _write_values(
    values: Values, weights: Mapping[str, DiskWeight], writers: Mapping[str, TensorFileWriter], dtype: torch.dtype
) -> None:
    """Write ranges of parameters, which come in order, where they belong; a transposed one with its last range."""
    whole = torch.empty(0)
    for name, part, exact_P in values:
        weight, value_P, place = weights[name], exact_P.reshape(-1).to("cpu", dtype), part
        if not bool(value_P.isfinite().all()):
            raise DivergenceError(
                f"{name}: has values that are not finite in {dtype}; export as float32, or an older checkpoint."
            )
        if weight.is_transposed:
            size = prod(weight.shape)
            whole = torch.empty(size, dtype=dtype) if part.start == 0 else whole
            whole[part] = value_P
            if part.stop < size:
                continue
            value_P, place = whole.view(weight.shape[::-1]).t().reshape(-1), slice(0, size)
        done = 0
        for disk_name, inner in weight.pieces(place):
            count = inner.stop - inner.start
            writers[disk_name].write(disk_name, inner.start, value_P[done : done + count])
            done += count


def _plan_shards(tensors: Sequence[tuple[str, tuple[int, ...]]], itemsize: int, most_bytes: int) -> list[Shard]:
    shards: list[Shard] = [[]]
    size = 0
    for name, shape in tensors:
        num_bytes = prod(shape) * itemsize
        if shards[-1] and size + num_bytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += num_bytes
    return shards


def _require_space(folder: Path, num_bytes: int) -> None:
    parent = next(parent for parent in folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(parent).free
    if num_bytes > free:
        raise DiskSpaceError(
            f"{folder}: the weights need {format_bytes(num_bytes)}, {format_bytes(free)} are free; nothing was "
            f"written. Free disk space, choose another disk, or a 16-bit dtype."
        )


def _config(trainer: Trainer, source_folder: Path | None, dtype: torch.dtype) -> JsonMapping:
    """Return the config.json that the model came with, its text part, or one of its shape, with the files' type."""
    if source_folder is None:
        content = hf_config_of(trainer.model.config)
    else:
        content = {**hf_text_config(json.loads((source_folder / _CONFIG).read_bytes()))}
        content.pop("quantization_config", None)
    content.pop("torch_dtype", None)  # what older versions call it
    return content | {"dtype": str(dtype).removeprefix("torch.")}


def _write_json(path: Path, content: JsonMapping) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
