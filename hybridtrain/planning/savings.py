"""Savings and costs of each optimization of a stack: the stack without it beside the whole one.

By dry runs for ``hybridtrain dry-run --savings``, by arithmetic for the first lines of a training run. Savings do not
add up: two optimizations may save the same bytes, or each only beside the other.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tabulate import tabulate

from hybridtrain.config.encode import encode
from hybridtrain.errors import HybridTrainError, PlanConflictError
from hybridtrain.models.model_config import ModelConfig, Workload
from hybridtrain.optim import Optimizer
from hybridtrain.optimizations.grad_accumulation import GradAccumulation
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import SETTINGS
from hybridtrain.planning.dry_runs import DryRun, DryRunInputs
from hybridtrain.planning.plan_bytes import bytes_of
from hybridtrain.progress import progress_bar
from hybridtrain.units import format_bytes, format_seconds, to_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A stack's dry run without one of its optimizations, less the one with it; bytes above 0 are saved."""

    kind: str
    claims: str
    """Of the plan, in words."""
    refused: str | None = None
    """Why there is no dry run without it; the figures are None then."""
    device_bytes: int | None = None
    """Of the card: reserved, as ``device_used_bytes``."""
    host_bytes: int | None = None
    disk_bytes: int | None = None
    fits_without: bool | None = None
    step_time_without_s: float | None = None
    tokens_per_s_without: float | None = None


def planned_savings(
    stack: Sequence[Optimization], whole: DryRun, setup: DryRunInputs, *, progress: bool = False
) -> tuple[Saving, ...]:
    """Dry-run a stack without each of its optimizations, on the same tokens per step, and compare with ``whole``.

    Without accumulation a step is one micro-batch of as many tokens.
    """

    def saving(item: Optimization) -> Saving:
        rest = without(stack, item)
        try:
            run = replace(setup, plan=compose(rest), workload=_work_without(item, setup.workload)).dry_run()
        except HybridTrainError as error:
            return Saving(kind=item.kind, claims=claims_of(item), refused=_why(rest, error))
        return Saving(
            kind=item.kind, claims=claims_of(item),
            device_bytes=run.device_used_bytes - whole.device_used_bytes,
            host_bytes=run.host_peak_bytes - whole.host_peak_bytes,
            disk_bytes=run.disk_peak_bytes - whole.disk_peak_bytes,
            fits_without=run.fits, step_time_without_s=run.time.seconds, tokens_per_s_without=run.tokens_per_s,
        )  # fmt: skip

    return tuple(map(saving, progress_bar(list(stack), shown=progress, unit="run", desc="dry runs without each")))


def _work_without(item: Optimization, workload: Workload) -> Workload:
    steps = item.grad_accum_steps if isinstance(item, GradAccumulation) else 1
    return replace(workload, micro_batch_size=workload.micro_batch_size * steps)


def savings_table(savings: Sequence[Saving], whole: DryRun) -> str:
    """Return the table of ``planned_savings``, and what each claims."""
    rows = []
    for saving in savings:
        device, host, seconds = saving.device_bytes, saving.host_bytes, saving.step_time_without_s
        cells = ["-", "-", "-", "-", saving.refused or ""]
        if device is not None and host is not None and seconds is not None:
            cells = [f"{to_gib(device):+.2f}", f"{to_gib(host):+.2f}", format_seconds(seconds)]
            cells += [f"{saving.tokens_per_s_without:,.0f}", "" if saving.fits_without else "does not fit"]
        rows.append([saving.kind, *cells])
    headers = ["without", "device GiB saved by it", "host GiB", "step", "tokens/s", ""]
    rows.append(["(all there)", "", "", format_seconds(whole.time.seconds), f"{whole.tokens_per_s:,.0f}", ""])
    claims = "\n".join(f"  {saving.kind}: {saving.claims}" for saving in savings)
    return (
        f"{tabulate(rows, headers=headers, tablefmt='simple', disable_numparse=True)}\n\nSame tokens a step; bytes are "
        f"planned, times estimated; savings do not add up. What each asks for:\n{claims}"
    )


def arithmetic_savings(
    stack: Sequence[Optimization], model: ModelConfig, workload: Workload, optimizer: Optimizer
) -> Iterator[tuple[str, str, float | None]]:
    """Yield kind, settings, and bytes of the card that each optimization saves, by arithmetic; None: unknown.

    ``workload`` is one micro-batch. Microseconds: no dry run.
    """
    whole = bytes_of(model, compose(stack), workload, optimizer).card
    for item in stack:
        saved = None
        with suppress(PlanConflictError):
            rest = compose(without(stack, item))
            saved = bytes_of(model, rest, _work_without(item, workload), optimizer).card - whole
        yield item.kind, settings_of(item), saved


def arithmetic_line(kind: str, settings: str, saved: float | None) -> str:
    """Return a line on an optimization for the log of a training run."""
    if saved is None:
        effect = "others in the stack need it"
    elif abs(saved) < 1:
        effect = "no bytes of the card by arithmetic"
    else:
        effect = f"{'saves' if saved > 0 else 'takes'} {format_bytes(abs(saved))} of the card (arithmetic)"
    return f"{kind}{f' ({settings})' if settings else ''}: {effect}"


def without(stack: Sequence[Optimization], item: Optimization) -> tuple[Optimization, ...]:
    """Return a stack less one of its optimizations."""
    return tuple(other for other in stack if other is not item)


def claims_of(item: Optimization) -> str:
    """Return the claims of an optimization that differ from plain training, in words."""
    phases_of: dict[str, list[str]] = {}
    for claim in item.claims():
        if claim.value != SETTINGS[claim.path].default or claim.path == "master.codec":
            phases_of.setdefault(f"{claim.path} {claim.value}", []).append(
                "" if claim.phase is None else claim.phase.value
            )
    return ", ".join(f"{claim} ({'/'.join(phases)})" if all(phases) else claim for claim, phases in phases_of.items())


def settings_of(item: Optimization) -> str:
    """Return the settings of an optimization in a line."""
    return ", ".join(
        f"{name} {'/'.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in encode(item).items()
        if name not in {"kind", "active_phases"} and value is not None
    )


def _why(rest: Sequence[Optimization], error: HybridTrainError) -> str:
    needing = []
    for item in rest:
        with suppress(PlanConflictError):
            compose(without(rest, item))
            needing.append(item.kind)
    if isinstance(error, PlanConflictError) and needing:
        return f"needed by {' or '.join(needing)}"
    return str(error).splitlines()[-1].strip()
