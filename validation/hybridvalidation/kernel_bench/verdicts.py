"""What was stated of kernels, judged by the records of a card."""

from collections.abc import Mapping, Sequence

from hybridvalidation.judge.case import Metric
from hybridvalidation.judge.verdict import Verdict, judge_metric
from hybridvalidation.kernel_bench.record import KernelRecord
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario import Target

SPEEDUPS = {"rssm-kernel-speedup": "rssm_gru", "state-encoding-kernel-speedup": "state_encoding"}
"""Op by target: how much faster a card's kernel is than the processor."""
_ON_PROCESSOR = "cpu"
"""Name of the provider that runs there, in a card's records."""


def processor_speedups(records: Sequence[KernelRecord]) -> list[tuple[KernelRecord, float]]:
    """Return, for each case of a card that was also run on the processor, by what factor ours is faster there."""
    found = []
    for record in records:
        timed = record.timed()
        ours = next((times for result, times in timed if result.is_ours), None)
        processor = next((times for result, times in timed if result.provider == _ON_PROCESSOR), None)
        if record.is_on_card and ours is not None and processor is not None:
            found.append((record, processor.q50_s / ours.q50_s))
    return found


def judge_kernels(records: Sequence[KernelRecord], targets: Mapping[str, Target]) -> list[Verdict]:
    """Return one verdict a target, by its slowest case; unproven without a card's record."""
    speedups = processor_speedups(records)
    verdicts = []
    for name, op in SPEEDUPS.items():
        if name not in targets:
            continue
        cases = [(factor, record.shape) for record, factor in speedups if record.op == op]
        metric = None
        if cases:
            factor, shape = min(cases)
            metric = Metric(factor, Evidence.MEASURED, "x", remark=f"{shape}; the least of {len(cases)} shapes")
        verdicts.append(judge_metric(targets[name], op, metric))
    return verdicts
