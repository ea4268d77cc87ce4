"""Absurd sizes are refused by arithmetic where they are declared, before anything is made of them."""

from dataclasses import replace

import pytest

from hybridtrain.config.decode import decode
from hybridtrain.errors import ConfigError, PlanConflictError
from hybridtrain.models.model_config import PRESETS, BatchWorkload, Workload
from hybridtrain.optimizations.grad_accumulation import GradAccumulation
from hybridtrain.optimizations.lora import Lora
from hybridtrain.plan.compose import compose
from hybridtrain.plan.memory_plan import SETTINGS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_blocks", 10**9), ("width", 12 * 10**12), ("vocab_size", 10**21), ("max_seq_len", 10**18),
        ("ffn_width", 10**15), ("num_heads", 10**9), ("head_size", 10**10), ("sliding_window", 10**30),
    ],
)  # fmt: skip
def test_a_model_beyond_all_bounds_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{name}: {value} must be at most"):
        replace(PRESETS["gpt2-small"], **{name: value})


def test_a_model_whose_sizes_are_allowed_one_by_one_may_have_too_many_parameters() -> None:
    with pytest.raises(ValueError, match="parameters must be at most"):
        replace(PRESETS["gpt2-small"], width=12 * 2**16, ffn_width=2**22, num_blocks=2**12)


@pytest.mark.parametrize("values", [{"batch_size": 10**13, "seq_len": 128}, {"batch_size": 1, "seq_len": 10**21}])
def test_a_batch_beyond_all_bounds_is_refused(values: dict[str, int]) -> None:
    micro = {"micro_batch_size" if name == "batch_size" else name: value for name, value in values.items()}
    for cls, given in ((BatchWorkload, values), (Workload, micro)):
        with pytest.raises(ConfigError, match="allowed are at most 67108864"):
            decode(cls, given, source="file")


def test_every_number_of_the_plan_has_an_upper_bound() -> None:
    assert SETTINGS["grad_accum_steps"].most < 10**6
    assert all(setting.most < 2**31 for setting in SETTINGS.values())


def test_an_optimization_beyond_all_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="grad_accum_steps: 1000000000 must be at most"):
        GradAccumulation(grad_accum_steps=10**9)
    with pytest.raises(PlanConflictError, match="adapter_rank: 1000000000000 must be at most"):
        compose([Lora(rank=10**12)])
