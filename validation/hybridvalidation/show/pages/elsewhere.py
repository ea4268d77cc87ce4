"""Pages of parts that keep their own records and pictures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from hybridvalidation.experiments.card_session.record import read_evidence
from hybridvalidation.experiments.card_session.table import write_evidence
from hybridvalidation.experiments.snapshots import write_reserved
from hybridvalidation.kernel_bench.attention_lengths import read_attention, write_attention
from hybridvalidation.kernel_bench.record import read_kernels
from hybridvalidation.kernel_bench.table import write_kernels
from hybridvalidation.pictures.picture import Picture
from hybridvalidation.show.kernel_pictures import attention_pictures, kernel_pictures
from hybridvalidation.show.page import Page, Source
from hybridvalidation.show.results import Results
from hybridvalidation.study.report import study_pictures, write_studies

_Write = Callable[[Results, Path], list[Path]]
_Draw = Callable[[Results], Mapping[str, Sequence[Picture]]]


def _write_kernels(results: Results, folder: Path) -> list[Path]:
    found = read_kernels(results.records)
    return write_kernels(found, folder, read_evidence(results.records), results.targets) if found else []


def _write_attention(results: Results, folder: Path) -> list[Path]:
    found = read_attention(results.records)
    return write_attention(found, results.targets, folder) if found else []  # targets need not be stated without


_WRITTEN: Sequence[tuple[str, _Write, _Draw]] = (
    ("Evidence", lambda results, folder: write_reserved(results.files.folder, folder), lambda _results: {}),
    ("Evidence", lambda results, folder: write_evidence(read_evidence(results.records), folder), lambda _results: {}),
    (
        "Studies",
        lambda results, folder: write_studies(results.files, folder),
        lambda results: study_pictures(results.files, results.folder),
    ),
    ("Kernels", _write_kernels, kernel_pictures),
    ("Kernels", _write_attention, attention_pictures),
)


def _pages(results: Results) -> Iterator[Page]:
    for group, write, draw in _WRITTEN:
        drawn = draw(results)
        with TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "records").symlink_to(results.records.resolve(), target_is_directory=True)
            paths = write(results, folder)
            files = {path.name: path.read_bytes() for path in paths if path.suffix == ".png"}
            for path in (path for path in paths if path.suffix == ".md"):
                text = path.read_text(encoding="utf-8").removesuffix("\n")
                yield Page(name=path.stem, group=group, text=text, pictures=drawn.get(path.stem, ()), files=files)
                files = {}


SOURCE = Source(order=20, pages=_pages)
