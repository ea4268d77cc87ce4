"""Adapters exported to and imported from PEFT's files, or merged into their weights."""

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hybridtrain.atomic_write import new_folder
from hybridtrain.config.encode import JsonMapping, JsonValue
from hybridtrain.data.tokenizer_files import copy_tokenizer
from hybridtrain.engine.parameter_pass import ParameterSlice, PassSettings
from hybridtrain.errors import ConfigError
from hybridtrain.memory.block_slots import Visit
from hybridtrain.memory.stored_layout import block_number
from hybridtrain.models.adapter import Adapter, is_adapter, without_adapters
from hybridtrain.models.hf_config import read_json
from hybridtrain.models.linear import Linear
from hybridtrain.models.widening import widened
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import AdapterScaling, PhasePlan
from hybridtrain.tensor_file import DTYPES, TensorFileWriter, open_tensor_file
from hybridtrain.trainer import Trainer
from hybridtrain.weights.disk_names import disk_weight
from hybridtrain.weights.exact_values import exact_values

_FILE, _CONFIG, _PICKLE = "adapter_model.safetensors", "adapter_config.json", "adapter_model.bin"
_PEFT_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_MIDDLE = ".adapter."
_PREFIX = "base_model.model."
_BLOCK = re.compile(r"^.*?\.\d+\.")
_UNKNOWN = (
    "bias", "lora_bias", "modules_to_save", "layers_to_transform", "layer_replication", "rank_pattern", "alpha_pattern",
    "target_parameters", "trainable_token_indices",
)  # fmt: skip
"""PEFT settings that would change the model, and are not supported."""
_REMEDIES = {
    "peft_type": "only LoRA and its variants are supported", "r": "set lora's rank", "lora_alpha": "set lora's alpha",
    "use_rslora": "set lora's scaling", "use_dora": "set lora's magnitude",
}  # fmt: skip


def has_adapters(trainer: Trainer) -> bool:
    """Return whether the trained parameters are adapters."""
    return trainer.plan.adapter_rank > 0


@torch.no_grad()
def merged_values(trainer: Trainer) -> Iterator[tuple[str, slice, Tensor]]:
    """Yield every parameter of the model without adapters, whole, as ``exact_values`` does.

    A matrix with an adapter is W + scale B A in float32 (DoRA: rescaled by rows), with W dequantized. One matrix is in
    memory at a time.
    """
    trained = _trained_values(trainer)
    units, weights = trainer.model.units(), trainer.weights
    weights.plan_visits([Visit(block) for block in range(len(units) - 2)])
    for unit in units:
        number = block_number(unit.name)
        block = weights.acquire(number) if number >= 0 else None
        named = [(f"{unit.name}.{name}", p) for name, p in without_adapters(block)] if block else unit.frozen
        for name, parameter in named:
            path, _, part = name.removeprefix(f"{unit.name}.").rpartition(".")
            with widened(parameter):
                value = parameter.detach().float()
            linear = block.get_submodule(path) if block and path else None
            if isinstance(linear, Linear) and isinstance(linear.adapter, Adapter) and part == "weight":
                value = _exact(linear.adapter, f"{unit.name}.{path}", trained).merged(value)
            yield name, slice(0, parameter.numel()), value.reshape(-1)


def _trained_values(trainer: Trainer) -> dict[str, Tensor]:
    """Return the exact values of all adapters, flat, on the device: small beside what is frozen."""
    parts_by_name: dict[str, list[Tensor]] = {}
    for name, _, value_P in exact_values(trainer):
        parts_by_name.setdefault(name, []).append(value_P.detach().reshape(-1).clone())
    return {name: torch.cat(parts) for name, parts in parts_by_name.items()}


def _exact(adapter: Adapter, matrix: str, trained: dict[str, Tensor]) -> Adapter:
    exact = copy.deepcopy(adapter).float()
    for name, parameter in exact.named_parameters():
        parameter.copy_(trained[f"{matrix}{_MIDDLE}{name}"].view(parameter.shape))
    return exact


