"""Weight files without data, for scripts that call ``from_pretrained`` under a virtual card."""

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from hybridtrain.atomic_write import new_folder
from hybridtrain.errors import ConfigError
from hybridtrain.models.hf_config import hf_config_of
from hybridtrain.models.model_config import PRESETS
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu

_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")


def write_dummy_model(folder: Path) -> tuple[list[Path], torch.dtype]:
    """Write dummy weights into a folder; a missing folder named as a preset also gets the preset's ``config.json``.

    The preset's weights are bfloat16. Returns and raises as ``write_dummy_weights``.
    """
    preset = PRESETS.get(folder.name)
    if preset is None or folder.exists():
        return write_dummy_weights(folder)
    with new_folder(folder) as partial:
        content = {**hf_config_of(preset), "dtype": "bfloat16"}
        (partial / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        files, dtype = write_dummy_weights(partial)
    return [folder / file.name for file in files], dtype


def write_dummy_weights(folder: Path) -> tuple[list[Path], torch.dtype]:
    """Write weight files for transformers' ``from_pretrained`` beside a model's ``config.json``.

    Headers and lengths equal real ones, in the configuration's dtype (default float32, as in transformers). They are
    sparse files that read as zeros. The configuration is not changed.

    Returns:
        The weight files, and their dtype.

    Raises:
        ConfigError: transformers is missing, the configuration is unusable, or weights exist already.
    """
    config_file = folder / "config.json"
    if find_spec("transformers") is None:
        raise ConfigError("dummy-weights", ["transformers is not installed; run pip install transformers."])
    if not config_file.is_file():
        fault = (
            f"{config_file}: no such file; put the model's config.json there (a few kB, from its hub), or name a new "
            "folder as a preset (hybridtrain list models)."
        )
        raise ConfigError("dummy-weights", [fault])
    there = [path.name for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))]
    if there:
        raise ConfigError("dummy-weights", [f"{folder}: has {there[0]} already; choose a folder without weights."])
    transformers = import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError("dummy-weights", [f"{config_file}: {str(error).splitlines()[0]}"]) from error
    kinds = [name for name in config.architectures or () if hasattr(transformers, name)]
    if not kinds:
        fault = f"{config_file}: architectures: {config.architectures} is not a class of transformers; correct it."
        raise ConfigError("dummy-weights", [fault])
    dtype = config.dtype or config.get_text_config().dtype or torch.float32
    text = config_file.read_bytes()
    import_module("safetensors.torch")
    import_module("transformers.utils.logging").disable_progress_bar()
    with VirtualGpu("h200"):  # any card: nothing is put on it
        model = getattr(transformers, kinds[0])._from_config(config, dtype=dtype)
        model.save_pretrained(folder, max_shard_size="5GB")
    config_file.write_bytes(text)
    return sorted(folder.glob("*.safetensors")), dtype
