"""What a script may ask of a virtual card: places, known values, stand-ins, autocast, attention."""

import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hybridtrain.virtual_gpu import DataDependentError, VirtualGpu, find_card
from hybridtrain.virtual_gpu.facade import cuda_paths

CARD = find_card("rtx-4090")


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(CARD) as opened:
        yield opened


def ops(gpu: VirtualGpu) -> list[str]:
    return [op.name.removeprefix("aten.").split(".")[0] for op in gpu.ledger.trace().ops]


def test_the_card_is_there(gpu: VirtualGpu) -> None:
    assert torch.cuda.is_available()
    assert (torch.cuda.device_count(), torch.cuda.get_device_name()) == (1, "NVIDIA GeForce RTX 4090")
    assert torch.cuda.get_device_properties(0).total_memory == CARD.memory_bytes
    assert torch.cuda.get_device_capability() == (8, 9)
    assert torch.cuda.is_bf16_supported()
    with torch.cuda.stream(torch.cuda.Stream()):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == gpu.ledger.allocator.allocated_bytes


def test_tensors_have_places(gpu: VirtualGpu) -> None:
    weight = torch.randn(3, 4, device="cuda")
    assert (weight.device, weight.is_cuda, weight.is_meta, weight.get_device()) == (
        torch.device("cuda:0"),
        True,
        False,
        0,
    )
    assert weight.type() == "torch.cuda.FloatTensor"
    assert "device='cuda:0', size=(3, 4)" in repr(weight)
    assert weight.to("cuda") is weight
    assert (weight + 1).t()[:2].device == weight.device
    assert weight.cpu().device == torch.device("cpu")
    assert torch.ones(2).pin_memory().to(weight.device, non_blocking=True).is_cuda
    assert torch.empty(2, device="meta").device == torch.device("meta")
    with pytest.raises(
        RuntimeError, match=r"two devices, cuda:0 and cpu!.*aten.add.Tensor; an operand of shape \(4,\)"
    ):
        weight + torch.ones(4)
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        weight.numpy()
    assert (weight * torch.tensor(2.0)).is_cuda  # a single number may lie anywhere
    assert gpu.ledger.allocator.allocated_bytes >= weight.nbytes


def test_a_product_of_two_dtypes_is_refused_as_on_a_card() -> None:
    with VirtualGpu("rtx-4090"):
        layer, rows = torch.nn.Linear(8, 8).cuda().half(), torch.randn(4, 8, device="cuda")
        with pytest.raises(RuntimeError, match=r"same dtype, but got: torch.float16 != torch.float32.*aten.addmm"):
            layer(rows)
        with torch.autocast("cuda", torch.float16):
            assert layer(rows).dtype is torch.float16


def test_a_large_model_takes_no_memory_and_keeps_its_identity(gpu: VirtualGpu) -> None:
    model = nn.Linear(2**20, 2**20)  # 4 TiB
    weight = model.weight
    assert weight.device == torch.device("cpu")
    with pytest.raises(torch.OutOfMemoryError, match=r"allocate 4096.00 GiB"):
        model.cuda()
    small = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    small[1].weight = small[0].weight
    first = small[0].weight
    assert small.cuda()[0].weight is small[1].weight is first
    assert gpu.host_peak_bytes > 4 * 2**40


def test_what_follows_from_data_is_known(gpu: VirtualGpu) -> None:
    ids = torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0]]).cuda()
    mask = ids.ne(0)
    assert mask.sum().item() == 4
    assert not mask.all()
    assert mask.sum(-1).max().item() == 3
    assert ids[mask].tolist() == [5, 6, 7, 8]
    assert mask.nonzero().shape == (4, 2)
    assert torch.arange(4, device="cuda").flip(0).tolist() == [3, 2, 1, 0]
    assert np.asarray(ids.cpu()).sum() == 26
    hidden = torch.randn(2, 4, 16, device="cuda")
    assert hidden[mask].shape == (4, 16)
    hidden[mask] = 0.0
    ids[0, 0] = 9
    assert ids.cpu()[0].tolist() == [9, 6, 7, 0]
    assert gpu.placeholders() == ()


