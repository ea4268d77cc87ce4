"""Page of the memory profiler's cost, and of the stated figure."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from hybridtrain.reports.tables import MARKDOWN, table
from hybridvalidation.judge.case import Decider, Metric
from hybridvalidation.judge.tables import verdict_table
from hybridvalidation.judge.verdict import Verdict, judge_metric
from hybridvalidation.records.card_step import CARD_STEP_OF, card_step_s
from hybridvalidation.records.makers import made_by
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.profiled import ProfilerRecord, read_profiled
from hybridvalidation.scenario import Target
from hybridvalidation.show.page import Page, Source
from hybridvalidation.show.results import Results

TARGET = "profiler-overhead"
_HEADERS = (
    "model", "parameters", "batch", "every", "pairs", "step ms", "snapshot ms", "share %", "with / without", "noise",
)  # fmt: skip
_HOW = (
    "Medians of wall time in fp32, steps with and without the profiler in turn. Step: without it; snapshot: "
    "record_step where it takes one; share: the snapshot's of the step at that interval. With / without is the ratio "
    "of the steps' medians; noise is that ratio between steps without it. Both are too coarse for so small a share, "
    "so the snapshot itself is timed. A card's step is far shorter than a processor's, so the share of the step "
    f"estimated for {CARD_STEP_OF} is shown too."
)


def judge_profiler(records: Path, targets: Mapping[str, Target]) -> list[Verdict]:
    """Return the verdict of the newest record; a snapshot's share of a card's estimated step decides."""
    found = read_profiled(records)
    if TARGET not in targets:
        return []
    if not found:
        return [judge_metric(targets[TARGET], "memory profiler", None, missing="no record of its benchmark")]
    record, case = found[-1], found[-1].judged
    step_s = card_step_s(records)
    decider = None
    if step_s is not None and record.evidence is Evidence.EXECUTED:
        decider = Decider(
            100 * case.snapshot_s / step_s, Evidence.ESTIMATED, "is of a processor's step",
            f"of a card's in bf16, {1000 * step_s:.0f} ms",
        )  # fmt: skip
    remark = (
        f"{case.model} at {case.batch_size} x {case.seq_len} tokens, a snapshot of {1000 * case.snapshot_s:.2f} ms at "
        f"every step of {case.step_s:.2f} s"
    )
    metric = Metric(case.overhead_pct, record.evidence, "%", remark=remark, decider=decider)
    return [judge_metric(targets[TARGET], "memory profiler", metric, record=f"profiler {record.started_at}")]


def _table(record: ProfilerRecord) -> str:
    rows = [
        [
            case.model, f"{case.num_params:,}", f"{case.batch_size} x {case.seq_len}", str(case.every_n_steps),
            str(case.rounds), f"{1e3 * case.step_s:.2f}", f"{1e3 * case.snapshot_s:.3f}", f"{case.overhead_pct:.4f}",
            f"{case.ratio:.4f}", f"{case.noise:.4f}",
        ]
        for case in record.cases
    ]  # fmt: skip
    return table(_HEADERS, rows, MARKDOWN)


def _pages(results: Results) -> Iterator[Page]:
    for newest in read_profiled(results.records)[-1:]:
        verdicts = verdict_table(judge_profiler(results.records, results.targets), MARKDOWN)
        parts = ["# The memory profiler's cost", _table(newest), _HOW, verdicts, made_by([("", newest)])]
        yield Page(name="profiler", group="Evidence", text="\n\n".join(parts))


SOURCE = Source(order=60, pages=_pages)
