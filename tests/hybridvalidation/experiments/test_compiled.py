"""What compiled code keeps in memory: arithmetic that a person can do."""

from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu
from hybridvalidation.engines.compiled import compiling

ROWS, WIDTH, INNER = 4096, 512, 2048
WIDE, NARROW = 2 * ROWS * INNER, 2 * ROWS * WIDTH  # bytes in bfloat16


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))
        return product


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Gated(), Gated()])

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)  # type: ignore[no-untyped-call]
        return hidden


def kept(module: nn.Module, *, is_compiled: bool) -> int:
    """Return what the forward pass leaves beside input, output and weights; and see that gradients come."""
    with VirtualGpu("rtx-4090") as gpu, compiling(gpu):
        module = module.bfloat16().cuda()
        if is_compiled:
            module.compile()
        hidden = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        module(hidden).sum().backward()  # the first call traces, and takes cuBLAS's workspace
        for one in (hidden, *module.parameters()):
            assert one.grad is not None
            assert one.grad.shape == one.shape
            one.grad = None
        before = torch.cuda.memory_allocated()
        out = module(hidden)
        found = torch.cuda.memory_allocated() - before - out.nbytes
        del out
        assert torch.cuda.memory_allocated() == before
    return found


def test_a_kernel_keeps_what_it_can_compute_again_out_of_memory() -> None:
    assert kept(Gated(), is_compiled=False) == 4 * WIDE  # both projections, the activation, and the product
    assert kept(Gated(), is_compiled=True) == 3 * WIDE  # the activation is computed again


def test_a_checkpoint_inside_keeps_its_input_alone() -> None:
    assert kept(Checkpointed(), is_compiled=False) == NARROW
    assert kept(Checkpointed(), is_compiled=True) == NARROW


def test_a_cross_entropy_keeps_its_logits_and_two_numbers_a_row() -> None:
    with VirtualGpu("rtx-4090") as gpu, compiling(gpu):
        logits = torch.zeros(ROWS, 32768, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        labels = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        loss: Any = torch.compile(lambda values, at: nn.functional.cross_entropy(values.float(), at))
        loss(logits, labels).backward()
        assert logits.grad is not None
        logits.grad = None
        before = torch.cuda.memory_allocated()
        found = loss(logits, labels)
        kept_bytes = torch.cuda.memory_allocated() - before
        assert 2 * 4 * ROWS <= kept_bytes <= 2 * 4 * ROWS + 4 * 512  # and a few numbers; eager: 4 B for each logit
        torch.cuda.reset_peak_memory_stats()
        found.backward()
        assert torch.cuda.max_memory_allocated() - before <= logits.nbytes + kept_bytes + 512


def test_layers_of_one_make_are_traced_once_and_keep_weights_of_their_own() -> None:
    with VirtualGpu("rtx-4090") as gpu, compiling(gpu):
        layers = [nn.Linear(WIDTH, WIDTH).cuda() for _ in range(3)]
        hidden = torch.zeros(ROWS, WIDTH, device="cuda")
        for layer in layers:
            layer.compile()
            hidden = layer(hidden)
        hidden.sum().backward()
        assert all(weight.grad is not None for layer in layers for weight in layer.parameters())