@pytest.mark.usefixtures("gpu")
def test_values_are_known_where_the_cpu_has_no_kernel_for_their_type() -> None:
    counts = torch.histc(torch.tensor([0, 2, 2, 3], dtype=torch.int32, device="cuda"), bins=4, min=0, max=3)
    assert counts.dtype is torch.int32  # CUDA counts whole numbers, the CPU none
    assert counts.tolist() == [1, 0, 2, 1]


@pytest.mark.parametrize(
    "sizes", [((8, 16), (2, 16, 20)), ((16, 8), (8, 24)), ((2, 8, 16), (16, 8)), ((2, 8, 16), (2, 16, 8))]
)
@pytest.mark.usefixtures("gpu")
def test_grouped_matmuls_run_in_every_type(sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    def multiply(device: str, dtype: torch.dtype) -> Tensor:
        one = torch.empty(sizes[0], device=device, dtype=dtype)
        other = torch.empty((*sizes[1][:-2], *sizes[1][:-3:-1]), device=device, dtype=dtype).mT
        is_batch = one.dim() == other.dim() == 3
        offs = None if is_batch else torch.tensor([2, 6], dtype=torch.int32).to(device)
        found: Tensor = torch.ops.aten._grouped_mm(one, other, offs)
        return found

    true = multiply("meta", torch.bfloat16)
    half, single = multiply("cuda", torch.bfloat16), multiply("cuda", torch.float32)
    assert (half.device.type, half.shape, half.stride(), half.dtype) == ("cuda", true.shape, true.stride(), true.dtype)
    assert (single.shape, single.dtype) == (true.shape, torch.float32)


@pytest.mark.parametrize(
    "pick",
    [
        lambda values, rows: values[rows],
        lambda values, rows: values.index_select(0, rows),
        lambda values, rows: values.gather(0, rows[:, None].expand(-1, 64)),
        lambda values, _rows: values.topk(2)[0],
    ],
)
def test_gradients_of_chosen_elements_are_put_into_zeros_in_place(gpu: VirtualGpu, pick: Callable[..., Tensor]) -> None:
    values = torch.zeros(512, 64, device="cuda", requires_grad=True)
    pick(values, torch.arange(8, device="cuda")).sum().backward()
    assert values.grad is not None
    sizes = gpu.ledger.trace().sizes
    assert sizes.count(values.nbytes) == 2  # itself and its gradient


def test_a_tensor_may_have_other_data_wherever_they_came_from() -> None:
    read = nn.Parameter(torch.ones(4, 2))  # as from a file: with values
    with VirtualGpu(CARD):
        layer = nn.Linear(8192, 2)
        held = read
        read.blocksize = 64  # type: ignore[attr-defined]  what a class of a library keeps with its data
        read.data = layer.weight.data
        assert held is read
        assert vars(read) == {"blocksize": 64}
        assert (read.shape, read.device.type, read.requires_grad, type(read)) == (
            (2, 8192), "cpu", True, nn.Parameter
        )  # fmt: skip
        layer.weight.data = torch.from_numpy(np.ones((3, 2), dtype=np.float32))
        assert layer.weight.shape == (3, 2)
        assert layer.weight.tolist() == [[1.0, 1.0]] * 3


def test_what_nobody_computed_has_a_stand_in_and_a_place_in_the_list(gpu: VirtualGpu) -> None:
    loss = torch.randn(2**20, device="cuda").square().mean()
    assert (loss.item(), float(loss), f"{loss:.1f}") == (1.0, 1.0, "1.0")
    assert not torch.isnan(loss)
    assert torch.isfinite(loss)
    assert not torch.randn(2**20, device="cuda").isinf().any()
    assert not loss > 10
    places = {(use.where.rpartition("/")[2].split(":")[0], use.op) for use in gpu.placeholders()}
    assert ("test_virtual_values.py", "aten._local_scalar_dense.default") in places


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (2.5, 3.0)])  # the second by rejection from a uniform distribution
@pytest.mark.usefixtures("gpu")
def test_truncated_samples_are_drawn_once(bounds: tuple[float, float]) -> None:
    weight = torch.empty(64, 128, device="cuda")
    with warnings.catch_warnings(action="ignore"):
        assert nn.init.trunc_normal_(weight, a=bounds[0], b=bounds[1]) is weight
    assert torch.isnan(weight).any().item() is False
    assert (weight > 0).any().item() is True  # elsewhere an unknown boolean is true as before


