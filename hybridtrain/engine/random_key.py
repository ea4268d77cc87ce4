"""Keyed random streams: a micro-batch and unit draw the same numbers in any schedule.

A recomputed block draws the same numbers without a saved generator state.
"""

_MASK = (1 << 64) - 1


def random_key(seed: int, *path: int) -> int:
    """Return a 63-bit key for a place in the run, as step, micro-batch, unit (splitmix64, Steele et al. 2014)."""
    state = _mix(seed & _MASK)
    for part in path:
        state = _mix((state + part) & _MASK)  # mixed before each sum: neighbouring seeds must not share streams
    return state >> 1


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
