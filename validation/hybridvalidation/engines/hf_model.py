"""Models as transformers builds them: its own classes and defaults, random weights."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridtrain.models.hf_config import hf_config_of
from hybridtrain.models.model_config import ModelConfig
from hybridvalidation.engines.task import Task


def hf_config(model: ModelConfig) -> Any:
    """Return the configuration of transformers' class of the family."""
    values = hf_config_of(model) | {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def build_model(task: Task) -> Any:
    """Return the model on the host, with weights in the task's precision."""
    dtype = torch.bfloat16 if task.precision == "bf16" else torch.float32
    return AutoModelForCausalLM.from_config(hf_config(task.model), dtype=dtype)
