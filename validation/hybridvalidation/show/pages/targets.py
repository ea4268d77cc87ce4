"""All stated figures on one page, each with the verdict that stands."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hybridtrain.planning.time_error import RATIO_ERROR, TIME_ERROR, WAITING_ERROR
from hybridtrain.reports.tables import MARKDOWN, table_with_notes
from hybridtrain.units import format_count
from hybridvalidation.judge.joint import judge_all, judge_jointly
from hybridvalidation.judge.roll_up import by_status, counts, roll_up
from hybridvalidation.judge.time_error import LEAST_WAITING
from hybridvalidation.judge.verdict import Verdict
from hybridvalidation.kernel_bench.attention_lengths import judge_attention, read_attention
from hybridvalidation.kernel_bench.record import newest_kernels, read_kernels
from hybridvalidation.kernel_bench.table import judge_kernels
from hybridvalidation.show.page import Page, Source
from hybridvalidation.show.pages.profiler import judge_profiler
from hybridvalidation.show.results import Results
from hybridvalidation.study.equivalence import Comparison, Finding
from hybridvalidation.study.factors import judge_study
from hybridvalidation.study.protocol import ladders, read_study
from hybridvalidation.study.quality import judge_ladder, range_text

_HEADERS = ("target", "verdict", "because", "stated", "evidence", "stack", "details")
_HOW = f"""## What a verdict means

- Holds: on the named kind of evidence only.
- By definition: met whatever a program does.
- Undecided: the difference is smaller than the time model's own error, or GB and GiB decide differently.
- Unproven: no record, or an interval on both sides of the bound.
- Misleading: right as it was got, but an average or a part; what decides misses the bound.
- Refuted: the bound is missed, or the stack runs out of memory.

## How it is reached

- Registered studies count first, then scenarios, then single stacks. The least favourable of those that count stands.
- A scenario's row is judged on the stack that does best on all its rows: fewest missed, then most held.
- A quality ladder judges at its largest finished model size; smaller ones are told.
- The time model's error is the mean absolute error of speeds by trainers left out of its fit, {100 * TIME_ERROR:.1f} %.
- It is {100 * WAITING_ERROR:.1f} % for steps that wait {LEAST_WAITING:.0%} of their time or more, over recorded runs on
  fitted cards, before a rule was added.
- That of a ratio of two speeds of one model on one card, by one trainer, is {100 * RATIO_ERROR:.1f} %.
- GB of a card are read as GiB, as cards are sold.
- Intervals are of 95 %, or of 97.5 % where the ladder registers a second interim analysis.
- The evidence of what decides stands behind the figure's own.
- Of a stated range, the end that a user asks for is the bound. A value on its good side but outside the range keeps the
  bound; the range then describes nothing."""


def all_targets(results: Results) -> list[Verdict]:
    """Return one row per stated figure, from records alone."""
    return [_with_quality(row, results.telling.get(row.stack)) for row in roll_up(results.targets, _judged(results))]


def _with_quality(row: Verdict, judged: Comparison | None) -> Verdict:
    """Add a remark to a held figure whose stack trains worse by a ladder."""
    if judged is None or not row.status.is_met or judged.finding is not Finding.WORSE:
        return row
    loss = f"{range_text(judged.interval, '+.4f')} nats{judged.diverged_text}"
    size = f"{format_count(judged.scale[0])} parameters"
    return replace(row, reason=f"{row.reason} Executed at {size} it trains worse than {judged.reference.name}: {loss}.")


def targets_text(rows: Sequence[Verdict], style: str) -> str:
    """Return counts and table."""
    cells = [
        [row.target, row.status, row.because, row.description, _evidence(row, style), row.stack or "-", row.reason]
        for row in rows
    ]
    return f"{counts(rows)}\n\n{table_with_notes(_HEADERS, cells, style, widths=(None, None, 24, 34, None, 14, 56))}"


def _evidence(row: Verdict, style: str) -> str:
    """Return the kind of evidence, in Markdown with a link to the page that shows it."""
    told = row.shown_by or "-"
    return f"[{told}]({row.place.replace(' ', '-')}.md)" if style == MARKDOWN and row.evidence is not None else told


def _judged(results: Results) -> Iterator[Verdict]:
    targets, records, elsewhere = results.targets, results.records, results.elsewhere
    for name in results.files.scenario_names():
        run = results.run(name)
        joint = judge_jointly(run, targets, elsewhere)
        for verdict in judge_all(run, targets, elsewhere):
            alone = ""
            if joint is not None and verdict.is_of_scenario and verdict.target in joint.rows:
                alone = by_status(joint.alone(verdict.target))
            studied = (verdict.target, verdict.stack) in elsewhere and verdict.is_of_scenario
            yield replace(verdict, place=name, is_registered=studied, alone=alone)
    for study in results.studies():
        for verdict in judge_study(study, read_study(results.folder, study), targets):
            record = verdict.record or f"studies/{study.name}"
            yield replace(verdict, record=record, place=f"study {study.name}", is_registered=True)
    for ladder in ladders(results.files.folder):
        for verdict in judge_ladder(ladder, read_study(results.folder, ladder), targets):
            yield replace(verdict, place=f"study {ladder.name}", is_registered=True)
    attention = read_attention(records)[-1:]
    pages = {
        "kernels": judge_kernels(newest_kernels(read_kernels(records)), targets),
        "attention": [verdict for record in attention for verdict in judge_attention(record, targets)],
        "profiler": judge_profiler(records, targets),
    }
    for place, verdicts in pages.items():
        yield from (replace(verdict, place=place) for verdict in verdicts)


def _pages(results: Results) -> Iterator[Page]:
    if not (results.files.folder / "targets.toml").is_file():  # scenarios of others state nothing
        return
    rows = all_targets(results)
    if any(row.record for row in rows):  # arithmetic alone needs no page
        text = f"# Stated targets\n\n{targets_text(rows, MARKDOWN)}\n\n{_HOW}"
        yield Page(name="targets", group="Evidence", text=text)


SOURCE = Source(order=70, pages=_pages)
