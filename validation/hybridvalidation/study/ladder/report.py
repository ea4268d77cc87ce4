"""A ladder as one Markdown file: its registration, what is done, verdicts by rung, stated figures, an extrapolation."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev

from tabulate import tabulate

from hybridtrain.reports.tables import MARKDOWN, write_page
from hybridtrain.units import format_count
from hybridvalidation.judge.tables import verdict_table
from hybridvalidation.records.makers import made_by
from hybridvalidation.scenario import Target
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.ladder.equivalence import (
    Finding,
    Judged,
    extrapolate,
    judge_rung,
    largest_deviation,
    last_look,
)
from hybridvalidation.study.ladder.order import first_runs, more_runs, next_runs
from hybridvalidation.study.ladder.protocol import (
    Arm,
    LadderFile,
    Made,
    Rung,
    chosen_lr,
    ladder_names,
    read_ladder_file,
    record_of,
    run_key,
    run_of,
)
from hybridvalidation.study.ladder.quality import range_text
from hybridvalidation.study.ladder.runner import holds, read_ladder, read_replays
from hybridvalidation.study.ladder.targets import judge_ladder

_FAR = (7e9, 20.0)
"""Parameters, and tokens for each, of the extrapolation."""
_HOW = (
    "Executed on the CPU, one thread a run, cosine to zero, the baseline's learning rate. Difference: validation loss "
    "above that of the arm it is compared with, nats a token, mean and 95 % interval over paired seeds (same first "
    "weights, same batches, same validation tokens). Equivalent: two one-sided t tests put the mean within the "
    "registered margin; worse, better: a two-sided one tells it from zero; odds are corrected over the arms of a "
    "family and rung (Holm), unfinished ones counted. Top-1: accuracy over the other's. Products of bfloat16 matrices "
    "are summed in float32 and rounded once. Stacks that compute the same to the bit share an arm's runs."
)
_HEADERS = (
    "arm", "against", "lr", "seeds", "loss", "difference, nats", "deviation", "top-1 kept %", "p equivalent",
    "p different", "verdict",
)  # fmt: skip


def ladder_sentence(ladder: LadderFile, made: Made) -> str:
    """Return what the finished rungs say, and what is missing."""
    told = []
    for rung in ladder.rungs:
        judged = judge_rung(ladder, made, rung)
        if all(one.finding is not Finding.UNFINISHED for one in judged):
            counts = {finding: [o.comparison.arm.name for o in judged if o.finding is finding] for finding in Finding}
            words = "; ".join(f"{finding}: {', '.join(names)}" for finding, names in counts.items() if names)
            told.append(f"{rung.name}: {words}.")
    if not told:
        return f"No rung is finished: the registered claim ({ladder.target}) is unproven."
    rest = " Not all rungs are finished." if next_runs(ladder, made) else ""
    return f"{' '.join(told)}{rest}"


def ladder_text(ladder: LadderFile, made: Made, targets: Mapping[str, Target], results: Path, style: str) -> str:
    """Return verdict, registration and tables."""
    registration = (
        f"Registered: {ladder.target}. Margin: {ladder.margin_nats:g} nats; odds of a wrong verdict in a family on a "
        f"rung: {ladder.alpha:g} of being told equivalent and as much of being told different, at most "
        f"{2 * ladder.alpha:g} together. {ladder.stop_rule}"
    )
    if ladder.remarks:
        registration += f"\n\nOn the registration: {ladder.remarks}"
    begun = [rung for rung in ladder.rungs if _num_made(ladder, made, rung)]
    tables = [part for rung in begun for part in _rung_parts(ladder, made, rung, style)]
    return "\n\n".join(
        [
            ladder_sentence(ladder, made), registration, _texts(made), _progress(ladder, made, style),
            _power(ladder, made),
            *tables, _HOW,
            *([verdict_table(judge_ladder(ladder, made, targets), style)] if ladder.targets else []),
            _extrapolations(ladder, made), _shares(ladder, style), _replays(ladder, made, results),
        ]
    )  # fmt: skip


def write_ladder(ladder: LadderFile, made: Made, targets: Mapping[str, Target], results: Path) -> list[Path]:
    """Write ``tables/NAME.md`` and its picture below ``results``."""
    from hybridvalidation.study.ladder.plots import write_ladder_plot  # noqa: PLC0415  matplotlib takes half a second

    plot = write_ladder_plot(ladder, made, results / "plots")
    parts = [
        f"# Quality: {ladder.says}", ladder_text(ladder, made, targets, results, MARKDOWN),
        made_by(("", record) for record in made.values()), f"![{plot.stem}](../plots/{plot.name})",
    ]  # fmt: skip
    return [write_page(results, f"study-{ladder.name}", "\n\n".join(parts)), plot]


def write_ladders(files: ScenarioFiles, results: Path) -> list[Path]:
    """Rebuild tables and pictures of every ladder that has records."""
    written: list[Path] = []
    for name in ladder_names(files.folder):
        if made := read_ladder(results, name):
            written += write_ladder(read_ladder_file(files.folder, name), made, files.targets(), results)
    return written


def _texts(made: Made) -> str:
    found = sorted({(record.corpus, record.corpus_digest) for record in made.values()})
    told = "; ".join(f"{name} (SHA-256 {digest})" for name, digest in found)
    return f"Texts, the Python sources of pinned packages, every byte a token: {told or 'none yet'}."


def _num_made(ladder: LadderFile, made: Made, rung: Rung) -> int:
    return sum(run_key(ladder, run) in made for run in first_runs(ladder, rung, made))


def _progress(ladder: LadderFile, made: Made, style: str) -> str:
    rows = []
    for rung in ladder.rungs:
        hours = sum(record.cpu_seconds for record in made.values() if record.run.rung == rung.name) / 3600
        total, count = len(ladder.arms_of(rung)) * len(rung.seeds), _num_made(ladder, made, rung)
        again = _second_look(ladder, made, rung) if count == total and rung.more_seeds else "-"
        rows.append([
            rung.name, f"{rung.model.num_params:,}", f"{rung.tokens_per_param:.0f}", format_count(rung.num_tokens),
            f"{rung.num_steps:,} x {rung.batch_size} x {rung.seq_len}", len(ladder.arms_of(rung)), len(rung.seeds),
            f"{count} of {total}", again, f"{hours:.1f}",
        ])  # fmt: skip
    headers = [
        "rung", "parameters", "tokens a parameter", "tokens", "steps x rows x tokens", "arms", "seeds", "runs made",
        "second look", "processor hours",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def _second_look(ladder: LadderFile, made: Made, rung: Rung) -> str:
    """Return how many of the runs that a first look leaves to it are made."""
    owed = [run_key(ladder, run) for run in more_runs(ladder, rung, made)]
    return f"{sum(key in made for key in owed)} of {len(owed)}"


def _power(ladder: LadderFile, made: Made) -> str:
    """Say how much seeds may differ before a rung can call nothing equivalent, and which open arms differ by more."""
    told = []
    for rung in ladder.rungs:
        seeds = [len(rung.seeds), *([len(rung.seeds) + len(rung.more_seeds)] if rung.more_seeds else [])]
        most = [f"{largest_deviation(ladder, rung, count):.4f} with {count} seeds" for count in seeds]
        limit = largest_deviation(ladder, rung, seeds[-1])
        far = [
            f"{judged.comparison.arm.name} ({deviation:.4f})"
            for judged in judge_rung(ladder, made, rung)
            if judged.finding is Finding.INCONCLUSIVE
            and judged.comparison.arm.family == "stack"
            and (deviation := stdev(judged.comparison.differences)) > limit
        ]
        beyond = f", too few, as they deviate now, to call equivalent {', '.join(far)}" if far else ""
        told.append(f"{rung.name}: {', '.join(most)}{beyond}")
    return (
        "What a rung cannot show: where the differences of all arms of family stack deviate by more than so many nats, "
        "it calls none of them equivalent, even at a mean of zero (the first by Holm's order; each that passes lets "
        f"the next deviate a little more). {'; '.join(told)}."
    )


def _rates(ladder: LadderFile, made: Made, rung: Rung) -> str:
    """Return which rates were tried, with their losses at the tuning seed, and whether the chosen one lies between."""
    told = []
    for arm in ladder.arms_of(rung):
        lrs = rung.lrs if arm is ladder.baseline else arm.lrs
        runs = {lr: made.get(run_key(ladder, run_of(ladder, made, rung, arm, ladder.tuning_seed, lr))) for lr in lrs}
        losses = {lr: run.validation_loss for lr, run in runs.items() if run is not None}
        if len(lrs) == 1:
            told.append(f"{arm.name} {lrs[0]:g}, not tuned")
        if len(losses) < 2:
            continue
        best = chosen_lr(ladder, made, rung, arm)
        edge = ", the end of what was tried: another may be better" if best in {min(losses), max(losses)} else ""
        tried = ", ".join(f"{lr:g}: {'diverged' if loss is None else f'{loss:.4f}'}" for lr, loss in losses.items())
        told.append(f"{arm.name} {tried}; chosen {best:g}{edge}")
    return f"Rates tried at seed {ladder.tuning_seed}, validation loss. {'. '.join(told)}." if told else ""


def _rung_parts(ladder: LadderFile, made: Made, rung: Rung, style: str) -> list[str]:
    rates = _rates(ladder, made, rung)
    return [_title(rung, style), _rung_table(ladder, made, rung, style), *([rates] if rates else [])]


def _title(rung: Rung, style: str) -> str:
    text = f"{rung.name}: {rung.model.num_params:,} parameters, {rung.tokens_per_param:.0f} tokens a parameter"
    return f"## {text}" if style == MARKDOWN else text


def _rung_table(ladder: LadderFile, made: Made, rung: Rung, style: str) -> str:
    judged = {one.comparison.arm.name: one for one in judge_rung(ladder, made, rung)}
    rows = [_row(ladder, made, rung, arm, judged.get(arm.name)) for arm in ladder.arms_of(rung)]
    return tabulate(rows, headers=_HEADERS, tablefmt=style, disable_numparse=True)


def _row(ladder: LadderFile, made: Made, rung: Rung, arm: Arm, judged: Judged | None) -> list[str]:
    seeds = rung.seeds if judged is None else judged.comparison.seeds
    records = [found for seed in seeds if (found := record_of(ladder, made, rung, arm, seed)) is not None]
    losses = [record.validation_loss for record in records if record.validation_loss is not None]
    head = [f"{chosen_lr(ladder, made, rung, arm):g}", f"{len(records)} of {len(seeds)}",
            f"{fmean(losses):.4f}" if losses else "-"]  # fmt: skip
    if judged is None:
        return [arm.name, "-", *head, *["-"] * 5, "baseline" if arm is ladder.baseline else "compared with"]
    comparison = judged.comparison
    interval, kept = comparison.interval, comparison.retention
    deviation = "-"
    if interval is not None and len(comparison.differences) > 1:
        mean = fmean(comparison.differences)
        spread = sum((value - mean) ** 2 for value in comparison.differences) / (len(comparison.differences) - 1)
        deviation = f"{spread**0.5:.4f}"
    odds = ["-", "-"] if judged.finding is Finding.UNFINISHED else [_p(judged.p_equivalent), _p(judged.p_different)]
    verdict = f"{judged.finding}{comparison.diverged_text}"
    return [
        arm.name, comparison.other.name, *head, range_text(interval, "+.4f"), deviation, range_text(kept, ".2f"), *odds,
        verdict,
    ]  # fmt: skip


def _p(odds: float) -> str:
    return "<0.0001" if odds < 0.0001 else f"{odds:.4f}"


def _extrapolations(ladder: LadderFile, made: Made) -> str:
    told = []
    for arm in ladder.arms:
        other = ladder.other_of(arm)
        rungs = [rung for rung in ladder.rungs if arm in ladder.arms_of(rung)]
        found = None if other is None else extrapolate([last_look(ladder, made, r, arm, other) for r in rungs], *_FAR)
        if found is not None:
            told.append(f"{arm.name} {range_text(found.interval, '+.4f')} (line in {' and '.join(found.terms)})")
    size = f"{format_count(int(_FAR[0]))} parameters and {_FAR[1]:.0f} tokens a parameter"
    if not told:
        return f"Extrapolation to {size}: none yet, too few rungs are finished."
    return (
        f"Extrapolation to {size}, no measurement: a line through the differences of all finished rungs over the "
        f"logarithms of size and length, if it went on so far: {'; '.join(told)}."
    )


def _shares(ladder: LadderFile, style: str) -> str:
    rows = [[stack, arm.name, arm.says] for arm in ladder.arms for stack in sorted(arm.stacks)]
    rows += [[f"({arm.family})", arm.name, arm.says] for arm in ladder.arms if not arm.stacks]
    return tabulate(
        rows, headers=["stack", "shares the runs of", "which computes"], tablefmt=style, disable_numparse=True
    )


def _replays(ladder: LadderFile, made: Made, results: Path) -> str:
    replays = [found for key, found in read_replays(results, ladder.name).items() if key in made]
    if not replays:
        return "Replays: no record's first steps were computed again by a later program."
    equal, fine = sum(found.is_equal for found in replays), sum(map(holds, replays))
    latest = max(replays, key=lambda found: found.started_at)
    return (
        f"Replays: of {len(replays)} records the first steps and a run in little were computed again, last by program "
        f"{latest.program} (commit {latest.environment.commit[:8] or 'of no checkout'}); {equal} equal to the bit, "
        f"{fine} hold, within rounding on another processor (with predicted steps up to the first of them)."
    )
