"""The harm that bad settings do: each beside plain AdamW under the same circumstances, seed by seed."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from tabulate import tabulate

from hybridvalidation.study.protocol import (
    Made,
    StudyFile,
    StudyMethod,
    StudyRecord,
    StudyRun,
    chosen,
    next_runs,
    run_key,
)

_HOW = (
    "Executed on the CPU, the validation loss at the end of the run. Harm: loss over that of AdamW under the same "
    "circumstances and with the same seed, in percent; negative: better. Taken back: jumps undone by the guard or by a "
    "search. Where AdamW stops with a message, stopping too is no harm."
)
_HEADERS = (
    "setting", "what", "against", "loss", "AdamW's loss", "harm %", "worst seed %", "jumps", "taken back", "bound kept",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """One setting over its seeds."""

    method: StudyMethod
    losses: tuple[float | None, ...]
    """None where the run stopped with a message."""
    baseline_losses: tuple[float | None, ...]
    jumps: float
    rollbacks: int

    @property
    def percents(self) -> list[float]:
        """Harm by seed, where both ended."""
        pairs = zip(self.losses, self.baseline_losses, strict=True)
        return [100 * (own / base - 1) for own, base in pairs if own is not None and base is not None]

    def keeps(self, largest_pct: float) -> bool:
        """Return whether the mean harm is within the bound, and no run stopped where AdamW's did not."""
        pairs = zip(self.losses, self.baseline_losses, strict=True)
        stopped_alone = any(own is None and base is not None for own, base in pairs)
        return not stopped_alone and (not self.percents or fmean(self.percents) <= largest_pct)


def harms(study: StudyFile, made: Made) -> list[Harm]:
    """Return every judged setting whose runs are finished; controls are what they are compared with."""
    found = []
    for method in study.methods:
        if method.role == "control":
            continue
        own = [_record(study, made, method.name, seed) for seed in study.seeds_of(method.name)]
        base = [_record(study, made, method.against, seed) for seed in study.seeds_of(method.name)]
        records = [record for record in own if record is not None]
        if len(records) == len(own) and all(record is not None for record in base):
            found.append(
                Harm(
                    method=method, losses=tuple(record.validation_loss for record in records),
                    baseline_losses=tuple(record.validation_loss for record in base if record is not None),
                    jumps=fmean(record.jumps for record in records),
                    rollbacks=sum(record.rollbacks for record in records),
                )
            )  # fmt: skip
    return found


def harm_sentence(study: StudyFile, made: Made) -> str:
    """Return the verdict on the harm bound."""
    found = harms(study, made)
    if next_runs(study, made) or not found:
        return f"Not finished: the registered claim ({study.target}) is unproven."
    assert study.largest_harm_pct is not None, "a study of harm"
    broken = [harm.method.name for harm in found if not harm.keeps(study.largest_harm_pct)]
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
        return f"The registered bound of {study.largest_harm_pct:g} % is broken by {', '.join(broken)}; {shown}."
    return f"The registered bound of {study.largest_harm_pct:g} % is kept by every setting: {shown}."


def harm_text(study: StudyFile, made: Made, style: str) -> str:
    """Return verdict, registration and table."""
    registration = f"Registered before the first run: {study.target}. {study.stop_rule}"
    if study.remarks:
        registration += f"\n\nAfter the registration: {study.remarks}"
    assert study.largest_harm_pct is not None, "a study of harm"
    rows = [_row(harm, study.largest_harm_pct) for harm in harms(study, made)]
    table = tabulate(rows, headers=_HEADERS, tablefmt=style, disable_numparse=True)
    return "\n\n".join([harm_sentence(study, made), registration, table, _HOW])


def _row(harm: Harm, largest_pct: float) -> list[str]:
    def mean(losses: tuple[float | None, ...]) -> str:
        ended = [loss for loss in losses if loss is not None]
        return f"{fmean(ended):.4f}" if ended else "stopped"

    def percent(pick: Callable[[list[float]], float]) -> str:
        return f"{pick(harm.percents):+.2f}" if harm.percents else "-"

    return [
        harm.method.name, harm.method.says, harm.method.against, mean(harm.losses), mean(harm.baseline_losses),
        percent(fmean), percent(max), f"{harm.jumps:,.0f}", str(harm.rollbacks),
        "yes" if harm.keeps(largest_pct) else "NO",
    ]  # fmt: skip


def _record(study: StudyFile, made: Made, name: str, seed: int) -> StudyRecord | None:
    lr, pair = chosen(study, made, name)
    run = StudyRun(method=name, lr=lr, beta1=pair.beta1, beta2=pair.beta2, seed=seed, num_steps=study.num_steps)
    return made.get(run_key(study, run))
