"""Every setting of every optimization is used as given, refused in one clear error, or changed and told."""

from collections.abc import Iterator
from dataclasses import Field, fields, replace
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain.errors import PlanConflictError
from hybridtrain.memory.stored_layout import streamed_blocks
from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.models.model_config import PRESETS, Workload
from hybridtrain.optim import Adafactor, AdamWConfig
from hybridtrain.optimizations import (
    OPTIMIZATIONS,
    Bf16Optimizer,
    ChunkedLoss,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Int8Weights,
    Lora,
    MixedPrecision,
    Pipeline,
    PredictMemory,
    TiledMlp,
    WeightStreaming,
    Zero,
)
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import SETTINGS, suited
from hybridtrain.planning.dry_runs import DryRunInputs
from hybridtrain.planning.plan_changes import plan_changes
from hybridtrain.reports.dry_run_report import plan_run
from hybridtrain.stacks import stack_folder
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.cards.links import World
from tiny_models import GPT2_UNTIED

WORK = Workload(micro_batch_size=1, seq_len=16)
BLOCKS = GPT2_UNTIED.num_blocks
HELPERS: dict[str, tuple[Optimization, ...]] = {
    "activation_offload": (GradientCheckpointing(),),
    "nf4_weights": (Lora(),),
    "zero": (WeightStreaming(max_active_layers=3, prefetch_distance=2),),
}
"""What an optimization cannot do without."""
PATHS = {
    ("lora", "rank"): "adapter_rank", ("lora", "alpha"): "adapter_alpha", ("lora", "scaling"): "adapter_scaling",
    ("lora", "dropout"): "adapter_dropout", ("lora", "targets"): "adapter_targets",
    ("lora", "magnitude"): "adapter_magnitude", ("zero", "stage"): "zero_stage", ("zero", "prefetch"): "zero_prefetch",
    ("pipeline", "stages"): "pipeline_stages", ("activation_offload", "tier"): "boundary.placement",
    ("weight_streaming", "tier"): "weight.placement", ("optimizer_offload", "tier"): "optim_state.placement",
    ("mixed_precision", "master"): "master.codec", ("int8_weights", "master"): "master.codec",
    ("grad_accumulation", "accumulator"): "grad.codec", ("predictor_state", "codec"): "history_codec",
    ("low_bit_matmul", "format"): "linear",
}  # fmt: skip
"""Where a setting of another name stands in the plan."""
CHANGED_CELLS = {
    ("optimizer_offload", "offload_grads"): ("grad.placement", {True: "host", False: "device"}),
    ("predict_memory", "optimizer_state"): (
        "optim_state.placement",
        {"none": "device", "cpu": "host", "pinned": "host", "compress": "device", "drop": "dropped"},
    ),
    ("predict_memory", "discard_activations"): ("boundary.placement", {True: "dropped", False: "device"}),
    ("predictor_state", "predictor"): ("history_tensors", {"slow_gradient": 1, "linear": 1}),
}
"""Settings that are words for a value of the plan."""
OF_PHASE = {f"{phase}_dtype": phase for phase in Phase}
"""Element types of one phase alone."""
SAME_IN_OTHER_WORDS = {"int8": "int8_blocks"}
LARGE = (2, 3, BLOCKS, BLOCKS + 1, 64, 2**16)


def values_of(field: "Field[object]", hint: object) -> Iterator[object]:
    """Yield values worth trying: all of an enumeration, some numbers."""
    options = [option for option in get_args(hint) if option is not NoneType] if NoneType in get_args(hint) else [hint]
    for option in options:
        if option is bool:
            yield from (True, False)
        elif get_origin(option) is Literal:
            yield from get_args(option)
        elif isinstance(option, type) and issubclass(option, StrEnum):
            yield from option
        elif option is int:
            yield from (0, 1, *LARGE)
        elif option is float:
            yield from (0.0, 0.25, 16.0)
        elif field.name == "targets":
            yield from (("query",), ("attention", "ffn_up"), ("query", "ffn_gate_up"))


