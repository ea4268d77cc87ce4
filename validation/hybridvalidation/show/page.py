"""A page: Markdown with its pictures, rendered as a file beside others and as HTML.

A file in ``pages/`` makes pages of one kind. It is found by being there: it holds a ``Source``, and nothing else has to
know of it.
"""

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from hybridtrain.atomic_write import replace_file
from hybridtrain.reports.tables import write_page
from hybridvalidation.pictures.picture import Picture
from hybridvalidation.show.results import Results


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Text, tables and pictures of one subject."""

    name: str
    """Of its files, without an ending."""
    group: str
    """Heading under which a menu lists it."""
    text: str
    """Markdown, the title first; pictures stand where ``png_links`` puts them."""
    pictures: Sequence[Picture] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    """PNGs that were drawn elsewhere, by name."""

    @property
    def summary(self) -> str:
        """The first paragraph below the title."""
        return self.text.split("\n\n")[1]

    def write(self, folder: Path) -> list[Path]:
        """Write ``tables/NAME.md`` and ``plots/*.png`` below a folder of results."""
        from hybridvalidation.pictures.png import png_of  # noqa: PLC0415  matplotlib takes half a second

        drawn = {png_name(self.name, picture): png_of(picture) for picture in self.pictures if picture.is_png}
        written = [write_page(folder, self.name, self.text)]
        for name, content in {**drawn, **self.files}.items():
            written.append(folder / "plots" / name)
            replace_file(written[-1], content)
        return written


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Pages of one kind."""

    order: int
    """Smaller ones come first."""
    pages: Callable[[Results], Iterable[Page]]
    """From records; none without."""


def sources() -> dict[str, Source]:
    """Return every source of pages by the name of its module, in their order."""
    folder = import_module("hybridvalidation.show.pages")
    names = [info.name for info in pkgutil.iter_modules(folder.__path__)]
    found = {name: import_module(f"{folder.__name__}.{name}").SOURCE for name in names}
    return dict(sorted(found.items(), key=lambda item: item[1].order))


def png_name(page: str, picture: Picture) -> str:
    """Return the file of a page's picture."""
    return f"{page}.png" if picture.name == page else f"{page}-{picture.name}.png"


def png_links(page: str, pictures: Iterable[Picture]) -> str:
    """Return Markdown that shows a page's pictures."""
    files = [Path(png_name(page, picture)) for picture in pictures if picture.is_png]
    return "\n".join(f"![{file.stem}](../plots/{file.name})" for file in files)
