"""Anyone's PyTorch code on a card that does not exist; peaks by hand arithmetic."""

import ast
import doctest
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import optimizer
from torch.utils.checkpoint import checkpoint

import hybridtrain.virtual_gpu
from hybridtrain.errors import ConfigError
from hybridtrain.units import MIB
from hybridtrain.virtual_gpu import CardRun, TensorClass, VirtualGpu, find_card
from hybridtrain.virtual_gpu.account.op_record import Stage
from hybridtrain.virtual_gpu.cards.roofline import Bottleneck
from hybridtrain.virtual_gpu.facade import virtual_gpu

CARD = find_card("rtx-4090")
CUBLAS = 8_519_680
"""One workspace for the forward and one for the backward thread."""
WIDTH, HIDDEN, BATCH = 1024, 4096, 256
PARAMS = 4 * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN)
"""Bytes of the parameters of ``mlp``, float32."""
INPUT, INNER = 4 * BATCH * WIDTH, 4 * BATCH * HIDDEN
"""Bytes of the batch and of the hidden layer."""

MakeOptimizer = Callable[..., torch.optim.Optimizer]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))


def watched(make_optimizer: MakeOptimizer, *, num_steps: int = 2, **settings: object) -> CardRun:
    with VirtualGpu(CARD) as gpu:
        model = mlp().cuda()
        chosen = make_optimizer(model.parameters(), **settings)
        batch = torch.empty(BATCH, WIDTH, device="cuda")
        for _ in range(num_steps):
            model(batch).sum().backward()
            chosen.step()
            chosen.zero_grad()
    return gpu.report()


def held(run: CardRun) -> dict[str, int]:
    return {name.value: size for name, size in run.by_class().items() if size}


def test_adamw_peaks_in_its_update_at_five_times_the_parameters() -> None:
    run = watched(torch.optim.AdamW, foreach=True)
    # Weights, gradients, two moments, and the roots of the second moments that the foreach update makes at once. The
    # counts of the steps live on the CPU. The loss and what the backward pass held are gone; the batch stays.
    expected = {
        "weight": PARAMS, "grad": PARAMS, "optim_state": 2 * PARAMS, "activation": INPUT,
        "workspace": PARAMS + 2 * CUBLAS,
    }  # fmt: skip
    assert [step.requested_bytes for step in run.steps] == [sum(expected.values())] * 2
    assert held(run) == expected  # every size is a multiple of 512, so nothing is lost to rounding
    assert run.peak.allocated_bytes == sum(expected.values())
    assert run.peak.stage is Stage.UPDATE
    assert run.fits_card
    assert run.peak_reserved_bytes >= run.peak.allocated_bytes
    assert run.device_used_bytes == run.peak_reserved_bytes + CARD.context_bytes


def test_sgd_peaks_in_the_backward_pass() -> None:
    run = watched(torch.optim.SGD, foreach=True, lr=0.1)
    # At the end of the backward pass: every gradient, and the gradient of the hidden layer that the last one is made
    # from. Loss and its gradient are 4 bytes each, a block of 512 on the card.
    assert run.steps[1].requested_bytes == 2 * PARAMS + INPUT + INNER + 2 * 4 + 2 * CUBLAS
    assert run.peak.allocated_bytes == 2 * PARAMS + INPUT + INNER + 2 * 512 + 2 * CUBLAS
    assert run.peak.stage is Stage.BACKWARD
    assert run.by_class()[TensorClass.GRAD] == PARAMS


def test_the_loop_over_tensors_takes_less_than_the_foreach_update() -> None:
    run = watched(torch.optim.AdamW, foreach=False)
    # Two temporaries of the last matrix: the root of its second moment, and the same divided by the correction. What
    # the loop made of the bias before is still held by its variable.
    temporaries = 2 * 4 * WIDTH * HIDDEN + 4 * HIDDEN
    assert run.peak.requested_bytes == 4 * PARAMS + INPUT + temporaries + 2 * CUBLAS


