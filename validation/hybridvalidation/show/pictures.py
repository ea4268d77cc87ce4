"""Records as pictures: what all of them share, and how they are written."""

from contextlib import AbstractContextManager
from pathlib import Path
from textwrap import fill

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hybridtrain.planning.figures import MemoryFigures
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.show.kinds import Plot, kinds_in

COLORS = {
    TensorClass.WEIGHT: "#0072b2", TensorClass.MASTER: "#56b4e9", TensorClass.OPTIM_STATE: "#009e73",
    TensorClass.GRAD: "#d55e00", TensorClass.BOUNDARY: "#f0e442", TensorClass.ACTIVATION: "#e69f00",
    TensorClass.WORKSPACE: "#cc79a7",
}  # fmt: skip
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
_LETTERS_PER_INCH = 10
"""Of a title in 11 points, with room on both sides."""
ORDER = tuple(COLORS)
"""From the bottom: what stays for the whole run, then what comes and goes."""


def write_plots(run: ScenarioRun, folder: Path) -> list[Path]:
    """Write every plot of a scenario as PNG and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with picture_settings():
        for plot in kinds_in("plots", Plot):
            if not plot.has_any(run):
                continue
            figure = Figure(figsize=plot.size(run), layout="constrained")
            plot.draw(run, figure)
            path = folder / f"{run.scenario.name}-{plot.name}.png"
            figure.savefig(path, dpi=110, metadata={"Software": None})
            paths.append(path)
    return paths


def picture_settings() -> AbstractContextManager[None]:
    """Return matplotlib's settings for every picture."""
    return mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False})


def with_memory(run: ScenarioRun) -> list[tuple[str, MemoryFigures]]:
    """Return the stacks that have a dry run with figures."""
    return [(stack, memory) for stack in run.scenario.stacks if (memory := run.memory(stack)) is not None]


def fitting(run: ScenarioRun) -> tuple[list[tuple[str, MemoryFigures]], list[str]]:
    """Return the stacks to show, those that fit, and the names of the others; where none fits all are shown."""
    stacks = with_memory(run)
    fit = [(stack, memory) for stack, memory in stacks if memory.fits]
    return (fit, [stack for stack, memory in stacks if not memory.fits]) if fit else (stacks, [])


def title_lines(text: str, figure: Figure) -> str:
    """Return a title in as many lines as a picture's width asks for."""
    return fill(text, int(_LETTERS_PER_INCH * figure.get_figwidth()))


def card_line(axes: Axes, gib: float, name: str) -> None:
    """Draw what a card holds."""
    axes.axhline(
        gib, color="black", linestyle="--", linewidth=1, label=f"{name.removeprefix('NVIDIA GeForce ')}: {gib:.1f} GiB"
    )
