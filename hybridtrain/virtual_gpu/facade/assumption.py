"""What a user states about values that a virtual card does not have: ``keep=0.5,lengths=512``."""

from dataclasses import dataclass

_SYNTAX = (
    "give keep=SHARE (above 0, at most 1), lengths=NUMBER (1 or more), or both with a comma, as keep=0.5,lengths=512"
)


@dataclass(frozen=True, slots=True)
class Assumption:
    """Rules for unknown values."""

    keep: float | None = None
    """Share of elements that an unknown mask keeps; None: not stated, which is an error where it decides a size."""
    lengths: int | None = None
    """Value of an unknown integer that is read; None: 1."""

    @classmethod
    def parse(cls, text: str) -> "Assumption":
        """Read the rules from text.

        Raises:
            ValueError: A key is unknown or given twice, or a value is not allowed.
        """
        found: dict[str, str] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in {"keep", "lengths"} or name in found:
                raise ValueError(f"--assume {text}: {part.strip()!r} is unknown or given twice; {_SYNTAX}.")
            found[name] = value
        try:
            made = cls(
                float(found["keep"]) if "keep" in found else None, int(found["lengths"]) if "lengths" in found else None
            )
        except ValueError:
            raise ValueError(f"--assume {text}: a value is no number; {_SYNTAX}.") from None
        if not (made.keep is None or 0 < made.keep <= 1) or not (made.lengths is None or made.lengths >= 1):
            raise ValueError(f"--assume {text}: a value is out of range; {_SYNTAX}.")
        return made

    def kept(self, count: int) -> int | None:
        """Return how many of so many elements a mask keeps; None: not stated."""
        return None if self.keep is None else max(1, round(self.keep * count))
