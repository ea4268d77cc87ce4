"""A study as one Markdown page: its registration, one sentence of verdict, tables, pictures."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hybridtrain.atomic_write import replace_file
from hybridtrain.reports.tables import MARKDOWN, table, write_page
from hybridtrain.units import format_count, to_gib
from hybridvalidation.judge.statistics import Interval, power_below
from hybridvalidation.judge.tables import verdict_table
from hybridvalidation.pictures.picture import Picture
from hybridvalidation.records.makers import made_by
from hybridvalidation.scenario import Target
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.duel import duel_sentence, duel_table
from hybridvalidation.study.equivalence import (
    Comparison,
    Finding,
    extrapolate,
    harm_levels,
    judge_size,
    largest_deviation,
    last_analysis,
)
from hybridvalidation.study.factors import (
    MethodFigures,
    SettingEffect,
    harms,
    horizon_curve,
    judge_study,
    lost_seeds,
    lr_curve,
    method_figures,
    noise_floor,
)
from hybridvalidation.study.forecast import write_forecasts
from hybridvalidation.study.order import first_runs, more_runs, next_runs
from hybridvalidation.study.pictures import pictures_of
from hybridvalidation.study.protocol import (
    BASELINE,
    JUDGED,
    Configuration,
    LadderFile,
    LadderMade,
    Made,
    ModelSize,
    Study,
    StudyFile,
    all_studies,
    chosen,
    chosen_lr,
    ladder_record,
    ladder_run,
    read_study,
    run_key,
)
from hybridvalidation.study.quality import judge_ladder, range_text
from hybridvalidation.study.runner import holds, read_replays

_FIVE, _NEEDS_FIVE = 5, 1.1
"""Seeds that the protocol wants for compute factors below the second."""
_FAR = (7e9, 20.0)
"""Parameters, and tokens for each, of the extrapolation."""
_HOW_FACTORS = (
    "Executed on the CPU, one thread a run. Loss: validation, nats per token, at the end of the run's own schedule. "
    "Test: other held-out batches, evaluated once. Factor: cost at which AdamW ends at the same loss over the "
    "method's own, interpolated on AdamW's horizon curve of the same seed. Cost counts a forward pass 1 and a "
    "backward pass 2, probes included. Intervals are 95 % over paired seeds: same initial weights, same batches. A "
    "method that probes keeps a part of the training text for that, so its batches are others. Intervals are open "
    "towards where a factor (> or <) is beyond AdamW's horizons. Predicted steps are a diagnostic, no speed. Step "
    "time: processor time of a true step over AdamW's."
)
_HOW_HARM = (
    "Executed on the CPU; loss: validation, at the end of the run. Harm: loss over AdamW's with the same seed under "
    "the same circumstances, in percent; negative is better. Rolled back: jumps undone by the guard or by a search. "
    "Where AdamW stops with a message, stopping too is no harm."
)
_HOW_DUEL = (
    "Executed on the CPU, one thread a run. Loss: validation, nats per token, at the end of the run's own schedule. "
    "Test: other held-out batches, evaluated once. Intervals are 95 % over paired seeds: same initial weights, same "
    "batches at the same step. Processor time: of the training loop, means of runs beside other work."
)
_HOW_QUALITY = (
    "Executed on the CPU, one thread a run, cosine to zero, the baseline's learning rate. Difference: validation "
    "loss above the reference configuration's, nats per token. It is a mean with its 95 % confidence interval over "
    "paired seeds: same first weights, batches and validation tokens. Equivalent: two one-sided t tests put the mean "
    "within the registered equivalence margin. Worse, better: a two-sided t test tells it from zero. p-values are "
    "adjusted over the configurations of a family at a model size (Holm), unfinished ones counted. Top-1: accuracy "
    "over the reference's. Products of bfloat16 matrices are summed in float32 and rounded once. Stacks that compute "
    "the same to the bit share a configuration's runs."
)
_METHOD_HEADERS = (
    "method", "role", "seeds", "gain over AdamW", "compute factor", "by seed", "lr", "loss", "test", "cost, steps",
    "step time", "predicted steps", "rolled back", "planned GiB",
)  # fmt: skip
_HARM_HEADERS = (
    "setting", "against", "harm %", "worst seed %", "within bound", "loss", "AdamW's loss", "jumps", "rolled back",
    "description",
)  # fmt: skip
_QUALITY_HEADERS = (
    "configuration", "against", "difference, nats", "adjusted p, equivalent", "adjusted p, different", "verdict", "lr",
    "seeds", "loss", "deviation", "top-1 kept %",
)  # fmt: skip
_HARM_TEST_HEADERS = tuple(
    {"adjusted p, equivalent": "largest harm, nats", "adjusted p, different": "error rate"}.get(name, name)
    for name in _QUALITY_HEADERS
)
_HOW_HARM_TEST = (
    "Executed on the CPU, one thread a run, cosine to zero, the baseline's learning rate. Difference: validation loss "
    "above the reference's, nats per token, with its 95 % interval over paired seeds, each pair on one processor. "
    "Largest harm: the upper bound of the mean difference at the error rate of the last analysis made. No harm: that "
    "bound is below the margin. Worse: the lower bound at the same rate is above the margin. Either ends the runs of a "
    "configuration."
)
_TRUE_HARM = (0.0, 0.002, 0.004)
"""Nats at which the power is told."""
_PROGRESS_HEADERS = (
    "model size", "parameters", "tokens per parameter", "runs made", "second interim analysis", "processor hours",
    "tokens", "steps x batch x tokens", "configurations", "seeds",
)  # fmt: skip


def verdict_sentence(study: Study, made: Mapping[str, Any]) -> str:
    """Return the sentence of the study's verdict."""
    if isinstance(study, LadderFile):
        return _quality_sentence(study, made)
    if study.duel is not None:
        return duel_sentence(study, study.duel, made)
    return _factor_sentence(study, made) if study.largest_harm_pct is None else _harm_sentence(study, made)


