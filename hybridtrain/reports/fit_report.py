"""``hybridtrain fit`` and ``recommend``: options to train a model on a card, the fastest stack, and their files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from shlex import quote
from typing import cast

from tabulate import tabulate

from hybridtrain.atomic_write import replace_file
from hybridtrain.config.encode import encode, to_toml
from hybridtrain.errors import ConfigError
from hybridtrain.extension import harness
from hybridtrain.models.find_model import find_model
from hybridtrain.models.model_config import MOST_TOKENS, PRESETS, BatchWorkload, asked_workload, check_workload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.optim import OPTIMIZERS, Optimizer
from hybridtrain.plan.compose import compose
from hybridtrain.planning.candidates import LEVELS, Candidate, FitRequest
from hybridtrain.planning.fitting import (
    METHODS,
    Method,
    Recommendation,
    TrainingOption,
    best_option,
    confirmed,
    fit,
    in_order,
    recommend,
)
from hybridtrain.planning.plan_bytes import saved_bytes
from hybridtrain.planning.time_error import TIME_ERROR, WAITING_ERROR
from hybridtrain.sizes import parse_size
from hybridtrain.stacks import RESULTS, Stack, evidence_folder
from hybridtrain.trainer_config import LrSchedule
from hybridtrain.training_file import TrainFile
from hybridtrain.units import GB, GIB, MIB, format_bytes, format_count, format_seconds, to_gib
from hybridtrain.virtual_gpu.cards.card import MARGIN_SHARE, FitVerdict, Host, find_card
from hybridtrain.virtual_gpu.cards.links import World
from hybridtrain.virtual_gpu.cards.roofline import Bound

_QUALITY = {
    "exact": "the others are compared with this one; itself against plain fp32",
    "lora": "see the guide's page LoRA",
    "qlora": "see the guide's pages LoRA and NF4 weights",
}
_PERCENT = 100
_SEQ_LEN, _TOKENS_PER_STEP = 2048, 131072
_MOST_CONFIRMED = 2
"""Options with a full dry run: the first one, and another where that turned out not to fit."""
_ADAPTER_LR = 2e-4
"""What QLoRA took for 7B and 13B (2305.14314, appendix B)."""
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
class FitArguments:
    """A request as the command names it."""

    model: str | None
    card: str | None
    host_memory: str = "64GiB"
    seq: int | None = None
    """None: 2048, or all positions of the model."""
    tokens_per_step: int | None = None
    """None: 131072 in whole sequences."""
    world: int = 1
    link: str = "pcie"

    def resolve(self) -> FitRequest:
        """Read the names and sizes; raise ``ConfigError`` for a wrong or missing one."""
        if self.model is None or self.card is None:
            names = [name for name, given in (("model", self.model), ("card", self.card)) if given is None]
            raise ConfigError("recommend", [f"--{name}: missing; name one, or give --scenario" for name in names])
        shape, world = find_model(self.model), World(size=self.world, link=self.link)
        seq_len = self.seq or min(_SEQ_LEN, shape.max_seq_len)
        check_workload(shape, asked_workload(1, seq_len))
        usual = max(1, _TOKENS_PER_STEP // seq_len // world.size) * world.size * seq_len
        num_sequences = whole_sequences(self.tokens_per_step or usual, seq_len)
        if num_sequences % world.size:
            fault = f"{num_sequences} sequences of {seq_len} tokens must be a multiple of {world.size} cards"
            raise ConfigError("--tokens-per-step", [f"{fault}; give {world.size * seq_len} times any number"])
        return FitRequest(shape, find_card(self.card), parse_host(self.host_memory), seq_len, num_sequences, world)


def parse_host(memory: str) -> Host:
    """Return a machine with that much memory; raises ``ConfigError``."""
    size = parse_size(memory, "--host-memory")
    try:
        return Host(memory_gib=size / GIB)
    except ValueError as error:
        raise ConfigError("--host-memory", str(error).splitlines()) from error


def whole_sequences(num_tokens: int, seq_len: int) -> int:
    """Return the sequences of a step; raise ``ConfigError`` where they are not whole, or too many."""
    if num_tokens % seq_len:
        raise ConfigError("--tokens-per-step", [f"{num_tokens} must be a multiple of --seq ({seq_len})"])
    if num_tokens > MOST_TOKENS:
        raise ConfigError("--tokens-per-step", [f"{num_tokens} must be at most {MOST_TOKENS}"])
    return num_tokens // seq_len


def stack_of(candidate: Candidate, name: str, finder: str) -> Stack:
    """Return a candidate as a stack file has it."""
    level = candidate.level
    description = f"{level.description}; {candidate.arrangement.name}; found by {finder}"
    return Stack(name=name, description=description, optimizer=level.optimizer, optimizations=candidate.optimizations())


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """The options to train a model on a card, as text and as JSON."""

    request: FitRequest
    arguments: FitArguments
    options: tuple[TrainingOption, ...]
    tokens: int
    """Of a data set."""
    free_percent: float
    folder: Path | None
    """Where the files that train were written."""
    notes: Mapping[str, str] | None = None
    """Loss of recorded ladders, a sentence by name of the precision; None: there are no records."""

    @property
    def fits(self) -> bool:
        """Whether any option does."""
        return any(option.fits for option in self.options)

    def command(self, option: TrainingOption) -> str:
        """Return the command that writes the files of an option, or trains it once they are written."""
        world = self.request.world
        if self.folder is not None:
            disk = " --disk FOLDER" if option.disk_bytes else ""
            program = (
                "hybridtrain" if world.size == 1 else f"torchrun --nproc-per-node {world.local_size} -m hybridtrain"
            )
            return f"{program} train {quote(str(train_path(self.folder, option)))} --data my-texts/{disk}"
        cards = "" if world.size == 1 else f"--world {world.size} --link {quote(world.link)} "
        memory = self.arguments.host_memory
        return (
            f"hybridtrain fit {quote(self._model)} --card {quote(str(self.arguments.card))} {cards}"
            f"--host-memory {memory} --seq {self.request.seq_len} "
            f"--tokens-per-step {self.request.tokens_per_step} --write ways/"
        )

    @property
    def _model(self) -> str:
        return str(self.arguments.model)

    def _of_machine(self, rank_bytes: float) -> float:
        return rank_bytes * self.request.world.local_size

    def as_mapping(self) -> dict[str, object]:
        """Return plain figures, bytes and seconds."""
        request = self.request
        return {
            "model": self._model,
            "params": request.model.num_params,
            "card": request.card.name,
            "card_bytes": request.card.memory_bytes,
            "world": request.world.size,
            "link": request.world.link,
            "host_tensor_bytes": request.host.tensor_bytes,
            "seq_len": request.seq_len,
            "tokens_per_step": request.tokens_per_step,
            "free_percent": self.free_percent,
            "card_note": request.card.note,
            "tokens": self.tokens,
            "ways": [self._row_mapping(option) for option in self.options],
            "recommended": None if (best := best_option(self.options)) is None else best.name,
        }

    def _row_mapping(self, option: TrainingOption) -> dict[str, object]:
        candidate = option.candidate
        return {
            "method": option.method, "numbers": option.name, "says": candidate.level.description, "fits": option.fits,
            "verdict": self.verdict(option).value,
            "arrangement": candidate.arrangement.name, "micro_batch_size": candidate.micro_batch_size,
            "num_micro_batches": candidate.num_micro_batches, "kept_blocks": candidate.keep_last,
            "device_used_bytes": round(option.device_bytes),
            "host_peak_bytes": round(self._of_machine(option.host_bytes)),
            "disk_peak_bytes": round(self._of_machine(option.disk_bytes)),
            "saved_state_bytes": round(self._saved_bytes(option)), "tokens_per_s": option.tokens_per_s,
            "bound": option.bound and option.bound.value, "hours": option.hours(self.tokens),
            "quality": self._quality(option), "stack": encode(stack_of(candidate, option.name, "fit")),
            "command": self.command(option),
            "evidence": {"memory": option.evidence, "time": "estimated"},
        }  # fmt: skip

    def as_text(self) -> str:
        """Return the same for a reader."""
        request = self.request
        headers = [
            "fits", "precision", "card GiB", "host GiB", "disk GiB", "tokens/s", "bottleneck",
            f"h / {format_count(self.tokens)} tokens",
            "micro-batch", "kept", "offload",
        ]  # fmt: skip
        best = best_option(self.options)
        evidence = next((option.evidence for option in self.options if option.run is not None), "planned")
        host, world = format_bytes(request.host.tensor_bytes), request.world
        cards = "" if world.size == 1 else f"{world.size} x "
        if world.size > 1:
            host += f" of a machine of {world.local_size} cards ({world.link})"
        lines = [
            (
                f"{self._model} ({format_count(request.model.num_params)} parameters) on {cards}{request.card.name}, "
                f"{to_gib(request.card.memory_bytes):.2f} GiB of which {self.free_percent:g} % stay free, "
                f"{host} of host memory for tensors; {request.num_sequences} x {request.seq_len} tokens a step"
            ),
            f"{note}\n" if (note := request.card.note) else "",
            tabulate(list(map(self._row, self.options)), headers=headers, tablefmt="simple", disable_numparse=True),
            "\nprecision, and what it costs in quality:",
            *(
                f"  {option.name}: {option.candidate.level.description}. {self._quality(option)}"
                for option in self.options
            ),
            (
                "\n~: extrapolated from a dry run of three blocks. ~~: arithmetic alone. "
                f"No mark: {evidence}, by a dry run of every block.\n"
                f"Times are roofline estimates. On published full training, on cards not used to calibrate, they are "
                f"off by {TIME_ERROR:.1%} on average; where steps wait for copies, by {WAITING_ERROR:.1%}."
            ),
            (
                "bottleneck: what most of a step's time goes to; micro-batch: sequences x micro-batches a step; kept: "
                "blocks that keep their activations, the others recompute them"
            ),
            (
                "disk, per checkpoint (arithmetic): "
                + ", ".join(f"{option.name} {format_bytes(self._saved_bytes(option))}" for option in self.options)
                + "; a run keeps two, writes a third, and keeps one per hour where there is room"
            ),
        ]
        if best is None:
            lines.append(
                "nothing fits: allow a smaller --seq or --tokens-per-step, more --host-memory, or take a larger card"
            )
        else:
            goal = (
                "write its training files" if self.folder is None else f"train it on {format_count(self.tokens)} tokens"
            )
            lines.append(
                f"recommended: {best.name}, the most exact of the options within 5 % of the fastest; to {goal}:\n"
                f"  {self.command(best)}"
            )
            others = [train_path(Path(), option).name for option in self.options if option.fits and option is not best]
            if others and self.folder is not None:
                lines.append(f"other training files there: {', '.join(others)}")
            if self.folder is not None and best.method != "full" and self._model in PRESETS:
                lines.append(
                    f"first: put the weights, a folder of Hugging Face, into {_weights_folder(self._model)} (or name "
                    "another folder in the file, init_from); adapters need a trained model below them"
                )
            if self.folder is not None and best.method == "full":
                lines.append(
                    "weights begin at random, and the tokenizer is bytes: [model] init_from in the file names a folder "
                    "of Hugging Face to begin with instead"
                )
        return "\n".join(lines)

    def _row(self, option: TrainingOption) -> list[str]:
        mark = {"estimated": "~", "arithmetic": "~~"}.get(option.evidence, "")
        hours, candidate = option.hours(self.tokens), option.candidate
        offloaded = (option.host_bytes, option.disk_bytes)
        return [
            "NO" if (verdict := self.verdict(option)) is FitVerdict.NO else verdict.value,
            option.name,
            *(f"{mark}{to_gib(size):.2f}" for size in (option.device_bytes, *map(self._of_machine, offloaded))),
            "-" if option.tokens_per_s is None else f"{mark}{option.tokens_per_s:,.0f}",
            self._missing(option) if option.bound is None else option.bound.value,
            "-" if hours is None else f"{hours:.1f}",
            f"{candidate.micro_batch_size} x {candidate.num_micro_batches}",
            str(candidate.keep_last),
            candidate.arrangement.name,
        ]

    def verdict(self, option: TrainingOption) -> FitVerdict:
        """Return whether an option fits; barely where only the margin that stays free has no room for it."""
        fits_host = self._of_machine(option.host_bytes) <= self.request.host.tensor_bytes
        is_within = option.device_bytes <= self.request.card.memory_bytes
        return FitVerdict.FITS if option.fits else FitVerdict.BARELY if fits_host and is_within else FitVerdict.NO

    def _quality(self, option: TrainingOption) -> str:
        missing = "not tested; the guide's page Which stack names the nearest tested configuration"
        note = "no records of quality here (--results)" if self.notes is None else self.notes.get(option.name, missing)
        return "; ".join(filter(None, (_QUALITY.get(option.name, ""), note)))

    def _saved_bytes(self, option: TrainingOption) -> float:
        plan = compose(option.candidate.optimizations())
        return saved_bytes(self.request.model, plan, OPTIMIZERS[option.candidate.level.optimizer]())

    def _missing(self, option: TrainingOption) -> str:
        device = option.device_bytes - (1 - self.free_percent / _PERCENT) * self.request.card.memory_bytes
        host = self._of_machine(option.host_bytes) - self.request.host.tensor_bytes
        short = [f"{format_bytes(size)} of {name}" for name, size in (("card", device), ("host", host)) if size > 0]
        return f"lacks {' and '.join(short)}" if short else "lacks card"


def _weights_folder(model: str) -> Path:
    return Path("models") / model


def train_path(folder: Path, option: TrainingOption) -> Path:
    """Return the training file's path."""
    return folder / f"train-{option.name}.toml"


