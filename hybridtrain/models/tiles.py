"""Token-wise work in tiles of the tokens: its activations exist for one tile at a time (TiledMLP of 2506.13996).

Backward runs each tile again. Gradients of parameters are summed over tiles in float32.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, autograd


class TokenWork(Protocol):
    """Work on each token by itself, without random numbers."""

    def __call__(self, hidden_ND: Tensor, *, computes_output: bool) -> Tensor:
        """Return (N, D); without ``computes_output`` values are undefined, but gradients are right."""


class _Tiled(autograd.Function):
    """Keeps the input alone."""

    @staticmethod
    def forward(
        ctx: Any, work: TokenWork, tile_tokens: int, computes_output: bool, hidden_ND: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND)
        ctx.work, ctx.tile_tokens, ctx.parameters = work, tile_tokens, parameters
        if not computes_output:
            return hidden_ND.new_empty(1).expand(hidden_ND.shape)
        out_ND = torch.empty_like(hidden_ND)
        for tile, out in zip(*(torch.split(tensor, tile_tokens) for tensor in (hidden_ND, out_ND)), strict=True):
            out.copy_(work(tile, computes_output=True))
        return out_ND

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_ND,) = ctx.saved_tensors
        grad_hidden_ND = torch.empty_like(hidden_ND)
        sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in ctx.parameters]
        tiles = (torch.split(tensor, ctx.tile_tokens) for tensor in (hidden_ND, grad_ND, grad_hidden_ND))
        for tile, grad, grad_tile in zip(*tiles, strict=True):
            with torch.enable_grad():
                leaf = tile.detach().requires_grad_()
                out = ctx.work(leaf, computes_output=False)
            found, *others = autograd.grad(out, (leaf, *ctx.parameters), grad)
            grad_tile.copy_(found)
            while others:  # each goes when it is added
                sums[len(others) - 1].add_(others.pop())
            del leaf, out, found
        return None, None, None, grad_hidden_ND, *[sums.pop(0).to(x.dtype) for x in ctx.parameters]


def in_tiles(
    work: TokenWork, hidden_BTD: Tensor, parameters: Sequence[Tensor], *, tile_tokens: int, computes_output: bool
) -> Tensor:
    """Return ``work(hidden_BTD)``, computed ``tile_tokens`` tokens at a time; no more tokens than that at once.

    Args:
        work: The work.
        hidden_BTD: Hidden states, of which all that backward needs is kept.
        parameters: Trained parameters of the work.
        tile_tokens: Tokens of a tile, at least 1.
        computes_output: Whether values are needed; where not, forward does no work.
    """
    hidden_ND = hidden_BTD.flatten(0, 1)
    if tile_tokens >= len(hidden_ND):
        return work(hidden_BTD, computes_output=computes_output)
    out_ND: Tensor = _Tiled.apply(work, tile_tokens, computes_output, hidden_ND, *parameters)  # type: ignore[no-untyped-call]
    return out_ND.view(hidden_BTD.shape)