CASES = [
    pytest.param(kind, field.name, value, id=f"{kind}-{field.name}-{value}")
    for kind, cls in OPTIMIZATIONS.items()
    for field in fields(cls)  # type: ignore[arg-type]
    if field.name != "active_phases"
    for value in values_of(field, get_type_hints(cls)[field.name])
]


@pytest.mark.parametrize(("kind", "name", "value"), CASES)
def test_a_setting_is_used_as_given_or_refused_or_its_change_is_told(kind: str, name: str, value: object) -> None:
    try:
        stack = (OPTIMIZATIONS[kind](**{name: value}), *HELPERS.get(kind, ()))
        plan = compose(stack)
    except ValueError as error:
        if name not in str(error):
            pytest.fail(f"refused without its name: {error}")
        return
    phase = OF_PHASE.get(name, Phase.PREDICT if kind == "predict_memory" else Phase.FULL)
    used = suited(plan.for_phase(phase), BLOCKS).values()
    own = "compute_dtype" if name in OF_PHASE else PATHS.get((kind, name), name)
    path, words = CHANGED_CELLS.get((kind, name), (own, {}))
    wanted = ",".join(value) if isinstance(value, tuple) else words.get(value, value)
    told = plan_changes(stack, GPT2_UNTIED, WORK)
    if used[path] not in {wanted, SAME_IN_OTHER_WORDS.get(str(wanted), wanted)}:
        assert any(line.startswith(f"{path}: {value} asked") for line in told), f"{path} is {used[path]}, told: {told}"


@pytest.mark.parametrize("kind", [kind for kind, cls in OPTIMIZATIONS.items() if hasattr(cls, "active_phases")])
def test_an_optimization_without_a_phase_of_the_run_is_told(kind: str) -> None:
    item = OPTIMIZATIONS[kind](active_phases=(Phase.PREDICT,))
    sentence = f"{kind}: acts in predict alone, which this run does not have"
    is_idle = all(claim.phase is Phase.PREDICT for claim in item.claims())
    assert (sentence in plan_changes([item], GPT2_UNTIED, WORK)) == is_idle
    assert sentence not in plan_changes([item], GPT2_UNTIED, WORK, phases=tuple(Phase))


@settings(max_examples=60, deadline=None)
@given(
    recompute=st.integers(1, 9), kept=st.integers(0, 9), active=st.integers(1, 9), ahead=st.integers(0, 8),
    resident=st.integers(0, 9), blocks=st.integers(1, 5), is_coded=st.booleans(),
)  # fmt: skip
def test_what_is_told_is_what_the_engine_does(
    recompute: int, kept: int, active: int, ahead: int, resident: int, blocks: int, is_coded: bool
) -> None:
    model = replace(GPT2_UNTIED, num_blocks=blocks)
    stack: list[Optimization] = [
        GradientCheckpointing(recompute_every=recompute, kept_blocks=kept),
        WeightStreaming(max_active_layers=active, prefetch_distance=min(ahead, active - 1), resident_layers=resident),
        *([Int8Weights()] if is_coded else []),
    ]
    plan = compose(stack)
    trainer = Trainer(model, plan, TrainerConfig(), VirtualTransfer())
    asked, executor, weights = plan.for_phase(Phase.FULL), trainer.executor, trainer.weights
    streamed = len(streamed_blocks(asked, range(blocks)))
    found = {"kept_blocks": blocks - executor.first_kept, "resident_layers": blocks - streamed}
    if not kept:
        found["recompute_every"] = max(map(len, executor.segments))
    if streamed:
        found["max_active_layers"] = len(weights._value_slots if is_coded else weights.places._slots)
        found["prefetch_distance"] = weights.places._prefetch_distance
    told = {line.partition(":")[0]: line for line in plan_changes(stack, model, WORK)}
    for name, value in found.items():
        if value != getattr(asked, name):
            assert told[name].startswith(f"{name}: {getattr(asked, name)} asked, {value} used; ")
        else:
            assert name not in told


