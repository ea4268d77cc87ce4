"""The location of each parameter in a transformers folder: names, shapes, transposes, pieces."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from hybridtrain.models.adapter import is_adapter
from hybridtrain.models.block_model import BlockModel
from hybridtrain.models.families import FAMILIES, WEIGHT_NAMES, Family
from hybridtrain.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class DiskWeight:
    """The tensors of one parameter in a checkpoint."""

    names: tuple[str, ...]
    """Tensor names; concatenated they are the parameter: one, or the experts that our parameter stacks."""
    shape: tuple[int, ...]
    """Shape of each tensor."""
    is_transposed: bool
    """Whether the tensor is transposed: GPT-2's Conv1D layers are stored as (in, out)."""

    def pieces(self, part: slice) -> Iterator[tuple[str, slice]]:
        """Yield the tensors and their element ranges for a range of the parameter's elements."""
        size = prod(self.shape)
        for number in range(part.start // size, -(-part.stop // size)):
            first = number * size
            yield self.names[number], slice(max(part.start - first, 0), min(part.stop - first, size))


def disk_weights(model: BlockModel) -> dict[str, DiskWeight]:
    """Return the location of every parameter except adapters', from shapes alone."""
    named = ((name, parameter) for name, parameter in model.named_unit_parameters() if not is_adapter(name))
    return {name: disk_weight(model.config, name, tuple(parameter.shape)) for name, parameter in named}


def disk_weight(config: ModelConfig, name: str, shape: tuple[int, ...] = ()) -> DiskWeight:
    """Return the location of a parameter by its qualified name and shape."""
    hf = config.architecture.hf
    names, block, path = {**WEIGHT_NAMES, **hf.weights}, "", name
    if name.startswith("block."):
        _, block, path = name.split(".", 2)
    layer, part = (path, "weight") if path in names else path.rsplit(".", 1)
    theirs = f"{hf.block_prefix.format(block=block) if block else ''}{names[layer]}.{part}"
    if "{expert}" in theirs:
        assert config.experts is not None, f"{config.family} without a number of experts"
        return DiskWeight(
            tuple(theirs.format(expert=expert) for expert in range(config.experts.count)), shape[1:], False
        )
    is_transposed = config.family == "gpt2" and bool(block) and part == "weight" and not layer.endswith("norm")
    return DiskWeight((theirs,), shape[::-1] if is_transposed else shape, is_transposed)


def hf_text_name(family: Family, name: str) -> str | None:
    """Return the name in a checkpoint of the text model alone; None: it is not part of the text model.

    ``name`` is from a checkpoint of the text model or of a multimodal model with it.
    """
    whole = FAMILIES[family].hf.multimodal
    if whole is not None and name.startswith(whole.beside):
        return None
    prefixes = {} if whole is None else whole.prefixes
    return next((theirs + name.removeprefix(old) for old, theirs in prefixes.items() if name.startswith(old)), name)
