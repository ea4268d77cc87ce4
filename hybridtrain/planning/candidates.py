"""Candidates of a search for a stack: precisions, times offload arrangements, times sizes of a micro-batch.

More exact precisions come first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from hybridtrain.models.model_config import ModelConfig, Workload
from hybridtrain.optim import OPTIMIZERS
from hybridtrain.optim.optimizer import Optimizer
from hybridtrain.optimizations.activation_offload import ActivationOffload
from hybridtrain.optimizations.bf16_optimizer import Bf16Optimizer
from hybridtrain.optimizations.chunked_loss import ChunkedLoss
from hybridtrain.optimizations.fused_update import FusedUpdate
from hybridtrain.optimizations.grad_accumulation import GradAccumulation
from hybridtrain.optimizations.gradient_checkpointing import GradientCheckpointing
from hybridtrain.optimizations.int8_optimizer import Int8Optimizer
from hybridtrain.optimizations.int8_weights import Int8Weights
from hybridtrain.optimizations.low_bit_matmul import LowBitMatmul
from hybridtrain.optimizations.mixed_precision import MixedPrecision
from hybridtrain.optimizations.optimizer_offload import OptimizerOffload
from hybridtrain.optimizations.tiled_mlp import TiledMlp
from hybridtrain.optimizations.weight_streaming import WeightStreaming
from hybridtrain.optimizations.zero import Zero
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import Demand, DryRun, DryRunInputs
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.cards.card import Card, Host
from hybridtrain.virtual_gpu.cards.links import World

_VISIT_TOKENS = 16384
"""Largest micro-batch tried: beyond it no copy is hidden that was not hidden before (peers' choice on fast cards)."""


_TIERS = ("host", "disk")


@dataclass(frozen=True, slots=True)
class Numerics:
    """Precision of weights and optimizer state: one level of the search."""

    name: str
    label: str
    """For a reader: what is trained, and its precision."""
    description: str
    optimizations: tuple[Optimization, ...]
    weight_bytes: float
    """Per parameter, as streamed."""
    state_bytes: float
    """Master and moments, per parameter."""
    accumulator: Literal["float32", "bfloat16"] = "bfloat16"
    """Element type in which gradients wait."""
    optimizer: str = "adamw"

    @property
    def trains_adapters(self) -> bool:
        """Whether the model's own weights are frozen."""
        return self.state_bytes == 0

    @property
    def master_bytes(self) -> int:
        """Per parameter: what split16 keeps beside the weight."""
        return 2 if any(isinstance(o, MixedPrecision) and o.master == "split16" for o in self.optimizations) else 0

    @property
    def grad_bytes(self) -> int:
        """Per parameter."""
        return 4 if self.accumulator == "float32" else 2

    @property
    def bytes_per_param(self) -> float:
        """Of weights, their state and the gradients that wait."""
        return self.weight_bytes + self.state_bytes + self.grad_bytes


LEVELS = (
    Numerics(
        "exact", "full, fp32 master, fp32 Adam", "exact fp32 master weights, fp32 moments",
        (MixedPrecision(master="split16"),), 2, 10, "float32",
    ),
    Numerics(
        "int8-state", "full, fp32 master, 8-bit Adam", "exact fp32 master weights, 8-bit moments",
        (MixedPrecision(master="split16"), Int8Optimizer()), 2, 4.05, "float32",
    ),
    Numerics(
        "bf16", "full, bf16, bf16 Adam", "bf16 weights with stochastic rounding, bf16 moments",
        (MixedPrecision(master="absent"), Bf16Optimizer()), 2, 4,
    ),
    Numerics(
        "bf16-int8-state", "full, bf16, 8-bit Adam", "bf16 weights with stochastic rounding, 8-bit moments",
        (MixedPrecision(master="absent"), Int8Optimizer()), 2, 2.05,
    ),
    Numerics(
        "bf16-factored", "full, bf16, Adafactor", "bf16 weights with stochastic rounding, factored state",
        (MixedPrecision(master="absent"),), 2, 0.02, optimizer="adafactor",
    ),
    Numerics(
        "int8-factored", "full, 8-bit, Adafactor", "8-bit weights with stochastic rounding, factored state",
        (MixedPrecision(master="absent"), Int8Weights()), 1.02, 0.02, optimizer="adafactor",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Places of weights and state, and the order of micro-batches: one shape of the search."""

    name: str
    streams: bool = False
    offloads_state: bool = False
    fuses: bool = False
    """Vertical, gradients never stored, boundaries on the host."""
    on_disk: tuple[Literal["weights", "state", "boundaries"], ...] = ()
    """What of that lies on disk in place of the host."""
    tiles: bool = False
    """The feed-forward parts in tiles of tokens, boundaries on the host: for long sequences."""
    keeps_attention: bool = False
    """Attention is computed once, and what it leaves is on the host with the boundaries."""
    zero_stage: int = 0
    """What is cut among several cards."""

    @property
    def cuts_weights(self) -> bool:
        """Whether weights are cut among cards."""
        return self.zero_stage == 3

    @property
    def is_resident(self) -> bool:
        """Whether everything is on the card."""
        return not (self.streams or self.offloads_state or self.tiles)

    @property
    def offload(self) -> str:
        """What is kept off the card, for a reader: ``none``, ``weights, state to host``."""
        return ", ".join(f"{what} to {tier}" for tier, what in self._away().items()) or "none"

    @property
    def tiers(self) -> str:
        """Where it is kept, in a word or two: ``none``, ``host``, ``host, disk``."""
        return ", ".join(self._away()) or "none"

    def _away(self) -> dict[str, str]:
        """Return what is kept off the card by the place where it is."""
        all_of_it = {"weights": self.streams, "state": self.offloads_state, "boundaries": self.fuses or self.tiles}
        found = dict[str, list[str]]()
        for name in (name for name, is_away in all_of_it.items() if is_away):
            found.setdefault("disk" if name in self.on_disk else "host", []).append(name)
        told = {tier: "all" if len(names) == len(all_of_it) else ", ".join(names) for tier, names in found.items()}
        return {tier: told[tier].replace("boundaries", "activations") for tier in _TIERS if tier in told}

    def optimizations(
        self, level: Numerics, num_micro_batches: int, keep_last: int, resident_layers: int = 0
    ) -> tuple[Optimization, ...]:
        """Return the whole stack for a number of micro-batches."""
        stack: list[Optimization] = [
            *level.optimizations,
            GradientCheckpointing(recompute_every=1, kept_blocks=keep_last, keep_attention=self.keeps_attention),
            ChunkedLoss(loss_chunk_tokens=2048),
            GradAccumulation(
                grad_accum_steps=num_micro_batches,
                schedule="vertical" if self.fuses else "horizontal",
                accumulator=level.accumulator,
            ),
        ]
        if self.streams:
            stack.append(WeightStreaming(resident_layers=resident_layers, tier=self._tier("weights")))
        if self.offloads_state:
            stack.append(OptimizerOffload(offload_grads=not self.fuses, tier=self._tier("state")))
        if self.fuses:
            stack.append(FusedUpdate())
        if self.fuses or self.tiles:
            stack.append(ActivationOffload(tier=self._tier("boundaries")))
        if self.tiles:
            stack.append(TiledMlp())
        if self.zero_stage:
            stack.append(Zero(stage=self.zero_stage))
        return tuple(stack)

    def _tier(self, name: Literal["weights", "state", "boundaries"]) -> Literal["host", "disk"]:
        return "disk" if name in self.on_disk else "host"


ARRANGEMENTS = (
    Arrangement("all on the card"),
    Arrangement("optimizer state on the host", offloads_state=True),
    Arrangement("weights and state on the host", streams=True, offloads_state=True),
    Arrangement("weights on the host, update fused", streams=True, offloads_state=True, fuses=True),
)
TILED_ARRANGEMENTS = (
    Arrangement("weights on the host, update fused, tiles", streams=True, offloads_state=True, fuses=True, tiles=True),
    Arrangement(
        "weights on the host, update fused, tiles, attention kept", streams=True, offloads_state=True, fuses=True,
        tiles=True, keeps_attention=True,
    ),
)  # fmt: skip
"""Tried for long sequences too."""
TILED_ADAPTER_ARRANGEMENTS = (
    Arrangement("activations on the host, tiles", tiles=True),
    Arrangement("weights and activations on the host, tiles", streams=True, tiles=True),
    Arrangement("activations and attention on the host, tiles", tiles=True, keeps_attention=True),
    Arrangement(
        "weights, activations and attention on the host, tiles", streams=True, tiles=True, keeps_attention=True
    ),
)
CUT_ARRANGEMENTS = (
    Arrangement("all on the cards, gradients and state cut", zero_stage=2),
    Arrangement("gradients and state cut, on the host", offloads_state=True, zero_stage=2),
    Arrangement("weights, gradients and state cut, on the host", streams=True, offloads_state=True, zero_stage=3),
)
"""Of several cards. Those above without a fused update give each card a copy of everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One stack that fits, with its estimate."""

    level: Numerics
    arrangement: Arrangement
    micro_batch_size: int
    num_micro_batches: int
    """On each card."""
    keep_last: int
    world: int = 1
    resident_layers: int = 0
    kept_bytes: float = 0.0
    """Of the card, that one more kept block takes."""
    tokens_per_s: float = 0.0

    def optimizations(self) -> tuple[Optimization, ...]:
        """Return the stack."""
        count = self.num_micro_batches * self.world
        return self.arrangement.optimizations(self.level, count, self.keep_last, self.resident_layers)


Clip = Literal["exact", "previous"]
"""How fused updates clip: by the norm of the step, which takes its passes twice, or by that of the step before."""
Matmul = Literal["full", "float8", "int8"]
"""The arithmetic of the blocks' products: the compute dtype's, or 8 bits."""


def in_low_bit(level: Numerics, matmul: Literal["float8", "int8"]) -> Numerics:
    """Return a level whose blocks multiply in 8 bits."""
    return replace(
        level, name=f"{level.name}_{matmul}-matmuls", label=f"{level.label}, {matmul} matmuls",
        optimizations=(*level.optimizations, LowBitMatmul(format=matmul)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FitRequest:
    """A model, its workload, and the cards and machine to train it on."""

    model: ModelConfig
    card: Card
    host: Host
    seq_len: int
    num_sequences: int
    """Per optimizer step, of all cards."""
    world: World = field(default_factory=World)
    """How many cards, and what joins them."""
    matmul: Matmul = "full"
    clip: Clip = "exact"
    tries_tiles: bool = True
    """Whether long sequences are also tried with a tiled MLP."""

    def __post_init__(self) -> None:
        if self.num_sequences % self.world.size:
            raise ValueError(
                f"num_sequences: {self.num_sequences} must be a multiple of {self.world.size} cards; "
                "each gets as many of a step"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, of all cards."""
        return self.num_sequences * self.seq_len

    @property
    def rank_host(self) -> Host:
        """What one card has of the machine around it."""
        return self.host.shared(self.world.local_size)

    @property
    def rank_sequences(self) -> int:
        """Sequences of a step on each card."""
        return self.num_sequences // self.world.size

    @property
    def changes(self) -> str:
        """Options of ``fit`` that change numerics, as on the command line."""
        matmul = "" if self.matmul == "full" else f" --matmul {self.matmul}"
        return matmul + ("" if self.clip == "exact" else f" --clip {self.clip}")

    def optimizer(self, level: Numerics) -> Optimizer:
        """Return the optimizer of a precision with its default settings."""
        return OPTIMIZERS[level.optimizer](clip=self.clip)

    def run(self, candidate: Candidate) -> DryRun:
        """Return a candidate's dry run: that of the card that holds most, with the time of the slowest."""
        runs = self._inputs(candidate).dry_run_ranks()
        return replace(runs[0], time=max((run.time for run in runs), key=lambda time: time.seconds))

    def demand(self, candidate: Candidate) -> Demand:
        """Return the bytes that a candidate asks for, of the card that holds most, by a dry run without times."""
        return self._inputs(candidate).demand()

    def _inputs(self, candidate: Candidate) -> DryRunInputs:
        return DryRunInputs(
            model=self.model, plan=compose(candidate.optimizations()), card=self.card, host=self.host, world=self.world,
            workload=Workload(micro_batch_size=candidate.micro_batch_size, seq_len=self.seq_len),
            config=TrainerConfig(optimizer=self.optimizer(candidate.level)),
        )  # fmt: skip


def sizes(request: FitRequest) -> Iterator[int]:
    """Yield micro-batch sizes from the largest down: powers of two that divide the step's sequences."""
    largest = max(1, _VISIT_TOKENS // request.seq_len)
    size = 1 << (largest.bit_length() - 1)
    while size:
        if request.rank_sequences % size == 0:
            yield size
        size //= 2