def fit_command(
    arguments: FitArguments, *, tokens: int = 100_000_000, methods: Sequence[str] = METHODS,
    margin: float | None = None, confirm: bool = True, write: Path | None = None,
    say: Callable[[str], None] = lambda _line: None, scenarios: Path | None = None, results: Path = RESULTS,
) -> FitReport:  # fmt: skip
    """Find the options, make a full dry run of the fastest, and write the files of those that fit to ``write``.

    ``results``, or the records that came with hybridtrain, tell the loss that precisions cost.

    Raises:
        ConfigError: names, files, sizes or methods are wrong.
    """
    faults = [f"'{name}' must be one of {', '.join(METHODS)}" for name in methods if name not in METHODS]
    if faults:
        raise ConfigError("--method", faults)
    margin = _PERCENT * MARGIN_SHARE if margin is None else margin
    if not 0 <= margin < _PERCENT:
        raise ConfigError("--margin", [f"{margin:g} must be a share of the card in percent, from 0 to below 100"])
    request, free = arguments.resolve(), margin / _PERCENT
    chosen = cast("list[Method]", list(dict.fromkeys(methods)))
    options = fit(request, methods=chosen, free_share=free, on_try=lambda text: say(f"trying {text}"))
    for _ in range(_MOST_CONFIRMED if confirm else 0):
        best = best_option(options)
        if best is None or best.run is not None:
            break
        say(f"full dry run of {best.name}")
        whole = confirmed(request, best, free_share=free)
        options = in_order(whole if option is best else option for option in options)
    if write is not None:
        _write_files(write, str(arguments.model), request, [option for option in options if option.fits], tokens)
    notes = None
    results = evidence_folder(results)
    if (results / "records" / "studies").is_dir():
        notes = harness().quality_notes([option.candidate for option in options], scenarios, results)
    return FitReport(
        request=request, arguments=arguments, options=options, tokens=tokens, free_percent=margin, folder=write,
        notes=notes,
    )  # fmt: skip


