"""Value rules that many configuration classes share."""

from collections.abc import Iterable


def below_least(owner: object, names: Iterable[str], least: int = 1) -> list[str]:
    """Return a fault for each named field of ``owner`` that is below ``least``."""
    return [f"{name}: {value} must be at least {least}" for name in names if (value := getattr(owner, name)) < least]
