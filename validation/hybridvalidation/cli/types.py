"""Types of arguments: numbers that a verb can work with."""

import argparse
import math


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' must be a whole number of at least 1") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def positive_number(text: str) -> float:
    """Return a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' must be a number above 0") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a finite number above 0")
    return value
