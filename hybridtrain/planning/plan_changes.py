"""Settings of a plan that a run lowers or does not use, in a sentence each."""

from collections.abc import Iterable, Iterator, Sequence

from hybridtrain.models.adapter import GROUPS
from hybridtrain.models.model_config import ModelConfig, Workload, block_shapes
from hybridtrain.optim.adamw import AdamWConfig
from hybridtrain.optim.optimizer import Optimizer, Role
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import PhasePlan, suited
from hybridtrain.plan.placement import Codec, Placement

_COUNTS = (
    "recompute_every", "kept_blocks", "resident_layers", "max_active_layers", "prefetch_distance", "zero_prefetch"
)  # fmt: skip


def plan_changes(
    stack: Sequence[Optimization],
    model: ModelConfig,
    workload: Workload,
    optimizer: Optimizer | None = None,
    *,
    world: int = 1,
    phases: Iterable[Phase] = (Phase.FULL,),
) -> list[str]:
    """Return a sentence for each setting of a stack that is lowered or has no effect in a run of ``phases``.

    ``workload`` is one micro-batch, ``world`` the number of ranks; no ``optimizer`` means AdamW.

    Raises:
        PlanConflictError: the stack contradicts itself.
    """
    plan, phases = compose(stack), tuple(phases)
    changes: list[str] = []
    for phase in phases:
        changes += _of_blocks(plan.for_phase(phase), model.num_blocks, world)
        changes += _of_batch(plan.for_phase(phase), workload, world)
    changes += _of_tensors(plan.for_phase(Phase.FULL), model, optimizer or AdamWConfig(), world)
    changes += _of_phases(stack, phases)
    return list(dict.fromkeys(changes))


def _of_blocks(plan: PhasePlan, num_blocks: int, world: int) -> Iterator[str]:
    stages = plan.pipeline_stages if world > 1 else 1
    held = -(-num_blocks // stages)
    used, where = suited(plan, held), "a stage" if stages > 1 else "the model"
    resident = f", {used.resident_layers} of them resident" if used.resident_layers else ""
    for name in _COUNTS:
        if getattr(plan, name) != getattr(used, name):
            yield (
                f"{name}: {getattr(plan, name)} asked, {getattr(used, name)} used; {where} has {held} "
                f"block{'s' * (held != 1)}{resident}"
            )


def _of_batch(plan: PhasePlan, workload: Workload, world: int) -> Iterator[str]:
    tokens = workload.micro_batch_size * workload.seq_len
    for name in ("loss_chunk_tokens", "mlp_tile_tokens"):
        if getattr(plan, name) > tokens:
            yield f"{name}: {getattr(plan, name)} asked, {tokens} used; a micro-batch has {tokens} tokens"
    own = plan.grad_accum_steps // (1 if plan.pipeline_stages > 1 else world)
    if plan.visit_micro_batches > own > 0:
        yield (
            f"visit_micro_batches: {plan.visit_micro_batches} asked, {own} used; a rank has {own} "
            f"micro-batch{'es' * (own != 1)} of a step"
        )


def _of_tensors(plan: PhasePlan, model: ModelConfig, optimizer: Optimizer, world: int) -> Iterator[str]:
    if plan.grad.placement is Placement.DROPPED and plan.grad.codec is not plan.compute_dtype:
        yield f"grad.codec: {plan.grad.codec} asked, none used; fused_update stores no gradients"
    has_state = any(spec.shape is None for spec in optimizer.state(Role((4096, 4096), in_block=True)))
    if plan.optim_state.codec is not Codec.FLOAT32 and not has_state:
        yield (
            f"optim_state.codec: {plan.optim_state.codec} asked, float32 used; {optimizer.kind} keeps rows and "
            "columns, which stay exact"
        )
    if plan.adapter_rank:
        names = {name.removesuffix(".weight") for name, shape in block_shapes(model).items() if len(shape) == 2}
        known = {*names, *GROUPS, "all-linear"}
        for name in plan.adapter_targets.split(","):
            if name not in known:
                yield f"targets: '{name}' asked, none used; this model's matrices are {', '.join(sorted(names))}"
    if world == 1 and plan.zero_stage:
        yield f"zero_stage: {plan.zero_stage} asked, nothing is cut; one card holds everything"
    if world == 1 and plan.pipeline_stages > 1:
        yield f"pipeline_stages: {plan.pipeline_stages} asked, 1 used; one card holds every block"


def _of_phases(stack: Sequence[Optimization], phases: Sequence[Phase]) -> Iterator[str]:
    for item in stack:
        acts = {claim.phase for claim in item.claims()}
        if None not in acts and acts and not acts & set(phases):
            names = "/".join(phase.value for phase in Phase if phase in acts)
            yield f"{item.kind}: acts in {names} alone, which this run does not have"
