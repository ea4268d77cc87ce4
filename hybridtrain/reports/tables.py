"""What tables have in common: their style, a column of verdicts, and the folder they are written to."""

from pathlib import Path

from hybridtrain.atomic_write import replace_file
from hybridtrain.virtual_gpu.cards.card import FitVerdict

TERMINAL, MARKDOWN = "simple", "github"
_FITS = {FitVerdict.FITS: "yes", FitVerdict.BARELY: "barely", FitVerdict.NO: "NO"}


def fits_cell(verdict: FitVerdict) -> str:
    """Return whether a plan fits as a cell of a column 'fits'."""
    return _FITS[verdict]


def write_page(results: Path, name: str, text: str) -> Path:
    """Write a page of Markdown as ``tables/NAME.md`` below the folder of results."""
    path = results / "tables" / f"{name}.md"
    replace_file(path, f"{text}\n".encode())
    return path
