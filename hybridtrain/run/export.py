"""``hybridtrain export``: a run's checkpoint as a folder that transformers loads."""

from contextlib import closing
from pathlib import Path

import torch

from hybridtrain.checkpoint import load_checkpoint
from hybridtrain.dtypes import to_torch_dtype
from hybridtrain.errors import ConfigError
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.memory.cuda_transfer import open_transfer
from hybridtrain.models.hf_config import is_multimodal, read_hf_config
from hybridtrain.run.run_folder import CHECKPOINTS, TOKENIZER, open_source, read_run_files, trains_adapters
from hybridtrain.run.train import open_trainer
from hybridtrain.run.train_log import Say
from hybridtrain.weights.adapters import export_adapter
from hybridtrain.weights.export import export_folder


def export_run(
    folder: Path,
    target: Path,
    *,
    dtype: str,
    merge: bool,
    say: Say,
    disk_folder: Path | None = None,
    host_limit_bytes: int | None = None,
) -> tuple[list[Path], int]:
    """Write a run's newest checkpoint as safetensors: the model, or its adapters.

    ``target`` is absent or empty. ``dtype`` is for weights; unmerged adapters are float32. Other arguments are as in
    training. Return the files, and the trained steps.

    Raises:
        ConfigError: no intact checkpoint, ``target`` is not empty, or unmerged adapters of a multimodal model.
        DiskSpaceError: ``target`` does not fit.
    """
    file, data = read_run_files(folder)
    keeps_adapters = trains_adapters(file) and not merge
    began_with, weights = file.model.init_from, None
    if trains_adapters(file) and merge:
        weights, found = open_source(file, reads_values=True, say=say)
        data |= found  # loading compares it with the run's own
    elif began_with is not None and not began_with.is_dir():
        say(f"{began_with} is missing, so config.json is written from the model's shape")
        began_with = None
    tokenizer = folder / TOKENIZER if (folder / TOKENIZER).is_dir() else None
    if tokenizer is None and began_with is not None:
        say(f"{folder} does not state its tokenizer; the tokenizer of the model's folder is exported")
    has_config = keeps_adapters and began_with is not None and (began_with / "config.json").is_file()
    if has_config and began_with is not None and is_multimodal(read_hf_config(began_with)):
        # PEFT would find no layer by our names in that class
        fault = "is a multimodal model, which adapters of its text model alone do not fit; add --merge"
        raise ConfigError(str(began_with), [fault])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with closing(open_transfer(device, disk_folder=disk_folder, host_limit_bytes=host_limit_bytes)) as transfer:
        trainer = open_trainer(file, transfer, source=weights)
        # What remembers the trajectory is saved and loaded with it; nothing asks for a batch here.
        cycle = None if file.hybrid is None else HybridTrainer(trainer, file.hybrid, lambda _: [])
        load_checkpoint(trainer, folder / CHECKPOINTS, cycle, data, say)
        if keeps_adapters:
            files = export_adapter(trainer, target, base=str(file.model.init_from or ""), tokenizer_folder=tokenizer)
        else:
            files = export_folder(
                trainer, target, dtype=to_torch_dtype(dtype), source_folder=began_with, tokenizer_folder=tokenizer
            )
        return files, trainer.steps_done
