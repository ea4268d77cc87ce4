"""Plan of a part, without the card: its stack and its dry run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hybridtrain.errors import ConfigError
from hybridtrain.models.model_config import Workload, model_preset
from hybridtrain.phase import Phase
from hybridtrain.planning.candidates import FitRequest
from hybridtrain.planning.dry_runs import DryRunInputs
from hybridtrain.planning.figures import MemoryFigures, memory_figures
from hybridtrain.planning.fitting import recommend
from hybridtrain.stacks import Stack
from hybridtrain.units import MIB, format_bytes
from hybridtrain.virtual_gpu.cards.card import Card, Host, card_catalogue
from hybridtrain.virtual_gpu.cards.kernels import curves_in
from hybridvalidation.experiments.card_session.parts import Part
from hybridvalidation.experiments.card_session.record import Ceilings
from hybridvalidation.records.asked import plan_figures

_FP32_SHARE = 1 / 8
"""Rate of fp32 matmuls against bfloat16 ones, for a card of no catalogue; the evidence trains in bfloat16. Cards below
compute capability 8.0, without tensor cores for it, have one rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """A model and a card to plan."""

    part: Part
    card: Card
    host: Host


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPart:
    """A part, ready to be run."""

    stack: Stack
    num_params: int
    plan: Mapping[str, str]
    micro_batch_size: int
    accum_steps: int
    predicted: MemoryFigures
    fault: str = ""
    """Reason why it cannot run on this machine; empty: it can."""


def card_under_cap(ceilings: Ceilings, cap_bytes: int) -> Card:
    """Return the card's data with the cap as its memory, and the measured context.

    Data are from the catalogue; an unknown card gets the measured rates.
    """
    alike = [card for card in card_catalogue().values() if card.name == ceilings.name]
    memory_mib, context_mib = cap_bytes // MIB, -(-ceilings.context_with_libraries_bytes // MIB)
    if alike:  # an RTX 3080 of 12 GB has more multiprocessors than one of 10 GB
        facts = min(alike, key=lambda card: abs(card.sms - ceilings.num_sms))
        return replace(facts, memory_mib=memory_mib, context_mib=context_mib)
    reached = curves_in("all")
    tflops = ceilings.matmul_tflops / reached.gemm
    share = _FP32_SHARE if float(ceilings.compute_capability) >= 8.0 else 1.0
    return Card(
        name=ceilings.name, memory_mib=memory_mib, context_mib=context_mib,
        compute_capability=ceilings.compute_capability, tflops_bf16=tflops, tflops_fp32=tflops * share,
        memory_gbps=ceilings.device_copy_gbps / reached.memory,
        pcie_gbps=ceilings.in_gbps / reached.bus, sms=ceilings.num_sms,
    )  # fmt: skip


def plan_part(job: PlanJob) -> PlannedPart:
    """Choose a stack if none is given, and dry-run it.

    Raises:
        OutOfMemoryError: no stack fits.
        ConfigError: the part's batch is not divisible into its stack's micro-batches.
    """
    part, model = job.part, model_preset(job.part.model)
    stack = part.stack
    if stack is None:
        request = FitRequest(model, job.card, job.host, part.seq_len, part.num_sequences)
        candidate = recommend(request, lambda _: None, free_share=0.0).chosen  # the cap is exact
        description = f"{candidate.level.description}; {candidate.arrangement.name}"
        stack = Stack(
            name="recommended",
            description=description,
            optimizer=candidate.level.optimizer,
            optimizations=candidate.optimizations(),
        )
    plan = stack.plan()
    accum_steps = plan.for_phase(Phase.FULL).grad_accum_steps
    if part.num_sequences % accum_steps:
        fault = f"{part.num_sequences} sequences cannot be divided into {accum_steps} micro-batches"
        raise ConfigError(part.name, [fault])
    workload = Workload(micro_batch_size=part.num_sequences // accum_steps, seq_len=part.seq_len)
    run = DryRunInputs(
        model=model, plan=plan, card=job.card, workload=workload, host=job.host, config=stack.training()
    ).dry_run()
    fault = (
        f"it needs {format_bytes(run.host_peak_bytes)} of host memory, {format_bytes(job.host.tensor_bytes)} are "
        f"available"
    )
    return PlannedPart(
        stack=stack, num_params=run.num_params, plan=plan_figures(plan), micro_batch_size=workload.micro_batch_size,
        accum_steps=accum_steps, fault="" if run.fits_host else fault,
        predicted=memory_figures(run, with_timeline=False),
    )  # fmt: skip
