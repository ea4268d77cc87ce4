"""A tiny scenario, and made-up records of its runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybridtrain.models.model_config import BatchWorkload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.planning.figures import MemoryFigures, RefusedRequest, StepPeaks, Timeline
from hybridtrain.run.environment import read_environment
from hybridtrain.stacks import Stack
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.stack_run import AccuracyFigures, MeasuredFigures, SeedResult, StackRun
from hybridvalidation.scenario import AccuracySpec, CardSpec, Scenario
from tiny_models import GPT2_UNTIED

ENVIRONMENT = read_environment()
PROXY = replace(GPT2_UNTIED, vocab_size=256, max_seq_len=16, num_blocks=1, width=32, num_heads=2, num_kv_heads=2)
SCENARIO = Scenario(
    name="mine", description="A tiny model", model=ModelSpec(shape=GPT2_UNTIED), card=CardSpec(name="rtx-3090"),
    workload=BatchWorkload(batch_size=2, seq_len=8), stacks=("vanilla", "lean"),
    accuracy=AccuracySpec(
        proxy=PROXY, seeds=(0, 1, 2), num_steps=3, batch_size=2, seq_len=8, lr=1e-3, validation_batches=2
    ),
)  # fmt: skip
VANILLA = Stack(name="vanilla", description="nothing on")
SIZES = {"weight": 5, "activation": 7}
MEMORY = MemoryFigures(
    num_params=3, fits=False,
    steps=(
        StepPeaks(
            step=1, allocated_bytes=12, active_bytes=12, reserved_bytes=20, by_class=SIZES, stage="backward",
            unit="head",
        ),
    ),
    peak_allocated_bytes=12, peak_reserved_bytes=20, device_used_bytes=30, host_peak_bytes=1, by_class=SIZES,
    by_unit={"weight/head": 12},
    oom=RefusedRequest(
        step=1, stage="backward", unit="head", requested_bytes=9, allocated_bytes=12, reserved_bytes=20,
        capacity_bytes=24, by_class=SIZES, by_unit={"weight/head": 12},
    ),
    step_time_s=0.1 + 0.2, time_by_bound={"memory": 1e-300}, tokens_per_step=16, tokens_per_s=1e15 / 3, bound="memory",
    timeline=Timeline(times_s=(0.0, 1e-6), by_class={"weight": (5, 5), "activation": (0, 7)}),
)  # fmt: skip
ACCURACY = AccuracyFigures(
    num_params=1, num_tokens=2, num_validation_tokens=3, corpus="fox", corpus_digest="d",
    seeds=(SeedResult(seed=0, validation_loss=2 / 3, validation_accuracy=1.0, final_train_loss=0.0),),
)  # fmt: skip
MEASURED = MeasuredFigures(
    peak_allocated_bytes=1, peak_reserved_bytes=2, device_used_bytes=3, num_alloc_retries=0, step_times_s=(0.1,),
    tokens_per_s=7.5, cap_bytes=9,
)  # fmt: skip


def record(key: str = "k", **changes: Any) -> StackRun:
    plain = StackRun(
        key=key, kind="dry_run", scenario="mine", stack="vanilla", evidence=Evidence.PLANNED, outcome=Outcome.OK,
        started_at="2026-01-01T00:00:00+00:00", duration_s=1.5, environment=ENVIRONMENT,
        asked={}, plan={"weight.codec": "float32"},
    )  # fmt: skip
    return replace(plain, **changes)


def figures(
    allocated: Sequence[int] = (10_000, 20_000), reserved: Sequence[int] = (100_000, 200_000),
    phases: Sequence[str] = ("full", "full"), **changes: Any,
) -> MemoryFigures:  # fmt: skip
    """Return made-up figures of steps that differ in what is given."""
    steps = tuple(
        StepPeaks(
            step=step, allocated_bytes=size, active_bytes=size, reserved_bytes=cached, by_class={"weight": size},
            stage="backward", unit="head", phase=phase,
        )
        for step, (size, cached, phase) in enumerate(zip(allocated, reserved, phases, strict=True), 1)
    )  # fmt: skip
    plain = replace(
        MEMORY, fits=True, oom=None, steps=steps, peak_allocated_bytes=max(allocated),
        peak_reserved_bytes=max(reserved), by_unit={"weight/head": max(allocated)}, step_time_s=1.0,
    )  # fmt: skip
    return replace(plain, **changes)
