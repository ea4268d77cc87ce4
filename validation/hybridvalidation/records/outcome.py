"""Evidence of a figure, and outcome of a run."""

from enum import StrEnum


class Evidence(StrEnum):
    """Evidence of a figure."""

    MEASURED = "measured"
    """On a CUDA card."""
    EXECUTED = "executed"
    """Real arithmetic on the CPU."""
    PLANNED = "planned"
    """Counted by a dry run on the virtual GPU."""
    ESTIMATED = "estimated"
    """From a roofline."""
    ARITHMETIC = "arithmetic"
    """Derived by hand."""


class Outcome(StrEnum):
    """Outcome of a run, or of a part of one."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    """Of the card or of the host; an outcome like any other."""
    DIVERGED = "diverged"
    ERROR = "error"
    WRONG = "wrong"
    """Of a kernel: its result is further from the definition than allowed, and it was not timed."""
    SKIPPED = "skipped"
    """Never started, here or at all; the message says why."""
