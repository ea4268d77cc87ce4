"""``hybridtrain recommend``: from arguments to a question, from the answer to text, JSON or a stack file."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from hybridtrain.atomic_write import replace_file
from hybridtrain.config.encode import encode, to_toml
from hybridtrain.errors import ConfigError
from hybridtrain.models.model_config import Workload, check_workload
from hybridtrain.recommendation import Candidate, Question, Recommendation, recommend
from hybridtrain.units import GB, GIB, format_bytes, format_count, format_seconds, to_gib
from hybridtrain.virtual_gpu.card import Host, find_card
from hybridtrain.virtual_gpu.observer import Lane
from hybridtrain.virtual_gpu.roofline import Bound
from hybridvalidation.runs.dry_run_report import read_model
from hybridvalidation.scenario import Scenario, Stack
from hybridvalidation.scenario_files import ScenarioFiles, default_folder

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


def recommend_command(
    *, model: str | None, card: str | None, host_memory: str, seq: int | None, tokens_per_step: int | None,
    scenario: str | None, write: Path | None, scenarios: Path | None, say: Callable[[str], None],
) -> RecommendReport:  # fmt: skip
    """Search for the fastest stack that fits, and write it to ``write`` if asked to; ``say`` hears what is tried.

    Raises:
        ConfigError: names, files or sizes are wrong, or neither a scenario nor model and card are given.
        OutOfMemoryError: nothing fits.
    """
    if scenario is None:
        question, name = _question(model, card, host_memory, seq, tokens_per_step)
    else:
        question, name = _of_scenario(ScenarioFiles(scenarios or default_folder()).scenario(scenario))
    report = RecommendReport(answer=recommend(question, lambda text: say(f"trying {text}")), model=name)
    if write is not None:
        replace_file(write, report.as_toml(write.stem).encode())
    return report


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


def _of_scenario(scenario: Scenario) -> tuple[Question, str]:
    work = scenario.workload
    return Question(
        scenario.model.resolve(), scenario.card.resolve(), scenario.host, work.seq_len, work.batch_size
    ), scenario.name


def _question(
    model: str | None, card: str | None, host_memory: str, seq: int | None, tokens_per_step: int | None
) -> tuple[Question, str]:
    if model is None or card is None:
        names = [name for name, given in (("model", model), ("card", card)) if given is None]
        raise ConfigError("recommend", [f"--{name}: missing; name one, or give --scenario" for name in names])
    shape = read_model(model)
    seq_len = seq or min(_SEQ_LEN, shape.max_seq_len)
    check_workload(shape, Workload(micro_batch_size=1, seq_len=seq_len))
    num_tokens = tokens_per_step or max(1, _TOKENS_PER_STEP // seq_len) * seq_len
    if num_tokens % seq_len:
        raise ConfigError("--tokens-per-step", [f"{num_tokens} must be a multiple of --seq ({seq_len})"])
    host = parse_host(host_memory)
    return Question(shape, find_card(card), host, seq_len, num_tokens // seq_len), Path(model).stem
