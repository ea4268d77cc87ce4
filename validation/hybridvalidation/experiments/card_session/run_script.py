"""Run a script on this machine's card, and print what torch's allocator and the clock say as one line of JSON.

Usage: ``python -m hybridvalidation.experiments.card_session.run_script LOCK SCRIPT TRACE``. Packages are imported first,
then ``LOCK`` is waited for, so that one script at a time has the card. ``TRACE``: a file (.json.gz) that gets the
allocator's events of the first two steps, with the innermost frames of each; later steps are timed without recording.
"""

import fcntl
import gzip
import json
import runpy
import sys
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hybridvalidation.experiments.measure import DeviceUse

_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "torchvision", "timm", "triton")


_TRACED_STEPS = 2
_FRAMES = 6
_MOST_EVENTS = 400_000


def main(lock: str, script: str, trace: str) -> dict[str, Any]:
    """Run the script; return its peaks in bytes, and its seconds from step to step."""
    text = Path(script).read_text(encoding="utf-8")
    for package in _PACKAGES:
        if f"import {package}" in text or f"from {package}" in text:
            import_module(package)
    ends: list[float] = []

    def note_step(*_: object) -> None:
        torch.cuda.synchronize()
        if len(ends) == _TRACED_STEPS - 1:
            _write_trace(Path(trace))
            torch.cuda.memory._record_memory_history(enabled=None)
        ends.append(time.perf_counter())

    torch.optim.optimizer.register_optimizer_step_post_hook(note_step)
    found: dict[str, Any] = {"script": Path(script).stem, "versions": _versions(), "fault": ""}
    with Path(lock).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        device = torch.device("cuda", 0)
        use = DeviceUse(device)
        begin = time.perf_counter()
        sys.argv = [script]
        torch.cuda.memory._record_memory_history(
            enabled="all", context="alloc", stacks="python", max_entries=_MOST_EVENTS
        )
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception as error:  # noqa: BLE001  whatever a library may raise belongs to the answer
            found["fault"] = f"{type(error).__name__}: {error}"[:600]
        torch.cuda.synchronize()
        found |= {
            "card": torch.cuda.get_device_name(), "seconds": time.perf_counter() - begin,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(), "outside_bytes": use.outside_bytes(),
            "num_alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
            "step_seconds": [later - earlier for earlier, later in zip(ends, ends[1:], strict=False)],
        }  # fmt: skip
        use.close()
    return found


def _write_trace(path: Path) -> None:
    events = [
        (event["action"], event["size"], event["addr"], event.get("stream", 0), [
            f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in event["frames"][:_FRAMES]
        ])
        for event in torch.cuda.memory._snapshot()["device_traces"][0]
    ]  # fmt: skip
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(events, file)


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


if __name__ == "__main__":
    answer = main(*sys.argv[1:4])
    print("\n" + json.dumps(answer), file=sys.stderr)
