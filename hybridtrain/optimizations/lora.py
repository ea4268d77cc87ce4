"""Low-rank adapters: weights are frozen, and two small matrices beside each are trained."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.config.rules import broken, refuse
from hybridtrain.plan.claim import Claim
from hybridtrain.plan.compose import Optimization


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora(Optimization):
    """Train a low-rank adapter beside each target; frozen weights need no gradient, optimizer state or master.

    Acts in every phase. Frozen matrices may be stored in 8 bits (int8_weights) or 4 bits (nf4_weights: QLoRA).
    """

    kind: ClassVar[str] = "lora"
    PATHS: ClassVar = {name: f"adapter_{name}" for name in ("rank", "alpha", "scaling", "dropout", "magnitude")}

    rank: int = 16
    """Rank of the adapters: capacity and trained parameters grow with it."""
    alpha: float = 32.0
    """Numerator of the adapter's scale, by default alpha / rank."""
    scaling: Literal["lora", "rslora"] = "lora"
    """lora: alpha / rank. rslora: alpha / sqrt(rank)."""
    dropout: float = 0.0
    """Dropout probability of an adapter's input in training."""
    targets: tuple[str, ...] = ("all-linear",)
    """Matrices of the blocks by name (query, key, value, qkv, attention_out, ffn_gate, ffn_up, ffn_gate_up, ffn_out),
    or attention, mlp, all-linear."""
    magnitude: bool = False
    """Also train each row's magnitude (DoRA)."""

    def __post_init__(self) -> None:
        rules = {
            f"rank: {self.rank} must be at least 1; drop the optimization instead": self.rank >= 1,
            f"alpha: {self.alpha} must be a finite number above 0": 0 < self.alpha < math.inf,
            f"dropout: {self.dropout} must be in [0, 1)": 0 <= self.dropout < 1,
            "targets: empty; name at least one matrix, or all-linear": self.targets and all(self.targets),
        }
        refuse(broken(rules))

    def claims(self) -> Iterable[Claim]:
        """Yield the claims on the trained parameters."""
        yield from Optimization.claims(self)
        yield Claim("adapter_targets", ",".join(self.targets))
