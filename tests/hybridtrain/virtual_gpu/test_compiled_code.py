"""What compiled code keeps in memory: arithmetic that a person can do. And what is no graph runs as eager code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule

from hybridtrain.virtual_gpu.facade import compiled_code
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu

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
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Gated() for _ in range(layers)])

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)  # type: ignore[no-untyped-call]
        return hidden


def kept(module: nn.Module, *, is_compiled: bool) -> int:
    """Return what the forward pass leaves beside input, output and weights; and see that gradients come."""
    with VirtualGpu("rtx-4090"):
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


class Recomputed(Gated):
    """A layer that is a checkpoint by itself, as those of transformers."""

    def __call__(self, hidden: Tensor) -> Tensor:
        found: Tensor = torch.utils.checkpoint.checkpoint(super().__call__, hidden, use_reentrant=False)  # type: ignore[no-untyped-call]
        return found


class Stack(nn.Module):
    """Layers of one make, numbered, with more before and after them."""

    def __init__(self, layers: int, *, between: float = 1.0, make: type[Gated] = Gated) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([make() for _ in range(layers)])
        for number, block in enumerate(self.blocks):
            block.number = number  # type: ignore[assignment]
        self.between = between

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden) if self.between == 1 else block(hidden * self.between)
        out: Tensor = self.last(hidden).tanh()
        return out


def test_a_chain_of_layers_keeps_what_one_graph_of_them_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_code, "_FEW_LAYERS", 3)
    chained = [kept(Stack(3, make=make), is_compiled=True) for make in (Gated, Recomputed)]
    monkeypatch.setattr(compiled_code, "_FEW_LAYERS", 9)
    whole = [kept(Stack(3, make=make), is_compiled=True) for make in (Gated, Recomputed)]
    assert chained[0] == whole[0] < kept(Stack(3), is_compiled=False)
    assert whole[1] <= chained[1] <= whole[1] + NARROW < chained[0]  # a chain keeps the input of every checkpoint


def test_layers_with_ops_or_checkpoints_between_them_are_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_code, "_FEW_LAYERS", 2)
    assert kept(Checkpointed(), is_compiled=True) == NARROW
    with_ops = kept(Stack(2, between=0.5), is_compiled=True)
    monkeypatch.setattr(compiled_code, "_FEW_LAYERS", 9)
    assert kept(Stack(2, between=0.5), is_compiled=True) == with_ops


def test_a_cross_entropy_keeps_its_logits_and_two_numbers_a_row() -> None:
    with VirtualGpu("rtx-4090"):
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
        assert torch.cuda.max_memory_allocated() - before <= logits.nbytes + kept_bytes + 2 * 4 * ROWS


def test_a_gradient_is_written_over_what_the_forward_pass_saved_for_it() -> None:
    with VirtualGpu("rtx-4090"):
        head = nn.Linear(WIDTH, 32768, bias=False).bfloat16().cuda()
        hidden = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
        labels = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        loss: Any = torch.compile(lambda x, at: nn.functional.cross_entropy(head(x).float(), at))
        loss(hidden, labels).backward()
        head.weight.grad = None
        logits, rows = 2 * ROWS * 32768, 4 * ROWS
        found = peak(lambda: loss(hidden, labels).backward())
        assert logits + head.weight.nbytes <= found <= logits + head.weight.nbytes + 4 * rows


def test_layers_of_one_make_are_traced_once_and_keep_weights_of_their_own() -> None:
    with VirtualGpu("rtx-4090"):
        layers = [nn.Linear(WIDTH, WIDTH).cuda() for _ in range(3)]
        hidden = torch.zeros(ROWS, WIDTH, device="cuda")
        for layer in layers:
            layer.compile()
            hidden = layer(hidden)
        hidden.sum().backward()
        assert all(weight.grad is not None for layer in layers for weight in layer.parameters())


def peak(function: Callable[[], Any]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


def test_a_chain_of_pointwise_ops_makes_its_result_alone() -> None:
    def chain(x: Tensor) -> Tensor:
        return (x.exp() + x.tanh()) * x.sigmoid()

    with VirtualGpu("rtx-4090") as gpu:
        x, of_chain = torch.zeros(2**22, device="cuda"), torch.compile(chain)
        of_chain(x)
        assert peak(lambda: of_chain(x)) == x.nbytes
        assert peak(lambda: chain(x)) == 3 * x.nbytes
        assert gpu.basis().captured
        assert not gpu.basis().upper_bound


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)
        self.head.weight = self.embed.weight
        self.table = torch.ones(64)  # neither parameter nor buffer
        self.cached: Tensor | None = None

    def forward(self, ids: Tensor) -> dict[str, Any]:
        if self.cached is None:
            self.cached = torch.arange(64, device=ids.device).float()
        hidden = self.embed(ids) * self.cached * self.table.to(ids.device)
        return {"logits": self.head(hidden), "name": "tied"}


def test_a_module_keeps_its_ties_its_results_and_what_it_sets() -> None:
    with VirtualGpu("rtx-4090") as gpu:
        model = Tied().cuda()
        model.table = model.table.cuda()
        call = torch.compile(model)
        assert isinstance(call, OptimizedModule)
        assert call.embed is model.embed
        for _ in range(2):
            found = call(torch.zeros(4, 8, dtype=torch.int64, device="cuda"))
            found["logits"].sum().backward()
        assert found["logits"].shape == (4, 8, 512)
        assert found["logits"].is_cuda
        assert found["name"] == "tied"
        assert isinstance(model.cached, Tensor)
        assert model.cached.is_cuda
        assert model.embed.weight is model.head.weight
        assert type(model.embed.weight) is nn.Parameter
        assert model.head.weight.grad is not None
        assert gpu.basis().compiled == []


def test_a_function_finds_the_modules_and_tensors_of_its_closure() -> None:
    with VirtualGpu("rtx-4090") as gpu:
        model, scale = nn.Linear(WIDTH, WIDTH).cuda(), torch.ones(WIDTH, device="cuda", requires_grad=True)

        @torch.compile
        def loss(x: Tensor) -> Tensor:
            return (model(x) * scale).square().mean()

        loss(torch.zeros(8, WIDTH, device="cuda")).backward()  # type: ignore[no-untyped-call]
        assert model.weight.grad is not None
        assert scale.grad is not None
        assert gpu.basis().compiled == []


def item(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x


def broken(x: Tensor) -> Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


def trained(x: Tensor) -> Tensor:
    weight = torch.ones(4, device=x.device, requires_grad=True)
    (x * weight).sum().backward()  # type: ignore[no-untyped-call]
    return x


HELD: list[Tensor] = []


def listed(x: Tensor) -> Tensor:
    if not HELD:
        HELD.append(torch.ones(4, device=x.device))
    return x * HELD[0]


def kept_out(x: Tensor) -> Tensor:
    return torch.compiler.disable(torch.tanh)(x) + 1  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (item, "reads a value"),
        (broken, "asks for a graph break"),
        (trained, "backward inside"),
        (listed, "neither its arguments nor its modules'"),
        (kept_out, "torch.compiler.disable"),
    ],
)
def test_what_is_no_graph_runs_as_eager_code_and_is_an_upper_bound(function: Any, reason: str) -> None:
    with VirtualGpu("rtx-4090") as gpu:
        x = torch.ones(4, device="cuda")
        HELD[:] = [torch.ones(4, device="cuda")]
        for _ in range(2):
            assert torch.compile(function)(x).shape == x.shape
        assert reason in gpu.basis().upper_bound
        assert "test_compiled_code.py:" in gpu.basis().upper_bound
        assert gpu.basis().captured == []


def test_pools_of_cuda_graphs_are_said_to_be_left_out() -> None:
    with VirtualGpu("rtx-4090") as gpu:
        torch.compile(torch.sin, mode="max-autotune-no-cudagraphs")(torch.ones(4, device="cuda"))
        assert not gpu.basis().approximated
        torch.compile(torch.sin, mode="reduce-overhead")(torch.ones(4, device="cuda"))
        assert "CUDA graphs" in next(iter(gpu.basis().approximated))


def test_steps_and_modules_are_those_of_eager_code() -> None:
    def plan(wrap: Callable[[nn.Module], Any]) -> tuple[int, set[str]]:
        with VirtualGpu("rtx-4090") as gpu:
            model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.ReLU(), nn.Linear(64, 64))).cuda()
            call = wrap(model)
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(3):
                call(torch.zeros(8, 64, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        run = gpu.report()
        return len(run.steps), {unit for _, unit in run.peak.by_unit if unit != "cublas"}

    def wrapped(model: nn.Module) -> Any:
        return torch.compile(model)  # the card's, as it is looked up now

    def itself(model: nn.Module) -> nn.Module:
        model.compile()
        return model

    steps, units = plan(lambda model: model)
    assert steps == 3
    for wrap in (wrapped, itself):
        assert plan(wrap) == (steps, units)


def test_code_with_the_card_as_default_device_is_a_graph_and_leaves_the_default_device_as_it_was() -> None:
    def shifted(x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[-1])

    with VirtualGpu("rtx-4090") as gpu:
        torch.set_default_device("cuda")
        torch.compile(shifted)(torch.zeros(2, 8, requires_grad=True)).sum().backward()
        assert len(gpu.basis().captured) == 1
        assert gpu.basis().compiled == []
    assert torch.tensor(1.0).device == torch.device("cpu")


def test_the_first_operands_do_not_live_as_long_as_the_graph() -> None:
    with VirtualGpu("rtx-4090"):
        compiled = torch.compile(lambda a, b: torch.tanh(a) * b + 1)
        for _ in range(2):
            a, b = (torch.randn(2**20, device="cuda", requires_grad=True) for _ in "ab")
            compiled(a, b).sum().backward()
            del a, b
            assert torch.cuda.memory_allocated() == 0