def study_text(study: Study, made: Mapping[str, Any], targets: Mapping[str, Target], results: Path, style: str) -> str:
    """Return verdict, registration and tables."""
    if isinstance(study, LadderFile):
        parts, verdicts = _quality_parts(study, made, results, style), judge_ladder(study, made, targets)
    else:
        text_of = _factor_parts if study.largest_harm_pct is None else _harm_parts
        text_of = text_of if study.duel is None else _duel_parts
        parts, verdicts = text_of(study, made, style), judge_study(study, made, targets)
    stated = verdict_table(verdicts, style) if verdicts else ""
    return "\n\n".join(part for part in (verdict_sentence(study, made), *parts, stated) if part)


def write_study(study: Study, made: Mapping[str, Any], targets: Mapping[str, Target], results: Path) -> list[Path]:
    """Write ``tables/study-NAME.md`` and its pictures below ``results``."""
    from hybridvalidation.pictures.png import png_of  # noqa: PLC0415  matplotlib takes half a second

    plots, page = list[Path](), f"study-{study.name}"
    for picture in pictures_of(study, made, verdict_sentence(study, made)):
        stem = page if picture.name == page else f"{page}-{picture.name}"
        plots.append(results / "plots" / f"{stem}.png")
        replace_file(plots[-1], png_of(picture))
    title = "Quality"
    if isinstance(study, StudyFile):
        title = "Time to loss" if study.largest_harm_pct is None else "Harm"
        title = title if study.duel is None else "Two methods"
    parts = [
        f"# {title}: {study.description}", study_text(study, made, targets, results, MARKDOWN),
        made_by(("", record) for record in made.values()), *(["## Pictures"] if plots else []),
        "\n".join(f"![{path.stem}](../plots/{path.name})" for path in plots),
    ]  # fmt: skip
    return [write_page(results, page, "\n\n".join(parts)), *plots]


def write_studies(files: ScenarioFiles, results: Path) -> list[Path]:
    """Rebuild tables and pictures of every study that has records, and of the forecasts."""
    written: list[Path] = []
    for study in all_studies(files.folder):
        if made := read_study(results, study):
            written += write_study(study, made, files.targets(), results)
    return written + write_forecasts(results)


