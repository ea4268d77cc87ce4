"""Recurrent layers as cuDNN runs them, packed sequences, and the CTC loss on a virtual card."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hybridtrain.virtual_gpu import DataDependentError, VirtualGpu, find_card

CARD = find_card("rtx-4090")
PUBLISHED = {"LSTM": 736_000_000, "GRU": 864_000_000}
"""Reserve spaces of four layers, 320 wide, over 25,000 steps of sequences (pytorch/pytorch, issue 2895)."""


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(CARD) as opened:
        yield opened


def sizes_of(run: Any, device: str) -> list[Any]:
    """Return what a run of layers gives: shapes and strides of its results, its inputs' gradients, its weights'."""
    torch.manual_seed(0)
    results, leaves = run(device)
    sum(result.float().sum() for result in results).backward()
    found = [(result.shape, result.stride(), result.dtype) for result in results]
    return [*found, *(None if leaf.grad is None else (leaf.grad.shape, leaf.grad.dtype) for leaf in leaves)]


@pytest.mark.parametrize("kind", PUBLISHED)
def test_the_reserve_space_has_its_published_size(gpu: VirtualGpu, kind: str) -> None:
    layer = getattr(nn, kind)(123, 320, num_layers=4).cuda()
    steps = torch.randn(250, 100, 123, device="cuda")
    with torch.no_grad():
        layer.eval()(steps)
    assert PUBLISHED[kind] not in gpu.ledger.trace().sizes
    output, _ = layer.train()(steps)
    assert gpu.ledger.trace().sizes.count(PUBLISHED[kind]) == 1
    output.sum().backward()
    assert torch.cuda.memory_allocated() < PUBLISHED[kind]


OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"batch_first": True}, {"bidirectional": True, "num_layers": 2}, {"bias": False}
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, options) for kind in ("LSTM", "GRU", "RNN") for options in OPTIONS),
        ("RNN", {"nonlinearity": "relu"}),
        ("LSTM", {"proj_size": 5, "num_layers": 2}),
    ],
)
def test_layers_give_what_they_give_on_the_cpu(kind: str, options: dict[str, Any]) -> None:
    def run(device: str) -> tuple[list[Tensor], list[Tensor]]:
        layer = getattr(nn, kind)(7, 9, **options).to(device)
        steps = torch.randn(4, 6, 7, device=device, requires_grad=True)
        output, state = layer(steps)
        return [output, *(state if kind == "LSTM" else [state])], [steps, *layer.parameters()]

    expected = sizes_of(run, "cpu")
    with VirtualGpu(CARD) as gpu:
        assert sizes_of(run, "cuda") == expected
        assert not gpu.without_gradient
        names = [op.name for op in gpu.ledger.trace().ops]
        assert sum("_cudnn_rnn" in name for name in names) == 2


@pytest.mark.usefixtures("gpu")
def test_weights_move_into_one_buffer_and_keep_their_names() -> None:
    layer = nn.LSTM(7, 9, num_layers=2).cuda()
    weights = list(layer.parameters())
    (storage,) = {weight.untyped_storage()._cdata for weight in weights}
    assert weights[0].untyped_storage().nbytes() == sum(weight.nbytes for weight in weights)
    assert [weight.is_leaf and weight.requires_grad for weight in weights] == [True] * 8
    assert weights[-1].untyped_storage()._cdata == storage
    assert layer.state_dict()["weight_hh_l1"].shape == (36, 9)


@pytest.mark.usefixtures("gpu")
def test_in_eval_mode_there_is_no_backward_pass() -> None:
    output, _ = nn.GRU(7, 9).cuda().eval()(torch.randn(4, 6, 7, device="cuda"))
    with pytest.raises(RuntimeError, match=r"only be called in training mode .*call model.train\(\) first"):
        output.sum().backward()


@pytest.mark.usefixtures("gpu")
def test_autocast_casts_a_layer() -> None:
    layer, steps = nn.LSTM(7, 9).cuda(), torch.randn(4, 6, 7, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        output, (_, cell) = layer(steps)
    output.float().sum().backward()
    assert (output.dtype, cell.dtype) == (torch.float16, torch.float16)
    assert {weight.grad.dtype for weight in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("on_card", [False, True])
def test_packed_sequences_have_as_many_steps_as_their_lengths_say(
    kind: str, *, batch_first: bool, on_card: bool
) -> None:
    lengths = torch.tensor([2, 5, 3])

    def run(device: str) -> tuple[list[Tensor], list[Tensor]]:
        layer = getattr(nn, kind)(7, 9, batch_first=batch_first).to(device)
        shape = (3, 5, 7) if batch_first else (5, 3, 7)
        steps = torch.randn(shape, device=device, requires_grad=True)
        told = lengths.to(device).cpu() if on_card else lengths
        packed = pack_padded_sequence(steps, told, batch_first=batch_first, enforce_sorted=False)
        assert packed.data.shape == (10, 7)
        output, state = layer(packed)
        padded, found = pad_packed_sequence(output, batch_first=batch_first)
        assert found.tolist() == [2, 5, 3]
        return [padded, state[0] if kind == "LSTM" else state], [steps, *layer.parameters()]

    expected = sizes_of(run, "cpu")
    with VirtualGpu(CARD):
        assert sizes_of(run, "cuda") == expected


@pytest.mark.usefixtures("gpu")
def test_lengths_that_are_computed_are_refused() -> None:
    steps = torch.randn(5, 3, 7, device="cuda")
    lengths = torch.randn(3, 5000, device="cuda").sum(1).long().cpu()
    with pytest.raises(DataDependentError, match="_pack_padded_sequence"):
        pack_padded_sequence(steps, lengths, enforce_sorted=False)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("form", ["on the card", "on the host", "numbers", "flat targets", "one sequence"])
def test_the_ctc_loss_reads_lengths_wherever_they_are(form: str, reduction: str) -> None:
    def run(device: str) -> tuple[list[Tensor], list[Tensor]]:
        targets, lengths = torch.randint(1, 6, (4, 3)), [torch.tensor([8] * 4), torch.tensor([3, 2, 1, 3])]
        scores: Tensor = torch.randn(8, 4, 6, device=device, requires_grad=True)
        read: Tensor = scores
        if form == "on the card":
            targets, lengths = targets.to(device), [one.to(device) for one in lengths]
        if form == "flat targets":
            targets = torch.cat([row[:size] for row, size in zip(targets, lengths[1].tolist(), strict=True)])
        if form == "one sequence":
            read, targets, lengths = scores[:, 0], targets[0], [one[0] for one in lengths]
        told = [one.tolist() for one in lengths] if form == "numbers" else lengths
        loss = nn.CTCLoss(reduction=reduction, zero_infinity=True)
        return [loss(read.log_softmax(-1), targets, *told)], [scores]

    expected = sizes_of(run, "cpu")
    with VirtualGpu(CARD):
        assert sizes_of(run, "cuda") == expected


@pytest.mark.usefixtures("gpu")
def test_the_ctc_loss_keeps_a_number_of_each_step_and_label() -> None:
    scores = torch.randn(50, 4, 20, device="cuda", requires_grad=True).log_softmax(-1)
    before = torch.cuda.memory_allocated()
    loss = nn.functional.ctc_loss(scores, torch.ones(4, 10, dtype=torch.long), [50] * 4, [10] * 4)
    kept = torch.cuda.memory_allocated() - before
    assert 4 * 4 * 50 * 21 <= kept <= 4 * 4 * 50 * 21 + 8 * 512  # the rest: a few numbers a sequence, 512 bytes each
    loss.backward()
