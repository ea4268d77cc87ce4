"""Checkpoints with a flipped bit or a zeroed page: detected, and the previous checkpoint is loaded."""

import random
import shutil
from pathlib import Path
from typing import Final

from faults.campaign import Campaign, Order, Tally
from faults.runs import KINDS, Run, go_unbroken
from hybridtrain.checkpoint.generations import generations, newest_generation
from hybridtrain.errors import HybridTrainError

_PAGE_BYTES: Final = 4096


def _damage(file: Path, draw: random.Random) -> str:
    """Flip a bit or zero a page of a file; return a description, empty if the page was zeros before."""
    content = bytearray(file.read_bytes())
    if draw.random() < 0.75:
        at, bit = draw.randrange(len(content)), draw.randrange(8)
        content[at] ^= 1 << bit
        told = f"bit {bit} of byte {at} of {file.name}"
    else:
        first = draw.randrange(len(content)) // _PAGE_BYTES * _PAGE_BYTES
        page = content[first : first + _PAGE_BYTES]
        if not any(page):
            return ""
        content[first : first + _PAGE_BYTES] = bytes(len(page))
        told = f"page at {first} of {file.name}"
    file.write_bytes(content)
    return told


def _flip(order: Order) -> Tally:
    tally, draw = Tally(), random.Random(order.seed)  # noqa: S311  not a secret
    for number, kind in enumerate(KINDS):
        whole = Run(kind, order.folder / kind / "run")
        go_unbroken(whole)
        older, newer = generations(whole.states)[-2:]
        end = order.count * (number + 1) // len(KINDS)
        while tally.num_attempts < end:
            states = order.folder / kind / "damaged"
            shutil.rmtree(states, ignore_errors=True)
            for source in (older, newer):
                shutil.copytree(source, states / source.name)
            files = sorted(path for path in (states / newer.name).iterdir() if path.is_file())
            file = draw.choices(files, [path.stat().st_size for path in files])[0]
            if told := _damage(file, draw):
                tally.add(kind, *_found(states, older.name, told))
        order.say(f"{kind}: {tally.counts.get(kind, {})}")
    return tally


def _found(states: Path, older: str, told: str) -> tuple[str, str]:
    said: list[str] = []
    try:
        taken = newest_generation(states, said.append).folder.name
    except (HybridTrainError, OSError) as error:
        return "no state taken", f"{told}: {error}"
    except Exception as error:  # noqa: BLE001  which is what is looked for
        return "traceback", f"{told}: {type(error).__name__}: {error}"
    if taken != older:
        return "accepted", f"{told}: the damaged state was taken"
    return ("noticed", "") if any("checkpoint is damaged" in line for line in said) else ("silent", f"{told}: not told")


FLIPS: Final = Campaign(
    name="flips",
    description=(
        "The newer of two checkpoints of each kind of run gets one flipped bit (three in four) or a zeroed page of 4 "
        "KiB, anywhere in its files. Passed: the damage is reported, and the previous checkpoint is loaded."
    ),
    count=1_000,
    run=_flip,
)
