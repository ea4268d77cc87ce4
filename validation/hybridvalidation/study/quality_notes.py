"""Ladder verdicts on a training option's precision, at its configuration's largest finished model size."""

from collections.abc import Iterable
from pathlib import Path

from hybridtrain.phase import Phase
from hybridtrain.plan.compose import compose
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.plan.placement import Codec
from hybridtrain.planning.candidates import Candidate
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.equivalence import Comparison, Finding
from hybridvalidation.study.protocol import LadderFile
from hybridvalidation.study.quality import all_judged, weight_of


def ladder_notes(candidates: Iterable[Candidate], files: ScenarioFiles, results: Path) -> dict[str, str]:
    """Return a sentence per precision that has a configuration on a ladder.

    A configuration has the same precision if compute dtypes and storage bits are equal. The number of micro-batches may
    differ; split16 counts as a float32 master.
    """
    weighed = [
        (judged.configuration, weight_of(judged), _said(ladder, judged))
        for ladder, judged in all_judged(files, results)
        if not judged.configuration.rounds_to_nearest
    ]
    numbers = {arm: _numbers(arm.plan()) for arm, _, _ in weighed}
    notes = {}
    for candidate in candidates:
        wanted = _numbers(compose(candidate.optimizations()))
        found = [
            (weight, note)
            for arm, weight, note in weighed
            if arm.optimizer == candidate.level.optimizer and _are_alike(numbers[arm], wanted, arm.num_micro_batches)
        ]
        if found:
            notes[candidate.level.name] = max(found, key=lambda note: note[0])[1]
    return notes


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
