"""``nvidia-smi`` for a virtual card: a command on PATH while the card is active."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from hybridtrain.virtual_gpu.cards.card import Card
from hybridtrain.virtual_gpu.facade.cuda_module import cuda_build

DRIVER = "580.65.06"
"""The driver that came with CUDA 13.0."""
_PROGRAM = """#!{python} -IS
import sys

VALUES, NUM_CARDS = {values!r}, {num_cards}
words = [part for word in sys.argv[1:] for part in word.split("=", 1)]
given = dict(zip(words, words[1:]))
query = next((given[name] for name in given if name.startswith("--query-")), "")
style = given.get("--format", "csv").split(",")
chosen = given.get("-i", given.get("--id", ""))
cards = [int(word) for word in chosen.split(",") if word.isdecimal()] if chosen else range(NUM_CARDS)
if "--query-compute-apps" in words or "--query-apps" in words:
    cards = ()  # no process has memory yet


def value(name, index):
    return str(index) if name == "index" else VALUES.get(name, ("[N/A]", ""))[0]


def show(name, index):
    unit = VALUES.get(name, ("", ""))[1]
    return value(name, index) if "nounits" in style or not unit else value(name, index) + " " + unit


if query:
    names = [name.strip() for name in query.split(",")]
    if "noheader" not in style:
        units = {{name: VALUES.get(name, ("", ""))[1] for name in names}}
        print(", ".join(name + (" [" + units[name] + "]" if units[name] else "") for name in names))
    for index in cards:
        print(", ".join(show(name, index) for name in names))
elif "-L" in words or "--list-gpus" in words:
    for index in cards:
        print("GPU " + str(index) + ": " + value("name", index) + " (UUID: " + value("uuid", index) + ")")
elif "-q" in words or "--query" in words:
    print("Driver Version : " + value("driver_version", 0) + chr(10) + "CUDA Version : " + value("cuda_version", 0))
    for index in cards:
        print("GPU " + str(index) + chr(10) + "    Product Name : " + value("name", index))
        print("    FB Memory Usage")
        for title in ("Total", "Used", "Free"):
            print("        " + title + " : " + show("memory." + title.lower(), index))
else:
    version = "Driver Version: " + value("driver_version", 0) + "   CUDA Version: " + value("cuda_version", 0)
    print("| NVIDIA-SMI " + value("driver_version", 0) + "   " + version + " |")
    for index in cards:
        print("|", index, value("name", index), "|  0MiB /", value("memory.total", index) + "MiB |")
"""


@contextmanager
def nvidia_smi(card: Card, num_cards: int) -> Iterator[None]:
    """Put the command first on PATH, also of child processes; it reports the card's properties, and no used memory."""
    total = str(card.nvidia_smi_mib or card.memory_mib)
    values = {
        "name": (card.name, ""), "gpu_name": (card.name, ""), "count": (str(num_cards), ""), "index": ("", ""),
        "memory.total": (total, "MiB"), "memory.free": (total, "MiB"), "memory.used": ("0", "MiB"),
        "compute_cap": (card.compute_capability, ""), "utilization.gpu": ("100", "%"), "utilization.memory": ("0", "%"),
        "driver_version": (DRIVER, ""), "cuda_version": (cuda_build(card)[0], ""),
        **dict.fromkeys(("uuid", "gpu_uuid"), ("GPU-00000000-0000-0000-0000-000000000000", "")),
    }  # fmt: skip
    with TemporaryDirectory(prefix="hybridtrain-bin-") as folder:
        path = Path(folder) / "nvidia-smi"
        path.write_text(_PROGRAM.format(python=sys.executable, values=values, num_cards=num_cards))
        path.chmod(0o755)
        with mock.patch.dict(os.environ, {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}):
            yield
