"""``hybridtrain recommend``: the fastest stack of full training that fits, with a reason for each setting."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tabulate import tabulate

from hybridtrain.atomic_write import replace_file
from hybridtrain.config.encode import encode, to_toml
from hybridtrain.errors import ConfigError
from hybridtrain.extension import harness
from hybridtrain.planning.candidates import LEVELS, Candidate, FitRequest
from hybridtrain.planning.fitting import Recommendation, recommend
from hybridtrain.reports.fit_arguments import FitArguments, whole_sequences
from hybridtrain.reports.fit_files import stack_of
from hybridtrain.sizes import parse_size
from hybridtrain.stacks import Stack
from hybridtrain.units import GB, MIB, format_bytes, format_count, format_seconds, to_gib
from hybridtrain.virtual_gpu.cards.card import MARGIN_SHARE, FitVerdict
from hybridtrain.virtual_gpu.cards.roofline import Bottleneck

_ADVICE = {
    Bottleneck.COMPUTE: "arithmetic: only a faster card, less recomputation (more room on it) or 8-bit matmuls help",
    Bottleneck.MEMORY: "bandwidth of the card's memory: fused kernels help",
    Bottleneck.TRANSFER: "the bus: more tokens per step or larger micro-batches hide more of it",
    Bottleneck.OPTIMIZER: "the update: more tokens per step make it rarer",
    Bottleneck.HOST: "the processor: update on the device",
    Bottleneck.DISK: "the drive: more host memory, or more tokens per step",
    Bottleneck.LINK: "the link to other cards: more tokens per step hide more of it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendReport:
    """An answer, ready to be shown."""

    answer: Recommendation
    model: str

    def stack(self, name: str) -> Stack:
        """Return the chosen stack under a name."""
        return stack_of(self.answer.chosen, name, f"recommend for {self.model}")

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
            "card_note": self.answer.request.card.note,
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
    def _step_seconds(self) -> float:
        return self.answer.request.tokens_per_step / (self.answer.option.tokens_per_s or 1.0)

    def as_text(self) -> str:
        """Return the same for a reader."""
        option, chosen, run, request = self.answer.option, self.answer.chosen, self.answer.run, self.answer.request
        rows = []
        for other in self.answer.options:
            tried, mark = other.candidate, "*" if other.name == option.name else ""
            size = f"{tried.micro_batch_size} x {tried.num_micro_batches}"
            cells = (
                mark,
                tried.level.description,
                tried.arrangement.name,
                size,
                str(tried.keep_last),
                f"{other.tokens_per_s:,.0f}",
            )
            rows.append(cells)
        headers = ["", "precision", "offload", "micro-batch", "kept blocks", "tokens/s"]
        size = format_bytes(self.answer.free_share * request.card.memory_bytes)
        margin = f", and a margin of {100 * share:g} % ({size})" if (share := self.answer.free_share) else ""
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
                    f"{request.tokens_per_step:,} tokens per step\n"
                ),
                tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True),
                f"\nchosen: {chosen.level.description}; {chosen.arrangement.name}",
                *(f"  {name.replace('_', ' ')}: {why}" for name, why in reasons(self.answer).items()),
                (
                    f"device {to_gib(option.device_bytes):.2f} of {to_gib(request.card.memory_bytes):.2f} GiB, host "
                    f"{format_bytes(round(option.host_bytes))} ({option.host_bytes / GB:.1f} GB), disk "
                    f"{format_bytes(round(option.disk_bytes))} ({option.evidence}); "
                    f"{format_bytes(option.margin_bytes)} of the card stay free for what more steps, "
                    "an evaluation or the driver add to reserved bytes"
                    f"{margin}"
                ),
                *filter(None, [request.card.note]),
                (
                    f"{format_seconds(self._step_seconds)} a step, {option.tokens_per_s:,.0f} tokens/s (estimated): "
                    f"{shares}{of}"
                ),
                f"bottleneck: {_ADVICE[run.bound]}\n",
                to_toml(self.stack("best")),
            ]
        )


def reasons(answer: Recommendation) -> dict[str, str]:
    """Return why the stack has its settings, a sentence by topic; bytes by arithmetic."""
    chosen, count = answer.chosen, answer.chosen.num_micro_batches
    tokens = chosen.micro_batch_size * answer.request.seq_len
    state = format_bytes(chosen.level.state_bytes * answer.request.model.num_params)
    return {
        "precision": _precision(answer),
        "accumulation": f"none: one micro-batch of {tokens:,} tokens is the whole step, and it fits"
        if count == 1
        else f"{count} micro-batches of {chosen.micro_batch_size} sequences, the fastest size tried that fits; the "
        "step has the tokens that were asked for, so gradients are their mean and scale_lr stays off",
        "checkpointing": _checkpointing(answer),
        "offload": _offload(chosen),
        "predict_memory": f"none: master and moments ({state}) are on the host in every phase"
        if chosen.arrangement.offloads_state
        else "none: no step of this stack is predicted; with predictor_state, predict_memory 'cpu' would clear "
        f"{state} of the card in PREDICT and fetch them ahead of their first use, to the bit",
    }


def _precision(answer: Recommendation) -> str:
    chosen = answer.chosen
    place = LEVELS.index(chosen.level)
    gentler = [option.tokens_per_s or 0.0 for option in answer.options if LEVELS.index(option.candidate.level) < place]
    why = "the most exact that fits" if place else "the most exact precision that is tried, and it fits"
    if gentler:
        why = f"{chosen.tokens_per_s / max(gentler):.2f} times as fast as a more exact precision that fits"
    told = f"{chosen.level.description}: {why}"
    for harsher in LEVELS[place + 1 : place + 2]:
        saved = (chosen.level.bytes_per_param - harsher.bytes_per_param) * answer.request.model.num_params
        told += f"; {harsher.description} would take {format_bytes(saved)} less, on card and host together"
    return told


def _checkpointing(answer: Recommendation) -> str:
    chosen, blocks = answer.chosen, answer.request.model.num_blocks
    if chosen.keep_last >= blocks:
        return "every block keeps its activations: there is room, and nothing is computed twice"
    if not chosen.keep_last:
        return "every block is computed again in the backward pass: there is no room to keep the activations of one"
    more = f"; one more takes {format_bytes(chosen.kept_bytes)}" if chosen.kept_bytes else ""
    return f"the last {chosen.keep_last} of {blocks} blocks keep their activations, as many as there is room for{more}"


def _offload(chosen: Candidate) -> str:
    if not (chosen.arrangement.streams or chosen.arrangement.offloads_state):
        return "none: weights, state and gradients fit on the card"
    resident = f", {chosen.resident_layers} blocks stay on the card" if chosen.resident_layers else ""
    fused = "; gradients are used where they arise and never stored" if chosen.arrangement.fuses else ""
    return f"{chosen.arrangement.name}{resident}: the fastest offload at this precision that fits{fused}"


def recommend_command(
    arguments: FitArguments, *, scenario: str | None, write: Path | None, scenarios: Path | None,
    say: Callable[[str], None], device_budget: str | None = None,
) -> RecommendReport:  # fmt: skip
    """Search for the fastest stack that fits, and write it to ``write`` if asked to; ``say`` receives each trial.

    Without ``device_budget`` a scenario's stack keeps the bound that the scenario states of the card's memory.

    Raises:
        ConfigError: names, files or sizes are wrong, or neither a scenario nor model and card are given.
        OutOfMemoryError: nothing fits.
    """
    given = budget = None if device_budget is None else parse_size(device_budget, "--device-budget")
    if scenario is None:
        request, name = arguments.resolve(), Path(str(arguments.model)).stem
    else:
        stated = harness().scenario_request(scenario, scenarios)
        request, name = stated.request, stated.name
        if arguments.tokens_per_step is not None:
            request = replace(request, num_sequences=whole_sequences(arguments.tokens_per_step, request.seq_len))
        budget = stated.budget_bytes if given is None else given
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
        replace_file(write, to_toml(report.stack(write.stem)).encode())
    return report


def _within(request: FitRequest, budget: int) -> tuple[FitRequest, float]:
    """Return the request for as much of the card as a budget allows, and the share of that which stays free.

    A budget that leaves the margin free is used to its end; one below the CUDA context raises ``ConfigError``.
    """
    card, size = request.card, budget // MIB
    if card.verdict(size * MIB) is not FitVerdict.FITS:
        return request, MARGIN_SHARE
    if size <= card.context_mib:
        fault = f"{format_bytes(budget)} must be above the CUDA context's {format_bytes(card.context_bytes)}"
        raise ConfigError("--device-budget", [f"{fault}; allow more"])
    return replace(request, card=replace(card, memory_mib=size)), 0.0
