"""A model's shape by name: a preset, a file, a folder, a name on the hub. No torch."""

import re
from pathlib import Path

from hybridtrain.config.decode import load_toml
from hybridtrain.errors import ConfigError
from hybridtrain.models.hf_config import model_config_from_hf
from hybridtrain.models.model_config import PRESETS, ModelConfig, model_preset

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def find_model(text: str) -> ModelConfig:
    """Return the shape of a named model; raises ``ConfigError`` if it is unknown or its file is invalid.

    ``text`` is a preset's name; a ``.toml`` file with a shape; a Hugging Face folder, or its ``config.json``; or a hub
    id such as ``Qwen/Qwen3-8B``, of which only ``config.json`` is downloaded.
    """
    path = Path(text)
    if text in PRESETS:
        return PRESETS[text]
    if path.suffix == ".toml":
        return load_toml(ModelConfig, path)
    if path.suffix == ".json" or path.is_dir():
        return model_config_from_hf(path)
    if _HUB_ID.fullmatch(text):
        return model_config_from_hf(_fetched(text))
    if "/" in text:
        fault = f"'{text}' is neither a folder nor a hub id; give a Hugging Face folder, or ORG/NAME"
        raise ConfigError("model", [fault])
    return model_preset(text)


def _fetched(name: str) -> Path:
    """Return the path of ``config.json`` of a model on the hub, fetched or kept from before."""
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415  optional
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415
    except ImportError:
        fault = (
            f"'{name}' is not a folder, and hub ids need huggingface_hub: pip install huggingface_hub, or give a folder"
        )
        raise ConfigError("model", [fault]) from None
    try:
        return Path(hf_hub_download(name, "config.json"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:  # the last: no such name can be
        reason = str(error).strip().splitlines()[0]
        fault = (
            f"'{name}' is not a folder, and was not found on the hub ({reason}); give a folder, or check the network"
        )
        raise ConfigError("model", [fault]) from error