def test_updates_inside_of_the_backward_pass_belong_to_its_step() -> None:
    with VirtualGpu(CARD) as gpu:
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).cuda() for _ in range(3)]
        for parameter in (parameter for block in blocks for parameter in block.parameters()):
            sgd = torch.optim.SGD([parameter])
            parameter.register_post_accumulate_grad_hook(lambda _, sgd=sgd: sgd.step())
        for _ in range(2):
            hidden = torch.empty(BATCH, WIDTH, device="cuda", requires_grad=True)
            for block in blocks:  # each is run again in the backward pass, after the next one was updated
                hidden = checkpoint(block, hidden, use_reentrant=False)
            hidden.sum().backward()
    run = gpu.report()
    assert len(run.steps) == 2
    assert run.time.flops == 3 * 4 * 2 * BATCH * WIDTH * WIDTH  # forward, again, and two in the backward pass
    assert gpu.without_gradient == ()


def test_the_time_of_a_step_follows_the_cards_rates() -> None:
    run = watched(torch.optim.AdamW, foreach=True)
    matmul_flops = 5 * 2 * BATCH * WIDTH * HIDDEN  # two forward, three backward: the batch needs no gradient
    assert run.time.flops == matmul_flops
    assert run.bound is Bottleneck.OPTIMIZER
    assert 0 < run.time.seconds < 1
    assert run.time.seconds == pytest.approx(sum(run.time.seconds_by_bound.values()))


def test_modules_have_names() -> None:
    by_unit = watched(torch.optim.AdamW, foreach=True).peak.by_unit
    first = 4 * (WIDTH * HIDDEN + HIDDEN)
    assert by_unit[TensorClass.WEIGHT, "0"] == by_unit[TensorClass.GRAD, "0"] == first
    assert by_unit[TensorClass.WEIGHT, "2"] == PARAMS - first
    assert by_unit[TensorClass.OPTIM_STATE, "2"] == 2 * (PARAMS - first)


def test_what_does_not_fit_is_refused_where_it_happens() -> None:
    small = replace(CARD, memory_mib=(5 * PARAMS + INPUT + 2 * CUBLAS) // MIB + CARD.context_mib)
    gpu = VirtualGpu(small)

    def script() -> None:
        with gpu:
            model = mlp().cuda()
            adamw = torch.optim.AdamW(model.parameters())
            model(torch.empty(BATCH, WIDTH, device="cuda")).sum().backward()
            adamw.step()

    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate .*RTX 4090, in update\)"):
        script()
    run = gpu.report()
    assert not run.fits_card
    assert run.oom is not None
    assert (run.oom.step, run.oom.stage) == (1, Stage.UPDATE)
    assert "does not fit" in run.summary()


def test_a_script_may_catch_what_does_not_fit_and_go_on() -> None:
    with VirtualGpu(CARD) as gpu:
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 40.00 GiB.* capacity of 23.52 GiB"):
            torch.empty(10 * 2**30, device="cuda")
        assert torch.cuda.memory_allocated() == 0
        half = torch.empty(10 * 2**30, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 10 * 2**30
        assert torch.cuda.mem_get_info() == (CARD.allocator_capacity_bytes - 10 * 2**30, CARD.memory_bytes)
        del half
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (0, 10 * 2**30)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
    assert gpu.ledger.host_bytes == 0


def test_code_without_a_step_has_a_peak_and_its_plan_is_a_lower_bound() -> None:
    with VirtualGpu(CARD) as gpu:
        kept = torch.empty(MIB, device="cuda")
    assert gpu.report().peak.allocated_bytes == kept.nbytes
    assert "no step" in gpu.basis().lower_bound


def test_an_unknown_card_is_refused() -> None:
    with pytest.raises(ConfigError, match="list cards"):
        VirtualGpu("rtx-4091")


@pytest.mark.parametrize("name", ["cuda", "cpu", "meta"])
def test_what_is_made_in_the_scope_of_a_device_lies_there(name: str) -> None:
    with VirtualGpu(CARD):
        assert torch.get_default_device() == torch.tensor([1.0]).device == torch.device("cpu")
        with torch.device(name):
            found = torch.get_default_device(), torch.tensor([1.0]).device, torch.zeros(2).device
        assert [device.type for device in found] == [name] * 3


def test_what_torchao_compiles_into_one_kernel_holds_nothing() -> None:
    def single_param_adam(parameter: torch.Tensor) -> None:
        parameter.copy_(parameter.double())

    with VirtualGpu(CARD) as gpu:
        parameter = torch.empty(2**20, device="cuda")
        torch.compile(single_param_adam, fullgraph=True)(parameter)
        assert torch.cuda.max_memory_allocated() == parameter.nbytes  # a kernel that writes in place
        assert len(gpu.ledger.seen.captured) == 1
        single_param_adam.__module__ = "torchao.optim.adam"
        torch.compile(single_param_adam, fullgraph=True)(parameter)  # left out: its states are tensors of tensors
        assert torch.cuda.max_memory_allocated() == parameter.nbytes
        assert len(gpu.ledger.seen.captured) == 1


def test_torch_is_as_it_was_afterwards() -> None:
    def state() -> tuple[object, ...]:
        return (
            len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks),
            torch.Tensor.to, torch.Tensor.device, torch.cuda.is_available, torch.cuda.memory_allocated, torch.empty,
            torch.compile, torch.Generator, torch.version.cuda, torch.accelerator.is_available(),
            torch.is_autocast_enabled("cuda"), "is_cuda" in vars(torch.Tensor),
        )  # fmt: skip

    def fail() -> None:
        with VirtualGpu(CARD), torch.autocast("cuda", torch.bfloat16):
            assert state() != before
            raise KeyError

    before = state()
    with pytest.raises(KeyError):
        fail()
    assert state() == before
    query = torch.zeros(1, 2, 16, 8, device="meta", dtype=torch.bfloat16)
    assert nn.functional.scaled_dot_product_attention(query, query, query).shape == query.shape
    assert (nn.functional.linear(query.float(), query.float()[0, 0])).dtype is torch.float32


