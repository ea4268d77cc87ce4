"""Where the memory goes: by tensor class at the peak, and what held it when a card was too small."""

from collections.abc import Mapping

from tabulate import tabulate

from hybridtrain.reports.tables import MARKDOWN
from hybridtrain.units import to_gib
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.show.kinds import Section, View

_TITLE = "Where the memory goes, GiB allocated at the peak (planned)"

_PHASES = "Phase by phase through a cycle, GiB allocated at the peak (planned)"


def class_table(run: ScenarioRun, style: str) -> str:
    """Return where the memory goes: GiB by tensor class at each stack's peak."""
    rows = []
    for stack in run.scenario.stacks:
        memory = run.memory(stack)
        cells = ["-"] * (len(TensorClass) + 1)
        if memory is not None:
            peak = max(memory.steps, key=lambda step: step.allocated_bytes)
            cells = [
                *(f"{to_gib(memory.by_class[name]):.2f}" for name in TensorClass),
                f"step {peak.step}, {peak.stage} {peak.unit}".strip(),
            ]
        rows.append([stack, *cells])
    headers = ["stack", *(name.replace("_", " ") for name in TensorClass), "peak at"]
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def phase_table(run: ScenarioRun, style: str) -> str:
    """Return the peak of each phase, for stacks whose steps have several; empty without any."""
    peaks = {
        stack: {phase: max(step.allocated_bytes for step in memory.steps if step.phase == phase) for phase in phases}
        for stack in run.scenario.stacks
        if (memory := run.memory(stack)) is not None
        and len(phases := list(dict.fromkeys(step.phase for step in memory.steps))) > 1
    }
    if not peaks:
        return ""
    names = list(dict.fromkeys(phase for of_phase in peaks.values() for phase in of_phase))
    rows = [
        [stack, *(f"{to_gib(of_phase[name]):.2f}" if name in of_phase else "-" for name in names)]
        for stack, of_phase in peaks.items()
    ]
    return tabulate(rows, headers=["stack", *names], tablefmt=style, disable_numparse=True)


def outcome_lines(run: ScenarioRun) -> list[str]:
    """Return a sentence for every run that did not end well, and for every refused request."""
    lines = []
    for (kind, stack), record in sorted(run.records.items()):
        memory = record.memory
        if memory is not None and memory.oom is not None:
            oom = memory.oom
            place = f"step {oom.step}, {oom.stage} {oom.unit}".strip() if oom.step else "while the model is built"
            largest = ", ".join(f"{name} {to_gib(size):.2f} GiB" for name, size in _largest(oom.by_class))
            lines.append(
                f"{stack}: out of memory ({place}): {to_gib(oom.requested_bytes):.2f} GiB requested with "
                f"{to_gib(oom.allocated_bytes):.2f} of {to_gib(oom.capacity_bytes):.2f} GiB allocated ({largest})."
            )
        elif record.outcome is not Outcome.OK:
            shortage = "" if memory is None else memory.shortage(run.scenario.host)
            reason = record.message or shortage or "no reason was recorded"
            lines.append(f"{stack}: {kind} ended as {record.outcome}: {reason}")
    return lines


def _largest(by_class: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((name, size) for name, size in by_class.items() if size), key=lambda item: -item[1])[:3]


def _parts(view: View) -> list[str]:
    bullet = "- " if view.style == MARKDOWN else ""
    return [
        view.title(_TITLE),
        class_table(view.run, view.style),
        *([view.title(_PHASES), phases] if (phases := phase_table(view.run, view.style)) else []),
        *(f"{bullet}{line}" for line in outcome_lines(view.run)),
    ]


SECTION = Section(order=20, parts=_parts)
