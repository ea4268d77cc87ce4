"""Bytes before and after, and the difference by holder, with equal blocks grouped."""

import re
from collections.abc import Mapping
from itertools import groupby

from hybridtrain.units import format_bytes

_BLOCK = re.compile(r"(?<=[./])\d+(?=\.|$)")
_BLOCKS = re.compile(r"\{(\d+)\.\.(\d+)\}")
_NUM_SHOWN = 6


def change_text(before: int, after: int) -> str:
    """Return bytes before and after, and the difference."""
    share = f", {100 * (after / before - 1):+.3f} %" if before else ""
    return f"{format_bytes(before)} -> {format_bytes(after)} ({after - before:+,} B{share})"


def moved_lines(old: Mapping[str, int], new: Mapping[str, int]) -> list[str]:
    """Return a line per holder whose bytes changed, the largest total change first."""
    changes = {name: new.get(name, 0) - old.get(name, 0) for name in {*old, *new}}
    folded = fold({name: change for name, change in changes.items() if change})
    moved = [(name, each, each * len(unfold({name: 0}))) for name, each in folded.items()]
    moved.sort(key=lambda row: (-abs(row[2]), row[0]))
    lines = [
        f"{name}: {total:+,} B" + (f", {each:+,} B in each block" if each != total else "")
        for name, each, total in moved[:_NUM_SHOWN]
    ]
    rest = moved[_NUM_SHOWN:]
    return [*lines, f"and {len(rest)} more: {sum(row[2] for row in rest):+,} B"] if rest else lines


def fold(held: Mapping[str, int]) -> dict[str, int]:
    """Group neighbouring blocks of equal bytes under one name.

    >>> fold({"grad/layers.0.mlp": 8, "grad/layers.1.mlp": 8, "grad/layers.2.mlp": 4})
    {'grad/layers.2.mlp': 4, 'grad/layers.{0..1}.mlp': 8}
    """
    alike: dict[tuple[str, str, int], list[int]] = {}
    folded = {}
    for name, size in held.items():
        block = _BLOCK.search(name)
        if block is None:
            folded[name] = size
        else:
            alike.setdefault((name[: block.start()], name[block.end() :], size), []).append(int(block[0]))
    for (before, after, size), blocks in alike.items():
        for _, run in groupby(enumerate(sorted(blocks)), key=lambda pair: pair[1] - pair[0]):  # neighbours
            numbers = [number for _, number in run]
            name = f"{{{numbers[0]}..{numbers[-1]}}}" if len(numbers) > 1 else f"{numbers[0]}"
            folded[f"{before}{name}{after}"] = size
    return dict(sorted(folded.items()))


def unfold(folded: Mapping[str, int]) -> dict[str, int]:
    """Return every block's holders; the inverse of ``fold``."""
    held: dict[str, int] = {}
    for name, size in folded.items():
        blocks = _BLOCKS.search(name)
        numbers = range(int(blocks[1]), int(blocks[2]) + 1) if blocks else ()
        held |= {_BLOCKS.sub(str(number), name, count=1): size for number in numbers} or {name: size}
    return held