def export_adapter(
    trainer: Trainer, folder: Path, *, base: str, tokenizer_folder: Path | None = None
) -> list[Path]:  # fmt: skip
    """Write adapters exactly, in PEFT's format for ``PeftModel.from_pretrained``; return the files.

    Args:
        trainer: The trainer with the adapters.
        folder: Absent or empty.
        base: Name or folder of the base model, which PEFT loads.
        tokenizer_folder: Folder of the tokenizer and chat template to copy.

    Raises:
        ConfigError: there are no adapters, or the folder holds something.
    """
    if not has_adapters(trainer):
        raise ConfigError(str(folder), ["the model has no adapters; export the whole model"])
    require_free(folder)
    places = _places(trainer)
    with new_folder(folder) as partial:
        file = partial / _FILE
        with closing(TensorFileWriter(file, [(*head, torch.float32) for head in places.values()])) as writer:
            for name, elements, value_P in exact_values(trainer):
                writer.write(places[name][0], elements.start, value_P.reshape(-1).cpu())
        content: JsonMapping = {
            **_settings(trainer.plan), "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
            "inference_mode": True, "lora_dropout": trainer.plan.adapter_dropout, "bias": "none",
            "target_modules": [*_modules(name for name, _ in places.values())],
            "fan_in_fan_out": trainer.model.config.family == "gpt2",
        }  # fmt: skip
        (partial / _CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if tokenizer_folder is not None:
            copy_tokenizer(tokenizer_folder, partial)
    return sorted(folder.iterdir())


def _places(trainer: Trainer) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return PEFT's name and the shape of every parameter of adapters."""
    places = {}
    for name, parameter in trainer.model.named_unit_parameters():
        if is_adapter(name):
            matrix, _, part = name.partition(_MIDDLE)
            theirs = disk_weight(trainer.model.config, f"{matrix}.weight").names[0].removesuffix(".weight")
            places[name] = (f"{_PREFIX}{theirs}.{_PEFT_NAMES[part]}", tuple(parameter.shape))
    return places


def _modules(names: Iterable[str]) -> list[str]:
    """Return the modules that tensors belong to, as seen from their block: ``self_attn.q_proj``."""
    paths = (name.removeprefix(_PREFIX).partition(".lora_")[0] for name in names)
    return list(dict.fromkeys(_BLOCK.sub("", path) for path in paths))


@torch.no_grad()
def load_adapter(trainer: Trainer, folder: Path) -> None:
    """Load adapters, before the first step, from a folder that PEFT or ``export_adapter`` wrote.

    Values are exact if adapters are float32 or have masters, else rounded to nearest. The plan's adapters must be of
    the same kind; dropout may differ. Nothing is unpickled.

    Raises:
        ConfigError: files are missing, damaged, pickled or of other adapters; each difference is a fault.
    """
    if not has_adapters(trainer):
        raise ConfigError(str(folder), ["the model has no adapters; add lora to the stack"])
    assert not trainer.steps_done, "loading adapters after a step would leave wrong moments"
    if not (folder / _FILE).is_file():
        raise ConfigError(str(folder), [_no_adapter(folder)])
    places = _places(trainer)
    faults = list(_config_faults(trainer, read_json(folder / _CONFIG, "save the adapter again")))
    tensors = open_tensor_file(folder / _FILE).tensors
    shapes = dict(places.values())
    wanted, present = sorted(_modules(shapes)), sorted(_modules(tensors))
    if wanted != present:
        faults.append(
            f"the adapters are of {', '.join(present)}, the plan's of {', '.join(wanted)}; set lora's targets"
        )
    else:
        strange = {*tensors} - {*shapes}
        faults += [f"{name}: not an adapter of this model; use the model that it was trained for" for name in strange]
        for theirs, shape in shapes.items():
            tensor = tensors.get(theirs)
            if tensor is None:
                faults.append(f"{theirs}: missing; shape {shape} is required: save the adapter again")
            elif tensor.shape != shape or tensor.dtype_name not in DTYPES:
                faults.append(
                    f"{theirs}: {tensor.dtype_name} {tensor.shape} must be {shape} of {', '.join(DTYPES)}; use the "
                    f"model and the rank that it was trained with"
                )
    if faults:
        raise ConfigError(str(folder), sorted(faults))
    _write_values(
        trainer, {ours: tensors[theirs].read(slice(0, prod(shape))) for ours, (theirs, shape) in places.items()}
    )


def _write_values(trainer: Trainer, values: Mapping[str, Tensor]) -> None:
    """Write flat values of all adapters, which are small, wherever and however they are stored."""
    trainer.enter_phase(Phase.FULL)
    names = {unit.name: [name for name, _ in unit.parameters] for unit in trainer.model.units()}

    def write(piece: ParameterSlice) -> None:
        piece.weight.value.view(-1).copy_(values[names[piece.unit][piece.index]][piece.part])

    trainer.parameters.visit(write, PassSettings(uses_extra=False, rounds_to_nearest=True))
    trainer.transfer.finish()


def _no_adapter(folder: Path) -> str:
    if (folder / _PICKLE).is_file():
        return (
            f"{_PICKLE} is a pickle, which can run code and is never opened; adapters must be safetensors: convert "
            "them where you trust them, by PEFT's save_pretrained"
        )
    return f"has no {_FILE}; give a folder that PEFT's save_pretrained wrote"


def _config_faults(trainer: Trainer, config: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yield a sentence for each setting that makes another adapter than the plan's."""
    for name, value in _settings(trainer.plan).items():
        given = config.get(name, False if isinstance(value, bool) else None)
        if given != value:
            yield f"{name}: {json.dumps(given)}, the plan has {json.dumps(value)}; {_REMEDIES[name]}"
    for name in _UNKNOWN:
        if config.get(name) not in (None, False, "none", [], {}):
            yield f"{name}: {json.dumps(config[name])} is not supported; use an adapter trained without it"
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "eva", "orthogonal"):
        yield (
            f"init_lora_weights: {json.dumps(config['init_lora_weights'])} changes the base weights; let PEFT convert "
            f"the adapter to plain LoRA when saving"
        )


def require_free(folder: Path) -> None:
    """Raise ``ConfigError`` if a folder is not empty: exports overwrite nothing."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(str(folder), ["exists already; the folder must be absent or empty: choose another"])


def _settings(plan: PhasePlan) -> JsonMapping:
    """Return the PEFT settings that define an adapter."""
    return {
        "peft_type": "LORA", "r": plan.adapter_rank, "lora_alpha": plan.adapter_alpha,
        "use_rslora": plan.adapter_scaling is AdapterScaling.RSLORA, "use_dora": plan.adapter_magnitude,
    }  # fmt: skip
