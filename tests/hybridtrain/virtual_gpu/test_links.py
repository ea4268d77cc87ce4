"""Collectives on links: their bytes, and that compute hides what it does not read."""

import pytest
import torch
import torch.distributed as dist

from hybridtrain.errors import ConfigError
from hybridtrain.virtual_gpu import VirtualGpu, find_card
from hybridtrain.virtual_gpu.account.op_record import Lane
from hybridtrain.virtual_gpu.cards.links import Collective, find_link
from hybridtrain.virtual_gpu.cards.roofline import StepTime

CARD = find_card("h100-sxm")
SIZE = 2**28


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(ranks: int) -> None:
    link = find_link("nvlink")
    halves = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    whole = link.seconds(Collective.ALL_REDUCE, SIZE, ranks, CARD)
    assert whole == pytest.approx(sum(link.seconds(kind, SIZE, ranks, CARD) for kind in halves))
    assert (whole == 0) == (ranks == 1)


def test_a_link_without_a_rate_is_the_cards_bus() -> None:
    assert find_link("pcie").bytes_per_second(CARD) == 0.8 * CARD.bus_bytes_per_second


def test_an_unknown_link_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"nvlin"):
        VirtualGpu(CARD, world=2, link="nvlin")


def step(link: str, *, on_side_stream: bool) -> StepTime:
    with VirtualGpu(CARD, world=8, link=link) as gpu:
        dist.init_process_group("nccl")
        share = torch.empty(SIZE // 8, dtype=torch.bfloat16, device="cuda")
        whole = torch.empty(SIZE, dtype=torch.bfloat16, device="cuda")
        matrix = torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")
        gpu.begin_step()
        side = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()
        with torch.cuda.stream(side):
            dist.all_gather_into_tensor(whole, share)
        if not on_side_stream:
            whole[:8] + 1
        for _ in range(20):
            matrix @ matrix
        torch.cuda.current_stream().wait_stream(side)
        whole + 1
    return gpu.report().time


@pytest.mark.filterwarnings("ignore:.*deprecated.*")
def test_a_collective_on_its_own_stream_is_hidden_by_compute() -> None:
    hidden, waited = step("nvlink", on_side_stream=True), step("nvlink", on_side_stream=False)
    gather = hidden.busy_seconds[Lane.LINK]
    expected = find_link("nvlink").seconds(Collective.ALL_GATHER, 2 * SIZE, 8, CARD)
    assert gather == waited.busy_seconds[Lane.LINK] == pytest.approx(expected)
    assert waited.seconds - hidden.seconds == pytest.approx(gather, rel=0.1)  # but for the op that reads early
    assert step("ethernet", on_side_stream=True).busy_seconds[Lane.LINK] > gather