def study_pictures(files: ScenarioFiles, results: Path) -> dict[str, Sequence[Picture]]:
    """Return the pictures of every study that has records, by the page's name."""
    found = [(study, read_study(results, study)) for study in all_studies(files.folder)]
    return {f"study-{s.name}": pictures_of(s, made, verdict_sentence(s, made)) for s, made in found if made}


# --- time to loss -----------------------------------------------------------------------------------------------------


def _factor_sentence(study: StudyFile, made: Made) -> str:
    if next_runs(study, made):
        return f"Not finished: the registered claim ({study.target}) is unproven."
    lost, figures = lost_seeds(study, made, JUDGED), method_figures(study, made, JUDGED)
    if figures is None or lost:
        seeds = ", ".join(map(str, lost))
        return f"{JUDGED} or AdamW diverged with seed {seeds}: the registered claim ({study.target}) is not met."
    factor, count = _range(figures.factor), len(figures.records)
    shown = f"{JUDGED} reaches AdamW's loss with a compute factor of {factor} over {count} seeds"
    if figures.bounds:
        told = " ".join(map(str, figures.factors))
        shown += f" (beyond AdamW's horizons where marked: {told}; the interval is open there)"
    return f"{shown}: {_judged(study, figures)}."


def _judged(study: StudyFile, figures: MethodFigures) -> str:
    """Return the verdict on the registered claim by the compute factor."""
    factor = figures.factor
    if factor.high < 1.0:
        return "it is slower than AdamW; the registered claim is refuted"
    if factor.low <= 1.0:
        return "no speed-up, the interval includes 1.0; the registered claim is not met"
    if factor.mean < study.least_gain:
        word = "refuted" if factor.high < study.least_gain else "not met"
        return f"a speed-up, below the registered {study.least_gain:g}; the claim is {word}"
    if factor.mean < _NEEDS_FIVE and len(figures.records) < _FIVE:
        return (
            f"a speed-up, but a claim below {_NEEDS_FIVE:g} needs {_FIVE} seeds by the protocol; the registered claim "
            "is unproven"
        )
    return f"a speed-up; the registered claim (at least {study.least_gain:g}, interval above 1.0) is met"


def _factor_parts(study: StudyFile, made: Made, style: str) -> list[str]:
    params = study.model.num_params
    registration = _registration(
        study,
        f"{study.target}. {study.stop_rule} {study.num_steps} steps of {study.batch_size} x {study.seq_len} tokens, "
        f"{study.num_steps * study.batch_size * study.seq_len / params:.1f} tokens per parameter ({params:,}).",
    )
    tuned = _tuned_text(study, made)
    if len(versions := sorted({record.environment.commit[:8] for record in made.values()})) > 1:
        tuned += f" The runs were made by {len(versions)} versions of the program: {', '.join(versions)}."
    if (floor := noise_floor(study, made)) is not None:
        tuned += f" Noise floor: its loss has a standard deviation of {floor:.4f} over {len(study.seeds)} seeds."
    shown = [_method_table(study, made, style), _HOW_FACTORS, _horizon_table(study, made, style)]
    return [registration, tuned, *shown, _lrs(study, made, style)]


def _registration(study: StudyFile, text: str) -> str:
    remarks = f"\n\nAfter the registration: {study.remarks}" if study.remarks else ""
    return f"Registered before the first run: {text}{remarks}"


def _tuned(study: StudyFile) -> list[str]:
    return [BASELINE, *(method.name for method in study.methods if method.lrs)]


def _tuned_text(study: StudyFile, made: Made) -> str:
    """Return the chosen learning rates, and those not tried."""
    run = chosen(study, made, BASELINE)
    told = (
        f"AdamW's learning rate is {run.lr:g}, betas {run.beta1:g} and {run.beta2:g}. Rates and betas were chosen at "
        f"seed {study.tuning_seed}, which is judged too."
    )
    for name in _tuned(study):
        method, best = study.method(name), chosen(study, made, name).lr
        tried, num_made = study.lrs if method is None else method.lrs, len(lr_curve(study, made, name))
        if num_made < len(tried):
            told += f" Not finished: {num_made} of {len(tried)} rates of {name} are tried."
        elif len(tried) > 1 and best in {min(tried), max(tried)}:
            end = "lowest" if best == min(tried) else "highest"
            told += f" The best rate of {name} ({best:g}) is the {end} tried: its optimum may lie beyond."
    return told