TOLD: dict[str, tuple[list[Optimization], dict[str, object]]] = {
    "loss_chunk_tokens: 1024 asked, 16 used; a micro-batch has 16 tokens": ([ChunkedLoss()], {}),
    "mlp_tile_tokens: 4096 asked, 16 used; a micro-batch has 16 tokens": ([TiledMlp()], {}),
    "visit_micro_batches: 4 asked, 2 used; a rank has 2 micro-batches of a step": (
        [GradAccumulation(grad_accum_steps=4, schedule="vertical", visit_micro_batches=4)], {"world": 2},
    ),
    "grad.codec: float32 asked, none used; fused_update stores no gradients": (
        [MixedPrecision(), FusedUpdate(), GradAccumulation(grad_accum_steps=1)], {},
    ),
    "optim_state.codec: bfloat16 asked, float32 used; adafactor keeps rows and columns, which stay exact": (
        [Bf16Optimizer()], {"optimizer": Adafactor()},
    ),
    "targets: 'ffn_gate_up' asked, none used; this model's matrices are attention_out, ffn_out, ffn_up, qkv": (
        [Lora(targets=("qkv", "ffn_gate_up"))], {},
    ),
    "zero_stage: 2 asked, nothing is cut; one card holds everything": ([Zero()], {}),
    "pipeline_stages: 2 asked, 1 used; one card holds every block": ([Pipeline()], {}),
    "recompute_every: 8 asked, 3 used; a stage has 3 blocks": (
        [Pipeline(), GradientCheckpointing(recompute_every=8)], {"world": 2},
    ),
    "predict_memory: acts in predict alone, which this run does not have": ([PredictMemory()], {}),
}  # fmt: skip


@pytest.mark.parametrize("sentence", TOLD)
def test_a_change_is_told_in_these_words_and_not_where_there_is_none(sentence: str) -> None:
    stack, keywords = TOLD[sentence]
    model = replace(GPT2_UNTIED, num_blocks=6)
    assert sentence in plan_changes(stack, model, WORK, **keywords)  # type: ignore[arg-type]
    roomy = Workload(micro_batch_size=1, seq_len=2048)
    assert not plan_changes([MixedPrecision(), ChunkedLoss()], model, roomy, AdamWConfig())


@pytest.mark.parametrize(
    ("path", "value"),
    [("max_active_layers", 2.5), ("static_scales", "false"), ("recompute_every", True), ("schedule", "diagonal")],
)
def test_a_value_that_would_be_rounded_or_read_as_another_is_refused(path: str, value: object) -> None:
    with pytest.raises(PlanConflictError, match=rf"^{path}: .* is not .*; set one of those"):
        SETTINGS[path].read(value)


def test_a_dry_run_tells_changes_beside_its_savings(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\ndescription = "mine"\n[[optimizations]]\nkind = "weight_streaming"\nmax_active_layers = 64\n'
        '[[optimizations]]\nkind = "gradient_checkpointing"\nrecompute_every = 64\n'
    )
    files = stack_folder(None)
    stack = files.stack(str(file))
    setup = DryRunInputs(
        model=PRESETS["gpt2-small"], plan=stack.plan(), card=find_card("rtx-4090"),
        workload=Workload(micro_batch_size=1, seq_len=16), world=World(link="nvlink"),
    )  # fmt: skip
    report = plan_run(setup, stack, "gpt2-small", files, savings=True)
    changes = [
        "recompute_every: 64 asked, 12 used; the model has 12 blocks",
        "max_active_layers: 64 asked, 12 used; the model has 12 blocks",
        "link: nvlink asked, none used; one card has no other to reach",
    ]
    assert report.as_mapping()["changes"] == changes
    assert all(f"not as asked: {change}" in report.as_text() for change in changes)
