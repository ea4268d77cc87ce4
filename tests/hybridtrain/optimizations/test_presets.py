"""A preset stands for settings, and what a file says besides wins."""

from dataclasses import dataclass, fields

import pytest

from hybridtrain.config.decode import decode
from hybridtrain.errors import ConfigError
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.plan.compose import Optimization

UNIONS = {Optimization: OPTIMIZATIONS}
WITH_PRESETS = {kind: found for kind, found in OPTIMIZATIONS.items() if hasattr(found, "PRESETS")}


@dataclass(frozen=True)
class File:
    optimization: Optimization


def read(**table: object) -> Optimization:
    return decode(File, {"optimization": table}, source="file", unions=UNIONS).optimization


@pytest.mark.parametrize("kind", WITH_PRESETS)
def test_every_preset_makes_its_optimization(kind: str) -> None:
    presets = WITH_PRESETS[kind].PRESETS  # type: ignore[attr-defined]
    assert set(presets) == {"conservative", "aggressive"}
    found = {name: read(kind=kind, preset=name) for name in presets}
    assert found["conservative"] != found["aggressive"]
    for name, settings in presets.items():
        assert {key: getattr(found[name], key) for key in settings} == dict(settings)


def test_what_the_file_says_wins() -> None:
    found = read(kind="grad_accumulation", preset="aggressive", grad_accum_steps=32)
    assert {field.name: getattr(found, field.name) for field in fields(found)}["grad_accum_steps"] == 32  # type: ignore[arg-type]
    assert found.schedule == "vertical"  # type: ignore[attr-defined]


def test_an_unknown_preset_and_one_where_there_is_none_are_faults() -> None:
    with pytest.raises(ConfigError, match="'agressive' is not one of conservative, aggressive; did you mean"):
        read(kind="mixed_precision", preset="agressive")
    with pytest.raises(ConfigError, match="preset: is an unknown key"):
        read(kind="fused_update", preset="aggressive")
