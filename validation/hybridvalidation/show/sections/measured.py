"""The plan beside what a card measured."""

from tabulate import tabulate

from hybridtrain.units import to_gib
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.show.kinds import Section, View

_TITLE = "Planned / measured under the card's cap"


def measured_table(run: ScenarioRun, style: str) -> str:
    """Return plan against measurement per stack; empty where nothing was measured."""
    rows = []
    for stack in run.scenario.stacks:
        record, planned = run.get("measured", stack), run.memory(stack)
        if record is None or planned is None:
            continue
        if record.measured is None:
            rows.append([stack, record.outcome, "-", "-", "-", "-"])
            continue
        found = record.measured
        rows.append(
            [
                stack, record.outcome,
                _against(planned.peak_allocated_bytes, found.peak_allocated_bytes),
                _against(planned.peak_reserved_bytes, found.peak_reserved_bytes),
                _against(planned.device_used_bytes, found.device_used_bytes),
                f"{planned.tokens_per_s:,.0f} / {found.tokens_per_s:,.0f}",
            ]
        )  # fmt: skip
    headers = ["stack", "outcome", "allocated", "reserved", "device", "tokens/s"]
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True) if rows else ""


def _against(planned: int, measured: int) -> str:
    return f"{to_gib(planned):.2f} / {to_gib(measured):.2f} GiB ({100 * (planned / measured - 1):+.1f} %)"


def _parts(view: View) -> list[str]:
    table = measured_table(view.run, view.style)
    return [view.title(_TITLE), table] if table else []


SECTION = Section(order=30, parts=_parts)
