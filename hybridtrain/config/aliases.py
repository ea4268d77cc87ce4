"""Alternative option names of the documents, and their names here: a file may use either."""

import logging
from collections.abc import Mapping
from functools import cache
from typing import Final

OPTIONS: Final[Mapping[str, dict[str, str]]] = {
    "GradientCheckpointing": {"interval": "recompute_every", "checkpoint_interval": "recompute_every"},
    "GradAccumulation": {
        "accumulation_steps": "grad_accum_steps", "gradient_accumulation_steps": "grad_accum_steps",
    },
    "HybridConfig": {"predictor_memory_budget_mib": "predictor_budget_mib"},
}  # fmt: skip
"""Aliases by class: alternative key -> the key that it sets."""
RENAMED: Final = {"says": "description"}
"""Former keys -> present keys, accepted in every table."""
KINDS: Final[Mapping[str, str]] = {
    "adamw_8bit": "int8_optimizer",
    "cpu_offload": "weight_streaming",
    "cpu_offloading": "weight_streaming",
    "gradient_accumulation": "grad_accumulation",
    "model_parallelism": "pipeline",
    "optimizer_state_offload": "optimizer_offload",
    "predict_aware_memory": "predict_memory",
    "quantization": "int8_weights",
}
"""Kinds of optimizations."""


@cache
def log_alias(source: str, alias: str, name: str) -> None:
    """Log that a name was read as another, once for each source."""
    logging.getLogger("hybridtrain.config").warning("%s: %s is read as %s; both names are allowed", source, alias, name)
