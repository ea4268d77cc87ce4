"""The ``bench`` verb: time the kernels, record each case at once, and judge, accept or choose by the records."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from hybridtrain.config.encode import encode
from hybridvalidation.card_session.ceilings import read_driver
from hybridvalidation.card_session.record import EvidenceRecord, read_evidence
from hybridvalidation.kernel_bench.attention_command import attention_command
from hybridvalidation.kernel_bench.baseline import SpeedCheck, accept_speed, check_speed
from hybridvalidation.kernel_bench.case import Mode
from hybridvalidation.kernel_bench.choose import CHOICES, Choice, Undecided, choose, write_choices
from hybridvalidation.kernel_bench.plan import OPS, plan_cases, require_names
from hybridvalidation.kernel_bench.record import (
    KERNELS_FILE,
    KernelRecord,
    append_kernel,
    newest_kernels,
    read_kernels,
)
from hybridvalidation.kernel_bench.run import CASE_BUDGET_S, QUICK_BUDGET_S, Bench, BenchOutcome, run_cases
from hybridvalidation.kernel_bench.table import absent_lines, card_peaks, case_table, write_kernels
from hybridvalidation.records.environment import read_environment
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.scenario import Target
from hybridvalidation.scenario_files import scenario_folder
from hybridvalidation.show.tables import TERMINAL

BENCH = (
    "time the kernels against other implementations, on this machine's CUDA card or, at small shapes, its processor; "
    "exit codes: 0 well, 1 one of ours is wrong or failed, 4 slower than the baseline, 6 no baseline"
)


def bench_arguments(parser: argparse.ArgumentParser, *, minutes: Callable[[str], float]) -> argparse.ArgumentParser:
    """Add the arguments of the verb; ``minutes`` reads that one."""
    parser.add_argument(
        "what", choices=["kernels", "attention"],
        help="kernels: timed; attention: what the flash kernel saves by length, planned (takes no other option)",
    )  # fmt: skip
    for option, metavar, says in (
        ("--only", "OP,OP", "ops; default: all"),
        ("--modes", "MODE,MODE", "forward, backward, both; default: all"),
    ):
        parser.add_argument(option, type=lambda text: text.split(","), default=(), metavar=metavar, help=says)
    parser.add_argument("--quick", action="store_true", help="one shape of each op, fewer samples")
    parser.add_argument(
        "--minutes", type=minutes, default=10.0, metavar="N", help="start no case that would end later (default: 10)"
    )
    parser.add_argument("--recorded", action="store_true", help="run nothing, take the newest record of each case")
    parser.add_argument("--check", action="store_true", help="compare with the baseline of the same card")
    parser.add_argument("--accept", action="store_true", help="record the times as the card's new baseline")
    parser.add_argument("--choose", action="store_true", help="rewrite hybridkernels/choices.toml from the records")
    return parser


@dataclass(slots=True)
class _Found:
    """What the command found and wrote."""

    outcome: BenchOutcome
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

    def exit_code(self, *, accepted: bool) -> int:
        """1 when a provider of ours is wrong or failed, or the card was lost; else what the comparison says."""
        if self.faults or self.outcome.lost_card:
            return 1
        return 0 if self.check is None or accepted else int(self.check.exit_code)


def bench_command(options: argparse.Namespace) -> int:
    """Time the kernels; with ``--recorded`` nothing is run, and the newest record of each case stands for a run."""
    if options.what == "attention":
        return attention_command(options)
    require_names(options.only, options.modes)
    targets = scenario_folder(options.scenarios).targets()
    folder = options.results / "records"
    earlier, evidence = read_kernels(folder), read_evidence(folder)  # a damaged file is told now, not after the run
    found = _Found(_recorded(options, earlier) if options.recorded else _measure(options, earlier, evidence, targets))
    known = read_kernels(folder)
    found.files += [folder / KERNELS_FILE] if found.outcome.records and not options.recorded else []
    found.files += write_kernels(known, options.results, evidence, targets)
    if options.check:
        found.check = check_speed(found.outcome.records, options.results / "baselines")
    if options.accept:
        found.files += accept_speed(found.outcome.records, options.results / "baselines")
    if options.choose:
        found.chosen, found.undecided = choose(known)
        write_choices(found.chosen, found.undecided, CHOICES)
        found.files.append(CHOICES)
    code = found.exit_code(accepted=options.accept)
    if options.json:
        sys.stdout.write(json.dumps(_as_mapping(found, code), allow_nan=False) + "\n")
    else:
        sys.stdout.write("\n\n".join(_as_text(found, evidence)) + "\n")
    return code


def _measure(
    options: argparse.Namespace,
    earlier: Sequence[KernelRecord],
    evidence: Sequence[EvidenceRecord],
    targets: Mapping[str, Target],
) -> BenchOutcome:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = plan_cases(device, only=options.only, modes=options.modes, quick=options.quick)
    records, made = options.results / "records", list(earlier)

    def on_record(record: KernelRecord) -> None:
        append_kernel(records, record)
        made.append(record)
        write_kernels(made, options.results, evidence, targets)

    def say(text: str) -> None:
        if not options.json:
            sys.stderr.write(text + "\n")

    environment, on_card = read_environment(), device.type == "cuda"
    bench = Bench(
        device=device, card=environment.gpu if on_card else environment.cpu, driver=read_driver() if on_card else "",
        triton=_triton_version(), environment=environment, budget_s=QUICK_BUDGET_S if options.quick else CASE_BUDGET_S,
        on_record=on_record, say=say,
    )  # fmt: skip
    if not on_card:
        say("no CUDA card: small shapes on the processor, executed; these times say nothing of a card")
    return run_cases(bench, cases, limit_s=60 * options.minutes)


def _recorded(options: argparse.Namespace, earlier: Sequence[KernelRecord]) -> BenchOutcome:
    wanted = [
        record
        for record in newest_kernels(earlier)
        if record.op in (options.only or OPS) and record.mode in (options.modes or list(Mode))
    ]
    return BenchOutcome(records=wanted)


def _triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def _as_mapping(found: _Found, code: int) -> dict[str, object]:
    return {
        "exit": code,
        "records": [encode(record) for record in found.outcome.records],
        "not_run": found.outcome.not_run,
        "lost_card": found.outcome.lost_card,
        "faults": found.faults,
        "findings": [] if found.check is None else [encode(finding) for finding in found.check.findings],
        "chosen": [encode(row) for row in found.chosen],
        "undecided": [encode(row) for row in found.undecided],
        "files": [path.as_posix() for path in found.files],
    }


def _as_text(found: _Found, evidence: Sequence[EvidenceRecord]) -> list[str]:
    records, outcome = found.outcome.records, found.outcome
    parts = [
        f"{card} ({'measured' if of_card[0].is_on_card else 'executed'})\n"
        f"{case_table(of_card, card_peaks(card, evidence), TERMINAL)}"
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
    parts += [f"{fault}" for fault in found.faults]
    if found.check is not None:
        parts += [
            f"{finding.exit.name.lower()}: {finding.case} {finding.provider} {finding.message}".replace("  ", " ")
            for finding in found.check.findings
        ]
        parts.append(
            f"check: {found.check.exit_code.name.lower()}, {found.check.num_compared} times compared, "
            f"{found.check.num_new} new"
        )
    parts += [f"chosen: {row.op} on {row.card}: {row.provider}" for row in found.chosen]
    parts += [f"default order kept: {row.op} on {row.card}: {row.reason}" for row in found.undecided]
    parts.append(f"written: {', '.join(path.as_posix() for path in found.files) or 'nothing'}")
    return parts
