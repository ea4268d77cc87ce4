"""What ordinary training scripts do besides training: each as it goes on CUDA, to the byte."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from hybridtrain.errors import HybridTrainError
from hybridtrain.virtual_gpu import DataDependentError, VirtualGpu, find_card
from hybridtrain.virtual_gpu.facade.known_values import Place

MIB = 2**20


@pytest.fixture(autouse=True)
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_card("rtx-4090")) as opened:
        yield opened


def allocated() -> int:
    return torch.cuda.memory_allocated()


def test_a_deep_copy_has_bytes_and_known_values_of_its_own(gpu: VirtualGpu) -> None:
    first = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")
    before, known = allocated(), gpu.ledger.trace()
    second = copy.deepcopy(first)
    assert allocated() - before == 512
    first.zero_()
    assert second.tolist() == [1.0, 2.0, 3.0, 4.0]
    large = torch.empty(MIB, device="cuda")
    before = allocated()
    other = copy.deepcopy(large)
    assert (other.device, allocated() - before) == (large.device, 4 * MIB)
    names = [op.name for op in gpu.ledger.trace().ops[len(known.ops) :]]
    assert not any("set_" in name for name in names), "no byte moves when a tensor gets another storage"
    del other
    assert allocated() == before


def test_aliases_stay_aliases_in_a_deep_copy() -> None:
    base = torch.arange(6, device="cuda")
    whole, part = copy.deepcopy([base, base[2:4]])
    whole.fill_(7)
    assert part.tolist() == [7, 7]


def test_models_with_buffers_are_averaged() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
    averaged = AveragedModel(model, use_buffers=True)
    averaged.update_parameters(model)
    assert averaged.module[1].running_mean.is_cuda


def test_rms_norm_keeps_its_result_and_a_number_of_each_row() -> None:
    norm = nn.RMSNorm(4096, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    before = allocated()
    out = norm(rows)
    assert allocated() - before == out.nbytes + 8192 * 4
    torch.cuda.reset_peak_memory_stats()
    out.backward(torch.empty_like(out))
    assert rows.grad is not None
    assert norm.weight.grad is not None


def test_rms_norm_of_known_values_has_a_backward_pass() -> None:
    rows = torch.ones(4, 64, device="cuda", requires_grad=True)
    nn.RMSNorm(64, device="cuda")(rows).sum().backward()
    assert rows.grad is not None


class Lines(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


class Opened(Dataset[int]):
    lines: tuple[int, ...] = ()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.lines[index]


def open_file(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert (number, info.id, info.num_workers) == (0, 0, 1)
    info.dataset.lines = (1, 2, 3, 4)


class Pictures(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(np.ones((3, 8, 8), np.float32)), index


def test_a_loader_with_workers_loads() -> None:
    loader = DataLoader(Pictures(), 4, num_workers=2, pin_memory=True, persistent_workers=True, timeout=5)
    for _ in range(2):
        labels = [each for pictures, indices in loader for each in indices.cuda().tolist() if pictures.cuda().is_cuda]
        assert labels == list(range(8))
    assert loader.num_workers == 2
    lines = DataLoader(Lines(), 2, num_workers=2, persistent_workers=True)
    assert [sum(1 for _ in lines) for _ in range(3)] == [3, 3, 3]
    opened = DataLoader(Opened(), 2, num_workers=2, worker_init_fn=open_file)
    assert [batch.tolist() for batch in opened] == [[1, 2], [3, 4]]
    assert get_worker_info() is None


def test_a_number_goes_where_an_unknown_mask_says() -> None:
    scores = torch.randn(100, 100, device="cuda")
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    scores[scores < 0] = -float("inf")
    assert allocated() == before
    assert torch.cuda.max_memory_allocated() - before <= 10_240 + 512  # the mask, and the number
    number = scores.mean()
    with pytest.raises(DataDependentError):  # a number on the card: torch asks for the mask's positions
        scores[scores < 0] = number


def test_a_tensor_of_another_ones_kind_lies_where_that_lies() -> None:
    like = torch.ones(1, device="cuda")
    before = allocated()
    made = torch.arange(MIB // 4).type_as(like)
    new, old = like.new(256, 1024), torch.ones(3).type("torch.cuda.HalfTensor")
    assert made.is_cuda
    assert new.is_cuda
    assert allocated() - before == 2 * MIB + 512
    assert (old.device.type, old.dtype) == ("cuda", torch.float16)
    assert like.new([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert (like.new().shape, like.new(np.int64(3)).shape, like.new(size=(2, 3)).shape) == ((0,), (3,), (2, 3))


def test_a_device_is_named_by_keyword_and_by_number() -> None:
    layer = nn.Linear(256, 256).to(0)
    assert layer.weight.is_cuda
    assert nn.Linear(3, 3).to(device=0).weight.is_cuda
    assert torch.cuda.max_memory_allocated(device="cuda:0") >= layer.weight.nbytes
    torch.cuda.reset_peak_memory_stats(device=0)
    assert torch.cuda.mem_get_info(device=0)[1] == torch.cuda.get_device_properties(device=0).total_memory


def test_what_grows_is_counted(gpu: VirtualGpu) -> None:
    before = allocated()
    grown = torch.empty(0, device="cuda")
    grown.resize_(1024, 1024)
    assert allocated() - before == 4 * MIB
    torch.cuda.reset_peak_memory_stats()
    grown.resize_(2048, 1024)
    assert torch.cuda.max_memory_allocated() - before == 12 * MIB  # the new bytes beside the old ones
    grown.resize_(1024, 1024)
    out = torch.empty(0, device="cuda")
    torch.cat([grown, grown], out=out)
    assert allocated() - before == 16 * MIB
    del grown, out
    assert allocated() == before
    host = gpu.ledger.host_bytes
    here = torch.ones(2)
    here.resize_(1024, 1024)
    assert gpu.ledger.host_bytes - host == 4 * MIB
    del here
    assert gpu.ledger.host_bytes == host


def test_experts_are_found_by_one_hot() -> None:
    chosen = nn.functional.one_hot(torch.tensor([0, 1, 2, 1], device="cuda"), 4)
    assert torch.where(chosen[:, 1] == 1)[0].tolist() == [1, 3]
    assert nn.functional.one_hot(torch.tensor([0, 2], device="cuda")).shape == (2, 3)
    each = torch.vmap(lambda chosen: nn.functional.one_hot(chosen, 3))(torch.tensor([0, 2], device="cuda"))
    assert each.shape == (2, 3)
    with pytest.raises(RuntimeError, match="index tensor"):
        nn.functional.one_hot(torch.tensor([0], dtype=torch.int32, device="cuda"), 4)


def test_lists_that_are_written_in_place_stay_known() -> None:
    count = torch.zeros((), device="cuda")
    torch._foreach_add_([count], 1)
    torch._foreach_add_([count], 1)
    assert count.item() == 2


def test_anomalies_are_looked_for() -> None:
    layer = nn.Linear(8, 8, device="cuda")
    with torch.autograd.set_detect_anomaly(True):
        layer(torch.randn(2, 8, device="cuda")).sum().backward()


def test_known_tensors_are_close() -> None:
    assert torch.allclose(torch.tensor([1.0], device="cuda"), torch.tensor([1.0 + 1e-9], device="cuda"))
    assert not torch.allclose(torch.tensor([1.0], device="cuda"), torch.tensor([1.1], device="cuda"))


def test_known_tensors_are_compared() -> None:
    assert torch.equal(torch.arange(3, device="cuda"), torch.tensor([0, 1, 2], device="cuda"))
    assert not torch.equal(torch.arange(3, device="cuda"), torch.ones(3, dtype=torch.int64, device="cuda"))


def test_fused_sgd_updates() -> None:
    layer = nn.Linear(256, 256, bias=False, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, fused=True)
    layer(torch.randn(2, 256, device="cuda")).sum().backward()
    before = allocated()
    optimizer.step()
    assert allocated() - before == layer.weight.nbytes


def test_ranges_for_a_profiler_are_no_fault() -> None:
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.range_push("forward")
        torch.cuda.nvtx.range_pop()
    torch.cuda.memory._record_memory_history(max_entries=10)
    assert torch.cuda.nvtx.range("f")(lambda: 3)() == 3


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "huber_loss", "l1_loss"])
def test_a_loss_keeps_the_storage_that_torch_leaves_it(name: str, reduction: str) -> None:
    function = getattr(nn.functional, name)
    ones = np.ones((64, 64), dtype=np.float32)  # real, as are the results
    real = function(torch.from_numpy(ones), torch.from_numpy(ones), reduction=reduction)
    found = function(torch.rand(64, 64, device="cuda"), torch.rand(64, 64, device="cuda"), reduction=reduction)
    assert (found.shape, found.untyped_storage().nbytes()) == (real.shape, real.untyped_storage().nbytes())


def test_a_default_device_leaves_tensors_where_they_are(gpu: VirtualGpu) -> None:
    before = torch.empty(8, device="cuda")
    with torch.device("cuda"):
        assert gpu.ledger.place_of(before) is gpu.ledger.place_of(torch.empty(8)) is Place.DEVICE
        model = torch.nn.Linear(16384, 8192)  # beyond what is kept real on the host
        model(torch.ones(2, 16384)).sum().backward()
        assert gpu.ledger.place_of(model.weight) is Place.DEVICE


@pytest.mark.usefixtures("gpu")
def test_a_default_device_does_not_change_what_values_are_read() -> None:
    def answers() -> list[object]:
        known, unknown = torch.arange(3, device="cuda"), torch.rand(4096, 4096, device="cuda")
        return [
            known.tolist(), known.sum().item(), unknown[0, :2].tolist(), unknown.sum().item(), bool(unknown[0, 0] > 2),
            bool(torch.isnan(unknown).any()), unknown.topk(2).indices[:3, 0].tolist(),
            torch.isin(unknown, known).sum().item(),
        ]  # fmt: skip

    outside = answers()
    with torch.device("cuda"):
        assert answers() == outside


def test_the_old_types_of_a_card_make_tensors_there() -> None:
    old = torch.cuda.FloatTensor
    sized, made = old(64, 2), old(np.zeros((3, 4)))
    assert (sized.shape, made.shape, old(torch.Size([2])).shape, old().shape) == ((64, 2), (3, 4), (2,), (0,))
    assert {sized.dtype, made.dtype} == {torch.float32}
    assert sized.is_cuda
    assert made.is_cuda
    moved = torch.zeros(3).type(torch.cuda.HalfTensor)
    assert moved.is_cuda
    assert moved.dtype is torch.float16
    assert isinstance(sized, old)
    assert not isinstance(torch.zeros(1), old)
    assert not isinstance(moved, old)
    assert old([1.0, 2.0]).tolist() == [1.0, 2.0]


def test_parameters_of_a_module_that_no_hook_sees_are_counted(gpu: VirtualGpu) -> None:
    layer = nn.Linear(10, 3).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.forward(torch.zeros(2, 10, device="cuda")).sum().backward()
    optimizer.step()
    assert gpu.num_params == 33


def sparse_of_host(size: int = 3) -> Tensor:
    places, values = torch.tensor([[0, 1], [1, 2]]), torch.tensor([1.0, 2.0])
    return torch.sparse_coo_tensor(places, values, (size, size), check_invariants=True)


def test_an_op_without_a_rule_is_one_sentence_that_a_script_can_catch_as_torchs_own_error() -> None:
    sparse = sparse_of_host()
    for attempt in (sparse.cuda, lambda: torch.histogram(torch.zeros(4, device="cuda"), bins=3)):
        with pytest.raises(
            NotImplementedError, match=r"test_virtual_idioms.py:\d+: .*; use another code path"
        ) as caught:
            attempt()
        assert isinstance(caught.value, HybridTrainError)


def test_sparse_tensors_of_the_host_are_computed() -> None:
    dense = torch.from_numpy(np.ones((600, 600), dtype=np.float32))
    product = sparse_of_host(600) @ dense
    assert product[:3, 0].tolist() == [1.0, 2.0, 0.0]
    assert product.cuda().is_cuda


def test_unknown_values_of_a_sparse_matrix_are_ones(gpu: VirtualGpu) -> None:
    places = torch.arange(5000)
    sparse = torch.sparse_coo_tensor(
        torch.stack([places, places]), torch.ones(5000), (5000, 5000), check_invariants=True
    )
    pairs = np.arange(10_000, dtype=np.int32).reshape(5000, 2) // 2
    whole = torch.sparse_coo_tensor(pairs.T, torch.ones(5000), (5000, 5000), dtype=torch.int64, check_invariants=True)
    assert whole.coalesce().indices()[:, 7].tolist() == [7, 7]
    assert (torch.eye(5000) + whole).dtype is torch.float32
    assert (sparse @ torch.ones(5000, 8)).cuda().shape == (5000, 8)
    assert {use.rule for use in gpu.placeholders()} == {"values of a sparse matrix: ones"}
    with pytest.raises(NotImplementedError, match="sparse tensors are planned on the host alone"):
        torch.sparse_coo_tensor(places[None], torch.ones(5000, device="cuda"), check_invariants=False)


def test_a_picture_of_the_graph_for_tensorboard_runs_the_module_once(gpu: VirtualGpu) -> None:
    layer, seen = nn.Linear(8, 8).cuda(), []
    layer.register_forward_hook(lambda *_: seen.append(1))
    caller = {"__name__": "torch.utils.tensorboard._pytorch_graph", "torch": torch, "layer": layer}
    exec("trace = torch.jit.trace(layer, torch.zeros(2, 8).cuda(), strict=True)", caller)  # noqa: S102
    assert (list(caller["trace"].graph.nodes()), dict(caller["trace"].named_modules())) == ([], {"": layer})
    assert seen == [1]
    assert not gpu.ledger.seen.compiled


def _negate(source: Tensor, out: Tensor, size: int, BLOCK: int) -> None:
    """Stand for the body of a kernel: it is never compiled."""


@pytest.mark.parametrize("is_tuned", [False, True])
def test_a_triton_kernel_takes_the_time_of_its_tensor_arguments_and_says_so(gpu: VirtualGpu, *, is_tuned: bool) -> None:
    triton = pytest.importorskip("triton", reason="Triton is made for Linux only")
    kernel = triton.jit(_negate)
    if is_tuned:
        kernel = triton.autotune([triton.Config({"BLOCK": 64})], key=["size"])(kernel)
    source, out, host = torch.empty(MIB, device="cuda"), torch.empty(2 * MIB, device="cuda"), torch.empty(MIB)
    before, known = allocated(), len(gpu.ledger.trace().ops)
    kernel[(1,)](source, out=out, size=MIB, unused=host, **({} if is_tuned else {"BLOCK": 64}))
    (op,) = gpu.ledger.trace().ops[known:]
    assert (op.name, op.bytes_moved, op.dtype, op.flops) == ("triton._negate", 12 * MIB, "float32", 0)
    assert allocated() == before
    kernel.warmup(torch.float32, size=MIB, grid=(1,))
    assert len(gpu.ledger.trace().ops) == known + 1, "a warm-up compiles alone"
    known_values = torch.zeros(2, device="cuda")
    kernel[(1,)](known_values, out=out, size=2, unused=host)
    assert known_values.tolist() == [1.0, 1.0], "what a kernel may have written is unknown: placeholders"
    assert any("Triton" in caveat for caveat in gpu.basis().caveats(fits=True))


def test_libraries_find_a_raw_stream_and_dynamo_its_rules() -> None:
    assert torch._C._cuda_getCurrentRawStream(0) == 0
    rules = torch._dynamo.trace_rules.get_torch_obj_rule_map
    assert rules.__wrapped__(), "two functions of torch that do nothing must not be one object"


def made_bytes() -> list[int]:
    found, x = list[int](), torch.empty(4096, 4096, device="cuda")
    for make in (
        x.half, x.long, lambda: x.t().contiguous(), lambda: x.t().reshape(-1), lambda: x.view(-1),
        lambda: x.softmax(-1, dtype=torch.float64), lambda: nn.functional.cross_entropy(x, x.argmax(-1)),
    ):  # fmt: skip
        before = allocated()
        made = make()
        found.append(allocated() - before)
        del made
    return found


def test_inference_mode_counts_what_no_grad_counts() -> None:
    with torch.inference_mode():
        found = made_bytes()
    with torch.no_grad():
        assert made_bytes() == found
    size = 4096 * 4096
    assert found == [2 * size, 8 * size, 4 * size, 4 * size, 0, 8 * size, 512]


def test_values_are_known_in_inference_mode() -> None:
    with torch.inference_mode():
        assert torch.linspace(0, 9, 4).long().tolist() == [0, 3, 6, 9]
        lengths = torch.tensor([20.0, 40.0], device="cuda") * 2
        assert torch.zeros(1, int(lengths.max().item())).shape == (1, 80)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_takes_its_iterations_and_fills_its_history(gpu: VirtualGpu, search: str | None) -> None:
    weight = nn.Parameter(torch.randn(MIB, device="cuda"))
    optimizer = torch.optim.LBFGS([weight], max_iter=6, history_size=5, line_search_fn=search)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    state = optimizer.state[weight]
    assert len(state["old_dirs"]) == len(state["old_stps"]) == 5
    assert calls == 2 * (6 if search is None else 7)
    assert optimizer.param_groups[0]["tolerance_change"] == 1e-9
    assert gpu.report().by_class()["optim_state"] == 5 * (2 * 4 * MIB + 512)  # pairs, and the number of each
    assert any("L-BFGS" in use.rule for use in gpu.placeholders())


def test_per_sample_gradients_of_a_module_called_with_other_parameters() -> None:
    net = nn.Linear(64, 32).cuda()
    params = {name: value.detach() for name, value in net.named_parameters()}

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(net, given, (x.to(torch.float32).unsqueeze(0),))
        return out.square().sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, torch.randn(16, 64, device="cuda"))
    assert {name: tuple(value.shape) for name, value in grads.items()} == {"weight": (16, 32, 64), "bias": (16, 32)}
    assert grads["weight"].is_cuda


def test_an_encoder_in_evaluation_keeps_its_padding(gpu: VirtualGpu) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).cuda().eval()
    mask = torch.zeros(8, 16, dtype=torch.bool, device="cuda")
    with torch.no_grad():
        assert encoder(torch.randn(8, 16, 64, device="cuda"), src_key_padding_mask=mask).shape == (8, 16, 64)
    assert any("padding" in use.rule for use in gpu.placeholders())


def test_a_fused_update_takes_its_rate_from_a_tensor() -> None:
    weight = nn.Parameter(torch.randn(MIB, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(1e-3), fused=True)
    before = allocated()
    weight.sum().backward()
    optimizer.step()
    assert allocated() - before == 3 * 4 * MIB + 512


@pytest.mark.parametrize("use", [
    lambda: torch.cuda.CUDAGraph(keep_graph=True), lambda: torch.cuda.make_graphed_callables(nn.Linear(1, 1), ()),
    lambda: torch.cuda.memory_stats()["inactive_split_bytes.all.peak"], lambda: torch.cuda.memory_snapshot(None),
    lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged, device="cuda"),
])  # fmt: skip
def test_what_is_not_planned_is_refused_in_one_sentence(use: Callable[[], object]) -> None:
    with pytest.raises(HybridTrainError, match=r"test_virtual_idioms.py:\d+: .* (not planned|not counted|alone)"):
        use()


def test_names_around_memory_that_scripts_use(tmp_path: Path) -> None:
    assert torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"] == 0
    assert torch.cuda.cudart().cudaProfilerStart() == 0
    assert torch.cuda.default_generators[0].get_state().numel()
    assert torch.cuda.get_device_properties(0).shared_memory_per_block == 48 * 1024
    torch.cuda.memory._record_memory_history()
    with pytest.warns(UserWarning, match="--snapshot FILE writes"):
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    assert not [*tmp_path.iterdir()]


def test_a_mask_is_filled_with_a_number_of_the_host() -> None:
    scores = torch.randn(4, 4, device="cuda", requires_grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool, device="cuda")
    scores.masked_fill(mask, torch.tensor(-1e9)).sum().backward()
    assert scores.grad is not None
    assert torch.zeros(2, device="cuda").masked_fill_(mask[0, :2], torch.tensor(3.0)).tolist() == [3.0, 3.0]


def test_annotations_may_name_a_graph() -> None:
    assert torch.cuda.CUDAGraph | None


def test_plain_attention_with_dropout_keeps_a_boolean_mask() -> None:
    queries, keys, values = (torch.randn(2, 4, 256, 64, device="cuda", requires_grad=True) for _ in range(3))
    before, scores, operand = allocated(), 4 * 2 * 4 * 256 * 256, 4 * 2 * 4 * 256 * 64
    with sdpa_kernel(SDPBackend.MATH):
        out = nn.functional.scaled_dot_product_attention(queries, keys, values, dropout_p=0.1)
    workspace = 8.125 * MIB
    kept = 2 * scores + scores // 4 + 3 * operand  # softmax, dropped and masked; queries and keys scaled, the result
    assert allocated() - before - workspace == kept, out.shape


@pytest.mark.parametrize(("function", "kept"), [
    (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), 5),
    (lambda x: torch.fake_quantize_per_channel_affine(
        x, torch.ones(64, device="cuda"), torch.zeros(64, device="cuda", dtype=torch.int32), 0, -128, 127), 5),
    (lambda x: nn.functional.fractional_max_pool3d(x.view(1, 4, 16, 16, 16), 2, output_size=(8, 8, 8)), 12 / 8),
    (torch._standard_gamma, 4),
])  # fmt: skip
def test_ops_that_torch_has_no_meta_kernel_for(function: Callable[[Tensor], Tensor], kept: float) -> None:
    weights = torch.rand(64, 256, device="cuda", requires_grad=True)
    before = allocated()
    out = function(weights)
    assert kept * weights.numel() <= allocated() - before <= kept * weights.numel() + 1024
    out.sum().backward()
    assert weights.grad is not None
    assert weights.grad.shape == weights.shape


def test_losses_and_factorizations_without_a_meta_kernel() -> None:
    scores = torch.randn(8, 5, device="cuda", requires_grad=True)
    nn.functional.multi_margin_loss(scores, torch.zeros(8, dtype=torch.int64, device="cuda")).backward()
    nn.functional.multilabel_margin_loss(scores, torch.zeros(8, 5, dtype=torch.int64, device="cuda")).backward()
    nn.functional.gaussian_nll_loss(scores, torch.zeros_like(scores), scores.exp()).backward()
    torch.distributions.Dirichlet(scores.exp()).rsample().sum().backward()
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(64, 8).cuda())
    assert layer(torch.randn(2, 64, device="cuda")).shape == (2, 8)
    assert torch.cov(scores).shape == (8, 8)
    assert [part.shape for part in torch.geqrf(torch.randn(3, 6, 4, device="cuda"))] == [(3, 6, 4), (3, 4)]


def test_places_are_filled_with_a_number_of_the_host() -> None:
    places = torch.tensor([1], device="cuda")
    assert torch.zeros(2, device="cuda").index_fill_(0, places, torch.tensor(3.0)).tolist() == [0.0, 3.0]


def test_derivatives_forward(gpu: VirtualGpu) -> None:
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).cuda(), torch.randn(4, 8, device="cuda")
    value, slope = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))
    assert value.shape == slope.shape == (4, 8)
    hessian = torch.func.hessian(lambda x: model(x).square().sum())(batch[0])
    assert hessian.shape == (8, 8)
    assert not gpu.ledger.seen.compiled, "torch's own preparation is no compiled code of the script"
