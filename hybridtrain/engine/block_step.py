"""One block, one micro-batch: run it with its autograd graph, or without. B batch, T sequence, D width."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """A block's forward pass that can be differentiated once."""

    hidden_in_BTD: Tensor
    output: GradientEdge
    """Where the block's output left the graph. Holding the tensor itself would keep one boundary alive for nothing."""


def run_block(block: nn.Module, hidden_BTD: Tensor, *, computes_output: bool = True) -> tuple[BlockGraph, Tensor]:
    """Run ``block`` on a detached input; return its graph and its detached hidden_BTD.

    Without ``computes_output`` the block's last projection is left out: nothing in the backward pass reads its result.
    """
    hidden_in_BTD = hidden_BTD.detach().requires_grad_()
    with torch.enable_grad():
        hidden_out_BTD = block(hidden_in_BTD) if computes_output else block(hidden_in_BTD, computes_output=False)
    return BlockGraph(hidden_in_BTD, get_gradient_edge(hidden_out_BTD)), hidden_out_BTD.detach()


def differentiate_block(
    graph: BlockGraph, parameters: tuple[nn.Parameter, ...], grad_BTD: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the gradient by the block's input and those by its parameters; the graph is used up."""
    grad_in_BTD, *grads = torch.autograd.grad(graph.output, (graph.hidden_in_BTD, *parameters), grad_BTD)
    return grad_in_BTD, tuple(grads)
