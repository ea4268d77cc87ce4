"""What a run depends on is saved and read back by its types; what is damaged is refused with its path."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_runs import fresh_hybrid, hybrid_config, remembers, run_steps
from hybridtrain.errors import ConfigError
from hybridtrain.hybrid.cycle import HybridTrainer
from tiny_models import GPT2_UNTIED

CONFIGS = {
    "linear": hybrid_config(predictor="linear", forecaster="ema"),
    "power_law": hybrid_config(fuse=False),
    "mlp": hybrid_config(predictor="mlp", correction="probe_gradients"),
}
ENSEMBLE = "watch forecaster ensemble"
PENDING = "watch forecaster calibrator pending"
BAD: dict[str, tuple[str, str, Callable[[Any], object]]] = {
    "statistics.cost: found many (str); float is required": ("power_law", "statistics cost", lambda _: "many"),
    "statistics.jumps: found True (bool); int is required": ("power_law", "statistics jumps", lambda _: True),
    "controller.state.phase: found jump (str); Phase": ("power_law", "controller state phase", lambda _: "jump"),
    "controller.state.rises: found nan (str)": ("power_law", "controller state rises", lambda _: ["nan"]),
    "watch.monitor: found [] (list); dict": ("power_law", "watch monitor", lambda _: []),
    "watch.forecaster.kind: the state is of forecaster 'ema'": ("mlp", "watch forecaster kind", lambda _: "ema"),
    "watch.forecaster.calibrator.pending.mean: missing": ("linear", PENDING, lambda _: [
        {"first_step": 1, "last_step": 2}
    ]),
    "watch.forecaster.ensemble.flat: found torch.float32 (3,)": ("mlp", f"{ENSEMBLE} flat", lambda _: torch.zeros(3)),
    "watch.forecaster.ensemble.m: found None (NoneType)": ("mlp", f"{ENSEMBLE} m", lambda _: None),
    "predictor.has_anchor: found 1.0 (float); bool": ("linear", "predictor has_anchor", lambda _: 1.0),
    "pending.rms: found  (str); float": ("power_law", "pending", lambda _: {
        "step": 1, "predicted_steps": 1.0, "lr": 1.0, "rms": "", "num_forwards": 0
    }),
}  # fmt: skip


def made(name: str) -> HybridTrainer:
    config = CONFIGS[name]
    kind = "slow_gradient" if config.follows_slow else config.predictor
    return fresh_hybrid(GPT2_UNTIED, [remembers(kind)], config)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_state_is_what_torch_reads_and_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:
    hybrid, other = made(name), made(name)
    run_steps(hybrid, 5)
    state = hybrid.state_dict()
    torch.save(state, tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert repr(other.state_dict()) == repr(state)


@pytest.mark.parametrize("fault", BAD)
def test_a_damaged_value_is_named(fault: str) -> None:
    name, place, damage = BAD[fault]
    state: dict[str, Any] = made(name).state_dict()
    *outer, last = place.split()
    inner = state
    for key in outer:
        inner = inner[key]
    inner[last] = damage(inner[last])
    with pytest.raises(ConfigError) as caught:
        made(name).load_state_dict(state)
    assert caught.value.faults[0].startswith(fault)


def test_a_missing_value_is_named() -> None:
    state = made("linear").state_dict()
    del state["num_probes"]
    with pytest.raises(ConfigError, match="num_probes: missing in the checkpoint; use an older one"):
        made("linear").load_state_dict(state)
