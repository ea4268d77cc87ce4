"""Weights that take no disk and no memory, for scripts that call ``from_pretrained`` under a virtual card."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from hybridtrain.errors import ConfigError
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu

_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")


def write_dummy_weights(folder: Path) -> tuple[list[Path], torch.dtype]:
    """Write beside a model's ``config.json`` the files that ``from_pretrained`` of transformers looks for.

    Their headers and lengths are those of real weights, in the type that the configuration names, float32 where it
    names none, as transformers has it; they read as zeros and take no disk. The configuration stays as it is.

    Returns:
        The files of weights, and their type.

    Raises:
        ConfigError: transformers is missing, there is no usable configuration, or there are weights already.
    """
    config_file = folder / "config.json"
    if find_spec("transformers") is None:
        raise ConfigError("dummy-weights", ["transformers: not installed; run pip install transformers."])
    if not config_file.is_file():
        raise ConfigError(
            "dummy-weights",
            [f"{config_file}: no such file; put the model's config.json there (a few kB, from its hub)."],
        )
    there = [path.name for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))]
    if there:
        raise ConfigError("dummy-weights", [f"{folder}: holds {there[0]} already; name a folder without weights."])
    transformers = import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError("dummy-weights", [f"{config_file}: {str(error).splitlines()[0]}"]) from error
    kinds = [name for name in config.architectures or () if hasattr(transformers, name)]
    if not kinds:
        fault = f"{config_file}: architectures: {config.architectures} is not a class of transformers; name one."
        raise ConfigError("dummy-weights", [fault])
    dtype = config.dtype or config.get_text_config().dtype or torch.float32
    text = config_file.read_bytes()
    import_module("safetensors.torch")
    with _without_bars(), VirtualGpu("h200"):  # any card: nothing is put on it
        model = getattr(transformers, kinds[0])._from_config(config, dtype=dtype)
        model.save_pretrained(folder, max_shard_size="5GB")
    config_file.write_bytes(text)
    return sorted(folder.glob("*.safetensors")), dtype


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers from drawing its progress bars."""
    logging = import_module("transformers.utils.logging")
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
