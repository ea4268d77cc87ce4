"""Disk images that a power cut may leave at any moment of a run; the run is resumed from each."""

import random
import shutil
from pathlib import Path
from typing import Final

from faults.campaign import Campaign, Order, Tally
from faults.disk_log import Act, image_of, read_log, recorded
from faults.runs import KINDS, Run, ended, fork, go_unbroken
from hybridtrain.checkpoint.generations import generations


def _cut(order: Order) -> Tally:
    tally, draw = Tally(), random.Random(order.seed)  # noqa: S311  not a secret
    for number, kind in enumerate(KINDS):
        whole, log = Run(kind, order.folder / kind / "whole"), order.folder / kind / "acts"
        go_unbroken(whole, recorded(whole.folder, log, whole.go))
        acts, wanted = read_log(log), whole.outcome()[:2]
        while tally.num_attempts < order.count * (number + 1) // len(KINDS):
            count, seed = draw.randint(1, len(acts)), draw.randrange(2**32)
            run = Run(kind, order.folder / kind / "image" / "run")
            _write(image_of(acts, count, seed), run.folder)
            tally.add(kind, *_resumed(run, _is_saved(acts[:count]), wanted, f"after {count} acts, seed {seed}"))
        order.say(f"{kind}: {tally.counts.get(kind, {})}")
    return tally


def _is_saved(acts: list[Act]) -> bool:
    """Return whether a checkpoint was renamed into place and synced."""
    moved = [number for number, act in enumerate(acts) if act.kind == "os.rename" and "step-" in Path(act.target).name]
    return bool(moved) and any(act.kind == "sync folder" for act in acts[moved[0] :])


def _write(image: dict[str, bytes], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in image.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _resumed(run: Run, is_saved: bool, wanted: tuple[object, ...], told: str) -> tuple[str, str]:
    has_states = bool(generations(run.states))
    if is_saved and not has_states:
        return "checkpoint lost", told
    if ended(fork(run.go)):
        return "not resumed", told
    if run.outcome()[:2] != wanted:
        return "other values", told
    return ("resumed" if has_states else "begun anew before the first save"), ""


POWER_CUTS: Final = Campaign(
    name="power-cuts",
    description=(
        "File operations of a run of each kind are recorded: files and names made, moved and removed, and fsync "
        "calls. Disk images are made after a random operation: synced content is there, of all else any part. "
        "Passed: every saved checkpoint is there, and the run resumes from it to the undisturbed run's tensors, to "
        "the bit. The log, which is never synced, may have lost lines."
    ),
    count=200,
    run=_cut,
)
