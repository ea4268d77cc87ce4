# mypy: disable-error-code="no-untyped-call"
"""Ops over sequences: recurrent layers as cuDNN runs them, packed sequences, and the CTC loss.

A recurrent layer is one op a pass, with weights in one buffer and a reserve space that is kept for backward.

Calls and tensors follow torch's aten/src/ATen/native/cudnn/RNN.cpp. The sizes of cuDNN's own spaces are not documented.
They follow the two that were published, of an LSTM and a GRU of four layers (pytorch/pytorch, issue 2895), and are
called approximate. Shapes: T steps, B sequences, D inputs, H hidden, L layers, N = sum of the sequences' steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hybridtrain.virtual_gpu.account.op_rules import Args, Op, register_scratch

_ATEN = torch.ops.aten
Replaced = Iterator[tuple[Any, str, Any]]
"""(owner, name, replacement)."""
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""Names in torch._VF -> cuDNN's number (torch/backends/cudnn/rnn.py)."""
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_KEPT = {0: 1, 1: 1, 2: 5, 3: 6}
"""Vectors of H kept a step and layer: gates and cell of an LSTM, six of a GRU (published); of the others a guess."""
_NO_LONGER = "backward of cuDNN's recurrent layers needs train mode: call model.train() first"


@dataclass(frozen=True, slots=True)
class _Call:
    """Sizes of a call of ``aten::_cudnn_rnn``, or of its backward pass."""

    input: Tensor
    weights: Sequence[Tensor]
    weight_buf: Tensor | None
    mode: int
    hidden: int
    projected: int
    layers: int
    batch_first: bool
    train: bool
    directions: int
    batch_sizes: Sequence[int]

    @classmethod
    def of(cls, args: Args, first: int) -> "_Call":
        """Return the sizes; ``first`` is the position of the mode among the arguments."""
        mode, hidden, projected, layers, batch_first, _, train, bidirectional, batch_sizes = args[first : first + 9]
        return cls(
            args[0], args[1], args[3], mode, hidden, projected, layers, batch_first, train, 2 if bidirectional else 1,
            batch_sizes,
        )  # fmt: skip

    @property
    def batch(self) -> int:
        return self.batch_sizes[0] if self.batch_sizes else self.input.shape[0 if self.batch_first else 1]

    @property
    def rows(self) -> int:
        return self.input.numel() // max(self.input.shape[-1], 1)

    @property
    def swaps(self) -> bool:
        """Whether sequences come first, while cuDNN reads steps first."""
        return self.batch_first and not self.batch_sizes

    @property
    def width(self) -> int:
        """Numbers of one step of the result."""
        return (self.projected or self.hidden) * self.directions

    @property
    def num_weights(self) -> int:
        return sum(weight.numel() for weight in self.weights)

    @property
    def reserve_bytes(self) -> int:
        """Bytes kept for the backward pass: of each layer, and what lies between layers."""
        vectors = _KEPT[self.mode] * self.layers + self.layers - 1
        return self.rows * self.hidden * self.directions * vectors * self.input.element_size()

    def workspace_bytes(self) -> int:
        """Bytes of one call's workspace, and of the input, copied where its rows are not in cuDNN's order."""
        matrices = sum(weight.numel() for weight in self.weights if weight.dim() > 1)
        between = self.layers * self.directions * self.batch * self.hidden * (3 * _GATES[self.mode] - 1)
        in_order = self.input.transpose(0, 1) if self.swaps else self.input
        copied = 0 if in_order.is_contiguous() else self.input.numel()
        return (matrices + between + copied) * self.input.element_size()


def _forward(args: Args) -> tuple[Any, ...]:
    call, hx, cx = _Call.of(args, 6), args[4], args[5]
    first = [*call.input.shape[:-1]]
    output = call.input.new_empty([*(reversed(first) if call.swaps else first), call.width])
    if call.swaps:
        output = output.transpose(0, 1)
    buffer = call.input.new_empty(call.num_weights) if call.weight_buf is None else call.weight_buf
    reserve = call.input.new_empty(call.reserve_bytes if call.train else 0, dtype=torch.uint8)
    cy = call.input.new_empty(0) if cx is None else torch.empty_like(cx)
    return output, torch.empty_like(hx), cy, reserve, buffer