def test_experts_are_chosen_evenly(gpu: VirtualGpu) -> None:
    scores = (torch.randn(6, 4096, device="cuda") @ torch.randn(4096, 4, device="cuda")).softmax(-1)
    chosen = scores.topk(2, dim=-1).indices
    assert torch.bincount(chosen.flatten(), minlength=4).tolist() == [3, 3, 3, 3]
    assert torch.where(chosen == 1)[0].shape == (3,)
    assert any("equally often" in use.rule for use in gpu.placeholders())


def test_a_size_that_nobody_knows_is_refused_with_its_line(gpu: VirtualGpu) -> None:
    hidden = torch.randn(128, 128, device="cuda") @ torch.randn(128, 128, device="cuda")
    with pytest.raises(
        DataDependentError, match=r"test_virtual_values.py:\d+: aten.nonzero.default makes a tensor whose"
    ):
        (hidden > 0).nonzero()
    assert gpu.ledger.allocator.allocated_bytes > 0


def test_autocast_converts_as_cuda_does(gpu: VirtualGpu) -> None:
    weight = nn.Parameter(torch.randn(8, 8, device="cuda"))
    inputs = torch.randn(4, 8, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        hidden = nn.functional.linear(inputs, weight)
        again = nn.functional.linear(hidden, weight)  # the weight is converted once
        assert hidden.dtype is again.dtype is torch.bfloat16
        assert hidden.softmax(-1).dtype is torch.float32
        assert nn.functional.layer_norm(hidden, (8,)).dtype is torch.float32
        assert (hidden + inputs).dtype is torch.float32
        assert torch.cat([hidden, inputs]).dtype is torch.float32
        with torch.autocast("cuda", enabled=False):
            assert nn.functional.linear(inputs, weight).dtype is torch.float32
        loss = nn.functional.cross_entropy(again, torch.zeros(4, dtype=torch.int64, device="cuda"))
    assert loss.dtype is torch.float32
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32
    # Forward: inputs, weight, up for softmax, layer norm, cat and the loss; backward: down again, the gradient up.
    assert ops(gpu).count("_to_copy") == 8
    assert nn.functional.linear(inputs, weight).dtype is torch.float32


def test_autocast_knows_every_op_that_torch_converts_for_cuda() -> None:
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    ours = {
        f"aten::{name}" for names in (cuda_paths.LOWER_PRECISION, cuda_paths.FULL_PRECISION,
                                      cuda_paths.FULL_PRECISION_RESULT, cuda_paths.WIDEST) for name in names
    }  # fmt: skip
    missing = {name for name in names if name.startswith("aten::")} - ours
    # Refused by torch for safety, kernels that want a real card, norms that append a type, and (in older torch)
    # dimensions by name: not converted here.
    assert {name for name in missing if "imname" not in name and ".names" not in name} <= NOT_CONVERTED


NOT_CONVERTED = {
    "aten::_cudnn_rnn",
    "aten::binary_cross_entropy", "aten::cudnn_convolution", "aten::cudnn_convolution_transpose", "aten::norm.Scalar",
    "aten::norm.ScalarOpt_dim",
}  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "mask", "width", "grouped", "expected"),
    [
        (torch.bfloat16, False, 64, False, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, False, 64, True, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, False, 60, False, "_scaled_dot_product_flash_attention"),  # widened to 64
        (torch.bfloat16, True, 64, False, "_scaled_dot_product_efficient_attention"),
        (torch.float32, False, 64, False, "_scaled_dot_product_efficient_attention"),
        (torch.bfloat16, True, 64, True, "bmm"),
        (torch.float64, False, 64, False, "bmm"),
    ],
)
def test_attention_takes_the_kernel_that_cuda_would(
    gpu: VirtualGpu, dtype: torch.dtype, width: int, expected: str, *, mask: bool, grouped: bool
) -> None:
    query = torch.randn(2, 8, 16, width, dtype=dtype, device="cuda", requires_grad=True)
    key = torch.randn(2, 2 if grouped else 8, 16, width, dtype=dtype, device="cuda")
    bias = torch.ones(2, 1, 16, 16, dtype=torch.bool, device="cuda") if mask else None
    out = nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=bias, enable_gqa=grouped)
    assert out.shape == query.shape
    assert expected in ops(gpu)
    out.sum().backward()


