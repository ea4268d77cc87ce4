"""Flex attention in a traced graph: one op that keeps its operands, its result and the log-sum-exp.

So does Inductor's kernel (torch/_inductor/kernel/flex); masks and scores are code in it, and take no memory here.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("hybridtrain::flex_attention", mutates_args=())
def flex_op(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001  shapes are all there is
    """Return result, laid out as the queries, and log-sum-exp (fp32): [batch, heads, tokens, width] without width."""
    out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)


@torch.library.custom_op("hybridtrain::flex_attention_backward", mutates_args=())
def _flex_backward_op(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, gradient: Tensor, _gradient_of_logsumexp: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = _flex_backward_op(gradient, *ctx.saved_tensors)
    return found


flex_op.register_fake(flex_op._init_fn)
_flex_backward_op.register_fake(_flex_backward_op._init_fn)
flex_op.register_autograd(_backward, setup_context=_save)


def flex_attention(true_attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's ``flex_attention``, as one op where it is traced."""

    @wraps(true_attention)
    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return true_attention(query, key, value, *args, **kwargs)
        out, logsumexp = flex_op(query, key, value)
        return (out, logsumexp) if kwargs.get("return_lse") else out

    return attend
