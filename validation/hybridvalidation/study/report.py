"""A study as one Markdown file: its registration, one sentence of verdict, tables, pictures."""

import math
from collections.abc import Mapping
from pathlib import Path

from tabulate import tabulate

from hybridtrain.config.decode import load_toml
from hybridtrain.reports.tables import MARKDOWN, write_page
from hybridtrain.units import to_gib
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.judge.tables import verdict_table
from hybridvalidation.records.makers import made_by
from hybridvalidation.scenario import Target
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.figures import (
    Factor,
    MethodFigures,
    horizon_curve,
    judge_study,
    lost_seeds,
    lr_curve,
    method_figures,
    noise_floor,
)
from hybridvalidation.study.forecast import write_forecasts
from hybridvalidation.study.harm import harm_sentence, harm_text
from hybridvalidation.study.protocol import BASELINE, JUDGED, Made, StudyFile, chosen, next_runs
from hybridvalidation.study.runner import read_study

_FIVE, _NEEDS_FIVE = 5, 1.1
"""Seeds that the protocol wants for compute factors below the second."""
_HOW = (
    "Executed on the CPU, one thread a run. Loss: validation, nats per token, at the end of the run's own schedule; "
    "test: other held-out batches, looked at once. Factor: cost at which AdamW ends at the same loss, by interpolation "
    "on its horizon curve of the same seed, over the method's own cost; cost counts a forward pass 1 and a backward "
    "pass 2, probes included. Intervals are 95 % over paired seeds (same initial weights, same batches; a method that "
    "probes keeps a part of the training text for that, so its batches are others), open towards where a factor (> or "
    "<) is beyond AdamW's horizons. Predicted steps are a diagnostic, no speed. Step time: processor time of a true "
    "step over AdamW's."
)
_HEADERS = (
    "method", "role", "lr", "seeds", "loss", "test", "gain on AdamW", "compute factor", "by seed",
)  # fmt: skip
_COST_HEADERS = ("method", "cost, steps", "step time", "predicted steps", "taken back", "planned GiB")


def verdict_sentence(study: StudyFile, made: Made) -> str:
    """Return the sentence that the study was made for."""
    if study.largest_harm_pct is not None:
        return harm_sentence(study, made)
    if next_runs(study, made):
        return f"Not finished: the registered claim ({study.target}) is unproven."
    lost = lost_seeds(study, made, JUDGED)
    figures = method_figures(study, made, JUDGED)
    if figures is None or lost:
        seeds = ", ".join(map(str, lost))
        return f"{JUDGED} or AdamW diverged with seed {seeds}: the registered claim ({study.target}) is not met."
    factor, count = _range(figures.factor), len(figures.seeds)
    shown = f"{JUDGED} reaches AdamW's loss with a compute factor of {factor} over {count} seeds"
    if figures.bounds:
        told = " ".join(map(_factor, figures.factors))
        shown += f" (beyond AdamW's horizons where marked: {told}; the interval is open there)"
    return f"{shown}: {_judged(study, figures)}."


def _judged(study: StudyFile, figures: MethodFigures) -> str:
    """Return what the compute factor says on the registered claim."""
    factor = figures.factor
    if factor.high < 1.0:
        return "it is slower than AdamW; the registered claim is refuted"
    if factor.low <= 1.0:
        return "no speed-up, the interval includes 1.0; the registered claim is not met"
    if factor.mean < study.least_gain:
        word = "refuted" if factor.high < study.least_gain else "not met"
        return f"a speed-up, below the registered {study.least_gain:g}; the claim is {word}"
    if factor.mean < _NEEDS_FIVE and len(figures.seeds) < _FIVE:
        return (
            f"a speed-up, but a claim below {_NEEDS_FIVE:g} needs {_FIVE} seeds by the protocol; the registered claim "
            "is unproven"
        )
    return f"a speed-up; the registered claim (at least {study.least_gain:g}, interval above 1.0) is met"


def study_text(study: StudyFile, made: Made, targets: Mapping[str, Target], style: str) -> str:
    """Return verdict, registration and tables."""
    if study.largest_harm_pct is not None:
        return harm_text(study, made, style)
    floor = noise_floor(study, made)
    size = study.model.num_params
    registration = (
        f"Registered before the first run: {study.target}. {study.stop_rule} {study.num_steps} steps of "
        f"{study.batch_size} x {study.seq_len} tokens, {study.tokens_per_param:.1f} tokens a parameter ({size:,})."
    )
    if study.remarks:
        registration += f"\n\nAfter the registration: {study.remarks}"
    tuned = _tuned_text(study, made)
    if len(versions := sorted({record.environment.commit[:8] for record in made.values()})) > 1:
        tuned += f" The runs were made by {len(versions)} versions of the program: {', '.join(versions)}."
    if floor is not None:
        tuned += f" Noise floor: its loss has a standard deviation of {floor:.4f} over {len(study.seeds)} seeds."
    return "\n\n".join(
        [
            verdict_sentence(study, made), registration, tuned, *_method_tables(study, made, style), _HOW,
            _horizon_table(study, made, style), _lr_table(study, made, style),
            *([verdict_table(judge_study(study, made, targets), style)] if study.targets else []),
        ]
    )  # fmt: skip


