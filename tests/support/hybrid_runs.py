"""Whole cycles of hybrid training on tiny models, and all that they leave behind."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hybridtrain.data.batches import TokenBatch
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.cycle import HybridResult, HybridTrainer
from hybridtrain.memory.transfer import DirectTransfer, Transfer
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import PredictorState
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from hybridtrain.virtual_gpu.account.observer import MemoryObserver
from stacks import settings_of
from tiny_models import random_steps
from training_history import SEQ_LEN, assert_all_bitwise, read_stored, stored_state, stored_weights

WARMUP_STEPS = 1
FULL_STEPS = 2
NUM_STEPS = 6
"""True steps: two jumps are followed by true steps."""
SETTINGS = TrainerConfig(
    optimizer=AdamWConfig(lr=3e-3, max_grad_norm=0.25), schedule=LrSchedule(warmup_steps=WARMUP_STEPS, total_steps=20)
)


def hybrid_config(**changes: object) -> HybridConfig:
    """Return short cycles."""
    values: dict[str, object] = {"full_steps": FULL_STEPS} | changes
    return HybridConfig(**values)  # type: ignore[arg-type]


CONFIGS: dict[str, HybridConfig] = {
    "slow-fused": hybrid_config(),
    "slow-separate": hybrid_config(fuse=False),
    "slow-copy": hybrid_config(rollback="copy"),
    "slow-probe": hybrid_config(monitor="probe", probe_every=1),
    "slow-every-step": hybrid_config(monitor="every_step", rollback="copy"),
    "linear-probe": hybrid_config(predictor="linear", monitor="probe", probe_every=2),
    "linear-every-step": hybrid_config(predictor="linear", monitor="every_step", strength=0.75),
}


@dataclass
class HybridHistory:
    """What a run left behind."""

    results: list[HybridResult] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    """Companions, moments and what the predictor remembers."""

    @property
    def losses(self) -> list[float | None]:
        """Of true steps."""
        return [result.loss for result in self.results if result.phase is not Phase.PREDICT]

    @property
    def norms(self) -> list[float | None]:
        """Of true steps."""
        return [result.grad_norm for result in self.results if result.phase is not Phase.PREDICT]

    @property
    def jumps(self) -> list[tuple[int, float]]:
        """Step and size of each."""
        return [(result.step, result.predicted_steps) for result in self.results if result.is_predicted]

    @property
    def phases(self) -> list[Phase]:
        """Of each call."""
        return [result.phase for result in self.results]


def fresh_hybrid(
    model: ModelConfig,
    stack: Sequence[Optimization],
    config: HybridConfig | None,
    transfer: Transfer | None = None,
    observer: MemoryObserver | None = None,
    settings: TrainerConfig = SETTINGS,
) -> HybridTrainer:
    """Return a hybrid trainer on the CPU; a probe is the batch of the step before: a jump on helps there."""
    plan = compose(stack)
    settings = settings_of(stack, settings)
    trainer = Trainer(model, plan, settings, transfer or DirectTransfer(torch.device("cpu")), observer)
    accum_steps = plan.for_phase(Phase.FULL).grad_accum_steps

    steps = random_steps(model, 40, accum_steps, seq_len=SEQ_LEN)

    def load_probe(number: int) -> list[TokenBatch]:
        return steps[WARMUP_STEPS + FULL_STEPS - 1 + FULL_STEPS * number]

    return HybridTrainer(trainer, config, load_probe)


def run_steps(
    hybrid: HybridTrainer, num_steps: int = NUM_STEPS, ledger: StorageLedger | None = None
) -> list[HybridResult]:
    """Run until so many true steps are done and no jump is due."""
    trainer = hybrid.trainer
    steps = random_steps(trainer.model.config, 40, trainer.plan.grad_accum_steps, seq_len=SEQ_LEN)
    results = []
    while trainer.steps_done < num_steps or hybrid.phase is Phase.PREDICT:
        if ledger is not None:
            ledger.begin_step()
        results.append(hybrid.advance(lambda number: steps[number]))
    return results


def hybrid_history(
    model: ModelConfig,
    stack: Sequence[Optimization],
    config: HybridConfig | None,
    *,
    transfer: Transfer | None = None,
    disk_folder: Path | None = None,
    num_steps: int = NUM_STEPS,
    settings: TrainerConfig = SETTINGS,
) -> HybridHistory:
    """Train through cycles, and read weights and state from where they live."""
    way = transfer or DirectTransfer(torch.device("cpu"), disk_folder=disk_folder)
    hybrid = fresh_hybrid(model, stack, config, way, settings=settings)
    history = HybridHistory(run_steps(hybrid, num_steps))
    hybrid.trainer.enter_phase(Phase.FULL)
    history.weights, history.state = everything(hybrid.trainer)
    way.close()
    return history


def everything(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return copies of weights, and of master weights, moments and history, wherever they are."""
    for unit in trainer.model.units():
        trainer.states.acquire(unit)  # waits for what is on its way back
    trainer.transfer.finish()
    return stored_weights(trainer), stored_state(trainer) | stored_trajectory(trainer)


def stored_trajectory(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of what the predictor remembers, flat."""
    found = {}
    for unit in trainer.model.units():
        for (name, _), state in zip(unit.parameters, trainer.states.of(unit.name), strict=True):
            for index, tensor in enumerate(tensor for slot in state.extra for tensor in slot.tensors):
                found[f"{name}.history{index}"] = read_stored(tensor).flatten()
    return found


def exact_values(trainer: Trainer) -> dict[str, Tensor]:
    """Return the fp32 values behind all weights, flat."""
    found = {}
    for unit in trainer.model.units():
        stored = trainer.weights.stored_tensors(unit.name, unit.tensors)
        for (name, _), state, parts in zip(unit.parameters, trainer.states.of(unit.name), stored, strict=True):
            weight = tuple(read_stored(part).flatten() for part in parts)
            master_weight = None if state.master_weight is None else read_stored(state.master_weight).flatten()
            found[name] = trainer.states.formats.of(weight).load(weight, master_weight).clone()
    return found


def remembers(predictor: str = "slow_gradient", codec: str = "float32") -> PredictorState:
    """Return the state of a predictor."""
    return PredictorState(predictor=predictor, codec=codec)  # type: ignore[arg-type]


def memory_of(config: HybridConfig, codec: str) -> Optimization:
    """Return the state that the configuration's predictor needs."""
    kind = config.predictor if config.predictor != "rssm" else "slow_gradient"
    return remembers(kind, codec)


def assert_same_cycles(actual: HybridHistory, expected: HybridHistory) -> None:
    """Fail unless losses, norms, jumps, weights and state are equal to the bit."""
    assert actual.losses == expected.losses
    assert actual.norms == expected.norms
    assert actual.jumps == expected.jumps
    assert_all_bitwise(actual.weights, expected.weights, "weight ")
    assert_all_bitwise(actual.state, expected.state, "state ")
