"""Evidence of a figure, and outcome of a run."""

from enum import StrEnum


class Evidence(StrEnum):
    """Evidence of a figure."""

    MEASURED = "measured"
    """Measured on a CUDA card."""
    EXECUTED = "executed"
    """Executed: real arithmetic on the CPU."""
    PLANNED = "planned"
    """Planned by a dry run on the virtual GPU."""
    ESTIMATED = "estimated"
    """Estimated by a roofline."""
    ARITHMETIC = "arithmetic"
    """Derived by arithmetic."""


class Outcome(StrEnum):
    """Outcome of a run, or of a part of one."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    """Out of memory on card or host; a valid outcome."""
    DIVERGED = "diverged"
    ERROR = "error"
    WRONG = "wrong"
    """A kernel's result exceeds its tolerance; it was not timed."""
    SKIPPED = "skipped"
    """Not started; the message states why."""
