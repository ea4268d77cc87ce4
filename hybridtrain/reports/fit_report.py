"""``hybridtrain fit``: a table of the options to train a model on a card, and the files that train it."""

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
from hybridtrain.models.model_config import PRESETS, BatchWorkload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.optim import OPTIMIZERS, Optimizer
from hybridtrain.plan.compose import compose
from hybridtrain.planning.candidates import FitRequest
from hybridtrain.planning.fitting import METHODS, Method, TrainingOption, confirmed, fit, in_order, recommended
from hybridtrain.planning.plan_bytes import saved_bytes
from hybridtrain.planning.time_error import TIME_ERROR, WAITING_ERROR
from hybridtrain.reports.recommend_report import ask
from hybridtrain.stacks import RESULTS, Stack, evidence_folder
from hybridtrain.trainer_config import LrSchedule
from hybridtrain.training_file import TrainFile
from hybridtrain.units import format_bytes, format_count, to_gib
from hybridtrain.virtual_gpu.cards.card import MARGIN_SHARE, FitVerdict
from hybridtrain.virtual_gpu.cards.links import World

_QUALITY = {
    "exact": "exact: fp32 masters and moments; the yardstick",
    "lora": "trains 16 directions of each matrix; the guide's page LoRA",
    "qlora": "as lora, over weights rounded to 4 bits; the guide's page NF4 weights",
}
_PERCENT = 100
_NO = "NO"
_MOST_CONFIRMED = 2
"""Ways with a full dry run: the first one, and another where that turned out not to fit."""
_ADAPTER_LR = 2e-4
"""What QLoRA took for 7B and 13B (2305.14314, appendix B)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """An answer, ready to be shown."""

    request: FitRequest
    model: str
    card: str
    host_memory: str
    options: tuple[TrainingOption, ...]
    tokens: int
    """Of a data set."""
    free_percent: float
    folder: Path | None
    """Where the files that train were written."""
    notes: Mapping[str, str] | None = None
    """What ladders on record say, by name of the numbers; None: there are no records."""

    @property
    def fits(self) -> bool:
        """Whether any way does."""
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
        return (
            f"hybridtrain fit {quote(self.model)} --card {quote(self.card)} {cards}--host-memory {self.host_memory} "
            f"--seq {self.request.seq_len} --tokens-per-step {self.request.num_sequences * self.request.seq_len} "
            "--write ways/"
        )

    def _of_machine(self, rank_bytes: float) -> float:
        """Return the bytes of all cards of a machine together."""
        return rank_bytes * self.request.world.local_size

    def as_mapping(self) -> dict[str, object]:
        """Return plain figures, bytes and seconds."""
        request = self.request
        return {
            "model": self.model,
            "params": request.model.num_params,
            "card": request.card.name,
            "card_bytes": request.card.memory_bytes,
            "world": request.world.size,
            "link": request.world.link,
            "host_tensor_bytes": request.host.tensor_bytes,
            "seq_len": request.seq_len,
            "tokens_per_step": request.num_sequences * request.seq_len,
            "free_percent": self.free_percent,
            "card_note": request.card.source_note,
            "tokens": self.tokens,
            "ways": [self._row_mapping(option) for option in self.options],
            "recommended": None if (best := recommended(self.options)) is None else best.name,
        }

    def _row_mapping(self, option: TrainingOption) -> dict[str, object]:
        candidate = option.candidate
        return {
            "method": option.method, "numbers": option.name, "says": candidate.level.says, "fits": option.fits,
            "verdict": self.verdict(option).value,
            "arrangement": candidate.arrangement.name, "micro_batch_size": candidate.micro_batch_size,
            "num_micro_batches": candidate.num_micro_batches, "kept_blocks": candidate.keep_last,
            "device_used_bytes": round(option.device_bytes),
            "host_peak_bytes": round(self._of_machine(option.host_bytes)),
            "disk_peak_bytes": round(self._of_machine(option.disk_bytes)),
            "saved_state_bytes": round(self._saved_bytes(option)), "tokens_per_s": option.tokens_per_s,
            "bound": option.bound and option.bound.value, "hours": option.hours(self.tokens),
            "quality": self._quality(option), "stack": encode(stack_of(option)), "command": self.command(option),
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
        best = recommended(self.options)
        host, world = format_bytes(request.host.tensor_bytes), request.world
        cards = "" if world.size == 1 else f"{world.size} x "
        if world.size > 1:
            host += f" of a machine of {world.local_size} cards ({world.link})"
        lines = [
            (
                f"{self.model} ({format_count(request.model.num_params)} parameters) on {cards}{request.card.name}, "
                f"{to_gib(request.card.memory_bytes):.2f} GiB of which {self.free_percent:g} % stay free, "
                f"{host} of host memory for tensors; {request.num_sequences} x {request.seq_len} tokens a step"
            ),
            f"{note}\n" if (note := request.card.source_note) else "",
            tabulate(
                [self._row(option) for option in self.options],
                headers=headers,
                tablefmt="simple",
                disable_numparse=True,
            ),
            "\nprecision, and what it costs in quality:",
            *(f"  {option.name}: {option.candidate.level.says}. {self._quality(option)}" for option in self.options),
            (
                "\nbytes and speeds with ~ are extended from a dry run of three blocks, with ~~ by arithmetic alone; "
                f"others are {self._confirmed()}; times are estimated (roofline): recorded full training on cards that "
                f"were left out of its fit was {TIME_ERROR:.1%} off on average; where a step waits, "
                f"{WAITING_ERROR:.1%} on cards of the fit"
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
            what = "write the files that train" if self.folder is None else f"train {format_count(self.tokens)} tokens"
            lines.append(
                f"{what}, of the options estimated within 5 % of the fastest the most exact: {self.command(best)}"
            )
            others = (
                [] if self.folder is None else [option for option in self.options if option.fits and option is not best]
            )
            if others:
                lines.append(
                    f"or by another file there: {', '.join(train_path(Path(), option).name for option in others)}"
                )
            if self.folder is not None and best.method != "full" and self.model in PRESETS:
                lines.append(
                    f"first: put the weights, a folder of Hugging Face, into {_weights_folder(self.model)} (or name "
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
        return [
            _NO if (verdict := self.verdict(option)) is FitVerdict.NO else verdict.value,
            option.name,
            f"{mark}{to_gib(option.device_bytes):.2f}",
            f"{mark}{to_gib(self._of_machine(option.host_bytes)):.2f}",
            f"{mark}{to_gib(self._of_machine(option.disk_bytes)):.2f}",
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
        missing = "not tested; the guide's page Which stack names the nearest configuration that was"
        note = "no records of quality here (--results)" if self.notes is None else self.notes.get(option.name, missing)
        parts = (_QUALITY.get(option.name, ""), note)
        return "; ".join(part for part in parts if part)

    def _saved_bytes(self, option: TrainingOption) -> float:
        plan = compose(option.candidate.optimizations())
        return saved_bytes(self.request.model, plan, OPTIMIZERS[option.candidate.level.optimizer]())

    def _confirmed(self) -> str:
        """Return how the bytes without a mark were found."""
        run = next((option.evidence for option in self.options if option.run is not None), "planned")
        return f"{run}, by a dry run of every block"

    def _missing(self, option: TrainingOption) -> str:
        """Return which memory is too small, and by how many bytes."""
        device = option.device_bytes - (1 - self.free_percent / _PERCENT) * self.request.card.memory_bytes
        host = self._of_machine(option.host_bytes) - self.request.host.tensor_bytes
        short = [f"{format_bytes(size)} of {name}" for name, size in (("card", device), ("host", host)) if size > 0]
        return f"lacks {' and '.join(short)}" if short else "lacks card"


def stack_of(option: TrainingOption) -> Stack:
    """Return an option as a stack file has it."""
    level, candidate = option.candidate.level, option.candidate
    says = f"{level.says}; {candidate.arrangement.name}; found by fit"
    return Stack(name=option.name, says=says, optimizer=level.optimizer, optimizations=candidate.optimizations())


def _weights_folder(model: str) -> Path:
    """Return where the weights of a preset are expected."""
    return Path("models") / model


def train_path(folder: Path, option: TrainingOption) -> Path:
    """Return the training file's path."""
    return folder / f"train-{option.name}.toml"


