"""A dry run for other people's viewers: memory_viz snapshots and Chrome traces."""

from collections.abc import Callable, Sequence
from pathlib import Path

from hybridtrain.units import GIB
from hybridtrain.virtual_gpu.account.op_record import Lane
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.account.trace import Counter, Slice, build_trace, write_trace
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.snapshot import Frame, build_snapshot, write_snapshot
from hybridtrain.virtual_gpu.facade.card_run import CardRun

_STREAMS = {lane: number for number, lane in enumerate(Lane)}


def write_run_snapshot(run: CardRun, path: Path, config: AllocatorConfig) -> None:
    """Write what https://pytorch.org/memory_viz opens; frames name the unit and the op that asked for the memory."""
    replay, trace = run.uncapped, run.trace

    def category(ordinal: int) -> str:
        index = replay.owners.get(ordinal)
        return (TensorClass.WORKSPACE if index is None else trace.classes[index]).value

    history, segments = replay.history, replay.segments
    write_snapshot(path, build_snapshot(history, segments, config=config, categories=category, frames=_frames(run)))


def write_run_trace(run: CardRun, path: Path) -> None:
    """Write the last step's estimated timeline, memory counters beside it."""
    slices = [
        Slice(
            name=timed.op.name, category=timed.bound, stream=_STREAMS[timed.op.lane], start_us=timed.start_s * 1e6,
            duration_us=timed.duration_s * 1e6,
            args={
                "stage": timed.op.stage, "unit": timed.op.unit, "flops": timed.op.flops, "bytes": timed.op.bytes_moved,
            },
        )
        for timed in run.time.ops
    ]  # fmt: skip
    upload_us = run.time.upload_seconds * 1e6
    stream = _STREAMS[Lane.COPY_IN]
    slices.append(Slice(name="batch", category="transfer", stream=stream, start_us=0.0, duration_us=upload_us))
    names = {number: lane.value for lane, number in _STREAMS.items()}
    write_trace(path, build_trace(slices, _counters(run), process_name=f"virtual {run.card.name}", stream_names=names))


def _counters(run: CardRun) -> list[Counter]:
    counters: dict[float, Counter] = {}
    for clock, by_class in run.moments():  # of one moment the last counts
        values = {tensor_class.value: size / GIB for tensor_class, size in by_class.items()}
        counters[clock] = Counter(name="allocated GiB", time_us=clock * 1e6, values=values)
    return list(counters.values())


def _frames(run: CardRun) -> Callable[[int], Sequence[Frame]]:
    replay, trace = run.uncapped, run.trace
    op_names: list[str] = [""] * len(trace.events)
    for op, following in zip(trace.ops, [*trace.ops[1:], None], strict=True):
        end = len(trace.events) if following is None else following.event
        op_names[op.event : end] = [op.name] * (end - op.event)
    position_of = {event: position for position, event in enumerate(trace.events) if event >= 0}

    def frames(ordinal: int) -> list[Frame]:
        index = replay.owners.get(ordinal)
        if index is None:
            return []
        name = op_names[position_of[index]]
        return [{"filename": trace.units[index] or "run", "line": 0, "name": name}]

    return frames
