"""The request of ``hybridtrain fit`` and ``recommend``: names, files and sizes of the command, resolved."""

from dataclasses import dataclass

from hybridtrain.errors import ConfigError
from hybridtrain.models.find_model import find_model
from hybridtrain.models.model_config import MOST_TOKENS, asked_workload, check_workload
from hybridtrain.planning.candidates import Clip, FitRequest, Matmul
from hybridtrain.planning.dry_runs import check_format
from hybridtrain.sizes import parse_size
from hybridtrain.units import GIB
from hybridtrain.virtual_gpu.cards.card import Host, find_card
from hybridtrain.virtual_gpu.cards.links import World

_SEQ_LEN, _TOKENS_PER_STEP = 2048, 131072


@dataclass(frozen=True, slots=True, kw_only=True)
class FitArguments:
    """A request as the command names it."""

    model: str | None
    card: str | None
    host_memory: str = "64GiB"
    seq: int | None = None
    """None: 2048, or all positions of the model."""
    tokens_per_step: int | None = None
    """None: 131072 in whole sequences."""
    world: int = 1
    link: str = "pcie"
    matmul: Matmul = "full"
    clip: Clip = "exact"
    verb: str = "recommend"
    instead: str = "name one, or give --scenario"
    """What to do where model or card are missing."""

    def resolve(self) -> FitRequest:
        """Read the names and sizes; raise ``ConfigError`` for a wrong or missing one."""
        if self.model is None or self.card is None:
            names = [name for name, given in (("model", self.model), ("card", self.card)) if given is None]
            raise ConfigError(self.verb, [f"--{name}: missing; {self.instead}" for name in names])
        shape, world = find_model(self.model), World(size=self.world, link=self.link)
        seq_len = self.seq or min(_SEQ_LEN, shape.max_seq_len)
        check_workload(shape, asked_workload(1, seq_len))
        usual = max(1, _TOKENS_PER_STEP // seq_len // world.size) * world.size * seq_len
        num_sequences = whole_sequences(self.tokens_per_step or usual, seq_len)
        if num_sequences % world.size:
            fault = f"{num_sequences} sequences of {seq_len} tokens must be a multiple of {world.size} cards"
            raise ConfigError("--tokens-per-step", [f"{fault}; give {world.size * seq_len} times any number"])
        card = find_card(self.card)
        if self.matmul != "full":
            check_format(self.matmul, card, "--matmul")
        host = parse_host(self.host_memory)
        return FitRequest(shape, card, host, seq_len, num_sequences, world, self.matmul, self.clip)


def parse_host(memory: str) -> Host:
    """Return a machine with that much memory; raises ``ConfigError``."""
    size = parse_size(memory, "--host-memory")
    try:
        return Host(memory_gib=size / GIB)
    except ValueError as error:
        faults = [line.removeprefix("memory_gib: ").replace(" (reserved_gib)", "") for line in str(error).splitlines()]
        raise ConfigError("--host-memory", faults) from error


def whole_sequences(num_tokens: int, seq_len: int) -> int:
    """Return the sequences of a step; raise ``ConfigError`` where they are not whole, or too many."""
    if num_tokens % seq_len:
        raise ConfigError("--tokens-per-step", [f"{num_tokens} must be a multiple of --seq ({seq_len})"])
    if num_tokens > MOST_TOKENS:
        raise ConfigError("--tokens-per-step", [f"{num_tokens} must be at most {MOST_TOKENS}"])
    return num_tokens // seq_len
