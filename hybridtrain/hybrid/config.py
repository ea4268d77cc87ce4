"""Options of hybrid predictive training in one flat section, and the check that a trainer can run them."""

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
    """Where a jump goes. mlp and rssm forecast losses and choose the strength of slow_gradient's jumps by them: they
    see scalars and cannot hold a direction in millions of dimensions."""
    warmup_steps: int | None = None
    """Steps before the first cycle; None: those of the learning rate's warm-up."""
    full_steps: int = 10
    """K: true steps between jumps, those of CORRECT included."""
    max_predict_steps: float | None = None
    """Largest P: predicted steps of one jump; 0 switches jumps off, None sets no limit."""
    correct_steps: int = 1
    """Steps after a jump that are called CORRECT: their true gradients enter all averages."""
    correction_interval: float | None = added_field(None)
    """Predicted steps after which CORRECT comes: a longer jump goes on after ``correct_steps`` true steps, until it is
    over. None: a jump is made at once. Not with linear, whose line a true step ends."""
    correction: Literal["next_gradients", "probe_gradients"] = "next_gradients"
    """probe_gradients: CORRECT takes its gradients on the probe split, as the documents have it, and the residual of
    its forecasts corrects the next one."""
    slow: SlowMomentum = field(default_factory=SlowMomentum)
    """Of slow_gradient."""
    strength: float = 0.5
    """Of linear: the jump in units of the displacement since the first step of the block."""
    forecaster: Literal["ema", "power_law", "mlp", "rssm"] | None = None
    """Model of the loss whose surprises lower the strength; None: the predictor's own, else the one that forecasts
    best (see results)."""
    predictor_budget_mib: int = 128
    """Memory that forecaster and residuals may take."""
    confidence_threshold: float = 0.5
    """Jumps stop while a smaller share of recent blocks ended below the forecast's upper bound."""
    divergence_threshold: float = 10.0
    """A gradient norm of so many medians is a divergence."""
    max_move: float = 2.0
    """Trust region: largest root mean square of a jump's move of a weight, in learning rates, for K of at least 10 and
    at the end of the ramp; proportionally less before. Longer jumps are shortened; good ones measured 1.1 to 1.9."""
    max_relative_move: float = 0.02
    """Likewise over the root mean square of the weights; 0.006 to 0.028 measured at tuned learning rates."""
    monitor: Literal["off", "probe", "every_step"] = "off"
    """Forwards on the probe split: around every ``probe_every``-th jump, or around each and per predicted step."""
    probe_every: int = 10
    """Jumps between looks of monitor = "probe"."""
    rollback: Literal["undo", "copy"] = "undo"
    """undo: the jump is recomputed and taken back, to the last bit of rounding. copy: weights are kept on the host."""
    fuse: bool = True
    """Jump within the last FULL step's update, where nothing has to happen between the two."""
    guard: bool = True
    """Refuse a step that diverges right after a jump, take the jump back, and go on more carefully; and keep the slow
    average's span within 5 to 20 % of the run."""
    adapt: bool = True
    """Lower the strength, and lengthen K, where losses end above their forecast."""
    adapt_lr: bool = False
    """Lower the learning rate too, down to half of the schedule's."""

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
                "full_steps: 1 gives predictor 'linear' no displacement: it is measured from the first FULL step; use 2"
            )
        if self.correction_interval is not None and not self.correction_interval > 0:
            faults.append(f"correction_interval: {self.correction_interval} must be above 0")
        if self.correction_interval is not None and self.predictor == "linear":
            faults.append(
                f"correction_interval: {self.correction_interval} cannot be used with predictor 'linear', whose "
                "displacement ends at a true step; leave it out"
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
        """Whether batches of a probe split are used."""
        return self.monitor != "off" or self.searches or self.correction == "probe_gradients"

    @property
    def searches(self) -> bool:
        """Whether every jump must lower the loss of a probe batch to stay: extrapolation does harm otherwise."""
        return self.predictor == "linear"

    @property
    def follows_slow(self) -> bool:
        """Whether jumps go along the slow average of the gradients."""
        return self.predictor in {"slow_gradient", "mlp", "rssm"}


def check_hybrid(trainer: Trainer, config: HybridConfig, *, has_probe: bool) -> None:
    """Raise ``ConfigError`` unless the stack keeps the predictor's state and all other requirements hold."""
    owner = f"hybrid.predictor = '{config.predictor}'"
    check_history(trainer.plan, is_needed=True, owner=owner)
    faults = []
    if config.needs_probe and not has_probe:
        faults.append("probe: this monitor, predictor or correction needs a probe split; name one or switch it off")
    faults += shared_state_faults(trainer.config.optimizer, config)
    if faults:
        raise ConfigError("hybrid", faults)


def shared_state_faults(optimizer: Optimizer, config: HybridConfig) -> list[str]:
    """Return a sentence where optimizer and predictor need the same state."""
    if config.follows_slow and not optimizer.second_moment_names:
        owner = f"hybrid.predictor: '{config.predictor}'"
        return [f"{owner} divides by a second moment, which {optimizer.kind} does not keep"]
    if optimizer.kind != "ademamix":
        return []
    if config.follows_slow:
        return ["optimizer.kind: AdEMAMix and jumps along the same slow average do the same; use one of them"]
    return [f"optimizer.kind: AdEMAMix keeps its average where '{config.predictor}' does; use one of them"]


def refuses_before_update(trainer: Trainer) -> bool:
    """Return whether a step that diverges is refused before it has changed anything, and so can be run again."""
    optimizer = trainer.config.optimizer
    is_exact = optimizer.max_grad_norm > 0 and optimizer.clip == "exact"
    return trainer.plan.grad.placement is not Placement.DROPPED or is_exact
