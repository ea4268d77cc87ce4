"""A slice of a weight or of state with exact values, whatever is stored. P elements."""

from dataclasses import dataclass, field

from torch import Tensor

from hybridtrain.memory.formats import ExactWeight, StateFormat, StoredWeight, WeightFormat, weight_part


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of state."""

    name: str
    signed: bool = True
    """Whether values may be negative; decides on the map of 8-bit codes."""
    shape: tuple[int, ...] | None = None
    """None: one value per element of the parameter, stored as the plan says. Else a small float32 tensor of this
    shape, which stays on the device."""


@dataclass(slots=True)
class WeightSlice:
    """A weight, or a flat slice of it.

    What is stored is flat; codes begin at a multiple of 256. ``shape``: of the parameter where this is all of it.
    """

    storage: WeightFormat
    stored: StoredWeight
    master_weight: Tensor | None
    shape: tuple[int, ...] = ()
    _value: Tensor | None = field(default=None, init=False)

    @property
    def value(self) -> Tensor:
        """The (P,) float32 value, to be changed in place; what reads it last writes it back."""
        if self._value is None:
            self._value = self.storage.load(self.stored, self.master_weight)
        return self._value

    def part(self, part: slice) -> "WeightSlice":
        """Return a range of the elements, with a value of its own, or one that the whole writes where it must."""
        if self.storage.needs_whole:
            return WeightSlice(ExactWeight(), (self.value.view(-1)[part],), None)
        master_weight = None if self.master_weight is None else self.master_weight.view(-1)[part]
        return WeightSlice(self.storage, weight_part(self.stored, part), master_weight)

    def write(self, *, nearest: bool = False) -> None:
        """Store the value if it was asked for."""
        if self._value is not None:
            self.storage.store(self._value, self.stored, self.master_weight, nearest=nearest)


@dataclass(frozen=True, slots=True)
class StateSlice:
    """A slice of one tensor of state."""

    storage: StateFormat
    stored: tuple[Tensor, ...]
    num_elements: int

    def load(self) -> Tensor:
        """Return the (P,) float32 values: the stored tensor itself where it is float32."""
        return self.storage.load(self.stored, self.num_elements)

    def store(self, value_P: Tensor) -> None:
        """Write values that ``load`` returned and the caller changed; fewer bits than 32 are rounded."""
        self.storage.store(value_P, self.stored)

    def part(self, part: slice) -> "StateSlice":
        """Return a range of the elements."""
        if part == slice(0, self.num_elements) and all(tensor.dim() == 1 for tensor in self.stored):
            return self
        stored = tuple(tensor.view(-1)[self.storage.part(i, part)] for i, tensor in enumerate(self.stored))
        return StateSlice(self.storage, stored, part.stop - part.start)
