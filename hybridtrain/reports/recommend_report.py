"""``hybridtrain recommend``: from arguments to a request, from the answer to text, JSON or a stack file."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tabulate import tabulate

from hybridtrain.atomic_write import replace_file
from hybridtrain.config.encode import encode, to_toml
from hybridtrain.errors import ConfigError
from hybridtrain.extension import harness
from hybridtrain.models.find_model import find_model
from hybridtrain.models.model_config import MOST_TOKENS, asked_workload, check_workload
from hybridtrain.planning.candidates import Candidate, FitRequest
from hybridtrain.planning.fitting import TrainingOption
from hybridtrain.planning.recommendation import Recommendation, recommend
from hybridtrain.reports.reasons import reasons
from hybridtrain.sizes import parse_size
from hybridtrain.stacks import Stack
from hybridtrain.units import GB, GIB, MIB, format_bytes, format_count, format_seconds, to_gib
from hybridtrain.virtual_gpu.cards.card import MARGIN_SHARE, FitVerdict, Host, find_card
from hybridtrain.virtual_gpu.cards.links import World
from hybridtrain.virtual_gpu.cards.roofline import Bound

_SEQ_LEN, _TOKENS_PER_STEP = 2048, 131072
_ADVICE = {
    Bound.COMPUTE: "arithmetic: only a faster card, less recomputation (more room on the card) or 8-bit matmuls help",
    Bound.MEMORY: "bandwidth of the card's memory: fused kernels help",
    Bound.TRANSFER: "the bus: more tokens per step or larger micro-batches hide more of it",
    Bound.OPTIMIZER: "the update: more tokens per step make it rarer",
    Bound.HOST: "the processor: update on the device",
    Bound.DISK: "the drive: more host memory, or more tokens per step",
    Bound.LINK: "the link to other cards: more tokens per step hide more of it",
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
        option, chosen = self.answer.option, self.answer.chosen
        return {
            "stack": encode(self.stack("best")),
            "micro_batch_size": chosen.micro_batch_size,
            "num_micro_batches": chosen.num_micro_batches,
            "tokens_per_s": option.tokens_per_s,
            "step_time_s": self._step_seconds,
            "bound": option.bound,
            "micro_batches_run": option.micro_batches_run,
            "time_by_bound": {  # of the micro-batches run
                bound.value: seconds for bound, seconds in self.answer.run.time.seconds_by_bound.items()
            },
            "device_used_bytes": round(option.device_bytes),
            "margin_bytes": option.margin_bytes,
            "free_percent": 100 * self.answer.free_share,
            "card_note": self.answer.request.card.source_note,
            "host_peak_bytes": round(option.host_bytes),
            "disk_peak_bytes": round(option.disk_bytes),
            "candidates": [
                {
                    "level": option.name, "arrangement": option.candidate.arrangement.name,
                    "micro_batch_size": option.candidate.micro_batch_size, "keep_last": option.candidate.keep_last,
                    "tokens_per_s": option.tokens_per_s,
                }
                for option in self.answer.options
            ],
            "reasons": reasons(self.answer),
            "evidence": {"memory": option.evidence, "time": "estimated"},
        }  # fmt: skip

    @property
    def _margin(self) -> str:
        share = self.answer.free_share
        size = format_bytes(share * self.answer.request.card.memory_bytes)
        return f", and a margin of {100 * share:g} % ({size})" if share else ""

    @property
    def _step_seconds(self) -> float:
        request = self.answer.request
        return request.num_sequences * request.seq_len / (self.answer.option.tokens_per_s or 1.0)

    def as_text(self) -> str:
        """Return the same for a reader."""
        option, chosen, run, request = self.answer.option, self.answer.chosen, self.answer.run, self.answer.request
        rows = [_row(each, chosen) for each in self.answer.options]
        headers = ["", "precision", "offload", "micro-batch", "kept blocks", "tokens/s"]
        shares = ", ".join(
            f"{bound} {100 * seconds / run.time.seconds:.0f} %"
            for bound, seconds in sorted(run.time.seconds_by_bound.items(), key=lambda item: -item[1])
            if seconds > 0.005 * run.time.seconds
        )
        of = "" if option.evidence == "planned" else f" in the {option.micro_batches_run} micro-batches that were run"
        return "\n".join(
            [
                (
                    f"{self.model} ({format_count(request.model.num_params)} parameters) on {request.card.name}, "
                    f"{request.num_sequences * request.seq_len:,} tokens per step\n"
                ),
                tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True),
                f"\nchosen: {chosen.level.says}; {chosen.arrangement.name}",
                *(f"  {name.replace('_', ' ')}: {why}" for name, why in reasons(self.answer).items()),
                (
                    f"device {to_gib(option.device_bytes):.2f} of {to_gib(request.card.memory_bytes):.2f} GiB, host "
                    f"{format_bytes(round(option.host_bytes))} ({option.host_bytes / GB:.1f} GB), disk "
                    f"{format_bytes(round(option.disk_bytes))} ({option.evidence}); "
                    f"{format_bytes(option.margin_bytes)} of the card stay free for what more steps, "
                    "an evaluation or the driver add to reserved bytes"
                    f"{self._margin}"
                ),
                *filter(None, [request.card.source_note]),
                (
                    f"{format_seconds(self._step_seconds)} a step, {option.tokens_per_s:,.0f} tokens/s (estimated): "
                    f"{shares}{of}"
                ),
                f"bottleneck: {_ADVICE[run.bound]}\n",
                self.as_toml("best"),
            ]
        )


def _row(option: TrainingOption, chosen: Candidate) -> list[str]:
    candidate = option.candidate
    return [
        "*" if candidate.level is chosen.level else "",
        candidate.level.says,
        candidate.arrangement.name,
        f"{candidate.micro_batch_size} x {candidate.num_micro_batches}",
        str(candidate.keep_last),
        f"{option.tokens_per_s:,.0f}",
    ]


def recommend_command(
    *, model: str | None, card: str | None, host_memory: str, seq: int | None, tokens_per_step: int | None,
    scenario: str | None, write: Path | None, scenarios: Path | None, say: Callable[[str], None],
    device_budget: str | None = None,
) -> RecommendReport:  # fmt: skip
    """Search for the fastest stack that fits, and write it to ``write`` if asked to; ``say`` hears what is tried.

    A scenario's stack keeps what the scenario states of the card's memory, another one ``device_budget``.

    Raises:
        ConfigError: names, files or sizes are wrong, or neither a scenario nor model and card are given.
        OutOfMemoryError: nothing fits.
    """
    given = None if device_budget is None else parse_size(device_budget, "--device-budget")
    budget = given
    if scenario is None:
        request, name = ask(model, card, host_memory, seq, tokens_per_step)
    else:
        stated = harness().scenario_request(scenario, scenarios)
        request, name = stated.request, stated.name
        if tokens_per_step is not None:
            request = replace(request, num_sequences=_sequences(tokens_per_step, request.seq_len))
        budget = stated.budget_bytes if budget is None else budget
    if given is not None and given > request.card.memory_bytes:
        has = f"{request.card.name}, which has {format_bytes(request.card.memory_bytes)}"
        raise ConfigError("--device-budget", [f"{device_budget} is above {has}; lower it, or leave it out"])
    free_share = MARGIN_SHARE
    if budget is not None:
        request, free_share = _within(request, budget)
        say(f"at most {format_bytes((1 - free_share) * request.card.memory_bytes)} of the card")
    answer = recommend(request, lambda text: say(f"trying {text}"), free_share=free_share)
    report = RecommendReport(answer=answer, model=name)
    if write is not None:
        replace_file(write, report.as_toml(write.stem).encode())
    return report


def parse_host(memory: str) -> Host:
    """Return a machine with that much memory; raises ``ConfigError``."""
    size = parse_size(memory, "--host-memory")
    try:
        return Host(memory_gib=size / GIB)
    except ValueError as error:
        raise ConfigError("--host-memory", str(error).splitlines()) from error


def _within(request: FitRequest, budget: int) -> tuple[FitRequest, float]:
    """Return the request for as much of the card as a budget allows, and the share of that which stays free.

    A budget that leaves the margin free is used to its end.

    Raises:
        ConfigError: the budget does not even hold the CUDA context.
    """
    card, size = request.card, budget // MIB
    if card.verdict(size * MIB) is not FitVerdict.FITS:
        return request, MARGIN_SHARE
    if size <= card.context_mib:
        said = f"{format_bytes(budget)} must be above the CUDA context's {format_bytes(card.context_bytes)}"
        raise ConfigError("--device-budget", [f"{said}; allow more"])
    return replace(request, card=replace(card, memory_mib=size)), 0.0


def ask(
    model: str | None, card: str | None, host_memory: str, seq: int | None, tokens_per_step: int | None,
    world: World | None = None,
) -> tuple[FitRequest, str]:  # fmt: skip
    """Resolve arguments to a request and the model's short name; raises ``ConfigError`` for a wrong or missing one."""
    if model is None or card is None:
        names = [name for name, given in (("model", model), ("card", card)) if given is None]
        raise ConfigError("recommend", [f"--{name}: missing; name one, or give --scenario" for name in names])
    shape = find_model(model)
    seq_len = seq or min(_SEQ_LEN, shape.max_seq_len)
    check_workload(shape, asked_workload(1, seq_len))
    world = world or World()
    usual = max(1, _TOKENS_PER_STEP // seq_len // world.size) * world.size * seq_len
    num_sequences = _sequences(tokens_per_step or usual, seq_len)
    if num_sequences % world.size:
        told = f"{num_sequences} sequences of {seq_len} tokens must be a multiple of {world.size} cards"
        raise ConfigError("--tokens-per-step", [f"{told}; give {world.size * seq_len} times any number"])
    return FitRequest(shape, find_card(card), parse_host(host_memory), seq_len, num_sequences, world), Path(model).stem


def _sequences(num_tokens: int, seq_len: int) -> int:
    if num_tokens % seq_len:
        raise ConfigError("--tokens-per-step", [f"{num_tokens} must be a multiple of --seq ({seq_len})"])
    if num_tokens > MOST_TOKENS:
        raise ConfigError("--tokens-per-step", [f"{num_tokens} must be at most {MOST_TOKENS}"])
    return num_tokens // seq_len
