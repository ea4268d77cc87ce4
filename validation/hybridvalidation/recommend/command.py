"""``hybridtrain recommend``: from arguments to a question, from the answer to text, JSON or a stack file."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from hybridtrain.atomic_write import replace_file
from hybridtrain.config.encode import encode, to_toml
from hybridtrain.dry_run import Workload, check_workload
from hybridtrain.errors import ConfigError
from hybridtrain.units import GB, GIB, format_bytes, format_count, format_seconds, to_gib
from hybridtrain.virtual_gpu.card import find_card
from hybridtrain.virtual_gpu.host import Host
from hybridtrain.virtual_gpu.observer import Lane
from hybridtrain.virtual_gpu.roofline import Bound
from hybridvalidation.recommend.search import Candidate, Question, Recommendation, recommend
from hybridvalidation.runs.dry_run_report import read_model
from hybridvalidation.scenario import Stack
from hybridvalidation.scenario_files import ScenarioFiles, default_folder

DEFAULT_HOST_MEMORY = "64GiB"
"""Of the machine around the card: what ``recommend`` and ``dry-run`` assume unless they are told."""
_SEQ_LEN, _TOKENS_PER_STEP = 2048, 131072
_UNITS = {"GiB": GIB, "GB": GB}
_ADVICE = {
    Bound.COMPUTE: "arithmetic: only a faster card, less recomputation (more room on the card) or 8-bit matmuls help",
    Bound.MEMORY: "bandwidth of the card's memory: fused kernels help",
    Bound.TRANSFER: "the bus: more tokens per step or larger micro-batches hide more of it",
    Bound.OPTIMIZER: "the update: more tokens per step make it rarer",
    Bound.HOST: "the processor: update on the device",
    Bound.DISK: "the drive: more host memory, or more tokens per step",
}


def recommend_command(options: argparse.Namespace) -> int:
    """Search, print the answer, write the stack if asked to."""
    question, model = _question(options)
    report = RecommendReport(answer=recommend(question, _say(options)), model=model)
    if options.write is not None:
        replace_file(options.write, report.as_toml(options.write.stem).encode())
    sys.stdout.write((json.dumps(report.as_mapping()) if options.json else report.as_text()) + "\n")
    return 0


def parse_size(text: str, path: str) -> int:
    """Return bytes of a size like ``64GiB`` or ``128GB``; raises ``ConfigError``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB)", text)
    if found is None or float(found[1]) <= 0:
        raise ConfigError(path, [f"'{text}' must be a size above 0 with a unit, as 64GiB or 128GB"])
    return int(float(found[1]) * _UNITS[found[2]])


def parse_host(memory: str) -> Host:
    """Return a machine with that much memory; raises ``ConfigError``."""
    size = parse_size(memory, "--host-memory")
    try:
        return Host(memory_gib=size / GIB)
    except ValueError as error:
        raise ConfigError("--host-memory", str(error).splitlines()) from error


def _question(options: argparse.Namespace) -> tuple[Question, str]:
    if options.scenario is not None:
        scenario = ScenarioFiles(options.scenarios or default_folder()).scenario(options.scenario)
        work = scenario.workload
        return Question(
            scenario.model.resolve(), scenario.card.resolve(), scenario.host, work.seq_len, work.batch_size
        ), scenario.name
    missing = [f"--{name}: missing; name one, or give --scenario" for name in ("model", "card")
               if getattr(options, name) is None]  # fmt: skip
    if missing:
        raise ConfigError("recommend", missing)
    model = read_model(options.model)
    seq_len = options.seq or min(_SEQ_LEN, model.max_seq_len)
    check_workload(model, Workload(micro_batch_size=1, seq_len=seq_len))
    num_tokens = options.tokens_per_step or max(1, _TOKENS_PER_STEP // seq_len) * seq_len
    if num_tokens % seq_len:
        raise ConfigError("--tokens-per-step", [f"{num_tokens} must be a multiple of --seq ({seq_len})"])
    host = parse_host(options.host_memory)
    return Question(model, find_card(options.card), host, seq_len, num_tokens // seq_len), Path(options.model).stem


def _say(options: argparse.Namespace) -> Callable[[str], None]:
    def say(text: str) -> None:
        if not options.json:
            sys.stderr.write(f"trying {text}\n")

    return say


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendReport:
    """An answer, ready to be shown."""

    answer: Recommendation
    model: str

    def stack(self, name: str) -> Stack:
        """Return the chosen stack under a name."""
        chosen = self.answer.chosen
        says = f"{chosen.level.says}; {chosen.arrangement.name}; found by recommend for {self.model}"
        return Stack(name=name, says=says, optimizations=chosen.optimizations())

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
