"""Ladder verdicts on the precision of a training option: decided ones first, at the largest model size."""

from collections.abc import Iterable
from pathlib import Path

from hybridtrain.extension import QualityNote
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import compose
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.plan.placement import Codec
from hybridtrain.planning.candidates import Candidate
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.equivalence import Comparison, Finding, judge_size, last_analysis
from hybridvalidation.study.protocol import Configuration, LadderFile, LadderMade, ladders, read_study
from hybridvalidation.study.quality import weight_of


def ladder_notes(candidates: Iterable[Candidate], files: ScenarioFiles, results: Path) -> dict[str, QualityNote]:
    """Return a note by name of the precision; one without a configuration on any ladder is missing.

    A configuration has the same precision if compute dtypes and storage bits are equal. The number of micro-batches may
    differ; split16 counts as a float32 master.
    """
    made = {ladder.name: (ladder, read_study(results, ladder)) for ladder in ladders(files.folder)}
    judged = [
        (ladder.name, one) for ladder, runs in made.values() for size in ladder.rungs
        for one in judge_size(ladder, runs, size) if not one.configuration.rounds_to_nearest
    ]  # fmt: skip
    numbers = {one.configuration: _numbers(one.configuration.plan()) for _, one in judged}
    notes = {}
    for candidate in candidates:
        wanted = _numbers(compose(candidate.optimizations()))
        found = [
            (name, one) for name, one in judged
            if (own := one.configuration).optimizer == candidate.level.optimizer
            and _are_alike(numbers[own], wanted, own.num_micro_batches)
        ]  # fmt: skip
        if found:
            name, best = max(found, key=lambda each: weight_of(each[1]))
            notes[candidate.level.name] = _note(*made[name], best)
    return notes


def _note(ladder: LadderFile, made: LadderMade, judged: Comparison) -> QualityNote:
    baseline, text = _baseline(ladder, judged.configuration), _said(ladder, judged)
    if baseline is judged.reference:
        return QualityNote(params=judged.scale[0], verdict=_verdict(ladder, judged), text=text)
    direct = last_analysis(ladder, made, judged.size, judged.configuration, baseline)
    text += f"; against {baseline.name}: {_nats(direct.interval) or 'not run'}"
    return QualityNote(params=judged.scale[0], verdict=_verdict(ladder, direct), text=text)


def _baseline(ladder: LadderFile, own: Configuration) -> Configuration:
    """Return full training in fp32, of fine-tuned configurations full fine-tuning: what all others end at."""
    while (reference := ladder.reference_of(own)) is not None:
        own = reference
    return own


def _verdict(ladder: LadderFile, judged: Comparison) -> str:
    """Return the ladder's finding, of a comparison that it does not judge what the interval shows."""
    found, margin = judged.interval, ladder.margin_nats
    if found is None or not judged.is_finished:
        return "no comparison with the baseline" if found is None else "test not finished"
    if judged.finding is Finding.NO_HARM:
        return f"no harm above {margin:g} nats per token"
    is_equal = -margin <= found.low and found.high <= margin
    if judged.finding is Finding.EQUIVALENT or (judged.finding is Finding.UNFINISHED and is_equal):
        return f"equal within {margin:g} nats per token"
    is_decided = judged.finding is not Finding.INCONCLUSIVE and (found.low > 0 or found.high < 0)
    if judged.num_diverged or is_decided:
        told = f"{'worse' if found.mean > 0 else 'better'} by {abs(found.mean):.3f} nats per token"
        return f"{told}{judged.diverged_text}"
    return f"undecided, {found.low:+.3f} to {found.high:+.3f} nats per token"


def _said(ladder: LadderFile, judged: Comparison) -> str:
    params, tokens = judged.scale
    size = f"{params / 1e6:.2f}M parameters and {tokens:.0f} tokens per parameter"
    head = (
        f"{judged.finding} (configuration {judged.configuration.name} of {ladder.name} against {judged.reference.name}"
    )
    if judged.finding is Finding.UNFINISHED:
        return (
            f"{head}, {len(judged.pairs)} of {len(judged.seeds)} seeds executed at {size}"
            f"{interim_text(judged, ladder.margin_nats)})"
        )
    nats = _nats(judged.interval)
    seeds = f"{len(judged.pairs)} seeds{judged.diverged_text}"
    return f"{head}: {nats}; margin {ladder.margin_nats}; executed at {size}, {seeds})"


def interim_text(judged: Comparison, margin_nats: float) -> str:
    """Return the interim result of an unfinished configuration; empty with too few seeds."""
    found = judged.interval
    if judged.finding is not Finding.UNFINISHED or found is None:
        return ""
    warning = ", WORSE so far by more than the margin" if found.low > margin_nats else ""
    return f"; so far {_nats(found)}{warning}"


def _nats(found: Interval | None) -> str:
    if found is None:
        return ""
    return f"loss {found.mean:+.4f} nats per token, 95 % interval {found.low:+.4f} to {found.high:+.4f}"


_Numbers = tuple[object, ...]


def _are_alike(own: _Numbers, wanted: _Numbers, num_micro_batches: int) -> bool:
    return own[1:] == wanted[1:] and (num_micro_batches == 1 or own[0] is wanted[0])


def _numbers(plan: MemoryPlan) -> _Numbers:
    """Return a plan's values that decide results: the precision of sums first, then everything else."""
    full = plan.for_phase(Phase.FULL)
    master = Codec.FLOAT32 if full.master.codec is Codec.SPLIT16 else full.master.codec
    return (
        full.grad.codec, full.compute_dtype, full.weight.codec, master, full.optim_state.codec, full.boundary.codec,
        full.linear, full.history_tensors, full.adapter_rank, full.adapter_alpha, full.adapter_scaling,
        full.adapter_dropout, full.adapter_targets, full.adapter_magnitude,
    )  # fmt: skip
