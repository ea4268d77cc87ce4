"""The settings that a resumed run must share with its checkpoint, and those that may change."""

import json
from collections.abc import Iterable, Mapping

from hybridtrain.config.encode import JsonValue, flat_settings
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.phase import Phase
from hybridtrain.trainer import Trainer

_NAME_ONLY = "data.name"
"""Shown beside a difference, but never compared: a corpus may be renamed."""
_DATA = "data"
_LAYOUT = "plan"
_MEANING = (
    "plan.normalize_gradients", "plan.scale_lr", "plan.linear", "plan.history_tensors", "plan.adapter_rank",
    "plan.adapter_alpha", "plan.adapter_scaling", "plan.adapter_dropout", "plan.adapter_targets",
    "plan.adapter_magnitude",
)  # fmt: skip
"""Plan settings that change what is trained; the others change only placement and format."""
_FIXED = ("model", "optimizer.kind", "hybrid", *(name for name in _MEANING if "scale_lr" not in name))
"""Settings that can never change: saved tensors would have another meaning."""


def settings_of(
    trainer: Trainer, hybrid: HybridTrainer | None, data: Mapping[str, JsonValue] | None
) -> dict[str, JsonValue]:
    """Return the settings that identify a run, by dotted name."""
    parts: dict[str, object] = {"": trainer.config, "model": trainer.model.config, _LAYOUT: trainer.plan}
    if hybrid is not None and hybrid.config is not None:
        parts["hybrid"] = hybrid.config
        parts |= {
            f"plan in {phase}": trainer.memory_plan.for_phase(phase) for phase in Phase if phase is not Phase.FULL
        }
    return flat_settings(parts) | dict(data or {})


def differences(
    saved: Mapping[str, JsonValue], given: Mapping[str, JsonValue], allowed: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Compare a checkpoint's settings with the current ones; ``allowed`` names, or prefixes before a dot, may change.

    Returns an error for each setting that must not differ, and a line for each allowed change; raises ``ConfigError``
    if an allowed name matches no setting.
    """
    allowed, known = tuple(allowed), {**given, **saved}
    if unknown := [name for name in allowed if name != _DATA and not any(_is_in(setting, [name]) for setting in known)]:
        groups = sorted({name.partition(".")[0].partition(" ")[0] for name in known})
        raise ConfigError(
            "settings allowed to change", [unknown_name("setting", name, [*groups, *known]) for name in unknown]
        )
    names = [name for name in known if given.get(name) != saved.get(name)]
    if names == [_NAME_ONLY]:
        return [], []
    refused, changed = [], []
    for name in names:
        change = f"{name}: {_shown(saved, name)} in the checkpoint, {_shown(given, name)} in this run"
        is_layout = name.startswith((f"{_LAYOUT}.", f"{_LAYOUT} in ")) and not _is_in(
            name.replace(" in ", "."), _MEANING
        )
        if is_layout or (_is_in(name, allowed) and not _is_in(name, _FIXED)):
            changed.append(change)
        else:
            option = "--allow-data-change" if _is_in(name, [_DATA]) else f"--change {name}"
            permit = "" if _is_in(name, _FIXED) else f", allow the change with {option}"
            refused.append(f"{change}; resume with the saved value{permit}, or start a new run in another folder")
    return refused, changed


def _is_in(name: str, groups: Iterable[str]) -> bool:
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def _shown(settings: Mapping[str, JsonValue], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "absent"