DOCUMENTED = hybridtrain.virtual_gpu._NAMES.keys() - {
    "account.op_rules",
    "account.tensor_class",
    "facade.card_run",
    "facade.placeholders",
}


@pytest.mark.parametrize("module", sorted(DOCUMENTED))
def test_the_examples_in_docstrings_run(module: str) -> None:
    failed, attempted = doctest.testmod(import_module(f"hybridtrain.virtual_gpu.{module}"))
    assert not failed
    assert attempted


def test_every_public_name_is_there_for_programs_and_for_type_checkers() -> None:
    package = hybridtrain.virtual_gpu
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    typed = {
        (node.module.removeprefix(f"{package.__name__}."), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("hybridtrain.")
        for alias in node.names
    }
    assert typed == {(module, name) for name, module in package._MODULES.items()}
    assert all(getattr(package, name).__doc__ for name in dir(package))
    with pytest.raises(AttributeError, match="no attribute 'VirtualTpu'"):
        package.VirtualTpu  # noqa: B018


def test_it_imports_nothing_of_the_trainer_and_no_torch_before_it_is_needed() -> None:
    program = (
        "import sys, hybridtrain.virtual_gpu as gpu, hybridtrain.virtual_gpu.account.tensor_class\n"
        "assert 'torch' not in sys.modules\n"
        "[getattr(gpu, name) for name in dir(gpu)]\n"
        "print(*sorted({'.'.join(name.split('.')[:2]) for name in sys.modules if name.startswith('hybrid')}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    allowed = {"hybridtrain", *(f"hybridtrain.{name}" for name in ("virtual_gpu", "units", "errors", "config"))}
    assert set(done.stdout.split()) <= allowed | {
        "hybridtrain.dtypes",
        "hybridtrain.atomic_write",
        "hybridtrain.plain_file",
    }


def test_a_fraction_of_the_card_is_a_cap() -> None:
    half = CARD.memory_bytes // 2
    with VirtualGpu(CARD):
        kept = torch.empty(half - 64 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.set_per_process_memory_fraction(0.5)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(ValueError, match="0~1"):
            torch.cuda.set_per_process_memory_fraction(2)
        del kept


def test_a_number_names_the_card() -> None:
    with VirtualGpu(CARD):
        device = torch.device(0)
        assert device == torch.device("cuda", 0) == torch.device("cuda:0") == torch.device(type="cuda", index=0)
        assert isinstance(device, torch.device)
        with device:
            assert torch.empty(2).device == device == torch.get_default_device()
            assert torch.tensor([1.0]).is_cuda
    assert torch.device is type(torch.device("cpu"))


def test_what_is_imported_for_the_script_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = "import logging, warnings\nlogging.getLogger(__name__).warning('noise')\nwarnings.warn('noise')\n"
    (tmp_path / "loud_library.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(virtual_gpu, "_BEFORE", ("loud_library", "there_is_no_such_library"))
    with VirtualGpu("rtx-4090"):  # a warning is an error in these tests
        assert "loud_library" in sys.modules
    assert caplog.records == []
    logging.getLogger(__name__).warning("heard again")
    assert len(caplog.records) == 1
