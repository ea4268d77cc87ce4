"""The update with factored second moments: they need a parameter's whole gradient at once. P elements of a slice."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtrain.engine.adafactor import factored_second_moment, update_factored
from hybridtrain.engine.adamw import AdamWStep
from hybridtrain.engine.slow_momentum import move, track
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.master_codec import MasterCodecs, StoredWeight, weight_part
from hybridtrain.memory.state_store import ParameterState, history_pieces
from hybridtrain.memory.tier_tensor import SliceStream, Stored, TierTensor, piece_bytes
from hybridtrain.virtual_gpu.observer import MemoryObserver

_SLICE_ELEMENTS = 1 << 23


class FactoredUpdate:
    """Updates the parameters of a unit one after the other."""

    def __init__(self, codecs: MasterCodecs, copies: CopyEngine, observer: MemoryObserver) -> None:
        self._codecs = codecs
        self._copies = copies
        self._observer = observer

    def apply(
        self,
        states: Sequence[ParameterState],
        weights: Sequence[StoredWeight],
        taken: list[Stored],
        steps: Sequence[AdamWStep],
        factor: Tensor | None,
    ) -> None:
        """Update parameters whose weights are on the device; ``taken`` holds their gradients and is emptied."""
        for index, (state, weight, step) in enumerate(zip(states, weights, steps, strict=True)):
            grad = self._bring(taken[index])
            taken[index] = grad
            if factor is not None:
                grad.mul_(factor)
            companion = None if state.companion is None else self._bring(state.companion)
            moments = [_tensor(moment) for moment in state.moments]
            codec = self._codecs.of(weight)
            update_factored(weight, companion, grad.view(state.parameter.shape), moments, codec, step)
            if step.slow is not None:
                self._follow_slow(state, weight, companion, grad, step)
            if isinstance(state.companion, TierTensor) and companion is not None:
                self._copies.wait(self._copies.store(companion, state.companion.buffer, state.companion.offset))

    def _follow_slow(
        self, state: ParameterState, weight: StoredWeight, companion: Tensor | None, grad: Tensor, step: AdamWStep
    ) -> None:
        """Add the gradient to the slow average, slice by slice, and move along it."""
        assert step.slow is not None, "the caller asked"
        count = state.parameter.numel()
        parts = [slice(start, min(start + _SLICE_ELEMENTS, count)) for start in range(0, count, _SLICE_ELEMENTS)]
        items = [history_pieces(state, part) for part in parts]
        slot_bytes = max((piece_bytes(item) for item in items), default=0)
        stream = SliceStream(self._copies, self._observer)
        for part, history in zip(parts, stream.run(items, slot_bytes), strict=True):
            slow_P = track(history, grad.view(-1)[part], step.slow)
            if step.slow.predicted_steps:
                second_P = factored_second_moment([_tensor(m) for m in state.moments], part)
                lr_steps = step.lr * step.slow.predicted_steps
                moved_P = move(
                    slow_P,
                    second_P,
                    correction=1.0,
                    eps=step.config.eps,
                    lr_steps=lr_steps,
                    largest_ratio=step.slow.largest_ratio,
                )
                piece, rest_P = weight_part(weight, part), None if companion is None else companion.view(-1)[part]
                codec = self._codecs.of(weight)
                value_P = codec.load(piece, rest_P)
                step.slow.count(value_P, moved_P)
                codec.store(value_P.add_(moved_P), piece, rest_P)
        state.history_is_fresh = False

    def _bring(self, stored: Stored) -> Tensor:
        """Return a whole tensor on the device."""
        if isinstance(stored, Tensor):
            return stored
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device=self._copies.transfer.device)
        self._copies.wait(self._copies.fetch(tensor, stored.buffer, stored.offset, after=[self._copies.mark()]))
        return tensor


def _tensor(stored: Stored) -> Tensor:
    assert isinstance(stored, Tensor), "factored moments stay on the device"
    return stored
