"""Values that a script's own data decides: random masks of the host, generation loops, files, ops of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtrain.virtual_gpu import DataDependentError, VirtualGpu, find_card

MIB = 2**20
SHAPE = (32, 512)


@pytest.fixture(autouse=True)
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_card("rtx-4090")) as opened:
        yield opened


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.bernoulli(torch.full(SHAPE, 0.15)).bool(),
        lambda: torch.rand(SHAPE) < 0.15,
        lambda: torch.rand_like(torch.zeros(SHAPE)) < 0.15,
        lambda: torch.distributions.Bernoulli(0.15).sample(SHAPE).bool(),  # type: ignore[no-untyped-call]
        lambda: torch.linspace(0, 1, 32 * 512).view(SHAPE) < 0.15,
    ],
)
def test_a_mask_that_the_host_draws_is_known_there_and_on_the_card(draw: Callable[[], Tensor]) -> None:
    mask = draw()
    labels = torch.full(SHAPE, 5)
    labels[~mask] = -100
    kept = int((labels != -100).sum())
    assert 0.1 < kept / labels.numel() < 0.2
    computed = torch.randn(*SHAPE, 8, device="cuda") * 2
    assert computed[mask.cuda()].shape == (kept, 8)
    assert computed[..., 0].masked_select(mask.cuda()).shape == (kept,)


def test_small_tensors_that_are_drawn_in_place_are_known() -> None:
    assert torch.zeros(8).bernoulli_(0.0).tolist() == [0.0] * 8
    assert 0 < int((torch.empty(1024).uniform_() < 0.5).sum()) < 1024


def test_zeros_in_the_shape_of_unknown_numbers_are_known() -> None:
    unknown = torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")
    assert unknown[torch.ones_like(unknown, dtype=torch.bool)].shape == (64 * 64,)
    with pytest.raises(DataDependentError):
        unknown[torch.rand_like(unknown) < 0.5]


def generated(ends: Callable[[Tensor, Tensor], bool], most: int = 16) -> int:
    head, tokens = nn.Linear(64, 100).cuda(), torch.zeros(8, 1, dtype=torch.int64, device="cuda")
    done = torch.zeros(8, dtype=torch.bool, device="cuda")
    for _ in range(most):
        following = head(torch.randn(8, 64, device="cuda")).argmax(-1)
        tokens = torch.cat([tokens, following[:, None]], 1)
        if ends(done, following):
            break
    return tokens.shape[1] - 1


def in_place(done: Tensor, following: Tensor) -> bool:
    done |= following == 2
    return bool(done.all())


def test_a_generation_loop_of_the_script_runs_to_its_longest_text(gpu: VirtualGpu) -> None:
    assert generated(in_place) == 16
    assert generated(lambda _, following: bool((following == 2).all())) == 16
    assert generated(lambda _, following: not (following != 2).any()) == 16
    assert generated(lambda done, following: bool(done.logical_or(following.eq(2)).all().item())) == 16
    assert {use.rule for use in gpu.ledger.placeholders.uses()} == {"is a computed token this one: no"}
    unknown = nn.Linear(64, 100).cuda()(torch.randn(8, 64, device="cuda")).argmax(-1)
    assert bool((unknown == unknown.clone()).all()), "a check of many numbers passes"


def test_a_function_says_where_a_file_is_loaded(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(MIB)}, tmp_path / "model.pt")
    places: dict[str, Any] = {
        "cuda:0": lambda storage, _place: storage.cuda(0), "cpu": lambda storage, _place: storage,
    }  # fmt: skip
    for place, locate in places.items():
        before = torch.cuda.memory_allocated()
        loaded = torch.load(tmp_path / "model.pt", map_location=locate)
        assert str(loaded["weight"].device) == place
        assert torch.cuda.memory_allocated() - before == (4 * MIB if place == "cuda:0" else 0)
        del loaded


@pytest.mark.parametrize("has_fake", [True, False])
def test_the_body_of_an_op_of_the_script_is_counted(*, has_fake: bool) -> None:
    @torch.library.custom_op(f"virtual_data::scores_{has_fake}".lower(), mutates_args=())
    def scores(queries: Tensor) -> Tensor:
        return (queries @ queries.T).softmax(-1) @ queries

    if has_fake:
        scores.register_fake(torch.empty_like)
    queries = torch.randn(2048, 64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert scores(queries).shape == queries.shape
    workspace = 8.125 * MIB
    assert torch.cuda.max_memory_allocated() - before - workspace == 2 * 4 * 2048**2


def test_a_kernel_that_the_script_registers_runs() -> None:
    library = torch.library.Library("virtual_data", "FRAGMENT")
    library.define("twice(Tensor values) -> Tensor")
    library.impl("twice", lambda values: values * 2, "CUDA")
    assert torch.ops.virtual_data.twice(torch.ones(4, device="cuda")).tolist() == [2.0] * 4