def test_attention_takes_a_kernel_that_the_script_allows(gpu: VirtualGpu) -> None:
    attend, backends = nn.functional.scaled_dot_product_attention, torch.nn.attention.SDPBackend
    query = torch.randn(2, 8, 16, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    mask = torch.ones(16, 16, dtype=torch.bool, device="cuda")
    with torch.nn.attention.sdpa_kernel([backends.CUDNN_ATTENTION]):
        attend(query, query, query).sum().backward()
        with pytest.raises(RuntimeError, match="No available kernel"):
            attend(*[query.detach().double()] * 3)
    assert "_scaled_dot_product_cudnn_attention" in ops(gpu)
    with (
        torch.nn.attention.sdpa_kernel([backends.FLASH_ATTENTION]),
        pytest.raises(RuntimeError, match="No available kernel"),
    ):
        attend(query, query, query, attn_mask=mask)
    bias = torch.zeros(1, 8, 16, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    attend(query, query, query, attn_mask=bias).sum().backward()
    assert bias.grad is not None
    assert "_scaled_dot_product_efficient_attention" in ops(gpu)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, "bmm"),
        (torch.float16, "_scaled_dot_product_efficient_attention"),
        (torch.float32, "_scaled_dot_product_efficient_attention"),
    ],
)
def test_a_card_below_8_0_takes_bfloat16_by_emulation_and_has_no_flash_attention(
    dtype: torch.dtype, expected: str
) -> None:
    with VirtualGpu("t4") as gpu:
        assert torch.cuda.is_bf16_supported()
        assert not torch.cuda.is_bf16_supported(including_emulation=False)
        query = torch.randn(2, 8, 16, 64, dtype=dtype, device="cuda", requires_grad=True)
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
        assert expected in ops(gpu)
        assert "_scaled_dot_product_flash_attention" not in ops(gpu)


