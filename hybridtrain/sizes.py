"""Sizes with units: 64GiB, 128GB."""

import re

from hybridtrain.errors import ConfigError
from hybridtrain.units import GB, GIB, MIB

_UNITS = {"MiB": MIB, "GiB": GIB, "MB": GB // 1000, "GB": GB}


def parse_size(text: str, path: str) -> int:
    """Return bytes of a size like ``64GiB``, ``128GB`` or ``500 MiB``; raises ``ConfigError`` that names ``path``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MG]i?B)", text)
    if found is None or float(found[1]) <= 0:
        raise ConfigError(path, [f"'{text}' must be a size above 0 with a unit, as 64GiB or 128GB"])
    return int(float(found[1]) * _UNITS[found[2]])
