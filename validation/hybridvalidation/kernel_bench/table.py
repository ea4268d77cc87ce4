"""``tables/kernels.md``: every case with its winner, and stated figures of kernels, from records alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtrain.reports.tables import MARKDOWN, table, write_page
from hybridtrain.units import GB, MIB
from hybridtrain.virtual_gpu.cards.card import card_catalogue
from hybridvalidation.experiments.card_session.record import EvidenceRecord
from hybridvalidation.judge.case import Metric
from hybridvalidation.judge.tables import verdict_table
from hybridvalidation.judge.verdict import Verdict, judge_metric
from hybridvalidation.kernel_bench.case import Clock
from hybridvalidation.kernel_bench.cases import OPS
from hybridvalidation.kernel_bench.record import KernelRecord, ProviderResult, newest_kernels
from hybridvalidation.kernel_bench.timing import Times
from hybridvalidation.records.makers import made_by
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.scenario import Target

SPEEDUPS = {"rssm-kernel-speedup": "rssm_gru", "state-encoding-kernel-speedup": "state_encoding"}
"""Target -> op whose kernel on a card is compared with the CPU."""
_ON_PROCESSOR = "cpu"
"""Provider's name on the CPU -> in a card's records."""


def processor_speedups(records: Sequence[KernelRecord]) -> list[tuple[KernelRecord, float]]:
    """Return the speed-up of each case of a card that was also run on the CPU."""
    speedups = []
    for record in records:
        ours = record.fastest(lambda result: result.is_ours)
        processor = record.fastest(lambda result: result.provider == _ON_PROCESSOR)
        if record.is_on_card and ours is not None and processor is not None:
            speedups.append((record, processor[1].q50_s / ours[1].q50_s))
    return speedups


def judge_kernels(records: Sequence[KernelRecord], targets: Mapping[str, Target]) -> list[Verdict]:
    """Return one verdict per target, by its slowest case; unproven without a card's record."""
    speedups, verdicts = processor_speedups(records), []
    for name, op in SPEEDUPS.items():
        cases = [(factor, record.shape) for record, factor in speedups if record.op == op]
        factor, shape = min(cases, default=(0.0, ""))
        remark = f"{shape}; the least of {len(cases)} shapes"
        metric = Metric(factor, Evidence.MEASURED, "x", remark=remark) if cases else None
        if name in targets:
            verdicts.append(judge_metric(targets[name], op, metric, missing="no record of a CUDA card"))
    return verdicts