def _backward(args: Args) -> tuple[Any, ...]:
    call, hx, cx, (*_, wants_weights) = _Call.of(args, 10), args[4], args[5], args[21]
    if not call.train:
        raise RuntimeError(f"cudnn RNN backward can only be called in training mode (virtual GPU: {_NO_LONGER})")
    in_order = call.input.transpose(0, 1) if call.swaps else call.input
    gradient = torch.empty_like(in_order, memory_format=torch.contiguous_format)
    if call.swaps:
        gradient = gradient.transpose(0, 1)
    of_weights: list[Tensor] = []
    if wants_weights:
        flat, begin = call.input.new_empty(call.num_weights), 0
        for weight in call.weights:
            of_weights.append(flat[begin : begin + weight.numel()].view(weight.shape))
            begin += weight.numel()
    return gradient, torch.empty_like(hx), None if cx is None else torch.empty_like(cx), of_weights


def _backward_scratch(args: Sequence[Any]) -> int:
    missing = args[6].nbytes if args[7] is None else 0  # a gradient of zeros
    return _Call.of(tuple(args), 10).workspace_bytes() + missing


def _pack_scratch(args: Sequence[Any]) -> int:
    """Return the bytes of steps copied before they are joined, at most (aten/src/ATen/native/PackedSequence.cpp)."""
    return int(args[0].nbytes)


def _ctc(args: Args) -> tuple[Tensor, Tensor]:
    """Return the losses and the forward variables that are kept (aten/src/ATen/native/cuda/LossCTC.cu)."""
    steps, batch = args[0].shape[:2]
    return args[0].new_empty(batch), args[0].new_empty(batch, steps, 2 * max(args[3]) + 1)


_FORWARD, _BACKWARD = _ATEN._cudnn_rnn.default, _ATEN._cudnn_rnn_backward.default
PACK = _ATEN._pack_padded_sequence.default
"""Reads lengths on the host, of sequences on the card."""
RECURRENT = frozenset({_FORWARD, _BACKWARD})
OF_SEQUENCES: dict[Op, Callable[[Args], Any]] = {
    PACK: lambda args: PACK(*args),
    _FORWARD: _forward,
    _BACKWARD: _backward,
    _ATEN._ctc_loss.default: _ctc,
    _ATEN._ctc_loss_backward.default: lambda args: torch.empty_like(args[1], memory_format=torch.contiguous_format),
}
"""Ops -> their results on the meta device, where torch has none, or another."""
register_scratch(_FORWARD, lambda args: _Call.of(tuple(args), 6).workspace_bytes())
register_scratch(_BACKWARD, _backward_scratch)
register_scratch(PACK, _pack_scratch)
register_scratch(_ATEN._ctc_loss_backward.default, lambda args: int(args[6].nbytes))  # the backward variables


def recurrent_work(func: Op, args: Args) -> tuple[int, tuple[int, int, int]]:
    """Return the arithmetic of a pass, and the shape of the products that follow one another: rows, columns, inner."""
    call = _Call.of(args, 6 if func is _FORWARD else 10)
    matrices = sum(weight.numel() for weight in call.weights if weight.dim() > 1)
    times = 2 if func is _FORWARD else 4
    return times * call.rows * matrices, (call.batch, _GATES[call.mode] * call.hidden, call.hidden)


def sequence_layers(is_on_card: Callable[[Tensor], bool], note: Callable[[str], object]) -> Replaced:
    """Yield the replacements of recurrent layers, as cuDNN's op, and of the CTC loss, for tensors on the card.

    Args:
        is_on_card: Whether a tensor is on the virtual card.
        note: Called with what is approximate, at each use.
    """
    for name, mode in _MODES.items():
        yield torch._VF, name, _layer(name, mode, is_on_card, note)
    yield torch, "ctc_loss", _ctc_loss(is_on_card)
    true_uses = torch._use_cudnn_rnn_flatten_weight
    yield torch, "_use_cudnn_rnn_flatten_weight", lambda: torch.backends.cudnn.enabled or true_uses()
    yield torch, "_cudnn_rnn_flatten_weight", _flatten
    yield import_module("torch.backends.cudnn.rnn"), "get_cudnn_mode", lambda name: _MODES[name.lower()]


