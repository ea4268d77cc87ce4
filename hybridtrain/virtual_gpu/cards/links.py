"""Links between cards, and the time of collectives on them.

Bytes are those of ring algorithms, per rank and direction (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005; nccl-tests, doc/PERFORMANCE.md): of S bytes that all ranks have
together at the end or the beginning, W ranks send

    all-gather, reduce-scatter, all-to-all    S (W - 1) / W      in W - 1 steps
    all-reduce                              2 S (W - 1) / W      in 2 (W - 1) steps
    broadcast, reduce                         S                  in W - 1 steps, pipelined

Every figure from here is estimated.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from hybridtrain.units import GB
from hybridtrain.virtual_gpu.cards.card import Card
from hybridtrain.virtual_gpu.cards.catalogue import figure_faults, find_entry, raise_faults, read_catalogue


class Collective(StrEnum):
    """The kinds of collectives."""

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
    """Share of the rate that is reached."""

    def __post_init__(self) -> None:
        raise_faults(figure_faults(self, above_0=("gbps", "share"), at_least_0=("hop_seconds",)))

    def bytes_per_second(self, card: Card) -> float:
        """Return the rate at which a card sends."""
        rate = card.bus_bytes_per_second if self.gbps is None else self.gbps * GB
        return rate * self.share

    def seconds(self, kind: Collective, total_bytes: int, ranks: int, card: Card) -> float:
        """Return the seconds for which a collective occupies the link.

        >>> from hybridtrain.virtual_gpu.cards.card import find_card
        >>> link = Link(gbps=100.0, hop_seconds=1e-6, share=1.0)
        >>> link.seconds(Collective.ALL_GATHER, 10**9, 2, find_card("h100-sxm"))
        0.005001
        """
        return kind.sent_bytes(total_bytes, ranks) / self.bytes_per_second(card) + kind.hops(ranks) * self.hop_seconds


@cache
def link_catalogue() -> dict[str, Link]:
    """Return every known link by its short name."""
    return read_catalogue(Link, "links.toml")


def find_link(name: str) -> Link:
    """Return a link by its name, or read it from a TOML file when ``name`` ends in ``.toml``.

    Raises:
        ConfigError: Unknown name, or a faulty file.
    """
    return find_entry(Link, "link", name, link_catalogue())


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A rank's number, the number of cards, and their machines.

    Raises:
        ValueError: There is no such rank.
    """

    size: int = 1
    rank: int = 0
    cards_per_machine: int = 8
    """Ranks on one machine, as torchrun's ``--nproc-per-node``."""
    link: str = "pcie"
    """Between cards of a machine: a name of links.toml, or a file of the same entries."""
    network: str = "ethernet"
    """Between machines."""

    def __post_init__(self) -> None:
        sizes = {"world": self.size, "cards_per_machine": self.cards_per_machine}
        faults = [f"{name}: {value} must be at least 1" for name, value in sizes.items() if value < 1]
        if not faults and not 0 <= self.rank < self.size:
            faults.append(f"rank: {self.rank} is not a rank of {self.size}; give one from 0 to {self.size - 1}")
        raise_faults(faults)
        find_link(self.link), find_link(self.network)  # a wrong name fails at once

    @property
    def local_size(self) -> int:
        """Ranks on this rank's machine."""
        return min(self.size, self.cards_per_machine)

    @property
    def local_rank(self) -> int:
        """This rank's number on its machine."""
        return self.rank % self.cards_per_machine

    def environment(self) -> dict[str, str]:
        """Return the variables that torchrun sets (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
        numbers = {
            "RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size, "GROUP_RANK": self.rank // self.cards_per_machine,
            "GROUP_WORLD_SIZE": -(-self.size // self.cards_per_machine), "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.size, "MASTER_PORT": 29500,
        }  # fmt: skip
        return {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}

    def seconds(self, kind: Collective, total_bytes: int, ranks: int, card: Card) -> float:
        """Return the seconds for which a collective occupies the link of each of its ranks.

        A group within a machine takes its link; one across machines is as fast as the slower, every card sending.
        """
        names = (self.link,) if ranks <= self.cards_per_machine else (self.link, self.network)
        return max(find_link(name).seconds(kind, total_bytes, ranks, card) for name in names)