def _method_table(study: StudyFile, made: Made, style: str) -> str:
    rows, is_finished = list[list[str]](), not next_runs(study, made)
    for name in [BASELINE, *(method.name for method in study.methods)]:
        figures = method_figures(study, made, name) if name != BASELINE or not study.is_constant else None
        if figures is not None:
            rows.append(_method_row(study, figures))
        elif is_finished and name != BASELINE:
            rows.append([name, *["diverged"] * (len(_METHOD_HEADERS) - 1)])
    return table(_METHOD_HEADERS, rows, style) if rows else ""


def _method_row(study: StudyFile, figures: MethodFigures) -> list[str]:
    method, about, records = study.method(figures.name), "about " if figures.bounds else "", figures.records
    gained = ["-", "1", "-"]
    if method is not None:
        by_seed = " ".join(map(str, figures.factors))
        gained = [_range(figures.gain, digits=4), f"{about}{_range(figures.factor)}", by_seed]
    tests = [math.nan if record.test_loss is None else record.test_loss for record in records]
    return [
        figures.name, "baseline" if method is None else method.role, str(len(records)), *gained, f"{figures.lr:g}",
        f"{figures.mean('validation_loss'):.4f}", f"{fmean(tests):.4f}", f"{figures.cost:,.0f}",
        f"{fmean(figures.cpu_ratios):.2f}", f"{figures.mean('predicted_steps'):,.0f}",
        str(sum(record.rollbacks for record in records)), f"{to_gib(records[0].planned_device_bytes):.3f}",
    ]  # fmt: skip


def _horizon_table(study: StudyFile, made: Made, style: str) -> str:
    if study.is_constant:
        return ""
    curves = [dict(horizon_curve(study, made, seed)) for seed in study.seeds]
    rows = [
        [f"{steps:,}", *(_cell(curve.get(float(steps))) for curve in curves)]
        for steps in sorted({*study.horizons, *study.tuning_horizons})
    ]
    return table(["AdamW's steps", *(f"seed {seed}" for seed in study.seeds)], rows, style)


def _lrs(study: StudyFile, made: Made, style: str) -> str:
    if len(study.lrs) < 2:
        return ""
    names = _tuned(study)
    curves = [dict(lr_curve(study, made, name)) for name in names]
    rows = [
        [f"{lr:g}", *(_cell(curve[lr], "diverged") if lr in curve else "-" for curve in curves)]
        for lr in sorted({lr for curve in curves for lr in curve})
    ]
    return table(["learning rate", *names], rows, style)


def _cell(loss: float | None, missing: str = "-") -> str:
    return missing if loss is None else f"{loss:.4f}"


def _range(interval: Interval, digits: int = 2) -> str:
    return f"{interval.mean:.{digits}f}" if math.isinf(interval.low) else range_text(interval, f".{digits}f")


# --- harm -------------------------------------------------------------------------------------------------------------


def _harm_sentence(study: StudyFile, made: Made) -> str:
    found, bound = harms(study, made), study.largest_harm_pct or 0.0
    if next_runs(study, made) or not found:
        return f"Not finished: the registered claim ({study.target}) is unproven."
    broken = [harm.method.name for harm in found if not harm.keeps(bound)]
    ended = [harm for harm in found if harm.percents]
    if not ended and not broken:
        return f"No setting ended beside AdamW: the registered claim ({study.target}) is unproven."
    shown = f"{len(found)} settings, {len(study.seeds)} seeds"
    if ended:
        mean = max(ended, key=lambda harm: fmean(harm.percents))
        seed = max(ended, key=lambda harm: max(harm.percents))
        shown = (
            f"worst mean harm {fmean(mean.percents):.2f} % ({mean.method.name}), worst single seed "
            f"{max(seed.percents):.2f} % ({seed.method.name}), over {shown}"
        )
    if broken:
        return f"The registered bound of {bound:g} % is broken by {', '.join(broken)}; {shown}."
    return f"The registered bound of {bound:g} % is kept by every setting: {shown}."


