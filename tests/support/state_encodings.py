"""What the state encoding takes: states of a training run, and moments in every kind of storage with their sums."""

import torch
from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import QUANT_GROUP_SIZE, dequantize, quantize
from hybridkernels.state_encoding import GRAD_NORM_STEPS, LOSS_STEPS, NUM_MOMENT_STATISTICS, NUM_PHASES, NUM_SCALARS
from hybridkernels.state_encoding.moments import MomentCodes, Moments, Stored

KINDS = ("fp32", "bf16", "codes")


def stored_as(kind: str, values: Tensor, *, signed: bool = True, padded: bool = True) -> Stored:
    """Return values as they are stored; codes may go on to the end of their group."""
    if kind != "codes":
        return values.to({"fp32": torch.float32, "bf16": torch.bfloat16}[kind])
    groups = -(-values.numel() // QUANT_GROUP_SIZE)
    whole = torch.zeros(groups * QUANT_GROUP_SIZE)
    whole[: values.numel()] = values.flatten()
    codes, scale = quantize(whole.view(groups, QUANT_GROUP_SIZE), signed=signed)
    return MomentCodes(codes.flatten() if padded else codes.flatten()[: values.numel()].clone(), scale)


def random_moments(numel: int, m: str = "fp32", v: str = "fp32", slow: str | None = None) -> Moments:
    """Return moments of a tensor: gradients of size 1e-3 and a slow average that resembles the first moment."""
    first = torch.randn(numel) * 1e-3
    second = torch.rand(numel) * 1e-6
    kept = None if slow is None else stored_as(slow, first + torch.randn(numel) * 1e-3)
    return Moments(stored_as(m, first), stored_as(v, second, signed=False), kept)


def values(stored: Stored, *, signed: bool, count: int) -> Tensor:
    """Return what is stored, float64."""
    if isinstance(stored, Tensor):
        return stored.double().flatten()
    whole = torch.zeros(stored.scale.numel() * QUANT_GROUP_SIZE, dtype=torch.uint8)
    whole[: stored.codes.numel()] = stored.codes.flatten()
    found = dequantize(whole.view(-1, QUANT_GROUP_SIZE), stored.scale, signed=signed)
    return found.flatten()[:count].double()


def exact_sums(moments: list[Moments]) -> Tensor:
    """Return what ``moment_statistics`` says, summed in float64."""
    sums = torch.zeros(8, dtype=torch.float64)
    for piece in moments:
        count = piece.num_elements
        m, v = values(piece.m, signed=True, count=count), values(piece.v, signed=False, count=count)
        slow = torch.zeros(count) if piece.slow is None else values(piece.slow, signed=True, count=count)
        slow = slow.double()
        sums += torch.stack([
            torch.tensor(float(count)), m.sum(), m @ m, v.sum(), v @ v, slow @ slow, m @ slow,
            torch.tensor(float(piece.slow is not None)),
        ])  # fmt: skip
    return sums


def assert_sums(found: Tensor, moments: list[Moments]) -> None:
    """Fail unless each sum is exact to 3e-7 of the sum of its terms' magnitudes.

    That is a few roundings, 2^-24, in a row: what a tree of float32 over a chunk takes.
    """
    exact = exact_sums(moments)
    assert found.dtype == torch.float64
    assert found[[0, 7]].tolist() == exact[[0, 7]].tolist()
    # What a sum of both signs may miss is relative to the sum of magnitudes: about sqrt(count x sum of squares).
    size = exact.clone()
    size[1] = (exact[0] * exact[2]).sqrt()
    size[6] = (exact[2] * exact[5]).sqrt()
    assert ((found.cpu() - exact).abs() <= 3e-7 * size).all(), (found.cpu() - exact, size)


def random_states(num_states: int) -> list[torch.Tensor]:
    """Return losses, gradient norms, moment statistics, scalars and phases of N states."""
    return [
        1.5 + torch.rand(num_states, LOSS_STEPS),
        0.5 + torch.rand(num_states, GRAD_NORM_STEPS),
        torch.rand(num_states, NUM_MOMENT_STATISTICS),
        torch.rand(num_states, NUM_SCALARS),
        torch.eye(NUM_PHASES)[torch.arange(num_states) % NUM_PHASES],
    ]
