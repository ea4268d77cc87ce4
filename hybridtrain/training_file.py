"""The configuration file of a training run: model, stack, optimizer, schedule, text, and the cycle if there is one."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from hybridtrain.config.decode import Unions, load_toml
from hybridtrain.config.rules import AtMost, below_least, faults_above_most
from hybridtrain.data.data_config import DataConfig
from hybridtrain.hybrid.config import HybridConfig, shared_state_faults
from hybridtrain.models.model_config import BatchWorkload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.optim import OPTIMIZERS, AdamWConfig, Optimizer
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.optimizations.predictor_state import PredictorState
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer_config import GuardConfig, LrSchedule

_UNIONS: Final[Unions] = {
    Optimization: OPTIMIZATIONS,
    Optimizer: {**OPTIMIZERS, "": AdamWConfig},
}
"""Classes that a file selects by ``kind``."""


def load_config(path: Path | str) -> "TrainFile":
    """Read a training file.

    >>> from hybridtrain import load_config
    >>> load_config("examples/train-small.toml").optimizer.lr  # doctest: +SKIP
    0.002

    Args:
        path: A TOML file; a table without ``kind`` under [optimizer] is AdamW's.

    Raises:
        ConfigError: all faults of the file, each with its path, what is allowed, and the nearest name.
    """
    return load_toml(TrainFile, Path(path), unions=_UNIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFile:
    """A training configuration file."""

    model: ModelSpec
    workload: BatchWorkload
    optimizations: tuple[Optimization, ...] = ()
    """The stack; each optimization is a table of its own."""
    optimizer: Optimizer = field(default_factory=AdamWConfig)
    """The optimizer; default kind: AdamW."""
    schedule: LrSchedule = field(default_factory=LrSchedule)
    hybrid: HybridConfig | None = None
    """Hybrid predictive training; None: plain training."""
    adapter_from: Path | None = None
    """PEFT folder with initial adapter values; None: new adapters."""
    seed: Annotated[int, AtMost(2**63 - 1)] = 0
    """Seed of initial weights, order of the text, dropout and stochastic rounding."""
    num_steps: int = 1000
    """True steps."""
    save_every: int = 200
    """True steps between checkpoints; the last step always has one."""
    save_minutes: float = 30.0
    """Minutes between additional checkpoints; 0: none."""
    keep_last: int = 2
    """Number of newest checkpoints to keep."""
    keep_hourly: int = 24
    """Number of further hours of which one checkpoint each is kept, while disk space allows."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Actions on NaN or infinity, and on loss spikes."""
    data: DataConfig | None = None
    """Training text; None: from the command line."""
    eval_every: int = 0
    """True steps between evaluations on held-out text; 0: only at the end, with a [data] table."""
    sample_prompt: str = "\n"
    """Prompt of the sample at the end."""
    sample_tokens: Annotated[int, AtMost(2**16)] = 200
    """Tokens of the sample; 0: no sample."""

    def __post_init__(self) -> None:
        faults = below_least(self, ("num_steps", "save_every", "keep_last")) + below_least(
            self, ("sample_tokens", "seed", "eval_every", "keep_hourly", "save_minutes"), least=0
        )
        faults += faults_above_most(self)
        holds_out = self.data is None or self.data.validation is not None or self.data.held_out_percent
        if self.eval_every and not holds_out:
            faults.append(
                f"eval_every: {self.eval_every} needs held-out text; set data.validation, a "
                "data.validation_percent above 0, or eval_every = 0"
            )
        try:
            plan = compose(self.optimizations).for_phase(Phase.FULL)
            steps = plan.grad_accum_steps
            if self.adapter_from is not None and not plan.adapter_rank:
                faults.append(f"adapter_from: {self.adapter_from} needs adapters; add lora to [[optimizations]]")
        except ValueError as error:
            faults += str(error).splitlines()
            steps = 1
        if self.workload.batch_size % steps:
            faults.append(
                f"workload.batch_size: {self.workload.batch_size} must be a multiple of grad_accumulation's "
                f"grad_accum_steps ({steps})"
            )
        model = self.model.resolve()
        if self.workload.seq_len > model.max_seq_len:
            faults.append(
                f"workload.seq_len: {self.workload.seq_len} is above the model's max_seq_len ({model.max_seq_len})"
            )
        faults += _state_faults(self)
        if self.hybrid is not None:
            faults += shared_state_faults(self.optimizer, self.hybrid)
            if self.guard.on_spike != "say":
                faults.append(
                    f"guard.on_spike: '{self.guard.on_spike}' is for plain runs only, as hybrid training has its own "
                    f"guard; set 'say'"
                )
            from hybridtrain.hybrid.watch import LossWatch  # noqa: PLC0415  plain training imports no forecaster

            try:
                LossWatch(self.hybrid, self.seed, lambda _: 0.0)
            except ValueError as error:  # the forecaster does not fit its budget
                faults.append(f"hybrid.predictor_{error}")
        if faults:
            raise ValueError("\n".join(faults))


def _state_faults(file: TrainFile) -> Iterator[str]:
    """Yield a fault unless the stack keeps the state that jumps, or AdEMAMix, need."""
    if file.hybrid is not None:
        owner = f"hybrid.predictor: '{file.hybrid.predictor}'"
        wanted = "slow_gradient" if file.hybrid.follows_slow else file.hybrid.predictor
    elif file.optimizer.kind == "ademamix":
        owner, wanted = "optimizer.kind: AdEMAMix", "slow_gradient"
    else:
        return
    kept = [stage.predictor for stage in file.optimizations if isinstance(stage, PredictorState)]
    if wanted not in kept:
        state = f"that of '{kept[0]}'" if kept else "none"
        yield (
            f"{owner} needs the state of predictor '{wanted}', but the stack stores {state}; set [[optimizations]] "
            f"with "
            f"kind = 'predictor_state' and predictor = '{wanted}'"
        )