def _harm_parts(study: StudyFile, made: Made, style: str) -> list[str]:
    rows = [_harm_row(harm, study.largest_harm_pct or 0.0) for harm in harms(study, made)]
    shown = table(_HARM_HEADERS, rows, style)
    return [_registration(study, f"{study.target}. {study.stop_rule}"), shown, _HOW_HARM]


def _harm_row(harm: SettingEffect, largest_pct: float) -> list[str]:
    losses = [[record.validation_loss for record in records] for records in zip(*harm.pairs, strict=True)]
    ended = [[loss for loss in some if loss is not None] for some in losses]
    percents, own = harm.percents, [record for record, _ in harm.pairs]
    return [
        harm.method.name, harm.method.against,
        *(f"{pick(percents):+.2f}" if percents else "-" for pick in (fmean, max)),
        "yes" if harm.keeps(largest_pct) else "NO",
        *(_cell(fmean(some) if some else None, "stopped") for some in ended),
        f"{fmean(record.jumps for record in own):,.0f}", str(sum(record.rollbacks for record in own)),
        harm.method.description,
    ]  # fmt: skip


# --- two methods ------------------------------------------------------------------------------------------------------


def _duel_parts(study: StudyFile, made: Made, style: str) -> list[str]:
    assert study.duel is not None, "a study of another kind"
    registration = _registration(study, f"{study.target}. {study.stop_rule} {study.model.num_params:,} parameters.")
    return [registration, duel_table(study, study.duel, made, style), _HOW_DUEL]


# --- quality ----------------------------------------------------------------------------------------------------------


def _quality_sentence(ladder: LadderFile, made: LadderMade) -> str:
    told = []
    for size in ladder.rungs:
        judged = judge_size(ladder, made, size)
        if all(one.finding is not Finding.UNFINISHED for one in judged):
            by_finding = {word: [o.configuration.name for o in judged if o.finding is word] for word in Finding}
            words = "; ".join(f"{finding}: {', '.join(names)}" for finding, names in by_finding.items() if names)
            told.append(f"{size.name}: {words}.")
    if not told:
        return f"No model size is finished: the registered claim ({ladder.target}) is unproven."
    rest = " Not all model sizes are finished." if next_runs(ladder, made) else ""
    return f"{' '.join(told)}{rest}"


def _quality_parts(ladder: LadderFile, made: LadderMade, results: Path, style: str) -> list[str]:
    seeks_harm = any(size.analyses for size in ladder.rungs)
    registration = (
        f"Registered: {ladder.target}. Margin of harm: {ladder.margin_nats:g} nats; error rate at a model size: "
        f"{ladder.alpha:g}, divided by the configurations. {ladder.stop_rule}"
        if seeks_harm
        else f"Registered: {ladder.target}. Equivalence margin: {ladder.margin_nats:g} nats; error rate of a family at "
        f"a model size: {ladder.alpha:g} of being judged equivalent and as much of being judged different, at most "
        f"{2 * ladder.alpha:g} together. {ladder.stop_rule}"
    )
    if ladder.closed:
        registration += f"\n\nClosed: {ladder.closed}"
    if ladder.remarks:
        registration += f"\n\nOn the registration: {ladder.remarks}"
    found = sorted({(record.corpus, record.corpus_digest) for record in made.values()})
    texts = "; ".join(f"{name} (SHA-256 {digest})" for name, digest in found) or "none yet"
    begun = [size for size in ladder.rungs if _num_made(ladder, made, size)]
    return [
        registration, f"Texts, the Python sources of pinned packages, every byte a token: {texts}.",
        _progress(ladder, made, style), _power_of_harm(ladder) if seeks_harm else _power(ladder, made),
        *(part for size in begun for part in _size_parts(ladder, made, size, style)),
        _HOW_HARM_TEST if seeks_harm else _HOW_QUALITY,
        _extrapolations(ladder, made), _shares(ladder, style), _replays(ladder, made, results),
    ]  # fmt: skip


def _num_made(ladder: LadderFile, made: LadderMade, size: ModelSize) -> int:
    return sum(run_key(ladder, run) in made for run in first_runs(ladder, made, size))


