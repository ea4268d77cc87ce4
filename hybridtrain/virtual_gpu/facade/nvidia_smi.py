"""``nvidia-smi`` for a virtual card: a command on PATH while the card is active."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from hybridtrain.virtual_gpu.cards.card import Card

_PROGRAM = """#!{python} -IS
import sys

VALUES, NUM_CARDS = {values!r}, {num_cards}
words = [part for word in sys.argv[1:] for part in word.split("=", 1)]
given = dict(zip(words, words[1:]))
fields = next((given[name] for name in ("--query-gpu", "--query-gpus") if name in given), "")
style = given.get("--format", "csv").split(",")


def show(name, index):
    value, unit = VALUES.get(name, ("[N/A]", ""))
    value = str(index) if name == "index" else value
    return value if "nounits" in style or not unit else value + " " + unit


if fields:
    names = [name.strip() for name in fields.split(",")]
    if "noheader" not in style:
        units = {{name: VALUES.get(name, ("", ""))[1] for name in names}}
        print(", ".join(name + (" [" + units[name] + "]" if units[name] else "") for name in names))
    for index in range(NUM_CARDS):
        print(", ".join(show(name, index) for name in names))
elif "-L" in words or "--list-gpus" in words:
    for index in range(NUM_CARDS):
        print("GPU " + str(index) + ": " + VALUES["name"][0] + " (virtual)")
else:
    for index in range(NUM_CARDS):
        print("|", index, VALUES["name"][0], "(virtual)  0MiB /", VALUES["memory.total"][0] + "MiB |")
"""


@contextmanager
def nvidia_smi(card: Card, num_cards: int) -> Iterator[None]:
    """Put the command first on PATH; it reports the card's properties, and no used memory."""
    total = str(card.nvidia_smi_mib or card.memory_mib)
    values = {
        "name": (card.name, ""), "gpu_name": (card.name, ""), "count": (str(num_cards), ""), "index": ("", ""),
        "memory.total": (total, "MiB"), "memory.free": (total, "MiB"), "memory.used": ("0", "MiB"),
        "compute_cap": (card.compute_capability, ""), "utilization.gpu": ("100", "%"),
    }  # fmt: skip
    with TemporaryDirectory(prefix="hybridtrain-bin-") as folder:
        path = Path(folder) / "nvidia-smi"
        path.write_text(_PROGRAM.format(python=sys.executable, values=values, num_cards=num_cards))
        path.chmod(0o755)
        with mock.patch.dict(os.environ, {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}):
            yield
