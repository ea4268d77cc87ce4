"""The only place where bytes and seconds change their unit or become text."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GB = 10**9


def to_gib(num_bytes: float) -> float:
    """Return bytes as GiB (2**30)."""
    return num_bytes / GIB


def format_bytes(num_bytes: float) -> str:
    """Return bytes as text with a binary unit, three significant digits; infinity is "any number"."""
    if num_bytes == float("inf"):
        return "any number"
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """Return a count as text with a decimal suffix: 1.24B, 124M, 50.3k."""
    for suffix, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if abs(count) >= size:
            return f"{count / size:.3g}{suffix}"
    return f"{count:.3g}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: 12.3 ms, 4.56 s, 3 min 20 s."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:  # two minutes: below, seconds read better
        return f"{seconds:.3g} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"
