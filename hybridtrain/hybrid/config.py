"""Settings of hybrid predictive training, and the check that a trainer supports them."""

import math
from dataclasses import dataclass, field
from typing import Literal

from hybridtrain.config.rules import added_field, below_least
from hybridtrain.errors import ConfigError
from hybridtrain.optim import Optimizer
from hybridtrain.optim.slow_average import SlowMomentum
from hybridtrain.plan.memory_plan import check_history
from hybridtrain.plan.placement import Placement
from hybridtrain.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """Settings of phases, predictor and guards."""

    predictor: Literal["slow_gradient", "linear", "mlp", "rssm"] = "slow_gradient"
    """How jumps are predicted. mlp and rssm forecast losses and set the strength of slow_gradient's jumps: they see
    scalars only and cannot predict a direction in millions of dimensions."""
    warmup_steps: int | None = None
    """Steps before the first cycle; None: the warm-up of the learning rate."""
    full_steps: int = 10
    """K: true steps between jumps, those of CORRECT included."""
    max_predict_steps: float | None = None
    """P, the most predicted steps of one jump; 0 switches jumps off, None sets no limit."""
    correct_steps: int = 1
    """Steps in phase CORRECT after a jump; their true gradients enter all averages."""
    correction_interval: float | None = added_field(None)
    """Predicted steps before CORRECT: a longer jump continues after ``correct_steps`` true steps. None: a jump is
    applied at once. Not for linear, whose displacement ends at a true step."""
    correction: Literal["next_gradients", "probe_gradients"] = "next_gradients"
    """probe_gradients: CORRECT trains on the probe split, as the documents specify, and the residuals of its forecasts
    correct the next forecast."""
    slow: SlowMomentum = field(default_factory=SlowMomentum)
    """Settings of slow_gradient."""
    strength: float = 0.5
    """For linear: the jump in units of the displacement since the round's first step."""
    forecaster: Literal["ema", "power_law", "mlp", "rssm"] | None = None
    """Forecaster of the loss; losses above its forecast lower the strength. None: the predictor's own, else the most
    accurate one (see results)."""
    predictor_budget_mib: int = 128
    """Memory limit of forecaster and residuals."""
    confidence_threshold: float = 0.5
    """Least share of recent rounds that must end below the forecast's upper bound; jumps stop below it."""
    divergence_threshold: float = 10.0
    """Gradient norm, in medians of recent ones, that counts as divergence."""
    max_move: float = 2.0
    """Trust region: largest RMS of a jump's weight change, in learning rates, for K of at least 10 after the ramp;
    proportionally less before. Longer jumps are shortened; successful ones measured 1.1 to 1.9."""
    max_relative_move: float = 0.02
    """Trust region relative to the RMS of the weights; 0.006 to 0.028 measured at tuned learning rates."""
    monitor: Literal["off", "probe", "every_step"] = "off"
    """Forward passes on the probe split: around every ``probe_every``-th jump, or around each jump and per predicted
    step."""
    probe_every: int = 10
    """Jumps between evaluations of monitor = "probe"."""
    rollback: Literal["undo", "copy"] = "undo"
    """undo: recompute the jump and subtract it, exact up to rounding. copy: keep the weights on the host."""
    fuse: bool = True
    """Apply the jump within the last FULL step's update, where nothing must happen between them."""
    guard: bool = True
    """Reject a step that diverges right after a jump, roll back the jump and continue with lower strength; keep the
    slow average's span within 5 to 20 % of the run."""
    adapt: bool = True
    """Lower the strength and lengthen K where losses end above their forecast."""
    adapt_lr: bool = False
    """Also lower the learning rate, down to half of the schedule's."""

    def __post_init__(self) -> None:
        faults = below_least(self, ("full_steps", "correct_steps", "probe_every", "predictor_budget_mib"))
        if self.warmup_steps is not None and self.warmup_steps < 0:
            faults.append(f"warmup_steps: {self.warmup_steps} must be at least 0")
        if self.correct_steps > self.full_steps:
            faults.append(f"correct_steps: {self.correct_steps} must be at most full_steps ({self.full_steps})")
        if self.strength == math.inf:
            faults.append("strength: inf must be a finite number")
        if self.predictor == "linear" and self.full_steps < 2:
            faults.append(
                "full_steps: 1 leaves predictor 'linear' without a displacement, which starts at the first FULL step; "
                "use at least 2"
            )
        if self.correction_interval is not None and not self.correction_interval > 0:
            faults.append(f"correction_interval: {self.correction_interval} must be above 0")
        if self.correction_interval is not None and self.predictor == "linear":
            faults.append(
                f"correction_interval: {self.correction_interval} cannot be used with predictor 'linear', whose "
                f"displacement ends at a true step; remove it"
            )
        for name, low, high in (
            ("confidence_threshold", 0.0, 1.0),
            ("max_predict_steps", 0.0, math.inf),
            ("strength", 0.0, math.inf),
            ("divergence_threshold", 1.0, math.inf),
            ("max_move", 0.0, math.inf),
            ("max_relative_move", 0.0, math.inf),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                faults.append(f"{name}: {value} must be from {low:g} to {high:g}")
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def needs_probe(self) -> bool:
        """Whether a probe split is needed."""
        return self.monitor != "off" or self.searches or self.correction == "probe_gradients"

    @property
    def searches(self) -> bool:
        """Whether a jump is kept only if it lowers the loss of a probe batch; plain extrapolation does harm."""
        return self.predictor == "linear"

    @property
    def follows_slow(self) -> bool:
        """Whether jumps follow the slow average of the gradients."""
        return self.predictor in {"slow_gradient", "mlp", "rssm"}


def check_hybrid(trainer: Trainer, config: HybridConfig, *, has_probe: bool) -> None:
    """Raise ``ConfigError`` unless the stack stores the predictor's state and all other requirements hold."""
    owner = f"hybrid.predictor = '{config.predictor}'"
    check_history(trainer.plan, is_needed=True, owner=owner)
    faults = []
    if config.needs_probe and not has_probe:
        faults.append("probe: monitor, predictor or correction needs a probe split; give one, or switch it off")
    faults += shared_state_faults(trainer.config.optimizer, config)
    if faults:
        raise ConfigError("hybrid", faults)


def shared_state_faults(optimizer: Optimizer, config: HybridConfig) -> list[str]:
    """Return an error if optimizer and predictor need the same state."""
    if config.follows_slow and not optimizer.second_moment_names:
        owner = f"hybrid.predictor: '{config.predictor}'"
        return [f"{owner} needs a second moment, which {optimizer.kind} does not have"]
    if optimizer.kind != "ademamix":
        return []
    if config.follows_slow:
        return ["optimizer.kind: AdEMAMix already moves along slow_gradient's average; use one of them"]
    return [f"optimizer.kind: AdEMAMix and predictor '{config.predictor}' need the same state tensor; use one of them"]


def refuses_before_update(trainer: Trainer) -> bool:
    """Return whether a diverging step is rejected before it changes anything, and so can be repeated."""
    optimizer = trainer.config.optimizer
    is_exact = optimizer.max_grad_norm > 0 and optimizer.clip == "exact"
    return trainer.plan.grad.placement is not Placement.DROPPED or is_exact
