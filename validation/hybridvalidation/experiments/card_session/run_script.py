"""A plain script on this machine's card: its peaks, its seconds from step to step, and the allocator's events."""

import gzip
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hybridtrain.virtual_gpu.facade.launchers import PythonCommand
from hybridvalidation.experiments.card_session.parts import script_imports
from hybridvalidation.experiments.card_session.record import RECORDED_STEPS, MeasuredScript
from hybridvalidation.experiments.measure import DeviceUse

_FRAMES = 6
"""Innermost frames of Python kept with each event."""
_MOST_EVENTS = 400_000
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptJob:
    """A script to run."""

    script: Path
    folder: Path
    """Working folder of the script."""
    go: Path
    """The script starts when this file is there; its packages are imported before."""
    trace: Path
    """A file (.json.gz) for the allocator's events of the first two steps."""


def run_script(job: ScriptJob) -> tuple[MeasuredScript, BaseException | None]:
    """Run a script to its end; return its figures, and the error that ended it."""
    os.chdir(job.folder)
    exec(compile(script_imports(job.script), str(job.script), "exec"), {})  # noqa: S102  its imports alone
    while not job.go.exists():
        time.sleep(_POLL_S)
    use, ends = DeviceUse(torch.device("cuda", 0)), list[float]()

    def note_step(*_: object) -> None:
        torch.cuda.synchronize()
        ends.append(time.perf_counter())
        if len(ends) == RECORDED_STEPS:
            _end_recording(job.trace)
            ends[-1] = time.perf_counter()

    torch.cuda.init()  # type: ignore[no-untyped-call]
    hook = register_optimizer_step_post_hook(note_step)
    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=_MOST_EVENTS)
    begin, error = time.perf_counter(), None
    try:
        PythonCommand(str(job.script), False, ()).run()
    except (Exception, SystemExit) as raised:  # noqa: BLE001  whatever a library may raise belongs to the answer
        error = raised
    finally:
        hook.remove()
    with suppress(RuntimeError):  # of a device that failed; what failed is told already
        torch.cuda.synchronize()
        if len(ends) < RECORDED_STEPS:
            _end_recording(job.trace)
    return _figures(use, time.perf_counter() - begin, ends), error


def _figures(use: DeviceUse, seconds: float, ends: list[float]) -> MeasuredScript:
    outside_bytes = 0
    with suppress(RuntimeError):  # as above
        outside_bytes = use.outside_bytes()
    use.close()
    device = torch.device("cuda", 0)
    return MeasuredScript(
        seconds=seconds, peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device), outside_bytes=outside_bytes,
        num_alloc_retries=int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)),
        step_seconds=tuple(later - earlier for earlier, later in pairwise(ends)),
    )  # fmt: skip


def _end_recording(path: Path) -> None:
    """Write what the allocator did as [action, bytes, address, stream, frames] of each event, and record no more."""
    with suppress(Exception):  # without events the figures still count
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        events = [
            (event["action"], event["size"], event.get("addr", 0), event.get("stream", 0), [
                f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
                for frame in event.get("frames", ())[:_FRAMES]
            ])
            for event in snapshot["device_traces"][0]
        ]  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
            json.dump(events, file)
