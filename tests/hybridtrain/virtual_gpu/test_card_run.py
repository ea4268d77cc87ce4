"""Plain PyTorch code, no trainer, on a card that does not exist; peaks by hand arithmetic."""

import ast
import doctest
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

import hybridtrain.virtual_gpu
from hybridtrain.errors import ConfigError
from hybridtrain.units import MIB
from hybridtrain.virtual_gpu import AllocatorConfig, CardRun, TensorClass, find_card, watch
from hybridtrain.virtual_gpu.observer import Stage
from hybridtrain.virtual_gpu.roofline import Bound

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


def watched(make_optimizer: MakeOptimizer, *, num_steps: int = 2, label: bool = False, **settings: object) -> CardRun:
    with watch(CARD) as gpu, torch.device("meta"):
        model = mlp()
        if label:
            gpu.label_model(model)
        chosen = make_optimizer(model.parameters(), **settings)
        batch = torch.empty(BATCH, WIDTH)
        for _ in range(num_steps):
            gpu.begin_step()
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


def test_the_time_of_a_step_follows_the_cards_rates() -> None:
    run = watched(torch.optim.AdamW, foreach=True)
    matmul_flops = 5 * 2 * BATCH * WIDTH * HIDDEN  # two forward, three backward: the batch needs no gradient
    assert run.time.flops == matmul_flops
    assert run.bound is Bound.OPTIMIZER
    assert 0 < run.time.seconds < 1
    assert run.time.seconds == pytest.approx(sum(run.time.seconds_by_bound.values()))


def test_a_labelled_models_modules_have_names() -> None:
    by_unit = watched(torch.optim.AdamW, label=True, foreach=True).peak.by_unit
    first = 4 * (WIDTH * HIDDEN + HIDDEN)
    assert by_unit[TensorClass.WEIGHT, "0"] == by_unit[TensorClass.GRAD, "0"] == first
    assert by_unit[TensorClass.WEIGHT, "2"] == PARAMS - first
    assert by_unit[TensorClass.OPTIM_STATE, "2"] == 2 * (PARAMS - first)


def test_what_does_not_fit_is_refused_where_it_happens() -> None:
    small = replace(CARD, memory_mib=(5 * PARAMS + INPUT + 2 * CUBLAS) // MIB + CARD.context_mib)
    with watch(small) as gpu, torch.device("meta"):
        model = mlp()
        adamw = torch.optim.AdamW(model.parameters(), foreach=True)
        batch = torch.empty(BATCH, WIDTH)
        gpu.begin_step()
        model(batch).sum().backward()
        adamw.step()
    run = gpu.report()
    assert not run.fits_card
    assert run.oom is not None
    assert (run.oom.step, run.oom.stage) == (1, Stage.UPDATE)
    assert run.steps == run.uncapped.steps
    assert "does not fit" in run.summary()
    rounded = gpu.report(allocator=AllocatorConfig(roundup_power2_divisions=2))
    assert rounded.uncapped.steps[0].allocated_bytes > run.uncapped.steps[0].allocated_bytes


def test_a_run_that_computes_is_watched_and_not_changed() -> None:
    def train(begin_step: Callable[[], None]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Tanh())
        adamw = torch.optim.AdamW(model.parameters(), fused=True)
        batch = torch.randn(4, 128)
        for _ in range(2):
            begin_step()
            model(batch).square().mean().backward()
            adamw.step()
            adamw.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    alone = train(lambda: None)
    with watch(CARD, device="cpu") as gpu:
        seen = train(gpu.begin_step)
    run = gpu.report()
    assert all(torch.equal(one, other) for one, other in zip(alone, seen, strict=True))
    params = 4 * 128 * 128
    assert held(run)["weight"] == held(run)["grad"] == params
    assert held(run)["optim_state"] == 2 * params + 512  # on this device the count of steps is there too


def test_a_model_from_before_the_watch_counts_from_its_label() -> None:
    with torch.device("meta"):
        model = mlp()
        batch = torch.empty(BATCH, WIDTH)
    with watch(CARD) as gpu:
        gpu.label_model(model)
        gpu.label(batch, TensorClass.BOUNDARY, "batch")
        gpu.begin_step()
        with torch.no_grad():
            model(batch)
    run = gpu.report()
    # Without gradients the hidden layer is there twice while ReLU runs, and the batch all the time.
    assert held(run) == {"weight": PARAMS, "boundary": INPUT, "activation": 2 * INNER, "workspace": CUBLAS}
    assert run.peak.by_unit[TensorClass.BOUNDARY, "batch"] == INPUT


def test_a_watch_without_steps_says_what_is_missing() -> None:
    with watch(CARD) as gpu:
        torch.empty(3, device="meta")
    with pytest.raises(ValueError, match=r"no step was begun.*call begin_step\(\) before each"):
        gpu.report()
    with pytest.raises(ConfigError, match="rtx-4090"), watch("rtx-4091"):
        pass


def test_a_watch_leaves_no_hook_behind() -> None:
    def hooks() -> tuple[int, int]:
        return len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)

    def fail() -> None:
        with watch(CARD):
            during.append(hooks())
            raise KeyError

    before, during = hooks(), []
    with pytest.raises(KeyError):
        fail()
    assert during == [(before[0] + 1, before[1] + 1)]
    assert hooks() == before


@pytest.mark.parametrize("module", sorted(hybridtrain.virtual_gpu._NAMES.keys() - {"op_rules", "tensor_class"}))
def test_the_examples_in_docstrings_run(module: str) -> None:
    failed, attempted = doctest.testmod(import_module(f"hybridtrain.virtual_gpu.{module}"))
    assert not failed
    assert attempted


def test_every_public_name_is_there_for_programs_and_for_type_checkers() -> None:
    package = hybridtrain.virtual_gpu
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    typed = {
        (node.module.rpartition(".")[2], alias.name)
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
        "import sys, hybridtrain.virtual_gpu as gpu, hybridtrain.virtual_gpu.tensor_class\n"
        "assert 'torch' not in sys.modules\n"
        "[getattr(gpu, name) for name in dir(gpu)]\n"
        "print(*sorted({'.'.join(name.split('.')[:2]) for name in sys.modules if name.startswith('hybrid')}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    allowed = {"hybridtrain", *(f"hybridtrain.{name}" for name in ("virtual_gpu", "units", "errors", "config"))}
    assert set(done.stdout.split()) <= allowed | {"hybridtrain.dtypes", "hybridtrain.atomic_write"}
