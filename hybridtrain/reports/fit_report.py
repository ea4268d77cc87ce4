"""``hybridtrain fit``: whether a model trains on a card, the fastest option and the smallest, one table, quality."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from textwrap import wrap

from hybridtrain.config.encode import encode
from hybridtrain.extension import QualityNote, harness
from hybridtrain.models.model_config import PRESETS
from hybridtrain.optim import OPTIMIZERS
from hybridtrain.plan.compose import compose
from hybridtrain.planning.candidates import FitRequest
from hybridtrain.planning.fitting import (
    ALIKE,
    AS_FAST,
    METHODS,
    TrainingOption,
    best_option,
    confirmed,
    fit,
    in_order,
    least,
    resident,
    smallest_first,
    verdict_of,
)
from hybridtrain.planning.plan_bytes import saved_bytes
from hybridtrain.planning.short_run import ShortRuns
from hybridtrain.planning.time_error import TIME_ERROR, WAITING_ERROR
from hybridtrain.reports.fit_arguments import FitArguments
from hybridtrain.reports.fit_files import stack_of, train_path, weights_folder, write_files
from hybridtrain.reports.fit_text import CLIPPED, PERCENT, chosen_methods, columns, free_share, in_blocks, short_name
from hybridtrain.stacks import RESULTS, evidence_folder
from hybridtrain.units import format_bytes, format_count, to_gib
from hybridtrain.virtual_gpu.cards.card import CardLimit, FitVerdict

_MOST_CONFIRMED = 2
"""Full dry runs of the smallest options where their table is not shown."""
_FLOAT16 = 'These rows compute in bfloat16. Faster: set compute_dtype = "float16" in the training file.'
_LEGEND = """\
name: of the precision, in files and JSON. bottleneck: what most of a step's time goes to. kept blocks: those that keep
their activations, the others recompute them. checkpoint: arithmetic; a run keeps two, writes a third, and keeps one per
hour where there is room. Bytes are planned by a dry run of every block, or estimated (~): extrapolated from a dry run
of three blocks.

