"""Slices of weights and state with exact values, independent of the storage format. P elements."""

from dataclasses import dataclass, field

from torch import Tensor

from hybridtrain.memory.formats import ExactWeight, StateFormat, StoredWeight, WeightFormat, weight_part


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of state."""

    name: str
    signed: bool = True
    """Whether values may be negative; selects the map of 8-bit codes."""
    shape: tuple[int, ...] | None = None
    """Shape of a small float32 tensor that stays on the device; None: one value per element, stored as planned."""


@dataclass(slots=True)
class WeightSlice:
    """A weight, or a flat slice of it. Stored tensors are flat; a slice of codes starts at a multiple of 256.

    ``shape``: the parameter's, for a whole weight.
    """

    storage: WeightFormat
    stored: StoredWeight
    master_weight: Tensor | None
    shape: tuple[int, ...] = ()
    _value: Tensor | None = field(default=None, init=False)

    @property
    def value(self) -> Tensor:
        """The (P,) float32 value, to be changed in place and written by ``write``."""
        if self._value is None:
            self._value = self.storage.load(self.stored, self.master_weight)
        return self._value

    def part(self, part: slice) -> "WeightSlice":
        """Return a range of the elements as a slice of its own."""
        if self.storage.needs_whole:
            return WeightSlice(ExactWeight(), (self.value.view(-1)[part],), None)
        master_weight = None if self.master_weight is None else self.master_weight.view(-1)[part]
        return WeightSlice(self.storage, weight_part(self.stored, part), master_weight)

    def write(self, *, nearest: bool = False) -> None:
        """Store the value if it was read."""
        if self._value is not None:
            self.storage.store(self._value, self.stored, self.master_weight, nearest=nearest)


@dataclass(frozen=True, slots=True)
class StateSlice:
    """A slice of one state tensor."""

    storage: StateFormat
    stored: tuple[Tensor, ...]
    num_elements: int

    def load(self) -> Tensor:
        """Return the (P,) float32 values: the stored tensor itself where it is float32."""
        return self.storage.load(self.stored, self.num_elements)

    def store(self, value_P: Tensor) -> None:
        """Store values that the caller changed after ``load``, rounded below 32 bits."""
        self.storage.store(value_P, self.stored)

    def part(self, part: slice) -> "StateSlice":
        """Return a range of the elements."""
        if part == slice(0, self.num_elements) and all(tensor.dim() == 1 for tensor in self.stored):
            return self
        stored = tuple(tensor.view(-1)[self.storage.part(i, part)] for i, tensor in enumerate(self.stored))
        return StateSlice(self.storage, stored, part.stop - part.start)
