"""The catalogue of cards as a table."""

from string import ascii_lowercase

from hybridtrain.reports.tables import TERMINAL, table
from hybridtrain.units import MIB, to_gib
from hybridtrain.virtual_gpu.cards.card import Card, CardLimit, card_catalogue

_HEADERS = ("card", "GiB", "GB/s", "bf16 TFLOPS", "year", "notes")


def card_table() -> str:
    """Return all cards by memory as sold and bandwidth, and below them, once, what holds for many."""
    cards = sorted(card_catalogue().items(), key=lambda item: _size(item[1]))
    marks = dict(zip(CardLimit, ascii_lowercase, strict=False))
    rows = [[name, *_figures(card), " ".join(marks[limit] for limit in card.limits)] for name, card in cards]
    notes = [f"{mark}: {limit}" for limit, mark in marks.items()]
    about = "GiB: as CUDA counts memory, its context included. GB/s and TFLOPS (dense): NVIDIA's figures."
    return "\n".join([table(_HEADERS, rows, TERMINAL), "", about, *notes])


def _figures(card: Card) -> list[str]:
    rate = "no" if CardLimit.BFLOAT16 in card.limits else f"{card.tflops_bf16:,.0f}"
    return [f"{to_gib(card.memory_bytes):.1f}", f"{card.memory_gbps:,.0f}", rate, str(card.year)]


def _size(card: Card) -> tuple[int, float]:
    return round(to_gib(card.nvidia_smi_mib * MIB)), card.memory_gbps
