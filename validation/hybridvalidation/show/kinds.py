"""What can be shown: sections of a scenario's page, pictures of a scenario, and pages of their own.

A section is a file in ``sections/``, a picture one in ``plots/``, a page one in ``pages/``, pictures to point at (of a
scenario or of pages) one in ``charts/``. A file is found by being there: it holds an object of its kind, and nothing
else has to know of it.
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hybridtrain.reports.tables import MARKDOWN
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.verdict import Elsewhere
from hybridvalidation.scenario import Target
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.drawing import Drawing

if TYPE_CHECKING:  # half a second that a dry run does not need
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a section is asked to show, and how."""

    run: ScenarioRun
    targets: Mapping[str, Target]
    style: str
    elsewhere: Elsewhere
    """Verdicts that were reached elsewhere."""
    quality: Mapping[str, tuple[str, ...]]
    """What ladders say of a stack, by its name: a row of the section quality."""

    def title(self, text: str) -> str:
        """Return the section's title as its style has it."""
        return f"## {text}" if self.style == MARKDOWN else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a scenario's page."""

    order: int
    """Smaller ones come first."""
    parts: Callable[[View], list[str]]
    """Paragraphs; none where there is nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A picture of a scenario."""

    order: int
    name: str
    """End of the file's name."""
    size: Callable[[ScenarioRun], tuple[float, float]]
    """Inches."""
    draw: "Callable[[ScenarioRun, Figure], None]"
    has_any: Callable[[ScenarioRun], bool] = lambda _run: True
    """Whether a scenario has this picture at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Tables of records that belong to no scenario."""

    order: int
    write: Callable[[ScenarioFiles, Path], list[Path]]
    """Writes below the folder of results what its records say; returns the files, none without records."""
    group: str
    """Heading under which a menu lists it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Pictures of a scenario to point at and zoom into."""

    order: int
    draw: Callable[[ScenarioRun], Sequence[Drawing]]
    """None where there is nothing to see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageChart:
    """The same of pages."""

    order: int
    draw: Callable[[ScenarioFiles, Path], Mapping[str, Sequence[Drawing]]]
    """Pictures by the page's name, from the folder of results."""


K = TypeVar("K", Section, Plot, Page, Chart, PageChart)


def kinds_in(package: str, kind: type[K]) -> list[K]:
    """Return the objects of a kind that the modules of ``hybridvalidation.show.PACKAGE`` hold, in their order."""
    folder = import_module(f"hybridvalidation.show.{package}")
    modules = [import_module(f"{folder.__name__}.{info.name}") for info in pkgutil.iter_modules(folder.__path__)]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, kind)]
    return sorted(found, key=lambda item: item.order)