Of arrangements within {alike:.0%} of a method's highest speed the one that offloads least is taken. Speeds are roofline
estimates: on published training by software not used to calibrate, off by {error:.1%} on average, where steps wait for
copies by {waiting:.1%}."""


def _mark(option: TrainingOption) -> str:
    return "~" if option.run is None else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """The options to train a model on a card, as text and as JSON."""

    request: FitRequest
    arguments: FitArguments
    options: tuple[TrainingOption, ...]
    """Each at its fastest."""
    smallest: tuple[TrainingOption, ...]
    """Each at the least memory of the card."""
    resident: TrainingOption | None
    """The fastest with everything on the card, where the others offload; None: none fits, or the fastest is one."""
    tokens: int
    """Of a data set."""
    free_percent: float
    folder: Path | None
    """Where the files that train were written."""
    notes: Mapping[str, QualityNote] | None = None
    """Quality on recorded ladders by name of the precision; None: there are no records."""
    shows_least: bool = False
    """Show the smallest options in place of the fastest."""
    explains: bool = False
    """Show what each figure rests on."""

    @property
    def fits(self) -> bool:
        """Whether any option does."""
        return any(option.fits for option in (*self.options, *self.smallest))

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
            f"--tokens-per-step {self.request.tokens_per_step}{self.request.changes} --write options/"
        )

    @property
    def _model(self) -> str:
        return str(self.arguments.model)

    def _of_machine(self, rank_bytes: float) -> float:
        return rank_bytes * self.request.world.local_size

    def as_mapping(self) -> dict[str, object]:
        """Return plain figures, bytes and seconds."""
        request, best = self.request, best_option(self.options)
        fastest, smallest = self.options[0], self.smallest[0]
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
            "matmul": request.matmul,
            "clip": request.clip,
            "card_note": request.card.note,
            "tokens": self.tokens,
            "options": [self._row_mapping(option) for option in self.options],
            "resident": self.resident and self._row_mapping(self.resident),
            "least": [self._row_mapping(option) for option in self.smallest],
            "fastest": fastest.name if fastest.fits else None,
            "least_memory": smallest.name if smallest.fits else None,
            "recommended": None if best is None else best.name,
        }

    def _row_mapping(self, option: TrainingOption) -> dict[str, object]:
        candidate, note = option.candidate, (self.notes or {}).get(option.name)
        return {
            "method": option.method, "precision": option.name, "label": candidate.level.label,
            "description": candidate.level.description, "fits": option.fits, "verdict": self.verdict(option).value,
            "arrangement": candidate.arrangement.name, "offload": candidate.arrangement.offload,
            "micro_batch_size": candidate.micro_batch_size,
            "num_micro_batches": candidate.num_micro_batches, "kept_blocks": candidate.keep_last,
            "device_used_bytes": round(option.device_bytes),
            "host_peak_bytes": round(self._of_machine(option.host_bytes)),
            "disk_peak_bytes": round(self._of_machine(option.disk_bytes)),
            "saved_state_bytes": round(self._saved_bytes(option)), "tokens_per_s": option.tokens_per_s,
            "tokens_per_s_range": option.speed_range,
            "bound": option.bound and option.bound.value, "hours": option.hours(self.tokens),
            "quality": self._quality(option),
            "quality_verdict": note and note.verdict, "quality_params": note and note.params,
            "stack": encode(stack_of(candidate, option.name, "fit")),
            "command": self.command(option),
            "evidence": {"memory": option.evidence, "time": "estimated"},
        }  # fmt: skip

    def as_text(self, width: int = 100) -> str:
        """Return the same for a reader: at most 25 lines of so many columns, and the notes where they are wanted."""
        shown = self.smallest if self.shows_least else self.options
        blocks = [
            self._answer(width),
            self._table(shown, width),
            [line for told in self._quality_lines(shown) for line in wrap(told, width, subsequent_indent="    ")],
            [line for told in self._notes() for line in wrap(told, width, break_on_hyphens=False)],
        ]
        return "\n".join([in_blocks(blocks), *(["", *self._explained()] if self.explains else [])])

    def _answer(self, width: int) -> list[str]:
        fastest, smallest, best = self.options[0], self.smallest[0], best_option(self.options)
        if not self.fits:
            nearest = min((*self.options, *self.smallest), key=self._lack)
            verdict = "Fits barely" if self.verdict(nearest) is FitVerdict.BARELY else "Does not fit"
            return wrap(
                f"{verdict}. Nearest: {self._told(nearest)[0]}, {self._missing(nearest)}. Take a smaller --seq or "
                "--tokens-per-step, more --host-memory, or a larger card.",
                width,
            )
        answers = [("Fits. Fastest", fastest), ("Least card memory", smallest)]
        if best is not None and best is not fastest:
            answers.insert(1, (f"Within {1 - AS_FAST:.0%} of it, and more exact", best))
        if self.resident is not None:
            answers.insert(-1, ("Without offload", self.resident))
        found = []
        for head, option in (answer for answer in answers if answer[1].fits):
            lines = [f"{head}: {told}." for told in self._told(option)]
            found.append(next((line for line in lines if len(line) <= width), lines[-1]))
        on_card = (option for option in (fastest, smallest, self.resident) if option is not None and option.fits)
        if not any(option.candidate.arrangement.is_resident for option in on_card):
            found.insert(-1, "Without offload: no method fits.")
        return found

    def _told(self, option: TrainingOption) -> list[str]:
        """Return an option in a line, and in shorter ones."""
        candidate, hours = option.candidate, option.hours(self.tokens)
        label, memory = candidate.level.label, f"{_mark(option)}{to_gib(option.device_bytes):.1f} GiB"
        placed = label if candidate.arrangement.is_resident else f"{label}, {candidate.arrangement.offload}"
        if hours is None:
            return [f"{placed}: {memory}"]
        fast = f"{memory}, {option.tokens_per_s:,.0f} tokens/s"
        sure = f"{fast} +/-{option.error:.0%}"
        in_all = f"{hours:.1f} h per {format_count(self.tokens)} tokens"
        return [f"{placed}: {sure}, {in_all}", f"{placed}: {sure}", f"{placed}: {fast}", f"{label}: {fast}"]

    def _table(self, options: Sequence[TrainingOption], width: int) -> list[str]:
        """Return a line for each option; on a narrow terminal offload in a word, then without the hours."""
        headers = ["method", "offload", "card GiB", "host GiB", "tokens/s", "batch"]
        hours = f"h/{format_count(self.tokens)} tokens"
        rows = [self._row(option) for option in options]
        in_a_word = [
            [row[0], option.candidate.arrangement.tiers, *row[2:]] for row, option in zip(rows, options, strict=True)
        ]
        without = [[*row[:5], row[6]] for row in in_a_word]
        tables = [
            columns([*headers[:5], hours, headers[5]], rows),
            columns([*headers[:5], hours, headers[5]], in_a_word),
        ]
        return next((lines for lines in tables if len(lines[0]) <= width), columns(headers, without))

    def _row(self, option: TrainingOption) -> list[str]:
        mark, candidate = _mark(option), option.candidate
        hours, verdict, host = option.hours(self.tokens), self.verdict(option), self._of_machine(option.host_bytes)
        speed = {FitVerdict.NO: "no fit", FitVerdict.BARELY: "barely"}.get(verdict, f"{option.tokens_per_s or 0:,.0f}")
        return [
            candidate.level.label,
            candidate.arrangement.offload,
            *(f"{mark}{to_gib(size):.2f}" if size else "0" for size in (option.device_bytes, host)),
            speed,
            "-" if hours is None else f"{hours:.1f}",
            f"{candidate.micro_batch_size} x {candidate.num_micro_batches}",
        ]

    def verdict(self, option: TrainingOption) -> FitVerdict:
        """Return whether an option fits; barely where only the margin that stays free has no room for it."""
        return verdict_of(self.request, option)

    def _quality_lines(self, options: Sequence[TrainingOption]) -> list[str]:
        """Return a line for each method, one for those of which nothing is known."""
        if self.notes is None:
            return ["Quality: no records here (--results)."]
        by_verdict = dict[str, list[str]]()
        sizes = {note.params for note in self.notes.values()}
        for option in options:
            note, label = self.notes.get(option.name), option.candidate.level.label
            verdict = "no test"
            if note is not None:
                verdict = note.verdict if len(sizes) == 1 else f"{note.verdict} ({format_count(note.params)})"
            by_verdict.setdefault(verdict, []).append(label)
        if [*by_verdict] == ["no test"]:
            return ["Loss beside full training in fp32: not tested."]
        where = f"on {format_count(sizes.pop())} parameters" if len(sizes) == 1 else "at sizes in brackets"
        asked = format_count(self.request.model.num_params)
        return [
            f"Loss beside full training in fp32: not tested at {asked}; {where}:",
            *(f"  {'; '.join(labels)}: {verdict}" for verdict, labels in by_verdict.items()),
        ]

    def _notes(self) -> list[str]:
        request, world = self.request, self.request.world
        host, cards = format_bytes(request.host.tensor_bytes), "" if world.size == 1 else f"{world.size} x "
        if world.size > 1:
            host += f" of a machine of {world.local_size} cards ({world.link})"
        has_source = {CardLimit.CAPACITY, CardLimit.CONTEXT}.isdisjoint(request.card.limits)
        source = "" if has_source else " (not all published, --explain)"
        rule = (
            "Rows: least memory of the card; batches of 1 sequence, everything recomputed."
            if self.shows_least
            else "Rows: each at its fastest micro-batch; batch: sequences x micro-batches a step."
        )
        asked = f"{self._model}, {request.num_sequences} x {request.seq_len} tokens/step"
        memory = f"{to_gib(request.card.memory_bytes):.2f} GiB{source}, {self.free_percent:g} % free"
        errors = f"{TIME_ERROR:.0%} off on average; {WAITING_ERROR:.0%} where PCIe is the bottleneck"
        lines = [
            rule,
            *([CLIPPED] if request.clip == "previous" else []),
            f"{asked}; {cards}{short_name(request.card)}: {memory}; host: {host} for tensors.",
            *([f"{request.card.note}. {_FLOAT16}"] if CardLimit.BFLOAT16 in request.card.limits else []),
            f"~: extrapolated, else planned. Speeds: estimated, {errors}; +/-: 80 % interval.",
        ]
        best = best_option(self.options)
        if best is None or self.folder is None:
            view = "Fastest: leave out --least" if self.shows_least else "Least memory of each: --least"
            return [*lines, f"Training files: --write FOLDER. {view}. More: --explain."]
        lines.append(f"Train on {format_count(self.tokens)} tokens: {self.command(best)}")
        others = [train_path(Path(), option).name for option in self.options if option.fits and option is not best]
        if others:
            lines.append(f"Other training files there: {', '.join(others)}.")
        if best.method == "full":
            lines.append(
                "Weights begin at random, and the tokenizer is bytes: [model] init_from in the file names a folder "
                "of Hugging Face to begin with instead."
            )
        elif self._model in PRESETS:
            lines.append(
                f"First put the weights, a folder of Hugging Face, into {weights_folder(self._model)} (or name another "
                "folder in the file, init_from): adapters need a trained model below them."
            )
        return lines

    def _explained(self) -> list[str]:
        options = self.smallest if self.shows_least else self.options
        headers = ["method", "name", "bottleneck", "kept blocks", "disk GiB", "checkpoint", "bytes"]
        rows = [
            [
                option.candidate.level.label, option.name,
                self._missing(option) if option.bound is None else option.bound.value,
                f"{option.candidate.keep_last} of {self.request.model.num_blocks}",
                f"{to_gib(self._of_machine(option.disk_bytes)):.2f}", format_bytes(self._saved_bytes(option)),
                option.evidence,
            ]
            for option in options
        ]  # fmt: skip
        best = best_option(self.options)
        recommended = (
            []
            if best is None
            else [
                "",
                f"Recommended: {best.name}, the most exact of its method within {1 - AS_FAST:.0%} of the fastest:",
                f"  {self.command(best)}",
            ]
        )
        return [
            *columns(headers, rows),
            "",
            _LEGEND.format(alike=1 - ALIKE, error=TIME_ERROR, waiting=WAITING_ERROR),
            *filter(None, [self.request.card.note]),
            "",
            "Precision, and what it costs in quality:",
            *(f"  {option.name}: {option.candidate.level.description}. {self._quality(option)}" for option in options),
            *recommended,
        ]

    def _quality(self, option: TrainingOption) -> str:
        if self.notes is None:
            return "no records of quality here (--results)"
        note = self.notes.get(option.name)
        missing = "not tested; the guide's page Which stack names the nearest tested configuration"
        return missing if note is None else note.text

    def _saved_bytes(self, option: TrainingOption) -> float:
        plan = compose(option.candidate.optimizations())
        return saved_bytes(self.request.model, plan, OPTIMIZERS[option.candidate.level.optimizer]())

    def _lack(self, option: TrainingOption) -> float:
        return sum(size for size, _ in self._short(option))

    def _short(self, option: TrainingOption) -> list[tuple[float, str]]:
        device = option.device_bytes - (1 - self.free_percent / PERCENT) * self.request.card.memory_bytes
        host = self._of_machine(option.host_bytes) - self.request.host.tensor_bytes
        return [(size, name) for size, name in ((device, "card"), (host, "host")) if size > 0]

    def _missing(self, option: TrainingOption) -> str:
        short = [f"{format_bytes(size)} of {name}" for size, name in self._short(option)]
        return f"lacks {' and '.join(short)}" if short else "lacks card"


def fit_command(
    arguments: FitArguments, *, tokens: int = 100_000_000, methods: Sequence[str] = METHODS,
    margin: float | None = None, confirm: bool = True, write: Path | None = None,
    say: Callable[[str], None] = lambda _line: None, scenarios: Path | None = None, results: Path = RESULTS,
    shows_least: bool = False, explains: bool = False,
) -> FitReport:  # fmt: skip
    """Find the options, make full dry runs of those that fit, and write their files.

    ``results``, or the records that came with hybridtrain, tell the loss that precisions cost.

    Raises:
        ConfigError: names, files, sizes or methods are wrong.
    """
    chosen, free = chosen_methods(methods), free_share(margin)
    request, runs = arguments.resolve(), ShortRuns()
    options = fit(request, methods=chosen, free_share=free, on_try=lambda text: say(f"trying {text}"), runs=runs)
    smallest = least(request, methods=chosen, free_share=free, runs=runs)
    if confirm:
        options = in_order(_confirmed(request, options, runs, free, say))
        count = len(smallest) if shows_least else _MOST_CONFIRMED
        smallest = smallest_first([*_confirmed(request, smallest[:count], None, free, say), *smallest[count:]])
    on_card = None
    if not any(option.candidate.arrangement.is_resident for option in (options[0], smallest[0])):
        on_card = resident(request, methods=chosen, free_share=free, runs=runs)
    if confirm and on_card is not None:
        planned = {option.candidate: option for option in options}.get(on_card.candidate)
        (on_card,) = [planned] if planned is not None else _confirmed(request, [on_card], None, free, say)
        on_card = on_card if on_card.fits else None
    written = smallest if shows_least else options
    if write is not None:
        write_files(write, str(arguments.model), request, [option for option in written if option.fits], tokens)
    notes = None
    results = evidence_folder(results)
    if (results / "records" / "studies").is_dir():
        notes = harness().quality_notes([option.candidate for option in options], scenarios, results)
    return FitReport(
        request=request, arguments=arguments, options=options, smallest=smallest,
        resident=on_card, tokens=tokens,
        free_percent=PERCENT * free, folder=write, notes=notes, shows_least=shows_least, explains=explains,
    )  # fmt: skip


def _confirmed(
    request: FitRequest, options: Sequence[TrainingOption], runs: ShortRuns | None, free: float,
    say: Callable[[str], None],
) -> Iterator[TrainingOption]:  # fmt: skip
    """Yield options after full dry runs; those that do not fit by short runs as they are."""
    for option in options:
        if option.fits:
            say(f"full dry run of {option.name}")
        yield confirmed(request, option, free_share=free, runs=runs) if option.fits else option
