"""Workspaces of convolutions, held to what cuDNN 9.28 asked for when its heuristics were queried without a card."""

import pytest
import torch
import torch.distributed as dist

from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu import VirtualGpu, find_card
from hybridtrain.virtual_gpu.account.reductions import Multiprocessors
from hybridtrain.virtual_gpu.facade.convolutions import workspace_rules

CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last
HALF, FULL = torch.float16, torch.float32
L40S = Multiprocessors(142, 1536)


@pytest.mark.parametrize(
    ("card", "dtype", "layout", "shapes", "stride", "mib"),
    [
        # capability, dtype, layout, (input, weight), stride -> forward pass; all 32 pictures of ResNet-50
        (90, HALF, CONTIGUOUS, ((64, 56), (64, 64, 3)), 1, 24.57),
        (80, HALF, CONTIGUOUS, ((64, 56), (64, 64, 3)), 1, 24.57),
        (89, HALF, CONTIGUOUS, ((256, 56), (64, 256, 1)), 1, 61.25),
        (80, HALF, CONTIGUOUS, ((512, 7), (512, 512, 3)), 1, 7.56),
        (90, HALF, LAST, ((64, 56), (64, 64, 3)), 1, 0),
        (80, HALF, LAST, ((256, 56), (64, 256, 1)), 1, 0),
        (90, FULL, CONTIGUOUS, ((512, 7), (512, 512, 3)), 1, 15.13),
        (90, FULL, LAST, ((64, 56), (64, 64, 3)), 1, 0),
    ],
)  # fmt: skip
def test_the_workspace_is_that_of_cudnns_heuristics(
    card: int, dtype: torch.dtype, layout: torch.memory_format, shapes: tuple[tuple[int, int], tuple[int, int, int]],
    stride: int, mib: float,
) -> None:  # fmt: skip
    (channels, size), (outputs, inputs, kernel) = shapes
    x = torch.empty(32, channels, size, size, dtype=dtype, device="meta", memory_format=layout)
    weight = torch.empty(outputs, inputs, kernel, kernel, dtype=dtype, device="meta", memory_format=layout)
    args = x, weight, None, [stride] * 2, [kernel // 2] * 2, [1] * 2, False, [0] * 2, 1
    taken = workspace_rules(card, L40S)[torch.ops.aten.convolution.default](args)
    assert taken / 2**20 == pytest.approx(mib, abs=0.01)  # cuDNN's figures are written with two decimals


def test_what_tensor_cores_do_not_read_needs_no_copy() -> None:
    x, weight = torch.empty(2, 64, 8, 8, device="meta"), torch.empty(64, 64, 3, 3, device="meta")
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    rule = torch.ops.aten.convolution.default
    assert workspace_rules(75, L40S)[rule](args) / 2**20 == pytest.approx(0.39, abs=0.01)  # Winograd's weights
    assert workspace_rules(80, L40S)[rule](args) > workspace_rules(75, L40S)[rule]((*args[:3], [2, 2], *args[4:])) == 0
    depthwise = (x.half(), torch.empty(64, 1, 3, 3, device="meta").half(), *args[2:8], 64)
    assert workspace_rules(80, L40S)[rule](depthwise) == 0


def test_the_gradient_of_a_bias_is_a_sum_over_pictures_and_places() -> None:
    def taken(layout: torch.memory_format, *, bias: bool) -> int:
        x = torch.empty(32, 320, 64, 64, dtype=HALF, device="meta").to(memory_format=layout)
        weight = torch.empty(320, 320, 3, 3, dtype=HALF, device="meta").to(memory_format=layout)
        args = (x, x, weight, [320], [1] * 2, [1] * 2, [1] * 2, False, [0] * 2, 1, [True, True, bias])
        return workspace_rules(89, L40S)[torch.ops.aten.convolution_backward.default](args)

    assert (taken(LAST, bias=False), taken(LAST, bias=True)) == (0, 93_061_132)  # channels lie side by side
    assert taken(CONTIGUOUS, bias=True) == taken(CONTIGUOUS, bias=False) > 0  # copies of operands are larger


@pytest.mark.parametrize("is_transposed", [False, True])
def test_both_passes_of_a_convolution_take_copies_of_the_same_three(is_transposed: bool) -> None:
    kind = torch.nn.ConvTranspose2d if is_transposed else torch.nn.Conv2d
    with VirtualGpu(find_card("a100-80gb")) as gpu:
        layer = kind(32, 16, 3, stride=2, padding=1, bias=False, dtype=torch.bfloat16).cuda()
        x = torch.empty(4, 32, 17, 17, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        out = layer(x)
        copies = 2 * (x.numel() + layer.weight.numel() + out.numel())
        assert gpu.basis().workspace_bytes == copies
        out.sum().backward()
        assert gpu.basis().workspace_bytes == copies
        assert f"a convolution's workspace counted as up to {format_bytes(copies)}" in gpu.basis().as_text()


def test_a_synchronized_norm_keeps_what_a_norm_keeps() -> None:
    peaks = []
    for kind in (torch.nn.BatchNorm2d, torch.nn.SyncBatchNorm):
        with VirtualGpu(find_card("a100-80gb"), world=2) as gpu:
            dist.init_process_group("nccl")
            norm = kind(64).cuda()
            x = torch.empty(8, 64, 64, 64, device="cuda", requires_grad=True)
            norm(x).square().sum().backward()
            dist.destroy_process_group()
        peaks.append(gpu.ledger.allocator.peak_allocated_bytes)
    assert abs(peaks[1] - peaks[0]) < 64 * 2**10  # statistics of ranks, some numbers of each channel


def test_a_search_for_algorithms_is_told_to_be_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with VirtualGpu(find_card("a100-80gb")) as gpu:
        torch.nn.Conv1d(8, 8, 3).cuda()(torch.empty(1, 8, 8, device="cuda"))
        assert list(gpu.basis().uncounted) == ["workspaces that cudnn.benchmark tries"]
