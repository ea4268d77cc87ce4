"""What joins cards, and how long a collective takes on it.

Bytes are those of ring algorithms, per rank and direction (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005; nccl-tests, doc/PERFORMANCE.md): of S bytes that all ranks have
together at the end or the beginning, W ranks send

    all-gather, reduce-scatter, all-to-all    S (W - 1) / W      in W - 1 steps
    all-reduce                              2 S (W - 1) / W      in 2 (W - 1) steps
    broadcast, reduce                         S                  in W - 1 steps, pipelined

Every figure from here is estimated.
"""

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from pathlib import Path

from hybridtrain.config.decode import decode, load_toml
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.units import GB
from hybridtrain.virtual_gpu.card import Card


class Collective(StrEnum):
    """What ranks do together."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    """From one rank, or to one rank."""

    def sent_bytes(self, total_bytes: int, ranks: int) -> float:
        """Return the bytes that each rank sends.

        >>> Collective.ALL_REDUCE.sent_bytes(1000, 4), Collective.ALL_GATHER.sent_bytes(1000, 4)
        (1500.0, 750.0)
        """
        if ranks == 1:
            return 0.0
        if self is Collective.BROADCAST:
            return float(total_bytes)
        return total_bytes * (ranks - 1) / ranks * (2 if self is Collective.ALL_REDUCE else 1)

    def hops(self, ranks: int) -> int:
        """Return the steps, one after the other."""
        return (ranks - 1) * (2 if self is Collective.ALL_REDUCE else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Facts about one kind of link."""

    gbps: float | None = None
    """GB/s in one direction for each card; None: the card's own bus."""
    hop_seconds: float
    """Of one step of a ring."""
    share: float = 0.8
    """Of the rate, that is reached."""

    def __post_init__(self) -> None:
        faults = [
            f"{name}: {value} must be above 0"
            for name, value in (("gbps", self.gbps), ("share", self.share))
            if value is not None and value <= 0
        ]
        if self.hop_seconds < 0:
            faults.append(f"hop_seconds: {self.hop_seconds} must be at least 0")
        if faults:
            raise ValueError("\n".join(faults))

    def bytes_per_second(self, card: Card) -> float:
        """Return what a card sends in a second."""
        rate = card.bus_bytes_per_second if self.gbps is None else self.gbps * GB
        return rate * self.share

    def seconds(self, kind: Collective, total_bytes: int, ranks: int, card: Card) -> float:
        """Return how long a collective keeps the link.

        >>> from hybridtrain.virtual_gpu.card import find_card
        >>> link = Link(gbps=100.0, hop_seconds=1e-6, share=1.0)
        >>> link.seconds(Collective.ALL_GATHER, 10**9, 2, find_card("h100-sxm"))
        0.005001
        """
        return kind.sent_bytes(total_bytes, ranks) / self.bytes_per_second(card) + kind.hops(ranks) * self.hop_seconds


@cache
def link_catalogue() -> dict[str, Link]:
    """Return every known link by its short name."""
    text = resources.files("hybridtrain.virtual_gpu").joinpath("links.toml").read_text(encoding="utf-8")
    return {name: decode(Link, table, source=f"links.toml [{name}]") for name, table in tomllib.loads(text).items()}


def find_link(name: str) -> Link:
    """Return a link by its name, or read it from a TOML file when ``name`` ends in ``.toml``.

    Raises:
        ConfigError: Unknown name, or a faulty file.
    """
    if name.endswith(".toml"):
        return load_toml(Link, Path(name))
    if name not in link_catalogue():
        raise ConfigError("link", [f"{unknown_name('link', name, link_catalogue())} Your own: a .toml file."])
    return link_catalogue()[name]
