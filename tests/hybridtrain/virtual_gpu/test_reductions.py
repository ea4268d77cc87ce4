"""Scratch of reductions and of products on CUDA, against figures of torch's own code.

The figures are those of ``setReduceConfig`` of torch 2.13, compiled for the host with tensors of the CPU, which were
compared at thousands of random shapes too.
"""

import pytest
import torch
from torch import Tensor, nn

from hybridtrain.virtual_gpu.account.op_rules import scratch_bytes
from hybridtrain.virtual_gpu.account.reductions import Multiprocessors
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu

L40S, A100 = Multiprocessors(142, 1536), Multiprocessors(108, 2048)
HALF, FULL = torch.float16, torch.float32


def _meta(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("x", "dims", "expected"), [
    (_meta(4096, 3072), [0], 100_663_392),
    (_meta(1023, 3072), [0], 25_165_920),
    (_meta(1020, 3072), [0], 0),
    (_meta(2048, 30522), [0], 15_629_172),
    (_meta(2, 1024, 768, dtype=FULL), [0, 1], 12_582_936),
    (_meta(4096, 50257, dtype=FULL), [0, 1], 6_288),
    (_meta(4096, 50257, dtype=FULL), [1], 0),
    (_meta(4, 2_000_000, dtype=FULL), [1], 1_728),
    (_meta(32, 320, 64, 64), [0, 2, 3], 3_840),
    (_meta(32, 320, 64, 64).to(memory_format=torch.channels_last), [0, 2, 3], 93_061_132),
    (_meta(1, 1).expand(4096, 768), [0], 1_572_960),
    (_meta(4096, 1025)[:, 1:], [0], 1_835_136),
    (_meta(0, 3), [0], 0),
])  # fmt: skip
def test_partial_results_of_thread_blocks_are_counted(x: Tensor, dims: list[int], expected: int) -> None:
    assert L40S.scratch_of(x, dims, 4) == expected


def test_more_multiprocessors_split_a_sum_further() -> None:
    x = _meta(16384, 3072)
    assert L40S.scratch_of(x, [0], 4) == 111_673_440
    assert A100.scratch_of(x, [0], 4) == 4 * 3072 * 72 * 128 + 4 * 24  # 1728 blocks for 24 of outputs
    assert Multiprocessors(0, 1536).scratch_of(x, [0], 4) == 0  # a card of one's own that does not tell them


def test_what_32_bit_indices_do_not_reach_is_halved_and_summed_in_a_buffer() -> None:
    whole, half = _meta(2**20, 2048), _meta(2**19, 2048)
    assert L40S.scratch_of(whole, [0], 4) == 4 * 2048 + L40S.scratch_of(half, [0], 4)
    assert L40S.scratch_of(_meta(1, 1).expand(2**31, 2), [0], 4) > 0  # no stride tells which dimension is long


@pytest.mark.parametrize("card", ["l40s", "a100-80gb", "rtx-2080-ti"])
def test_a_bias_takes_the_scratch_of_its_gradient(card: str) -> None:
    def peak(*, bias: bool) -> int:
        with VirtualGpu(find_card(card)):
            layer = nn.Linear(64, 3072, bias=bias, device="cuda", dtype=HALF)
            out = layer(torch.empty(4096, 64, device="cuda", dtype=HALF))
            out.backward(torch.ones_like(out))
            return torch.cuda.max_memory_allocated()

    found = find_card(card)
    scratch = Multiprocessors(found.sms, found.threads_per_multiprocessor).scratch_of(_meta(4096, 3072), [0], 4)
    assert scratch > 2**24
    assert 0 <= peak(bias=True) - peak(bias=False) - scratch < 2**16  # the bias, its gradient, rounding


def test_an_operand_that_lies_in_neither_order_is_copied_for_a_product() -> None:
    dense, expanded = _meta(1024, 512), _meta(1, 1).expand(1024, 512)
    weight, mm, bmm = _meta(512, 64), torch.ops.aten.mm.default, torch.ops.aten.bmm.default
    assert scratch_bytes(mm, (dense, weight)) == scratch_bytes(mm, (weight.t(), dense.t())) == 0
    assert scratch_bytes(mm, (dense[:, :64], weight[:64])) == 0
    assert scratch_bytes(mm, (expanded, weight)) == scratch_bytes(mm, (weight.t(), expanded.t())) == dense.nbytes
    assert scratch_bytes(mm, (_meta(1024, 1024)[:, ::2], weight)) == dense.nbytes
    assert scratch_bytes(torch.ops.aten.addmm.default, (_meta(64), expanded, weight)) == dense.nbytes
    assert scratch_bytes(bmm, (dense.expand(4, -1, -1), weight.expand(4, -1, -1))) == 0
    assert scratch_bytes(bmm, (expanded.expand(4, -1, -1), weight.expand(4, -1, -1))) == 4 * dense.nbytes
