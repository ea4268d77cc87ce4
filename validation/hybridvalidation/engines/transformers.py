"""transformers' Trainer; settings are ``TrainingArguments``."""

import tempfile
from typing import Any

from transformers import Trainer, TrainingArguments

from hybridvalidation.engines.hf_model import build_model
from hybridvalidation.engines.task import Task


def train(task: Task) -> list[float]:
    """Run the steps; return the loss of each."""
    return run_trainer(task, build_model(task), task.settings)


def run_trainer(task: Task, model: Any, settings: dict[str, Any]) -> list[float]:
    """Train a model by the Trainer with the task's settings."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**common_arguments(task, folder) | settings)
        samples = [{"input_ids": task.sample, "labels": task.sample}] * (task.workload.batch_size * task.num_steps)
        trainer = Trainer(model=model, args=arguments, train_dataset=samples)
        trainer.train()
        return losses_of(trainer)


def common_arguments(task: Task, folder: str) -> dict[str, Any]:
    """Return the common arguments: batch, precision, no saving and no reporting."""
    return {
        "output_dir": folder, "per_device_train_batch_size": task.micro_batch_size,
        "gradient_accumulation_steps": task.micro_batches, "max_steps": task.num_steps,
        "bf16": task.precision == "mixed", "use_cpu": task.device == "cpu", "learning_rate": 1e-3, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 0,
    }  # fmt: skip


def losses_of(trainer: Any) -> list[float]:
    """Return the loss of each step."""
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
