"""The configuration file of a training run: model, stack, optimizer, schedule, and the cycle if there is one."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hybridtrain.config.decode import Unions, load_toml
from hybridtrain.config.rules import below_least
from hybridtrain.hybrid.config import HybridConfig, rival_faults
from hybridtrain.hybrid.watch import LossWatch
from hybridtrain.models.model_config import BatchWorkload, ModelSpec
from hybridtrain.optim import OPTIMIZERS, AdamWConfig, Optimizer
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.optimizations.predictor_state import PredictorState
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer_config import LrSchedule

_UNIONS: Final[Unions] = {
    Optimization: OPTIMIZATIONS,
    Optimizer: {**OPTIMIZERS, "": AdamWConfig},
}
"""What a file names by ``kind``."""


def load_config(path: Path | str) -> "TrainFile":
    """Read a training file.

    >>> from hybridtrain import load_config
    >>> load_config("examples/train-small.toml").optimizer.lr  # doctest: +SKIP
    0.002

    Args:
        path: A TOML file; a table without ``kind`` under [optimizer] is AdamW's.

    Raises:
        ConfigError: everything that is wrong with it, each fault with its path, what is allowed and the nearest name.
    """
    return load_toml(TrainFile, Path(path), unions=_UNIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFile:
    """A training configuration file."""

    model: ModelSpec
    workload: BatchWorkload
    optimizations: tuple[Optimization, ...] = ()
    optimizer: Optimizer = field(default_factory=AdamWConfig)
    schedule: LrSchedule = field(default_factory=LrSchedule)
    hybrid: HybridConfig | None = None
    """Hybrid predictive training; None: every step is a true one."""
    seed: int = 0
    num_steps: int = 1000
    """True steps."""
    save_every: int = 200
    """True steps between saved states; one is always written at the end."""
    sample_prompt: str = "\n"
    sample_tokens: int = 200

    def __post_init__(self) -> None:
        faults = below_least(self, ("num_steps", "save_every")) + below_least(self, ("sample_tokens", "seed"), least=0)
        try:
            steps = compose(self.optimizations).for_phase(Phase.FULL).grad_accum_steps
        except ValueError as error:
            faults += str(error).splitlines()
            steps = 1
        if self.workload.batch_size % steps:
            faults.append(
                f"workload.batch_size: {self.workload.batch_size} must be a multiple of accumulation's steps ({steps})"
            )
        model = self.model.resolve()
        if self.workload.seq_len > model.max_seq_len:
            faults.append(
                f"workload.seq_len: {self.workload.seq_len} is above the model's max_seq_len ({model.max_seq_len})"
            )
        faults += _state_faults(self)
        if self.hybrid is not None:
            faults += rival_faults(self.optimizer, self.hybrid)
            faults += _budget_faults(self.hybrid, self.seed)
        if faults:
            raise ValueError("\n".join(faults))


def _state_faults(file: TrainFile) -> Iterator[str]:
    """Yield a sentence unless the stack keeps what jumps, or AdEMAMix, remember of the trajectory."""
    if file.hybrid is not None:
        owner = f"hybrid.predictor: '{file.hybrid.predictor}'"
        wanted = "slow_gradient" if file.hybrid.follows_slow else file.hybrid.predictor
    elif file.optimizer.kind == "ademamix":
        owner, wanted = "optimizer.kind: AdEMAMix", "slow_gradient"
    else:
        return
    kept = [stage.predictor for stage in file.optimizations if isinstance(stage, PredictorState)]
    if wanted not in kept:
        found = f"that of '{kept[0]}'" if kept else "none"
        yield (
            f"{owner} needs the state of predictor '{wanted}', the stack keeps {found}; set [[optimizations]] with "
            f"kind = 'predictor_state' and predictor = '{wanted}'"
        )


def _budget_faults(config: HybridConfig, seed: int) -> Iterator[str]:
    """Yield a sentence unless the forecaster fits its budget."""
    try:
        LossWatch(config, seed, lambda _: 0.0)
    except ValueError as error:
        yield f"hybrid.predictor_{error}"
