"""``hybridtrain recommend``: the question from the command line, the answer as text, JSON or a stack file."""

from dataclasses import dataclass

from tabulate import tabulate

from hybridtrain.config.encode import encode, to_toml
from hybridtrain.units import GB, format_bytes, format_count, format_seconds, to_gib
from hybridtrain.virtual_gpu.observer import Lane
from hybridtrain.virtual_gpu.roofline import Bound
from hybridvalidation.recommend.search import Candidate, Recommendation
from hybridvalidation.scenario import Stack

_ADVICE = {
    Bound.COMPUTE: "arithmetic: only a faster card, less recomputation (more room on the card) or 8-bit matmuls help",
    Bound.MEMORY: "bandwidth of the card's memory: fused kernels help",
    Bound.TRANSFER: "the bus: more tokens per step or larger micro-batches hide more of it",
    Bound.OPTIMIZER: "the update: more tokens per step make it rarer",
    Bound.HOST: "the processor: update on the device",
    Bound.DISK: "the drive: more host memory, or more tokens per step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendReport:
    """An answer, ready to be shown."""

    answer: Recommendation
    model: str

    def stack(self, name: str) -> Stack:
        """Return the chosen stack under a name."""
        chosen = self.answer.chosen
        says = f"{chosen.level.says}; {chosen.arrangement.name}; found by recommend for {self.model}"
        return Stack(name=name, says=says, optimizer=chosen.level.optimizer, optimizations=chosen.optimizations())

    def as_toml(self, name: str) -> str:
        """Return the chosen stack as a file's text."""
        return to_toml(self.stack(name))

    def as_mapping(self) -> dict[str, object]:
        """Return plain figures, bytes and seconds."""
        run, chosen = self.answer.run, self.answer.chosen
        return {
            "stack": encode(self.stack("best")),
            "micro_batch_size": chosen.micro_batch_size,
            "num_micro_batches": chosen.num_micro_batches,
            "tokens_per_s": run.tokens_per_s,
            "step_time_s": run.time.seconds,
            "bound": run.bound,
            "time_by_bound": {bound.value: seconds for bound, seconds in run.time.seconds_by_bound.items()},
            "device_used_bytes": run.device_used_bytes,
            "host_peak_bytes": run.host_peak_bytes,
            "disk_peak_bytes": run.disk_peak_bytes,
            "candidates": [
                {
                    "level": c.level.name, "arrangement": c.arrangement.name, "micro_batch_size": c.micro_batch_size,
                    "keep_last": c.keep_last, "tokens_per_s": c.tokens_per_s,
                }
                for c in self.answer.candidates
            ],
            "evidence": {"memory": "planned", "time": "estimated"},
        }  # fmt: skip

    def as_text(self) -> str:
        """Return the same for a reader."""
        run, chosen = self.answer.run, self.answer.chosen
        rows = [_row(candidate, chosen) for candidate in self.answer.candidates]
        headers = ["", "numbers", "where", "micro-batch", "kept blocks", "tokens/s"]
        shares = ", ".join(
            f"{bound} {100 * seconds / run.time.seconds:.0f} %"
            for bound, seconds in sorted(run.time.seconds_by_bound.items(), key=lambda item: -item[1])
            if seconds > 0.005 * run.time.seconds
        )
        bus = max(run.time.busy_seconds.get(lane, 0.0) for lane in (Lane.COPY_IN, Lane.COPY_OUT))
        return "\n".join(
            [
                (
                    f"{self.model} ({format_count(run.num_params)} parameters) on {run.card.name}, "
                    f"{run.tokens_per_step:,} tokens per step\n"
                ),
                tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True),
                f"\nchosen: {chosen.level.says}; {chosen.arrangement.name}",
                (
                    f"device {to_gib(run.device_used_bytes):.2f} of {to_gib(run.card.memory_bytes):.2f} GiB, host "
                    f"{format_bytes(run.host_peak_bytes)} ({run.host_peak_bytes / GB:.1f} GB), disk "
                    f"{format_bytes(run.disk_peak_bytes)} (planned)"
                ),
                (
                    f"{format_seconds(run.time.seconds)} a step, {run.tokens_per_s:,.0f} tokens/s (estimated): "
                    f"{shares}; the bus is busy {format_seconds(bus)}"
                ),
                f"what binds: {_ADVICE[run.bound]}\n",
                self.as_toml("best"),
            ]
        )


def _row(candidate: Candidate, chosen: Candidate) -> list[str]:
    return [
        "*" if candidate.level is chosen.level else "",
        candidate.level.says,
        candidate.arrangement.name,
        f"{candidate.micro_batch_size} x {candidate.num_micro_batches}",
        str(candidate.keep_last),
        f"{candidate.tokens_per_s:,.0f}",
    ]
