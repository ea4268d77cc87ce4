"""Whether a trainer can run the cycle that a configuration asks for, and take a step back."""

from hybridtrain.errors import ConfigError
from hybridtrain.optim import Optimizer
from hybridtrain.phases.hybrid_config import HybridConfig
from hybridtrain.plan.memory_plan import check_history
from hybridtrain.plan.placement import Placement
from hybridtrain.trainer import Trainer


def check_hybrid(trainer: Trainer, config: HybridConfig, *, has_probe: bool) -> None:
    """Raise ``ConfigError`` unless the stack keeps what the predictor needs, and all else is there."""
    owner = f"hybrid.predictor = '{config.predictor}'"
    check_history(trainer.plan, is_needed=True, owner=owner, num_tensors=config.num_history)
    faults = []
    if config.needs_probe and not has_probe:
        faults.append("probe: this monitor, predictor or correction needs a probe split; name one or switch it off")
    faults += rival_faults(trainer.config.optimizer, config)
    if faults:
        raise ConfigError("hybrid", faults)


def rival_faults(optimizer: Optimizer, config: HybridConfig) -> list[str]:
    """Return a sentence where the optimizer uses what the predictor needs for itself."""
    if config.follows_slow and not optimizer.second_moment_names:
        return [
            f"hybrid.predictor: '{config.predictor}' divides by a second moment, which {optimizer.kind} does not keep"
        ]
    if optimizer.kind != "ademamix":
        return []
    if config.follows_slow:
        return ["optimizer.kind: AdEMAMix and jumps along the same slow average do the same; use one of them"]
    return [f"optimizer.kind: AdEMAMix keeps its average where '{config.predictor}' does; use one of them"]


def refuses_in_time(trainer: Trainer) -> bool:
    """Return whether a step that diverges is refused before it has changed anything, and so can be run again."""
    optimizer = trainer.config.optimizer
    is_exact = optimizer.max_grad_norm > 0 and optimizer.clip == "exact"
    return trainer.plan.grad.placement is not Placement.DROPPED or is_exact
