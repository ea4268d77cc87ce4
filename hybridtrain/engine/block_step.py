"""One block, one micro-batch: run it with its autograd graph, or without. B batch, T sequence, D width."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class BlockGraph:
    """A block's forward pass that can be differentiated once."""

    hidden_in_BTD: Tensor
    hidden_out_BTD: Tensor


def run_block(block: nn.Module, hidden_BTD: Tensor) -> BlockGraph:
    """Run ``block`` on a detached input and keep its graph."""
    hidden_in_BTD = hidden_BTD.detach().requires_grad_()
    with torch.enable_grad():
        return BlockGraph(hidden_in_BTD, block(hidden_in_BTD))


def differentiate_block(
    graph: BlockGraph, parameters: tuple[nn.Parameter, ...], grad_BTD: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the gradient by the block's input and those by its parameters; the graph is used up."""
    grad_in_BTD, *grads = torch.autograd.grad(graph.hidden_out_BTD, (graph.hidden_in_BTD, *parameters), grad_BTD)
    return grad_in_BTD, tuple(grads)
