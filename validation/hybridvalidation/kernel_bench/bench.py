"""``bench kernels``: time them, record each case at once, and judge, accept or choose by the records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hybridtrain.config.encode import encode
from hybridtrain.reports.tables import TERMINAL
from hybridtrain.run.environment import package_version, read_environment
from hybridvalidation.experiments.card_session.ceilings import read_driver
from hybridvalidation.experiments.card_session.record import EvidenceRecord, read_evidence
from hybridvalidation.kernel_bench.baseline import SpeedCheck, accept_speed, check_speed
from hybridvalidation.kernel_bench.case import Mode
from hybridvalidation.kernel_bench.choose import CHOICES, Choice, Undecided, choose, write_choices
from hybridvalidation.kernel_bench.record import (
    KERNELS_FILE,
    KernelRecord,
    append_kernel,
    newest_kernels,
    read_kernels,
)
from hybridvalidation.kernel_bench.run import (
    CASE_BUDGET_S,
    OPS,
    QUICK_BUDGET_S,
    Bench,
    BenchOutcome,
    plan_cases,
    require_names,
    run_cases,
)
from hybridvalidation.kernel_bench.table import absent_lines, card_peaks, case_table, write_kernels
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.scenario import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOrder:
    """What is to be timed, and what is to be done with the times."""

    only: Sequence[str] = ()
    """Ops; empty: all."""
    modes: Sequence[str] = ()
    """Empty: all."""
    quick: bool = False
    """One shape of each op, fewer samples."""
    limit_s: float = 600.0
    """No case is started that would end later."""
    recorded: bool = False
    """Run nothing, take the newest record of each case."""
    check: bool = False
    accept: bool = False
    choose: bool = False


@dataclass(slots=True)
class BenchReport:
    """What was found and written."""

    outcome: BenchOutcome
    evidence: Sequence[EvidenceRecord]
    """What was measured of the card itself: peaks for the table."""
    is_accepted: bool = False
    files: list[Path] = field(default_factory=list)
    check: SpeedCheck | None = None
    chosen: list[Choice] = field(default_factory=list)
    undecided: list[Undecided] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """What is wrong with this project's own providers."""
        return [
            f"{record.name}: {result.provider} is {result.outcome}: {result.message}"
            for record in self.outcome.records
            for result in record.results
            if result.is_ours and result.outcome in {Outcome.WRONG, Outcome.ERROR}
        ]

    @property
    def exit_code(self) -> int:
        """1 when a provider of ours is wrong or failed, or the card was lost; else what the comparison says."""
        if self.faults or self.outcome.lost_card:
            return 1
        return 0 if self.check is None or self.is_accepted else int(self.check.exit_code)

    def as_mapping(self) -> dict[str, object]:
        """Return everything as plain data."""
        return {
            "exit": self.exit_code,
            "records": [encode(record) for record in self.outcome.records],
            "not_run": self.outcome.not_run,
            "lost_card": self.outcome.lost_card,
            "faults": self.faults,
            "findings": [] if self.check is None else [encode(finding) for finding in self.check.findings],
            "chosen": [encode(row) for row in self.chosen],
            "undecided": [encode(row) for row in self.undecided],
            "files": [path.as_posix() for path in self.files],
        }

    def as_text(self) -> str:
        """Return a table for each card, then what is missing, wrong, slower and chosen."""
        records, outcome = self.outcome.records, self.outcome
        parts = [
            f"{card} ({'measured' if of_card[0].is_on_card else 'executed'})\n"
            f"{case_table(of_card, card_peaks(card, self.evidence), TERMINAL)}"
            for card in dict.fromkeys(record.card for record in records)
            if (of_card := [record for record in records if record.card == card])
        ]
        parts.append("\n".join(absent_lines(records)) or "every provider was timed")
        if outcome.lost_card:
            parts.append(
                f"the card stopped answering after {outcome.lost_card}: a kernel may have written where it must not; "
                f"run the rest with --only, without that op"
            )
        if outcome.not_run:
            parts.append(f"not run: {len(outcome.not_run)} cases ({', '.join(outcome.not_run)}); give more --minutes")
        parts += [*self.faults, *self._findings()]
        parts += [f"chosen: {row.op} on {row.card}: {row.provider}" for row in self.chosen]
        parts += [f"default order kept: {row.op} on {row.card}: {row.reason}" for row in self.undecided]
        parts.append(f"written: {', '.join(path.as_posix() for path in self.files) or 'nothing'}")
        return "\n\n".join(parts)

    def _findings(self) -> list[str]:
        if self.check is None:
            return []
        found = [
            f"{finding.exit.name.lower()}: {finding.case} {finding.provider} {finding.message}".replace("  ", " ")
            for finding in self.check.findings
        ]
        code, compared, new = self.check.exit_code.name.lower(), self.check.num_compared, self.check.num_new
        return [*found, f"check: {code}, {compared} times compared, {new} new"]


def bench_kernels(
    order: BenchOrder, results: Path, targets: Mapping[str, Target], say: Callable[[str], None]
) -> BenchReport:
    """Time the kernels; when ``order.recorded``, the newest record of each case stands for a run.

    Raises:
        ConfigError: an op or a mode that nobody knows.
        RecordError: a record file is damaged.
    """
    require_names(order.only, order.modes)
    folder = results / "records"
    earlier, evidence = read_kernels(folder), read_evidence(folder)  # a damaged file is told now, not after the run
    if order.recorded:
        outcome = _recorded(order, earlier)
    else:
        made = list(earlier)

        def on_record(record: KernelRecord) -> None:
            append_kernel(folder, record)
            made.append(record)
            write_kernels(made, results, evidence, targets)

        outcome = _measure(order, on_record, say)
    found = BenchReport(outcome, evidence, order.accept)
    known = read_kernels(folder)
    found.files += [folder / KERNELS_FILE] if found.outcome.records and not order.recorded else []
    found.files += write_kernels(known, results, evidence, targets)
    if order.check:
        found.check = check_speed(found.outcome.records, results / "baselines")
    if order.accept:
        found.files += accept_speed(found.outcome.records, results / "baselines")
    if order.choose:
        found.chosen, found.undecided = choose(known)
        write_choices(found.chosen, found.undecided, CHOICES)
        found.files.append(CHOICES)
    return found


def _measure(order: BenchOrder, on_record: Callable[[KernelRecord], None], say: Callable[[str], None]) -> BenchOutcome:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = plan_cases(device, only=order.only, modes=order.modes, quick=order.quick)
    environment, on_card = read_environment(), device.type == "cuda"
    bench = Bench(
        device=device, card=environment.gpu if on_card else environment.cpu, driver=read_driver() if on_card else "",
        triton=package_version("triton"), environment=environment,
        budget_s=QUICK_BUDGET_S if order.quick else CASE_BUDGET_S, on_record=on_record, say=say,
    )  # fmt: skip
    if not on_card:
        say("no CUDA card: small shapes on the processor, executed; these times say nothing of a card")
    return run_cases(bench, cases, limit_s=order.limit_s)


def _recorded(order: BenchOrder, earlier: Sequence[KernelRecord]) -> BenchOutcome:
    wanted = [
        record
        for record in newest_kernels(earlier)
        if record.op in (order.only or OPS) and record.mode in (order.modes or list(Mode))
    ]
    return BenchOutcome(records=wanted)
