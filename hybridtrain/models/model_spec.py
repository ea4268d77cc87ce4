"""The model of a training file: a preset, a shape, a folder."""

from dataclasses import dataclass
from pathlib import Path

from hybridtrain.config.rules import added_field
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.models.hf_config import model_config_from_hf
from hybridtrain.models.model_config import PRESETS, ModelConfig, model_preset


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model's shape (a preset, sizes, or a Hugging Face folder), and the source of its initial weights."""

    preset: str | None = None
    """Name of a preset (``hybridtrain list models``)."""
    shape: ModelConfig | None = None
    """Sizes of the model."""
    folder: Path | None = added_field(None)
    """Folder with a ``config.json``; its weights are not read."""
    init_from: Path | None = added_field(None)
    """Folder with the initial weights; without preset, shape or folder its ``config.json`` gives the shape."""

    def __post_init__(self) -> None:
        num_shapes = sum(given is not None for given in (self.preset, self.shape, self.folder))
        if num_shapes > 1 or (num_shapes == 0 and self.init_from is None):
            raise ValueError(
                'give one of preset = "name", folder = "path" and a table [model.shape], or init_from = "path" alone'
            )
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset: {unknown_name('model', self.preset, PRESETS)}")
        if self.preset is None and self.shape is None:
            name = "init_from" if self.folder is None else "folder"
            try:
                self.resolve()
            except ConfigError as error:
                raise ValueError("\n".join(f"{name}: {error.source}: {fault}" for fault in error.faults)) from None

    def resolve(self) -> ModelConfig:
        """Return the shape."""
        if self.shape is not None:
            return self.shape
        if self.preset is not None:
            return model_preset(self.preset)
        folder = self.init_from if self.folder is None else self.folder
        assert folder is not None, "no shape after construction"
        return model_config_from_hf(folder)