def _tuned_text(study: StudyFile, made: Made) -> str:
    """Return the learning rates that were chosen, and what was not tried."""
    lr, pair = chosen(study, made, BASELINE)
    told = (
        f"AdamW's learning rate is {lr:g}, betas {pair.beta1:g} and {pair.beta2:g}. Rates and betas were chosen at "
        f"seed {study.tuning_seed}, which is judged too."
    )
    for name in [BASELINE, *(method.name for method in study.methods if method.lrs)]:
        method = study.method(name)
        tried, (best, _) = study.lrs if method is None else method.lrs, chosen(study, made, name)
        num_made = len(lr_curve(study, made, name))
        if num_made < len(tried):
            told += f" Not finished: {num_made} of {len(tried)} rates of {name} are tried."
        elif len(tried) > 1 and best in {min(tried), max(tried)}:
            end = "lowest" if best == min(tried) else "highest"
            told += f" The best rate of {name} ({best:g}) is the {end} tried: its optimum may lie beyond."
    return told


def write_study(study: StudyFile, made: Made, targets: Mapping[str, Target], results: Path) -> list[Path]:
    """Write ``tables/study-NAME.md`` and its pictures below ``results``."""
    from hybridvalidation.study.plots import (  # noqa: PLC0415  matplotlib takes half a second
        harm_plots,
        write_study_plots,
    )

    draw = write_study_plots if study.largest_harm_pct is None else harm_plots
    plots = draw(study, made, results / "plots")
    pictures = "\n".join(f"![{path.stem}](../plots/{path.name})" for path in plots)
    title = "Time to loss" if study.largest_harm_pct is None else "Harm"
    parts = [
        f"# {title}: {study.says}", study_text(study, made, targets, MARKDOWN),
        made_by(("", record) for record in made.values()), "## Pictures", pictures,
    ]  # fmt: skip
    return [write_page(results, f"study-{study.name}", "\n\n".join(parts)), *plots]


def write_studies(files: ScenarioFiles, results: Path) -> list[Path]:
    """Rebuild tables and pictures of every study that has records, and of the forecasts."""
    written: list[Path] = []
    paths = sorted((files.folder / "studies").glob("*.toml"))
    targets = files.targets() if paths else {}
    for path in paths:
        study = load_toml(StudyFile, path)
        made = read_study(results, study.name)
        if made:
            written += write_study(study, made, targets, results)
    return written + write_forecasts(results)


def _method_tables(study: StudyFile, made: Made, style: str) -> list[str]:
    """Return what each method reaches, and what it takes."""
    reached, taken = list[list[str]](), list[list[str]]()
    for name in [BASELINE, *(method.name for method in study.methods)]:
        figures = method_figures(study, made, name) if name != BASELINE or not study.is_constant else None
        if figures is not None:
            reached.append(_method_row(study, figures))
            taken.append(_cost_row(figures))
        elif next_runs(study, made) == [] and name != BASELINE:
            reached.append([name, *["diverged"] * (len(_HEADERS) - 1)])
    return [
        tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)
        for rows, headers in ((reached, _HEADERS), (taken, _COST_HEADERS))
        if rows
    ]


def _method_row(study: StudyFile, figures: MethodFigures) -> list[str]:
    method = study.method(figures.name)
    mean = sum(figures.losses) / len(figures.losses)
    test = sum(figures.test_losses) / len(figures.test_losses)
    is_baseline = method is None
    return [
        figures.name, "baseline" if method is None else method.role, f"{figures.lr:g}", str(len(figures.seeds)),
        f"{mean:.4f}", f"{test:.4f}", "-" if is_baseline else _range(figures.gain, digits=4),
        "1" if is_baseline else ("about " if figures.bounds else "") + _range(figures.factor),
        "-" if is_baseline else " ".join(_factor(factor) for factor in figures.factors),
    ]  # fmt: skip


def _cost_row(figures: MethodFigures) -> list[str]:
    return [
        figures.name, f"{figures.cost:,.0f}", f"{figures.cpu_ratio:.2f}", f"{figures.predicted_steps:,.0f}",
        str(figures.rollbacks), f"{to_gib(figures.planned_device_bytes):.3f}",
    ]  # fmt: skip


def _horizon_table(study: StudyFile, made: Made, style: str) -> str:
    if study.is_constant:
        return ""
    curves = {seed: dict(horizon_curve(study, made, seed)) for seed in study.seeds}
    rows = []
    for steps in sorted({*study.horizons, *study.tuning_horizons}):
        cells = [curves[seed].get(float(steps)) for seed in study.seeds]
        rows.append([f"{steps:,}", *("-" if loss is None else f"{loss:.4f}" for loss in cells)])
    headers = ["AdamW's steps", *(f"seed {seed}" for seed in study.seeds)]
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def _lr_table(study: StudyFile, made: Made, style: str) -> str:
    if len(study.lrs) < 2:
        return ""
    names = [BASELINE, *(method.name for method in study.methods if method.lrs)]
    curves = {name: dict(lr_curve(study, made, name)) for name in names}
    rows = []
    for lr in sorted({lr for curve in curves.values() for lr in curve}):
        cells = [_loss_cell(curves[name], lr) for name in names]
        rows.append([f"{lr:g}", *cells])
    return tabulate(rows, headers=["learning rate", *names], tablefmt=style, disable_numparse=True)


def _loss_cell(curve: dict[float, float | None], lr: float) -> str:
    if lr not in curve:
        return "-"
    loss = curve[lr]
    return "diverged" if loss is None else f"{loss:.4f}"


def _factor(factor: Factor) -> str:
    return f"{factor.bound}{factor.value:.2f}"


def _range(interval: Interval, digits: int = 2) -> str:
    if math.isinf(interval.low):
        return f"{interval.mean:.{digits}f}"
    return f"{interval.mean:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"