def _progress(ladder: LadderFile, made: LadderMade, style: str) -> str:
    rows = []
    for size in ladder.rungs:
        hours = sum(record.cpu_seconds for record in made.values() if record.run.rung == size.name) / 3600
        num_own, again = len(ladder.configurations_at(size)), "-"
        total, count = num_own * len(size.seeds), _num_made(ladder, made, size)
        if size.more_seeds and (owed := [run_key(ladder, run) for run in more_runs(ladder, made, size)]):
            again = f"{sum(key in made for key in owed)} of {len(owed)}"
        rows.append([
            size.name, f"{size.model.num_params:,}", f"{size.tokens_per_param:.0f}", f"{count} of {total}", again,
            f"{hours:.1f}", format_count(size.num_tokens), f"{size.num_steps:,} x {size.batch_size} x {size.seq_len}",
            str(num_own), str(len(size.seeds)),
        ])  # fmt: skip
    return table(_PROGRESS_HEADERS, rows, style)


def _power(ladder: LadderFile, made: LadderMade) -> str:
    """Return the largest deviation that allows equivalence at each size, and inconclusive ones above it."""
    told = []
    for size in ladder.rungs:
        counts = [len(size.seeds), *([len(size.seeds) + len(size.more_seeds)] if size.more_seeds else [])]
        limits = [largest_deviation(ladder, size, count) for count in counts]
        most = ", ".join(f"{limit:.4f} with {count} seeds" for limit, count in zip(limits, counts, strict=True))
        far = [
            f"{judged.configuration.name} ({deviation:.4f})"
            for judged in judge_size(ladder, made, size)
            if judged.finding is Finding.INCONCLUSIVE and judged.configuration.family == "stack"
            if (deviation := stdev(judged.differences)) > limits[-1]
        ]
        beyond = f", too few at their present deviation for {', '.join(far)}" if far else ""
        told.append(f"{size.name}: {most}{beyond}")
    return (
        "Power: above these standard deviations of paired differences, in nats, no configuration of family stack is "
        "equivalent. That holds even at a mean of zero, for the first by Holm's order; each that passes lets the next "
        f"deviate a little more. {'; '.join(told)}."
    )


def _power_of_harm(ladder: LadderFile) -> str:
    """Return the power of each size's test, at the deviation it was planned with."""
    told = []
    for size in ladder.rungs:
        for family in ("stack", "control"):
            own = next((own for own, _ in ladder.pairs_at(size) if own.family == family), None)
            if own is None:
                continue
            level, count = harm_levels(ladder, size, own)[-1], size.analyses[-1]
            shown = (
                f"{power_below(ladder.margin_nats, size.deviation_nats, count, level, mean):.0%} at {mean:g}"
                for mean in (*_TRUE_HARM, 2 * ladder.margin_nats)
            )
            told.append(
                f"{size.name}, family {family}, {count} seeds, deviation {size.deviation_nats:g}, error rate "
                f"{level:.4f}: {', '.join(shown)}"
            )
    return (
        "Power, computed before the first run: how often the last analysis alone shows no harm, by the true difference "
        f"in nats. {'; '.join(told)}."
    )


def _size_parts(ladder: LadderFile, made: LadderMade, size: ModelSize, style: str) -> list[str]:
    text = f"{size.name}: {size.model.num_params:,} parameters, {size.tokens_per_param:.0f} tokens per parameter"
    judged = {one.configuration.name: one for one in judge_size(ladder, made, size)}
    present = [own for one in judged.values() for own in (one.configuration, one.reference)]
    rows = [
        _row(ladder, made, size, own, judged.get(own.name))
        for own in ladder.configurations_at(size)
        if own in present or not size.analyses
    ]
    title = f"## {text}" if style == MARKDOWN else text
    return [
        title,
        table(_HARM_TEST_HEADERS if size.analyses else _QUALITY_HEADERS, rows, style),
        _rates(ladder, made, size),
    ]