def _flatten(weights: Sequence[Tensor], *_sizes: Any) -> Tensor:
    """Move a layer's weights into one buffer, as ``Module.flatten_parameters`` does on a card."""
    flat = weights[0].new_empty(sum(weight.numel() for weight in weights))
    begin = 0
    for weight in weights:
        part = flat[begin : begin + weight.numel()].view(weight.shape)
        weight.data = part.copy_(weight)
        begin += weight.numel()
    return flat


def _layer(
    name: str, mode: int, is_on_card: Callable[[Tensor], bool], note: Callable[[str], object]
) -> Callable[..., Any]:  # fmt: skip
    function, is_lstm = getattr(torch._VF, name), name == "lstm"
    told = f"{name.partition('_')[0].upper()}: cuDNN does not document the size of its reserve space and workspace"

    def run(input: Tensor, *args: Any) -> Any:  # noqa: A002  torch's name
        if not (is_on_card(input) and torch.backends.cudnn.enabled and input.numel()):
            return function(input, *args)
        note(told)
        is_packed = isinstance(args[2], list | tuple)
        batch_sizes = args[0].tolist() if is_packed else []
        state, weights, has_bias, layers, dropout, train, bidirectional, *last = args[is_packed:]
        tensors = [input, *(state if is_lstm else (state, None)), *weights]
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            tensors = [one if one is None else one.to(dtype) for one in tensors]
        sequence, hx, cx, *weights = tensors
        size = hx.shape[-1] if cx is None else cx.shape[-1]
        projected = 0 if hx.shape[-1] == size else hx.shape[-1]
        output, hy, cy, *_ = _ATEN._cudnn_rnn(
            sequence, weights, (4 if has_bias else 2) + (projected > 0), _flat(weights), hx, cx, mode, size, projected,
            layers, bool(last and last[0]), dropout, train, bidirectional, batch_sizes, None,
        )  # fmt: skip
        return (output, hy, cy) if is_lstm else (output, hy)

    return run


def _flat(weights: Sequence[Tensor]) -> Tensor | None:
    """Return the buffer in which all weights lie one after the other; None where each has its own."""
    storage = weights[0].untyped_storage()
    begin = 0
    for weight in weights:
        if weight.untyped_storage()._cdata != storage._cdata or weight.storage_offset() != begin:
            return None
        begin += weight.numel()
    flat: Tensor = weights[0].new_empty(0).set_(storage, 0, (begin,), (1,))
    return flat


def _ctc_loss(is_on_card: Callable[[Tensor], bool]) -> Callable[..., Tensor]:
    """Return the CTC loss that reads lengths as numbers, as on a card (aten/src/ATen/native/LossCTC.cpp)."""
    true_loss = torch.ctc_loss

    def loss(
        log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: int = 1,
        zero_infinity: bool = False,
    ) -> Tensor:  # fmt: skip
        if not is_on_card(log_probs):
            return true_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        is_single = log_probs.dim() == 2
        if is_single:
            log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
        lengths = [
            value.reshape(-1).tolist() if isinstance(value, Tensor) else list(value)
            for value in (input_lengths, target_lengths)
        ]
        found: Tensor = _ATEN._ctc_loss(log_probs, targets.to(log_probs.device), *lengths, blank, zero_infinity)[0]
        if zero_infinity:
            found = torch.where(found == float("inf"), 0.0, found)
        if reduction == 1:
            divisors = torch.tensor(lengths[1], dtype=found.dtype, device=found.device).clamp_min(1)
            return (found / divisors).mean()
        return found.sum() if reduction == 2 else found.squeeze(0) if is_single else found

    return loss
