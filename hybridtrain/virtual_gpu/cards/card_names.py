"""What to tell of a card that is not in the catalogue: cards of the same model and memory, or why there is none."""

import re
from collections.abc import Mapping

from hybridtrain.errors import known_names

_UNKNOWN_MEMORY = "cannot be planned: its context, allocator settings and kernels' workspaces are not known here."
_ONE_MEMORY = "cannot be planned as it is: card and processor share one memory, which would be counted twice."
_OTHERS = {
    r"(radeon|instinct|vega|rx\d{3,4}|\d{4}xtx?$|mi\d{2,3}|w[67]\d{3}|gfx\d|strix)": (
        f"a card of AMD's ROCm {_UNKNOWN_MEMORY}"
    ),
    r"(intel|arc|a[37][1578]0m?$|b5[78]0$|gaudi|max1\d{3}|flex\d{3})": f"a card of Intel's XPU {_UNKNOWN_MEMORY}",
    r"(apple|mac|m[1-9](pro|max|ultra)?$)": f"Apple's MPS {_ONE_MEMORY} Nor is its allocator known here.",
    r"(dgx)?(gb10|spark)": f"GB10 (DGX Spark) {_ONE_MEMORY} Split it: a .toml file describes the card's part, "
    "--host-memory is the rest.",
}
"""Reasons by the beginning of a name without separators."""
_WORDS = r"nvidia|amd|geforce|tesla|quadro|rtx|gtx|generation|blackwell|edition|workstation|gpu"
_FORM = r"sxm\d?|pcie|nvl|server"
_MEMORY = r"(?<![a-z0-9])(\d+) *(?:gib|gb|g)\b"
_NOMINAL = 0.07
"""Of the memory in a name: nvidia-smi reports as much less (48 GB with ECC: 45 GiB; 192 GB of a B200: 179 GiB)."""


def unknown_card(name: str, catalogue: Mapping[str, tuple[str, int]]) -> str:
    """Return the sentence for a name that is not in the catalogue.

    Args:
        name: As asked for.
        catalogue: Name and MiB that nvidia-smi reports, by short name.
    """
    told = f"{known_names('card', catalogue)} Your own card: a .toml file with its figures."
    if alike := _alike(name, catalogue):
        quoted = " or ".join(f"'{known}'" for known in alike)
        return f"card '{name}' is unknown; did you mean {quoted}? {told}"
    plain = re.sub(r"[^a-z0-9]", "", re.sub(_WORDS, "", name.lower()))
    for beginning, reason in _OTHERS.items():
        if re.match(beginning, plain):
            return f"card '{name}': {reason}"
    return f"card '{name}' is unknown. {told}"


def _alike(name: str, catalogue: Mapping[str, tuple[str, int]]) -> list[str]:
    """Return cards of nvidia-smi's name, or of the same model, and of the memory and form that the name tells."""
    if same := [known for known, (reported, _mib) in catalogue.items() if reported.lower() == name.lower()]:
        return same
    model, form, gib = _parts(name)
    same = [known for known in catalogue if _parts(known)[0] == model]
    if gib is not None:
        same = [known for known in same if abs(catalogue[known][1] / 1024 - gib) <= _NOMINAL * gib]
    return [known for known in same if _parts(known)[1] == form] or same


def _parts(name: str) -> tuple[str, str, int | None]:
    """Return the model, the form (as pcie) and the GiB of a name."""
    text = re.sub(r"[^a-z0-9]+", " ", name.lower().replace("mobile", "laptop"))
    memory, form = re.search(_MEMORY, text), re.search(_FORM, text)
    model = re.sub(rf"{_MEMORY}|{_FORM}|{_WORDS}| ", "", text)
    return model, re.sub(r"\d", "", form[0]) if form else "", int(memory[1]) if memory else None