_CASE_HEADERS = (
    "op", "case", "winner", "ours us", "best other", "its us", "ours / other", "GB/s", "TFLOP/s", "of roofline",
    "clock",
)  # fmt: skip
_PROVIDER_HEADERS = (
    "op", "case", "provider", "us", "20 to 80 %", "samples", "peak MiB", "GB/s", "TFLOP/s", "of roofline",
    "error / tolerance",
)  # fmt: skip
_HOW = (
    "Times: median of one call, providers in turn. Clock `device`: between CUDA events, inputs in no cache, launches "
    "hidden; `wall`: from the call to the result, launches included. The winner's quantiles 0.2 to 0.8 lie below "
    "those of all others; where they overlap, there is none. Ours / other: time of our fastest provider over that of "
    "the fastest other one; below 1 ours is faster. GB/s and TFLOP/s of our provider count the least traffic and "
    "arithmetic that the op needs (arithmetic). Of roofline: {peaks}. Error: largest difference from the definition "
    "over its largest value, of the output nearest to its bound. Tolerance: twice the error of plain torch in the "
    "same dtype and one rounding. Peak MiB: peak of a call above memory held before. Differences: Liger's loss "
    "synchronizes with the device, bitsandbytes' time includes a cast of the gradient to float32, and torchao's "
    "gradients are float32."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Highest rates of a card."""

    bytes_per_s: float
    matmul_flops_per_s: float
    """Rate of tensor cores with 16-bit numbers, in FLOP/s."""
    flops_per_s: float
    """Rate of other arithmetic, in FLOP/s; 0: unknown."""
    source: str

    def share(self, record: KernelRecord, seconds: float) -> float | None:
        """Return the roofline's time over ``seconds``; None without rates."""
        if record.clock is Clock.WALL:
            return None
        rate = self.matmul_flops_per_s if record.uses_tensor_cores else self.flops_per_s
        least_s = max(record.num_bytes / self.bytes_per_s, record.flops / rate if rate else 0.0)
        return least_s / seconds


def card_peaks(card: str, evidence: Sequence[EvidenceRecord]) -> Peaks | None:
    """Return a card's data-sheet figures by its CUDA name; else its measured ceilings; None for an unknown card."""
    for known in card_catalogue().values():
        if known.name == card:
            return Peaks(
                bytes_per_s=known.memory_bytes_per_second, matmul_flops_per_s=known.flops_per_second["bfloat16"],
                flops_per_s=known.flops_per_second["float32"], source="the card's data-sheet rates",
            )  # fmt: skip
    for record in reversed(evidence):
        if record.card == card and record.ceilings is not None:
            ceilings = record.ceilings
            return Peaks(
                bytes_per_s=ceilings.device_copy_gbps * GB, matmul_flops_per_s=ceilings.matmul_tflops * 1e12,
                flops_per_s=0.0, source="the rates measured in results/records/evidence.jsonl",
            )  # fmt: skip
    return None


def case_table(records: Sequence[KernelRecord], peaks: Peaks | None, style: str) -> str:
    """Return one row per case: the winner, and our time over the best other one's."""
    rows = [_case_row(record, peaks) for record in records]
    return table(_CASE_HEADERS, rows, style, keys=2)


def provider_table(records: Sequence[KernelRecord], peaks: Peaks | None, style: str) -> str:
    """Return one row per timed provider."""
    rows = [_provider_row(record, result, times, peaks) for record in records for result, times in record.timed()]
    return table(_PROVIDER_HEADERS, rows, style, keys=3)


_WORDS = {Outcome.WRONG: "wrong", Outcome.ERROR: "failed", Outcome.SKIPPED: "missing"}


def absent_lines(records: Sequence[KernelRecord]) -> list[str]:
    """Return a sentence per missing, wrong or failed provider, with its cases."""
    cases: dict[tuple[str, str, Outcome, str], list[str]] = {}
    for record in records:
        for result in record.results:
            if result.outcome is not Outcome.OK:
                key = (record.op, result.provider, result.outcome, result.message)
                cases.setdefault(key, []).append(f"{record.shape} {record.mode}")
    return [
        f"{op} `{provider}` is {_WORDS[outcome]}: {message}"
        + (f" ({'; '.join(shapes)})" if outcome is not Outcome.SKIPPED else "")
        for (op, provider, outcome, message), shapes in cases.items()
    ]


def write_kernels(
    records: Sequence[KernelRecord], results: Path, evidence: Sequence[EvidenceRecord], targets: Mapping[str, Target]
) -> list[Path]:
    """Write ``tables/kernels.md`` below ``results``; nothing without records."""
    if not records:
        return []
    places = {op: place for place, op in enumerate(OPS)}
    newest = sorted(newest_kernels(records), key=lambda record: (places.get(record.op, len(OPS)), record.name))
    parts, on_card = ["# Kernels"], {record.card for record in newest if record.is_on_card}
    for card in sorted({record.card for record in newest}, key=lambda card: (card not in on_card, card)):
        parts += _card_parts([record for record in newest if record.card == card], card_peaks(card, evidence))
    parts += ["## Stated targets", verdict_table(judge_kernels(newest, targets), MARKDOWN)]
    parts.append(made_by(("", record) for record in newest))
    return [write_page(results, "kernels", "\n\n".join(parts))]


def _card_parts(records: Sequence[KernelRecord], peaks: Peaks | None) -> list[str]:
    last = max(records, key=lambda record: record.started_at)
    share = "no peak rates are known for this machine"
    if peaks is not None:
        share = f"least time at {peaks.source} over the median; none for wall times"
    absent = absent_lines(records)
    processor = [
        f"{record.op}, {record.shape}: {factor:.1f} times as fast" for record, factor in processor_speedups(records)
    ]
    made = [f"torch {last.environment.torch}", f"triton {last.triton or 'missing'}"]
    made += [f"driver {last.driver or 'unknown'}"] if last.is_on_card else [f"{last.environment.num_cpus} processors"]
    changes = ", with uncommitted changes" if last.environment.dirty else ""
    return [
        f"## {records[0].card} ({last.evidence})",
        case_table(records, peaks, MARKDOWN),
        _HOW.format(peaks=share),
        *(["### Speed-up over the processor", "\n".join(f"- {line}" for line in processor)] if processor else []),
        "### Every provider",
        provider_table(records, peaks, MARKDOWN),
        *(["### Not timed", "\n".join(f"- {line}" for line in absent)] if absent else []),
        f"{', '.join(made)}; commit {last.environment.commit[:12] or 'unknown'}{changes}.",
    ]


def _case_row(record: KernelRecord, peaks: Peaks | None) -> list[str]:
    ours, other = record.fastest(lambda result: result.is_ours), record.fastest(lambda result: not result.is_ours)
    head = [record.op, f"{record.shape}, {record.mode}", _winner(record.timed())]
    other_cells = ["-", "-"] if other is None else [other[0].provider, _us(other[1].q50_s)]
    if ours is None:
        return [*head, "-", *other_cells, *["-"] * 4, record.clock]
    ratio = "-" if other is None else f"{ours[1].q50_s / other[1].q50_s:.2f}"
    return [*head, _us(ours[1].q50_s), *other_cells, ratio, *_rates(record, ours[1].q50_s, peaks), record.clock]


def _winner(timed: Sequence[tuple[ProviderResult, Times]]) -> str:
    if not timed:
        return "-"
    (first, best), *others = timed
    if not others:
        return f"{first.provider}, alone"
    return first.provider if all(best.is_faster_than(times) for _, times in others) else "none"


def _provider_row(record: KernelRecord, result: ProviderResult, times: Times, peaks: Peaks | None) -> list[str]:
    return [
        record.op, f"{record.shape}, {record.dtype}, {record.mode}", result.provider, _us(times.q50_s),
        f"{_us(times.q20_s)} to {_us(times.q80_s)}", str(times.num_samples),
        "n/a" if result.peak_bytes is None else f"{result.peak_bytes / MIB:,.1f}",
        *_rates(record, times.q50_s, peaks), f"{_error(result.error)} / {_error(result.allowed_error)}",
    ]  # fmt: skip


def _rates(record: KernelRecord, seconds: float, peaks: Peaks | None) -> list[str]:
    share = None if peaks is None else peaks.share(record, seconds)
    return [
        f"{record.num_bytes / seconds / GB:,.1f}", f"{record.flops / seconds / 1e12:,.3g}",
        "n/a" if share is None else f"{100 * share:.0f} %",
    ]  # fmt: skip


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f}"


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.2g}"
