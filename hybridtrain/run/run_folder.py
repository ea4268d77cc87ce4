"""The files of a run's folder that are needed to open its checkpoint."""

import json
import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from hybridtrain.atomic_write import new_folder, replace_file
from hybridtrain.config.encode import DIGEST_LENGTH, JsonMapping, encode, to_toml
from hybridtrain.data.data_config import BYTES
from hybridtrain.data.tokenizer_files import write_tokenizer
from hybridtrain.errors import ConfigError
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.models.weight_source import WeightSource
from hybridtrain.phase import Phase
from hybridtrain.plain_file import read_plain
from hybridtrain.plan.compose import compose
from hybridtrain.run.environment import read_environment
from hybridtrain.run.train_data import RunData, tokenizer_of
from hybridtrain.run.train_log import Say
from hybridtrain.training_file import TrainFile, load_config

CHECKPOINTS = "checkpoints"
"""Folder of checkpoints in a run's folder."""
TOKENIZER = "tokenizer"
"""Folder of tokenizer and chat template in a run's folder, copied by ``export``."""
_TRAINING, _DATA, _ENVIRONMENT = "training.toml", "data.json", "environment.jsonl"
_SAMPLES, _SAMPLE_BYTES = 256, 4096
LOG, FAULTS = "log.jsonl", "faults.jsonl"
_LIBRARIES = ("hybridtrain", "torch", "numpy", "triton", "transformers", "safetensors")


def is_run(folder: Path) -> bool:
    """Return whether a folder is a training run's, by the files of ``write_run_files``."""
    return (folder / _TRAINING).is_file()


def require_places(out: Path) -> None:
    """Raise ``ConfigError`` if existing files would block the files that a run writes."""
    faults = []
    for name in (LOG, FAULTS, _TRAINING, _DATA, _ENVIRONMENT):
        path = out / name
        if (path.is_symlink() or path.exists()) and not path.is_file():
            faults.append(f"{name}: must be a file or absent, but is {_kind(path)}; remove it, or choose another --out")
    for name in (CHECKPOINTS, TOKENIZER):
        path = out / name
        if not path.is_symlink() and not path.exists():
            continue
        if not path.is_dir():
            faults.append(
                f"{name}: must be a folder or absent, but is {_kind(path)}; remove it, or choose another --out"
            )
        elif not os.access(path, os.W_OK | os.X_OK):
            faults.append(f"{name}: is not writable; change its permissions, or choose another --out")
    if faults:
        raise ConfigError(str(out), faults)


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    if not path.exists():
        return f"a link to {path.readlink()}, which does not exist"
    return "a file" if path.is_file() else "a pipe or a device"


def trains_adapters(file: TrainFile) -> bool:
    """Return whether a run trains only adapters, so that its checkpoints lack the base weights."""
    return compose(file.optimizations).for_phase(Phase.FULL).adapter_rank > 0


def open_source(file: TrainFile, *, reads_values: bool, say: Say) -> tuple[WeightSource | None, JsonMapping]:
    """Open the folder of initial weights; return a source of values, and a digest that must be equal on resume.

    The digest covers headers and sizes, as reading all values takes minutes. Without ``reads_values`` the source is
    None.

    Raises:
        ConfigError: the folder does not contain the model.
    """
    if file.model.init_from is None:
        return None, {}
    from hybridtrain.weights.hf_source import open_folder  # noqa: PLC0415  other runs neither read nor list it

    source = open_folder(file.model.init_from, file.model.resolve())
    if reads_values and source.left_out:
        say(f"{file.model.init_from}: {source.left_out}")
    return source if reads_values else None, {"model.init_from": source.digest}


def write_run_files(out: Path, file: TrainFile, data: RunData) -> None:
    """Write a run's files: training file, model shape, tokenizer, and settings that identify its data."""
    begins_with = file.model.init_from
    model = ModelSpec(shape=file.model.resolve(), init_from=None if begins_with is None else begins_with.absolute())
    text = file.data
    if text is not None:
        named = tokenizer_of(file, text)
        text = replace(text, tokenizer=named if named == BYTES else str(Path(named).absolute()))  # export copies it
    adapter = None if file.adapter_from is None else file.adapter_from.absolute()
    content = to_toml(replace(file, model=model, data=text, adapter_from=adapter))
    replace_file(out / _TRAINING, content.encode())
    replace_file(out / _DATA, json.dumps(data.settings, indent=2).encode() + b"\n")
    shutil.rmtree(out / TOKENIZER, ignore_errors=True)
    if data.tokenizer_name:
        is_models = begins_with is not None and Path(data.tokenizer_name).resolve() == begins_with.resolve()
        with new_folder(out / TOKENIZER) as folder:
            write_tokenizer(
                folder, data.tokenizer, data.tokenizer_name, is_models=is_models,
                eos_token="" if text is None else text.eos_token, template=data.template,
            )  # fmt: skip


def note_environment(out: Path, steps_done: int) -> None:
    """Append this call's time, machine, program and library versions."""
    entry = {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"), "steps_done": steps_done,
        "environment": encode(read_environment()),
        "versions": versions_of(),
    }  # fmt: skip
    with (out / _ENVIRONMENT).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def versions_of() -> dict[str, str]:
    """Return the versions of installed libraries that affect results."""
    return {name: version(name) for name in _LIBRARIES if find_spec(name) is not None}


def sampled_digest(folder: Path) -> str:
    """Return a digest of samples of every weight file; different weights differ everywhere."""
    found = sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()[:DIGEST_LENGTH]


def read_run_files(folder: Path) -> tuple[TrainFile, JsonMapping]:
    """Read the files of ``write_run_files``; raises ``ConfigError`` for any other folder."""
    if not is_run(folder):
        raise ConfigError(
            str(folder),
            [f"has no {_TRAINING}, so it is not a run folder; check the path, or resume the run once to write it"],
        )
    try:
        data = json.loads(read_plain(folder / _DATA))
        return load_config(folder / _TRAINING), dict(data)
    except (OSError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(str(folder / _DATA), [f"is damaged ({error}); resume the run to rewrite it"]) from error