@pytest.mark.parametrize(
    ("card", "runs"), [("rtx-4090", True), ("h100-pcie", True), ("rtx-3090", False), ("t4", False)]
)
def test_float8_products_need_compute_capability_8_9(card: str, *, runs: bool) -> None:
    with VirtualGpu(card) as gpu:
        left, right = (torch.ones(32, 32, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        scale = torch.ones((), device="cuda")
        if runs:
            out = torch._scaled_mm(left, right.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
            assert (out.shape, ops(gpu)[-1]) == ((32, 32), "_scaled_mm")
        else:
            with pytest.raises(RuntimeError, match=r"need compute capability 8\.9"):
                torch._scaled_mm(left, right.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


def test_dropout_keeps_a_mask_of_booleans(gpu: VirtualGpu) -> None:
    inputs = torch.randn(1024, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    out = nn.functional.dropout(inputs, 0.1)
    assert torch.cuda.memory_allocated() - before == 1024 * 4 + 1024
    assert nn.functional.dropout(out, 0.1, training=False) is not None
    assert ops(gpu).count("native_dropout") == 1


@pytest.mark.parametrize(
    ("card", "dtype", "scratch"),
    [
        # Blocks of 64 x 64 do not hold rows of 128 in registers: keys and values are summed in fp32, over 3 splits.
        # 4 blocks of rows, 2 of columns, each with 16 bytes of locks.
        ("rtx-4090", torch.bfloat16, 4 * (3 * 64 * (128 + 128) + 4 * 2 * (64 * 64 + 4))),
        # Blocks of 128 x 128 do: what is left is the queries' accumulator, 2 blocks of rows.
        ("a100-80gb", torch.bfloat16, 4 * (2 * 1 * (128 * 128 + 4))),
        # The kernel for rows of 96 is for 8.6 and 8.9.
        ("t4", torch.float16, 4 * (3 * 64 * (128 + 128) + 4 * 2 * (64 * 64 + 4))),
        # Gradients of keys and values are fp32 themselves.
        ("rtx-4090", torch.float32, 4 * (4 * 2 * (64 * 64 + 4))),
    ],
)  # fmt: skip
def test_memory_efficient_attentions_backward_pass_takes_its_accumulators(
    card: str, dtype: torch.dtype, scratch: int
) -> None:
    batch, heads, rows, width = 2, 30, 200, 128  # 200 // 60 splits of at most 4
    with VirtualGpu(card) as gpu:
        operands = [torch.empty(batch, heads, rows, width, dtype=dtype, device="cuda") for _ in range(3)]
        mask = torch.zeros(batch, 1, rows, rows, dtype=dtype, device="cuda")
        query, key, value = (operand.requires_grad_() for operand in operands)
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        grad = torch.empty_like(out)
        before = len(gpu.ledger.trace().sizes)
        torch.autograd.grad(out, [query, key, value], grad)
        assert batch * heads * (4 * rows + scratch) in gpu.ledger.trace().sizes[before:]


@pytest.mark.parametrize("draw", [torch.poisson, torch.bernoulli, torch._standard_gamma, torch.rrelu, torch.rand_like])
def test_what_is_drawn_from_operands_is_unknown(gpu: VirtualGpu, draw: Callable[[Tensor], Tensor]) -> None:
    before = torch.get_rng_state()
    made = draw(torch.full((4,), 0.5, device="cuda"))
    assert gpu.ledger.values.of(made) is None or draw is torch.rrelu, "of evaluation, rrelu draws nothing"
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [torch.hann_window, torch.arange, torch.eye, torch.ones, torch.fft.fftfreq])
def test_what_a_factory_makes_is_known(gpu: VirtualGpu, make: Callable[..., Tensor]) -> None:
    known = gpu.ledger.values.of(make(8, device="cuda"))
    assert known is not None
    assert torch.equal(known, make(8))
    assert gpu.ledger.values.of(torch.empty(8, device="cuda")) is None


def test_the_gradient_of_a_subclass_is_no_subclass(gpu: VirtualGpu) -> None:
    class Marked(Tensor):
        pass

    weight = torch.ones(3, device="cuda").as_subclass(Marked).requires_grad_()
    weight.grad = torch.ones(3, device="cuda")
    assert type(weight.grad) is Tensor, "torch.overrides knows the getter by its identity"
    assert gpu.ledger.place_of(weight.grad) is not None
    del weight.grad
    assert weight.grad is None


def test_generated_tokens_are_no_end_tokens_so_that_the_longest_text_is_planned(gpu: VirtualGpu) -> None:
    layer, ends, longest = nn.Linear(8, 300).cuda(), torch.tensor([1, 2], device="cuda"), 5
    tokens = torch.full((4, 1), 7, device="cuda")
    running = torch.ones(4, dtype=torch.long, device="cuda")
    while not bool(running.max() == 0) and tokens.shape[1] <= longest:
        chosen = layer(torch.randn(4, 8, device="cuda")).argmax(-1)
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        is_long = torch.full((4,), tokens.shape[1] == longest, device="cuda")
        running = running & ~(is_long | torch.isin(tokens[:, -1], ends))
    assert tokens.shape[1] == longest
    assert "is it one of these: no" in {use.rule for use in gpu.placeholders()}
    assert torch.isin(chosen, ends, invert=True).tolist() == [True] * 4
    assert torch.isin(torch.arange(3).cuda(), ends).tolist() == [False, True, True]
