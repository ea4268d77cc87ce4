"""Low-rank adapters: the weights are frozen, and little matrices beside them are trained."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.config.rules import broken, refuse
from hybridtrain.plan.claim import Claim
from hybridtrain.plan.compose import Optimization


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora(Optimization):
    """Train two thin matrices beside each target; frozen weights have no gradient, no optimizer state, no master.

    Acts in every phase. Frozen matrices may be stored in 8 bits (int8_weights) or in 4 (nf4_weights: QLoRA).
    """

    kind: ClassVar[str] = "lora"
    PATHS: ClassVar = {name: f"adapter_{name}" for name in ("rank", "alpha", "scaling", "dropout", "magnitude")}

    rank: int = 16
    """Rows of the thin matrices: what they can learn grows with it, and what is trained."""
    alpha: float = 32.0
    """The adapter's output is multiplied with alpha / rank, or what ``scaling`` says."""
    scaling: Literal["lora", "rslora"] = "lora"
    """lora: alpha / rank. rslora: alpha / sqrt(rank)."""
    dropout: float = 0.0
    """Probability that an adapter's input is dropped while training."""
    targets: tuple[str, ...] = ("all-linear",)
    """Matrices of the blocks by name (query, key, value, qkv, attention_out, ffn_gate, ffn_up, ffn_gate_up, ffn_out),
    or attention, mlp, all-linear."""
    magnitude: bool = False
    """Also learn the length of each row of the matrix (DoRA)."""

    def __post_init__(self) -> None:
        rules = {
            f"rank: {self.rank} must be at least 1; drop the optimization instead": self.rank >= 1,
            f"alpha: {self.alpha} must be a finite number above 0": 0 < self.alpha < math.inf,
            f"dropout: {self.dropout} must be in [0, 1)": 0 <= self.dropout < 1,
            "targets: empty; name at least one matrix, or all-linear": self.targets and all(self.targets),
        }
        refuse(broken(rules))

    def claims(self) -> Iterable[Claim]:
        """Yield the claims on what is trained."""
        yield from Optimization.claims(self)
        yield Claim("adapter_targets", ",".join(self.targets))
