"""A dry run as the plain figures of a record."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridtrain.dry_runs import DryRun, dry_run_ranks
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.replay import OutOfMemory
from hybridvalidation.records.stack_run import MemoryFigures, RefusedRequest, StackRun, StepPeaks, Timeline
from hybridvalidation.runs.job import Job, run_and_record

_TIMELINE_POINTS = 240
_LARGEST_HOLDERS = 10


def run_dry(job: Job) -> StackRun:
    """Plan what a job asks for."""
    plan = job.stack.plan()
    workload = job.workload.micro_batch(plan)
    return run_and_record(
        job,
        lambda: figures_of_ranks(
            dry_run_ranks(
                job.model,
                plan,
                job.card,
                workload,
                host=job.host,
                config=job.stack.training(),
                world=job.world,
            )
        ),
    )


def figures_of_ranks(runs: Sequence[DryRun], *, with_timeline: bool = True) -> MemoryFigures:
    """Return the bytes of the first run, which holds the most, and the time of the one that takes longest."""
    figures = memory_figures(runs[0], with_timeline=with_timeline)
    if len(runs) == 1:
        return figures
    slowest = memory_figures(max(runs, key=lambda run: run.time.seconds), with_timeline=False)
    return replace(
        figures,
        fits=all(run.fits for run in runs),
        fits_host=all(run.fits_host for run in runs),
        host_peak_bytes=max(run.host_peak_bytes for run in runs),
        disk_peak_bytes=max(run.disk_peak_bytes for run in runs),
        step_time_s=slowest.step_time_s,
        busy_s=slowest.busy_s,
        flops=slowest.flops,
        time_by_bound=slowest.time_by_bound,
        tokens_per_s=slowest.tokens_per_s,
        bound=slowest.bound,
        ranks={str(run.world.rank): run.device_used_bytes for run in sorted(runs, key=lambda run: run.world.rank)},
    )


def memory_figures(run: DryRun, *, with_timeline: bool = True) -> MemoryFigures:
    """Return what a record keeps of a dry run."""
    return MemoryFigures(
        num_params=run.num_params,
        fits=run.fits,
        steps=tuple(
            StepPeaks(
                step=step.step, allocated_bytes=step.allocated_bytes, active_bytes=step.active_bytes,
                reserved_bytes=step.reserved_bytes, by_class=_plain(step.by_class), stage=step.stage, unit=step.unit,
                phase=run.phase_of(step.step).value,
            )
            for step in run.steps
        ),
        peak_allocated_bytes=run.peak.allocated_bytes,
        peak_reserved_bytes=run.peak_reserved_bytes,
        device_used_bytes=run.device_used_bytes,
        host_peak_bytes=run.host_peak_bytes,
        host_by_class=_plain(run.host_by_class),
        disk_peak_bytes=run.disk_peak_bytes,
        fits_host=run.fits_host,
        by_class=_plain(run.by_class()),
        by_unit=unit_names(run.peak.by_unit),
        oom=None if run.oom is None else _refused(run.oom),
        step_time_s=run.time.seconds,
        busy_s={lane.value: seconds for lane, seconds in run.time.busy_seconds.items()},
        flops=run.time.flops,
        time_by_bound={bound.value: seconds for bound, seconds in run.time.seconds_by_bound.items()},
        tokens_per_step=run.tokens_per_step,
        tokens_per_s=run.tokens_per_s,
        bound=run.bound,
        timeline=_timeline(run) if with_timeline else None,
    )  # fmt: skip


def unit_names(by_unit: Mapping[tuple[TensorClass, str], int]) -> dict[str, int]:
    """Return holders as ``class/unit``, largest first."""
    ranked = sorted(by_unit.items(), key=lambda item: (-item[1], item[0]))
    return {
        f"{tensor_class.value}/{unit}" if unit else tensor_class.value: size for (tensor_class, unit), size in ranked
    }


def _plain(by_class: Mapping[TensorClass, int]) -> dict[str, int]:
    return {tensor_class.value: size for tensor_class, size in by_class.items()}


def _refused(oom: OutOfMemory) -> RefusedRequest:
    return RefusedRequest(
        step=oom.step, stage=oom.stage, unit=oom.unit, requested_bytes=oom.requested_bytes,
        allocated_bytes=oom.allocated_bytes, reserved_bytes=oom.reserved_bytes, capacity_bytes=oom.capacity_bytes,
        by_class=_plain(oom.by_class), by_unit=dict(list(unit_names(oom.by_unit).items())[:_LARGEST_HOLDERS]),
    )  # fmt: skip


def _timeline(run: DryRun) -> Timeline:
    """Return the highest moment of each of a few hundred equal slices of the last step."""
    moments: dict[int, tuple[float, dict[TensorClass, int]]] = {}
    width = run.time.seconds / _TIMELINE_POINTS
    for clock, by_class in run.moments():
        bucket = int(clock / width)
        if bucket not in moments or sum(by_class.values()) > sum(moments[bucket][1].values()):
            moments[bucket] = (clock, by_class)
    kept = [moments[bucket] for bucket in sorted(moments)]
    return Timeline(
        times_s=tuple(round(time, 6) for time, _ in kept),
        by_class={name.value: tuple(by_class[name] for _, by_class in kept) for name in TensorClass},
    )