def _rates(ladder: LadderFile, made: LadderMade, size: ModelSize) -> str:
    """Return the rates tried with their losses at the tuning seed, and whether the chosen one is interior."""
    told = []
    for own in ladder.configurations_at(size):
        lrs, losses = ladder.rates_of(size, own), dict[float, float | None]()
        for lr in lrs:
            run = ladder_run(ladder, made, size, own, ladder.tuning_seed, lr)
            if (record := made.get(run_key(ladder, run))) is not None:
                losses[lr] = record.validation_loss
        if len(lrs) == 1:
            told.append(f"{own.name} {lrs[0]:g}, not tuned")
        if len(losses) < 2:
            continue
        best = chosen_lr(ladder, made, size, own)
        edge = ", an end of the range tried: another may be better" if best in {min(losses), max(losses)} else ""
        tried = ", ".join(f"{lr:g}: {_cell(loss, 'diverged')}" for lr, loss in losses.items())
        told.append(f"{own.name} {tried}; chosen {best:g}{edge}")
    return f"Rates tried at seed {ladder.tuning_seed}, validation loss. {'. '.join(told)}." if told else ""


def _row(
    ladder: LadderFile, made: LadderMade, size: ModelSize, own: Configuration, judged: Comparison | None
) -> list[str]:
    seeds = size.seeds if judged is None else judged.seeds
    records = [found for seed in seeds if (found := ladder_record(ladder, made, size, own, seed)) is not None]
    losses = [record.validation_loss for record in records if record.validation_loss is not None]
    tail = [
        f"{chosen_lr(ladder, made, size, own):g}", f"{len(records)} of {len(seeds)}",
        _cell(fmean(losses) if losses else None),
    ]  # fmt: skip
    if judged is None:
        word = "baseline" if own is ladder.baseline else "compared with"
        return [own.name, *["-"] * 4, word, *tail, "-", "-"]
    p_values = ["-", "-"]
    if size.analyses:
        p_values = [_cell(judged.largest_harm), f"{judged.level:.5f}" if judged.level else "-"]
    elif judged.finding is not Finding.UNFINISHED:
        p_values = ["<0.0001" if p < 0.0001 else f"{p:.4f}" for p in (judged.p_equivalent, judged.p_different)]
    deviation = _cell(stdev(judged.differences) if len(judged.differences) > 1 else None)
    return [
        own.name, judged.reference.name, range_text(judged.interval, "+.4f"), *p_values,
        f"{judged.finding}{judged.diverged_text}", *tail, deviation, range_text(judged.retention(), ".2f"),
    ]  # fmt: skip


def _extrapolations(ladder: LadderFile, made: LadderMade) -> str:
    told = []
    for own in ladder.arms:
        pairs = [(size, pair) for size in ladder.rungs for pair in ladder.pairs_at(size) if pair[0] is own]
        found = extrapolate([last_analysis(ladder, made, size, *pair) for size, pair in pairs], *_FAR)
        if found is not None:
            told.append(f"{own.name} {range_text(found[0], '+.4f')} (line in {found[1]})")
    far = f"{format_count(int(_FAR[0]))} parameters and {_FAR[1]:.0f} tokens per parameter"
    if not told:
        return f"Extrapolation to {far}: none yet, too few model sizes are finished."
    return (
        f"Extrapolation to {far}, no measurement: a line through the differences of all finished model sizes over the "
        f"logarithms of size and length, extended that far: {'; '.join(told)}."
    )


def _shares(ladder: LadderFile, style: str) -> str:
    rows = [[stack, own.name, own.description] for own in ladder.arms for stack in sorted(own.stacks)]
    rows += [["-", own.name, own.description] for own in ladder.arms if not own.stacks]
    return table(["stack", "shares the runs of", "which computes"], rows, style)


def _replays(ladder: LadderFile, made: LadderMade, results: Path) -> str:
    replays = [found for key, found in read_replays(results, ladder).items() if key in made]
    if not replays:
        return "Replays: no later program has recomputed a record's first steps."
    equal, fine = sum(found.is_equal for found in replays), sum(map(holds, replays))
    latest = max(replays, key=lambda found: found.started_at)
    return (
        f"Replays: the first steps and a small run of {len(replays)} records were recomputed, last by program "
        f"{latest.program} (commit {latest.environment.commit[:8] or 'of no checkout'}). {equal} are equal to the bit; "
        f"{fine} hold, within rounding on another processor (with predicted steps up to the first of them)."
    )
