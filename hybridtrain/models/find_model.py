"""A model's shape by name: a preset, a file, a folder, a name on the hub. No torch."""

import os
import re
from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from hybridtrain.config.decode import load_toml
from hybridtrain.errors import ConfigError
from hybridtrain.models.hf_config import model_config_from_hf
from hybridtrain.models.model_config import PRESETS, ModelConfig, model_preset

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_CONFIG = "config.json"
_PATIENCE_S = 5.0
"""Within which the hub must answer."""
_YES = {"1", "ON", "YES", "TRUE"}
"""Values of a variable that huggingface_hub takes for yes."""


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
    """Return the path of ``config.json`` of a model on the hub, kept from before or fetched."""
    try:
        import huggingface_hub as hub  # noqa: PLC0415  optional
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415
    except ImportError:
        raise _not_fetched(name, "the package huggingface_hub is not installed (pip install it)") from None
    try:
        kept = hub.try_to_load_from_cache(name, _CONFIG)
        if isinstance(kept, str):
            return Path(kept)
        if reason := _unreachable(hub.hf_hub_url(name, _CONFIG)):
            raise _not_fetched(name, f"the hub cannot be reached ({reason})")
        return Path(hub.hf_hub_download(name, _CONFIG))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:  # the last: no such name can be
        raise _not_fetched(name, f"the hub does not have it ({str(error).strip().splitlines()[0]})") from error


def _unreachable(url: str) -> str:
    """Return why no server answers at ``url``, empty if one does; huggingface_hub would retry for half a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _YES:
        return "HF_HUB_OFFLINE is set"
    try:
        with urlopen(Request(url, method="HEAD"), timeout=_PATIENCE_S):  # noqa: S310  the hub's own address
            return ""
    except HTTPError:
        return ""
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        return "" if isinstance(reason, SSLError) else str(reason)  # huggingface_hub may know other certificates


def _not_fetched(name: str, reason: str) -> ConfigError:
    preset = name.rpartition("/")[2].lower()
    near = f"the preset {preset}" if preset in PRESETS else "a preset (hybridtrain list models)"
    fault = f"'{name}' is not a folder here, and {reason}; give {near}, or a folder that holds the model's config.json"
    return ConfigError("model", [fault])
