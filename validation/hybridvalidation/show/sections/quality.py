"""What a scenario's stacks cost in quality, as far as ladders executed it on small models."""

from tabulate import tabulate

from hybridvalidation.show.kinds import Section, View

_HEADERS = (
    "stack", "arm", "parameters", "tokens a parameter", "seeds", "against", "loss above it, nats", "top-1 kept %",
    "verdict",
)  # fmt: skip
_HOW = (
    "Executed: small models of the sizes told, trained from the start on the CPU, adapters from where the baseline "
    "ended, on another text; no figure of this scenario's size. Loss above and top-1 accuracy over those of the arm "
    "that it is compared with, means and 95 % intervals over paired seeds; an arm shares the runs of all stacks that "
    "compute the same. The ladder has a page of its own."
)


def _parts(view: View) -> list[str]:
    rows = [[stack, *view.quality[stack]] for stack in view.run.scenario.stacks if stack in view.quality]
    if not rows:
        return []
    return [
        view.title("What it costs in quality, on small models"),
        tabulate(rows, headers=_HEADERS, tablefmt=view.style, disable_numparse=True), _HOW,
    ]  # fmt: skip


SECTION = Section(order=35, parts=_parts)
