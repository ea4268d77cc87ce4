"""Pages of the parts that keep records of their own."""

from pathlib import Path

from hybridvalidation.experiments.card_session.record import read_evidence
from hybridvalidation.experiments.card_session.table import write_evidence
from hybridvalidation.kernel_bench.attention_lengths import read_attention, write_attention
from hybridvalidation.kernel_bench.record import read_kernels
from hybridvalidation.kernel_bench.table import write_kernels
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.kinds import Page
from hybridvalidation.study.ladder.report import write_ladders
from hybridvalidation.study.report import write_studies


def _write_kernels(files: ScenarioFiles, results: Path) -> list[Path]:
    records = results / "records"
    found = read_kernels(records)
    return write_kernels(found, results, read_evidence(records), files.targets()) if found else []


def _write_attention(files: ScenarioFiles, results: Path) -> list[Path]:
    found = read_attention(results / "records")
    return write_attention(found, files.targets(), results) if found else []  # which need not be stated without


CARD_SESSION = Page(
    order=20,
    group="Evidence",
    write=lambda _files, results: write_evidence(read_evidence(results / "records"), results),
)
STUDIES = Page(order=30, group="Studies", write=write_studies)
LADDERS = Page(order=35, group="Studies", write=write_ladders)
KERNELS = Page(order=40, group="Kernels", write=_write_kernels)
ATTENTION = Page(order=50, group="Kernels", write=_write_attention)
