"""Files of training options: a stack file and a training file of each."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from hybridtrain.atomic_write import replace_file
from hybridtrain.config.encode import to_toml
from hybridtrain.models.model_config import PRESETS, BatchWorkload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.optim import Optimizer
from hybridtrain.planning.candidates import Candidate, FitRequest
from hybridtrain.planning.fitting import TrainingOption
from hybridtrain.stacks import Stack
from hybridtrain.trainer_config import LrSchedule
from hybridtrain.training_file import TrainFile

_ADAPTER_LR = 2e-4
"""What QLoRA took for 7B and 13B (2305.14314, appendix B)."""


def stack_of(candidate: Candidate, name: str, finder: str) -> Stack:
    """Return a candidate as a stack file has it."""
    level = candidate.level
    description = f"{level.description}; {candidate.arrangement.name}; found by {finder}"
    return Stack(name=name, description=description, optimizer=level.optimizer, optimizations=candidate.optimizations())


def weights_folder(model: str) -> Path:
    """Return the folder where the weights of a preset are looked for."""
    return Path("models") / model


def train_path(folder: Path, option: TrainingOption) -> Path:
    """Return the training file's path."""
    return folder / f"train-{option.name}.toml"


def write_files(folder: Path, model: str, request: FitRequest, options: Sequence[TrainingOption], tokens: int) -> None:
    """Write the files of options that fit, for a data set of so many tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    num_steps = ceil(tokens / (request.tokens_per_step))
    schedule = LrSchedule(warmup_steps=min(LrSchedule().warmup_steps, num_steps // 10), total_steps=num_steps)
    path = Path(model)
    if model in PRESETS:
        spec = ModelSpec(preset=model)
    elif path.is_dir():
        spec = ModelSpec(init_from=path)
    else:
        spec = ModelSpec(shape=request.model)
    for option in options:
        optimizer: Optimizer = request.optimizer(option.candidate.level)
        begins = spec
        if option.method != "full":
            optimizer = replace(optimizer, lr=_ADAPTER_LR, weight_decay=0.0)
            begins = replace(spec, init_from=weights_folder(model)) if spec.preset is not None else spec
        file = TrainFile(
            model=begins, workload=BatchWorkload(batch_size=request.num_sequences, seq_len=request.seq_len),
            optimizations=option.candidate.optimizations(), optimizer=optimizer, num_steps=num_steps, schedule=schedule,
        )  # fmt: skip
        replace_file(folder / f"{option.name}.toml", to_toml(stack_of(option.candidate, option.name, "fit")).encode())
        replace_file(train_path(folder, option), to_toml(file).encode())
