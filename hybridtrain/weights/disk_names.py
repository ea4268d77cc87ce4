"""Where a folder holds each parameter: under which names, in which shapes, turned or cut into pieces."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from hybridtrain.models.adapter import is_adapter
from hybridtrain.models.block_model import BlockModel
from hybridtrain.models.hf_import import hf_weight


@dataclass(frozen=True, slots=True)
class DiskWeight:
    """The tensors of one parameter."""

    names: tuple[str, ...]
    """One after the other they are the parameter: the experts, or a single one."""
    shape: tuple[int, ...]
    """Of each of them."""
    is_transposed: bool
    """The parameter is the transpose of its only tensor."""

    def pieces(self, part: slice) -> Iterator[tuple[str, slice]]:
        """Yield the tensors, and the ranges of their elements, that a range of the parameter's is made of."""
        size = prod(self.shape)
        for number in range(part.start // size, -(-part.stop // size)):
            first = number * size
            yield self.names[number], slice(max(part.start - first, 0), min(part.stop - first, size))


def disk_weights(model: BlockModel) -> dict[str, DiskWeight]:
    """Return the place of every parameter but adapters'; only shapes are looked at."""
    found = {}
    for name, parameter in model.named_unit_parameters():
        if is_adapter(name):
            continue
        kept, shape = hf_weight(model.config, name), tuple(parameter.shape)
        shape = shape[1:] if kept.is_stacked else shape[::-1] if kept.is_transposed else shape
        found[name] = DiskWeight(kept.names, shape, kept.is_transposed)
    return found
