"""The hint of a dry run that does not fit: arithmetic near enough to the plan to be worth saying."""

import pytest

from hybridtrain.checkpoint.parts import state_bytes
from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.models.model_config import PRESETS, Workload
from hybridtrain.optim import OPTIMIZERS
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.planning.plan_bytes import bytes_of, saved_bytes
from hybridtrain.stacks import default_folder
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridvalidation.scenario_files import ScenarioFiles


@pytest.mark.parametrize("stack", ["vanilla", "mixed", "checkpointing", "balanced", "chunked-loss"])
def test_the_arithmetic_is_near_the_plan(stack: str) -> None:
    plan = ScenarioFiles(default_folder()).stack(stack).plan()
    workload = Workload(micro_batch_size=2, seq_len=512)
    found = bytes_of(PRESETS["gpt2-small"], plan, workload)
    run = dry_run(PRESETS["gpt2-small"], plan, find_card("rtx-4090"), workload)
    assert found.card == pytest.approx(run.peak_reserved_bytes, rel=0.25)
    assert found.host == pytest.approx(run.host_peak_bytes, rel=0.25, abs=1e6)
    assert found.disk == run.disk_peak_bytes == 0


@pytest.mark.parametrize("name", ["vanilla", "tight", "adamw8bit", "aggressive", "qlora", "best-7b-16gb", "hybrid"])
def test_a_saved_state_is_as_large_as_arithmetic_says(name: str) -> None:
    stack, model = ScenarioFiles(default_folder()).stack(name), PRESETS["gpt2-small"]
    optimizer = OPTIMIZERS[stack.optimizer]()
    trainer = Trainer(model, stack.plan(), TrainerConfig(optimizer=optimizer), VirtualTransfer())
    # Norms and biases: in whole groups, or kept wider than their matrices.
    assert saved_bytes(model, stack.plan(), optimizer) == pytest.approx(state_bytes(trainer), rel=2e-3)