def _write_files(folder: Path, model: str, request: FitRequest, options: Sequence[TrainingOption], tokens: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    num_steps = ceil(tokens / (request.tokens_per_step))
    schedule = LrSchedule(warmup_steps=min(LrSchedule().warmup_steps, num_steps // 10), total_steps=num_steps)
    path = Path(model)
    if model in PRESETS:
        spec = ModelSpec(preset=model)
    elif path.is_dir():
        spec = ModelSpec(init_from=path)
    else:
        spec = ModelSpec(shape=request.model)
    for option in options:
        optimizer: Optimizer = OPTIMIZERS[option.candidate.level.optimizer]()
        begins = spec
        if option.method != "full":
            optimizer = replace(optimizer, lr=_ADAPTER_LR, weight_decay=0.0)
            begins = replace(spec, init_from=_weights_folder(model)) if spec.preset is not None else spec
        file = TrainFile(
            model=begins, workload=BatchWorkload(batch_size=request.num_sequences, seq_len=request.seq_len),
            optimizations=option.candidate.optimizations(), optimizer=optimizer, num_steps=num_steps, schedule=schedule,
        )  # fmt: skip
        replace_file(folder / f"{option.name}.toml", to_toml(stack_of(option.candidate, option.name, "fit")).encode())
        replace_file(train_path(folder, option), to_toml(file).encode())


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