def fit_command(
    *, model: str, card: str, host_memory: str, seq: int | None, tokens_per_step: int | None, tokens: int,
    methods: Sequence[str], margin: float | None, confirm: bool, write: Path | None, say: Callable[[str], None],
    world: int = 1, link: str = "pcie", scenarios: Path | None = None, results: Path = RESULTS,
) -> FitReport:  # fmt: skip
    """Find the options, run the fastest whole if asked to, and write the files of those that fit to ``write``.

    What ladders say of quality is read in ``results``, or in the records that came with hybridtrain.

    Raises:
        ConfigError: names, files, sizes or methods are wrong.
    """
    faults = [f"'{name}' must be one of {', '.join(METHODS)}" for name in methods if name not in METHODS]
    if faults:
        raise ConfigError("--method", faults)
    margin = _PERCENT * MARGIN_SHARE if margin is None else margin
    if not 0 <= margin < _PERCENT:
        raise ConfigError("--margin", [f"{margin:g} must be a share of the card in percent, from 0 to below 100"])
    request, _ = ask(model, card, host_memory, seq, tokens_per_step, World(size=world, link=link))
    free = margin / _PERCENT
    chosen = cast("list[Method]", list(dict.fromkeys(methods)))
    options = fit(request, methods=chosen, free_share=free, on_try=lambda text: say(f"trying {text}"))
    for _ in range(_MOST_CONFIRMED if confirm else 0):
        best = recommended(options)
        if best is None or best.run is not None:
            break
        say(f"running {best.name} whole")
        whole = confirmed(request, best, free_share=free)
        options = in_order(whole if option is best else option for option in options)
    if write is not None:
        _write_files(write, model, request, [option for option in options if option.fits], tokens)
    notes = None
    results = evidence_folder(results)
    if (results / "records" / "studies").is_dir():
        notes = harness().quality_notes([option.candidate for option in options], scenarios, results)
    return FitReport(
        request=request, model=model, card=card, host_memory=host_memory, options=options, tokens=tokens,
        free_percent=margin, folder=write, notes=notes,
    )  # fmt: skip


def _write_files(folder: Path, model: str, request: FitRequest, options: Sequence[TrainingOption], tokens: int) -> None:
    """Write a stack file and a training file of each option; as many steps as the tokens take whose hours are told."""
    folder.mkdir(parents=True, exist_ok=True)
    num_steps = ceil(tokens / (request.num_sequences * request.seq_len))
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
        replace_file(folder / f"{option.name}.toml", to_toml(stack_of(option)).encode())
        replace_file(train_path(folder, option), to_toml(file).encode())
