"""The job of a record as values: their digest is the key, their differences explain a changed job."""

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256

from hybridtrain.config.encode import DIGEST_LENGTH, JsonValue, to_json
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import SETTINGS, MemoryPlan


def values_of(**parts: object) -> dict[str, str]:
    """Return all values of dataclasses by path, as text.

    >>> from hybridtrain.virtual_gpu.cards.links import Link
    >>> values_of(link=Link(gbps=25.0, hop_seconds=1e-5))
    {'link.gbps': '25', 'link.hop_seconds': '1e-05', 'link.share': '0.8'}
    """
    return {path: text for name, part in parts.items() for path, text in _flat(name, json.loads(to_json(part)))}


def key_of(*values: Mapping[str, str]) -> str:
    """Return 16 hex characters of the SHA-256 of values, independent of order."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the differing values, as ``path: old -> new``, sorted by path.

    >>> differences({"card.memory_mib": "16376", "host.disk_gbps": "4"}, {"card.memory_mib": "16303"})
    ['card.memory_mib: 16376 -> 16303', 'host.disk_gbps: 4 -> absent']
    """
    return [
        f"{path}: {old.get(path, 'absent')} -> {new.get(path, 'absent')}"
        for path in sorted({*old, *new})
        if old.get(path) != new.get(path)
    ]


def _flat(path: str, value: JsonValue) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _flat(f"{path}.{name}", part)
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)


def plan_figures(plan: MemoryPlan) -> dict[str, str]:
    """Return the plan of ordinary steps as ``path: value``; for a cycle also the differences between phases."""
    full = plan.for_phase(Phase.FULL)
    values = full.values()
    kept = {
        path: str(value)
        for path, value in values.items()
        if not (SETTINGS[path].omit_if_default and value == SETTINGS[path].default)
    }
    if not full.history_tensors:
        return kept
    return kept | {
        f"{phase}.{path}": str(value)
        for phase in Phase
        for path, value in plan.for_phase(phase).values().items()
        if value != values[path]
    }
