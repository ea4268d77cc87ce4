"""How a figure was got, and how a run ended."""

from enum import StrEnum


class Evidence(StrEnum):
    """Every figure carries one of these."""

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


EVIDENCE_OF_KIND = {"dry_run": Evidence.PLANNED, "accuracy": Evidence.EXECUTED, "measured": Evidence.MEASURED}
"""How the figures of each kind of run are got."""


class Outcome(StrEnum):
    """How a run ended."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    DIVERGED = "diverged"
    ERROR = "error"
