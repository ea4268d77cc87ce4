"""Training options for a model on a card, or on several: which fit, how many bytes the others lack, their speed.

For each precision, short runs (``short_run``) of every offload arrangement and micro-batch size that may fit tell
speed, and how many blocks may keep their activations: ``fit`` takes the fastest, ``least`` the one with the fewest
bytes on the card. A full dry run of every block is made on request (``confirmed``). ``recommend`` chooses the one stack
of full training: the most exact that is not much slower.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, exp, floor, inf
from typing import Literal

from hybridtrain.errors import OutOfMemoryError
from hybridtrain.models.model_config import block_params
from hybridtrain.optimizations.int8_weights import Int8Weights
from hybridtrain.optimizations.lora import Lora
from hybridtrain.optimizations.mixed_precision import MixedPrecision
from hybridtrain.optimizations.nf4_weights import Nf4Weights
from hybridtrain.optimizations.tiled_mlp import TiledMlp
from hybridtrain.plan.memory_plan import DynamicRange
from hybridtrain.planning.candidates import (
    ARRANGEMENTS,
    CUT_ARRANGEMENTS,
    LEVELS,
    TILED_ADAPTER_ARRANGEMENTS,
    TILED_ARRANGEMENTS,
    Arrangement,
    Candidate,
    FitRequest,
    Matmul,
    Numerics,
    in_low_bit,
    sizes,
)
from hybridtrain.planning.dry_runs import DryRun
from hybridtrain.planning.short_run import ShortRun, ShortRuns, arithmetic, batch_bytes, typical_pass_seconds
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.allocator.replay import SETTLING_STEPS
from hybridtrain.virtual_gpu.allocator.reserved_range import reserved_range
from hybridtrain.virtual_gpu.cards.card import MARGIN_SHARE, FitVerdict
from hybridtrain.virtual_gpu.cards.roofline import WIDTH_OF_80, Bottleneck

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
ALIKE = 0.98
"""Share of the highest speed from which on the arrangement that offloads least is taken."""
AS_FAST = 0.95
"""Share of the fastest option's speed from which on another is no slower as far as short runs tell."""
_ARITHMETIC_ERROR = 1.25
"""What arithmetic puts so far above the room is not run."""

_CONFIRMED_MICRO_BATCHES = 2
"""Of a step's, at most, in a run of every block: the second meets the gradients of the first, as all others do. Of
several cards one more, for the last sums over them."""

_ADAPTERS: dict[Method, Numerics] = {
    "lora": Numerics(
        "lora", "LoRA, bf16", "adapters of rank 16 beside every matrix, frozen bf16 weights",
        (Lora(), MixedPrecision()), 2, 0, "float32",
    ),
    "qlora": Numerics(
        "qlora", "QLoRA, 4-bit (NF4)",
        "adapters of rank 16 beside every matrix, frozen weights in 4 bits (NF4)",
        (Lora(), Nf4Weights(), MixedPrecision()), 0.52, 0, "float32",
    ),
}  # fmt: skip
_LORA_OF_CODES = Numerics(
    "lora-int8", "LoRA, 8-bit", "adapters of rank 16 beside every matrix, frozen 8-bit weights, multiplied as stored",
    (Lora(), Int8Weights(dynamic_range=DynamicRange.ROW), MixedPrecision()), 1, 0, "float32",
)  # fmt: skip
"""Where int8 products take codes as they are."""
_ADAPTER_ARRANGEMENTS = (ARRANGEMENTS[0], Arrangement("weights on the host", streams=True))
_DISK_ARRANGEMENTS = (
    Arrangement("state on disk", streams=True, offloads_state=True, on_disk=("state",)),
    Arrangement("state on disk, update fused", streams=True, offloads_state=True, fuses=True, on_disk=("state",)),
    Arrangement(
        "state and block inputs on disk, update fused", streams=True, offloads_state=True, fuses=True,
        on_disk=("state", "boundaries"),
    ),
    Arrangement(
        "everything on disk, update fused", streams=True, offloads_state=True, fuses=True,
        on_disk=("weights", "state", "boundaries"),
    ),
)  # fmt: skip
"""Tried where host memory has no room for any other."""
_SHORT_RUN_SLACK = 0.03
"""Of the card, beside the margin, in short runs: their bytes are extended by arithmetic, reserved ones are no line."""
_WORTH_HARSHER = 1.05
"""A harsher level must be this much faster to be chosen."""
_WORTH_NEXT_LEVEL = 1.02
"""A harsher level must be this much faster than the one before, or even harsher ones are not looked at."""
_WAITS = 0.01
"""Of a step, for the bus: less than this is not worth blocks that stay on the card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOption:
    """One precision at its fastest, or at its smallest where it does not fit.

    Bytes and times are ``estimated`` from short runs until a full dry run.
    """

    method: Method
    candidate: Candidate
    device_bytes: float
    """At most, CUDA context included."""
    host_bytes: float
    """Of each card, as ``disk_bytes``."""
    fits: bool
    tokens_per_s: float | None = None
    """None: it does not fit."""
    spread: float = 0.0
    """Standard deviation of the logarithm of the true speed over it."""
    bound: Bottleneck | None = None
    run: DryRun | None = None
    """The same option, every block; of many micro-batches the first."""
    micro_batches_run: int = 0
    disk_bytes: float = 0.0
    margin_bytes: int = 0
    """Left free beside ``device_bytes``: by how much reserved bytes move when the run is not quite the planned one."""

    @property
    def name(self) -> str:
        """Of the precision: ``exact``, ``lora``."""
        return self.candidate.level.name

    @property
    def evidence(self) -> str:
        """How its bytes were found."""
        if self.run is not None:
            few, count = self.micro_batches_run, self.candidate.num_micro_batches
            return "planned" if few == count else f"planned, {few} of {count} micro-batches"
        return "estimated"

    @property
    def error(self) -> float:
        """By how much the speed may be higher or lower, relative, in four runs of five."""
        return exp(WIDTH_OF_80 * self.spread) - 1

    @property
    def speed_range(self) -> tuple[float, float] | None:
        """Tokens/s between which four runs of five are; None: it does not fit."""
        speed, factor = self.tokens_per_s, 1 + self.error
        return None if speed is None else (speed / factor, speed * factor)

    def hours(self, tokens: int) -> float | None:
        """Return the hours that so many tokens take."""
        return None if self.tokens_per_s is None else tokens / self.tokens_per_s / 3600


def fit(
    request: FitRequest,
    *,
    methods: Sequence[str] = METHODS,
    free_share: float = MARGIN_SHARE,
    on_try: Callable[[str], None] = lambda _text: None,
    is_exhaustive: bool = False,
    runs: ShortRuns | None = None,
) -> tuple[TrainingOption, ...]:
    """Return an option for each precision: those that fit, the fastest first, then the others, the smallest first.

    The method ``full`` trains all parameters, at each level of ``candidates.LEVELS``; ``lora`` and ``qlora`` train
    adapters. A name of a precision asks for that alone. Every option has the micro-batch size that is fastest, of those
    within 2 % the one that offloads least.
    ``free_share`` of the card's bytes stays free. ``on_try`` receives a line before each short run. ``is_exhaustive``
    tries disk too where host memory has room. ``runs`` are shared by requests that differ in card, host or length.
    """
    search = _search(request, free_share, on_try, runs, is_exhaustive)
    return in_order([search.option(method, level) for method, level in precisions(methods, request.matmul)])


def resident(
    request: FitRequest, *, methods: Sequence[str] = METHODS, free_share: float = MARGIN_SHARE,
    runs: ShortRuns | None = None,
) -> TrainingOption | None:  # fmt: skip
    """Return the fastest option with everything on the card; None: none fits. Arguments are those of ``fit``."""
    search = _search(request, free_share, lambda _text: None, runs, False)
    found = (o for method, level in precisions(methods, request.matmul) for o in search.resident(method, level))
    return max(found, key=speed, default=None)


def least(
    request: FitRequest,
    *,
    methods: Sequence[str] = METHODS,
    free_share: float = MARGIN_SHARE,
    runs: ShortRuns | None = None,
) -> tuple[TrainingOption, ...]:
    """Return the option of each precision that takes least of the card: those that fit first, the smallest first.

    Micro-batches are of one sequence, every block recomputes its activations, and what host memory has room for is
    offloaded. Arguments are those of ``fit``.
    """
    search = _search(request, free_share, lambda _text: None, runs, False)
    options = [search.least(method, level) for method, level in precisions(methods, request.matmul)]
    return smallest_first(options)


def _search(
    request: FitRequest, free_share: float, on_try: Callable[[str], None], runs: ShortRuns | None, is_exhaustive: bool
) -> "_Search":
    return _Search(request, runs or ShortRuns(), (1 - free_share) * request.card.memory_bytes, on_try, is_exhaustive)


def in_order(options: Iterable[TrainingOption]) -> tuple[TrainingOption, ...]:
    """Return those that fit, the fastest first, then the others, the smallest first."""
    return tuple(sorted(options, key=lambda option: (not option.fits, -speed(option), option.device_bytes)))


def smallest_first(options: Iterable[TrainingOption]) -> tuple[TrainingOption, ...]:
    """Return those that fit, then the others; what takes least of the card first."""
    return tuple(sorted(options, key=lambda option: (not option.fits, option.device_bytes)))


def best_option(options: Sequence[TrainingOption]) -> TrainingOption | None:
    """Return the most exact option of those about as fast as the fastest; None: none fits.

    About as fast is within 5 %. Between full training and adapters speed alone decides.
    """
    fitting = [option for option in options if option.fits]
    if not fitting:
        return None
    fastest = max(fitting, key=speed)
    alike = [other for other in fitting if other.method == fastest.method and speed(other) >= AS_FAST * speed(fastest)]
    places = {level.name: place for place, level in enumerate(levels_of(fastest.method, "int8"))}
    return min(alike, key=lambda option: places[option.candidate.level.name.partition("_")[0]])


def verdict_of(request: FitRequest, option: TrainingOption) -> FitVerdict:
    """Return whether an option fits; barely where only the margin that stays free has no room for it."""
    fits_host = option.host_bytes * request.world.local_size <= request.host.tensor_bytes
    is_within = option.device_bytes <= request.card.memory_bytes
    return FitVerdict.FITS if option.fits else FitVerdict.BARELY if fits_host and is_within else FitVerdict.NO


def speed(option: TrainingOption) -> float:
    """Return tokens per second, 0 where an option does not fit."""
    return option.tokens_per_s or 0.0


Refused = dict[Arrangement, int]
"""The smallest micro-batch of an arrangement that a full dry run did not fit."""


def confirmed(
    request: FitRequest, option: TrainingOption, *, free_share: float = MARGIN_SHARE, leaves_margin: bool = False,
    runs: ShortRuns | None = None,
) -> TrainingOption:  # fmt: skip
    """Return an option after a full dry run, or the next one where short runs, which see no fragments, took too much.

    Next are fewer kept blocks; with ``runs`` also smaller micro-batches and other arrangements. ``leaves_margin`` keeps
    the range of reserved bytes free too. What does not fit either is returned as it was run first.
    """
    refused, first = Refused(), None
    while True:
        run = request.run(few_micro_batches(option.candidate))
        whole = after_run(request, option, run, free_share=free_share, leaves_margin=leaves_margin)
        first = first or whole
        following = None if whole.fits else following_option(request, whole, refused, free_share=free_share, runs=runs)
        if following is None:
            return whole if whole.fits or runs is None else first
        option = following


def following_option(
    request: FitRequest, option: TrainingOption, refused: Refused, *, free_share: float = MARGIN_SHARE,
    runs: ShortRuns | None = None,
) -> TrainingOption | None:  # fmt: skip
    """Return what to run after an option that its full dry run did not fit; None: nothing is left.

    ``refused`` is changed: it holds what need not be tried again.
    """
    candidate = option.candidate
    if candidate.keep_last:
        return _with_fewer_kept(request, option, free_share)
    if runs is None:
        return None
    refused[candidate.arrangement] = candidate.micro_batch_size
    search = replace(_search(request, free_share, lambda _text: None, runs, False), refused=refused)
    found = search.option(option.method, candidate.level)
    return found if found.fits else None


def _with_fewer_kept(request: FitRequest, option: TrainingOption, free_share: float) -> TrainingOption:
    """Return an option that its full dry run did not fit, with as many kept blocks as may."""
    candidate = option.candidate
    over = option.device_bytes + option.margin_bytes - (1 - free_share) * request.card.memory_bytes
    fewer = ceil(over / max(1.0, candidate.kept_bytes)) if over > 0 else 1
    return replace(option, candidate=replace(candidate, keep_last=max(0, candidate.keep_last - max(1, fewer))))


def few_micro_batches(candidate: Candidate) -> Candidate:
    """Return a candidate with the micro-batches that its full dry run has."""
    few = min(candidate.num_micro_batches, _CONFIRMED_MICRO_BATCHES + (candidate.world > 1))
    return replace(candidate, num_micro_batches=few)


def after_run(
    request: FitRequest, option: TrainingOption, run: DryRun, *, free_share: float = MARGIN_SHARE,
    leaves_margin: bool = False,
) -> TrainingOption:  # fmt: skip
    """Return an option after its full dry run, of ``few_micro_batches``.

    Of more than two micro-batches the first two are run. Others take as long as the second, and their bytes on card
    and host are arithmetic: tokens, and where all pass a block together its inputs.
    """
    capacity, machine = (1 - free_share) * request.card.memory_bytes, request.rank_host
    candidate, few = option.candidate, few_micro_batches(option.candidate).num_micro_batches
    fuses, count = candidate.arrangement.fuses, candidate.num_micro_batches
    all_of_them = arithmetic(request, request.model, candidate)
    those_run = arithmetic(request, request.model, replace(candidate, num_micro_batches=few))
    batches = (count - few) * batch_bytes(request, candidate)
    device = run.device_used_bytes + batches + all_of_them.card - those_run.card
    margin = _margin_bytes(run) if leaves_margin else 0
    host = run.host_peak_bytes + all_of_them.host - those_run.host
    fits_host = host <= machine.tensor_bytes and run.disk_peak_bytes <= machine.disk_bytes
    seconds = run.time.seconds + (count - few) * (
        run.time.seconds / few if fuses else typical_pass_seconds(run, candidate)
    )
    return replace(
        option, device_bytes=device, host_bytes=host, disk_bytes=run.disk_peak_bytes,
        tokens_per_s=request.tokens_per_step / seconds, bound=run.bound, run=run, spread=run.time.spread,
        fits=run.fits and device + margin <= capacity and fits_host, micro_batches_run=few, margin_bytes=margin,
    )  # fmt: skip


def _margin_bytes(run: DryRun) -> int:
    workspace = run.card.cublas_workspace_bytes
    return reserved_range(run.trace, workspace_bytes=workspace, repeats=SETTLING_STEPS, with_lengths=False).margin_bytes


def precisions(names: Collection[str], matmul: Matmul = "full") -> list[tuple[Method, Numerics]]:
    """Return what names of methods, or of single precisions, ask for; the most exact first.

    ``matmul`` multiplies each of them in 8 bits; their names say so.
    """
    every = [(method, level) for method in METHODS for level in levels_of(method, matmul)]
    chosen = [(method, level) for method, level in every if method in names or level.name in names]
    return chosen if matmul == "full" else [(method, in_low_bit(level, matmul)) for method, level in chosen]


def levels_of(method: Method, matmul: Matmul = "full") -> tuple[Numerics, ...]:
    """Return the precisions of a method, the most exact first."""
    if method == "full":
        return LEVELS
    return (_ADAPTERS[method], _LORA_OF_CODES) if (method, matmul) == ("lora", "int8") else (_ADAPTERS[method],)


@dataclass(frozen=True, slots=True)
class _Search:
    request: FitRequest
    runs: ShortRuns
    capacity: float
    on_try: Callable[[str], None]
    is_exhaustive: bool
    refused: Mapping[Arrangement, int] = field(default_factory=dict)

    def option(self, method: Method, level: Numerics) -> TrainingOption:
        """Return the fastest option of one precision, or its smallest."""
        tiers = tiers_of(self.request, level)
        for arrangements in (sum(tiers, ()),) if self.is_exhaustive else tiers:
            found = list(self._found(method, level, arrangements))
            if found:  # those that offload least are first
                return next(option for option in found if speed(option) >= ALIKE * max(map(speed, found)))
        return self._nearest(method, level, sum(tiers, ()))

    def resident(self, method: Method, level: Numerics) -> Iterator[TrainingOption]:
        """Yield the fastest option of one precision with everything on the card, if one fits."""
        arrangements = (arrangement for tier in tiers_of(self.request, level) for arrangement in tier)
        return self._found(method, level, [each for each in arrangements if each.is_resident])

    def least(self, method: Method, level: Numerics) -> TrainingOption:
        """Return the option of one precision that takes least of the card: micro-batches of 1, nothing kept."""
        tiers = tiers_of(self.request, level)
        for arrangements in tiers:
            candidates = [self._candidate(level, arrangement, 1) for arrangement in arrangements]
            shorts = [self.runs.of(self.request, candidate) for candidate in candidates if self._may_fit(candidate)]
            found = [self._option(method, short, 0) for short in shorts if short.most_kept(self.capacity) is not None]
            if found:
                return min(found, key=lambda option: option.device_bytes)
        return self._nearest(method, level, sum(tiers, ()))

    def _found(self, method: Method, level: Numerics, arrangements: Sequence[Arrangement]) -> Iterator[TrainingOption]:
        """Yield an option for each arrangement at the fastest of its micro-batch sizes, the largest of equal ones."""
        request, roomy = self.request, 0
        for arrangement in arrangements:
            found = list[TrainingOption]()
            for size in sizes(request):
                if size <= roomy and not arrangement.is_resident:
                    continue  # all on the card nothing is recomputed and nothing waits: elsewhere it is no faster
                candidate = self._candidate(level, arrangement, size)
                if size >= self.refused.get(arrangement, inf) or not self._may_fit(candidate):
                    continue
                self.on_try(f"{level.name}, {arrangement.name}: {size} x {request.seq_len}")
                short = self.runs.of(request, candidate)
                kept = short.most_kept(self.capacity)
                if kept is not None:
                    found.append(self._option(method, short, kept))
                if arrangement.is_resident and kept == request.model.num_blocks:
                    roomy = max(roomy, size)
            if found:
                yield max(found, key=speed)

    def _nearest(self, method: Method, level: Numerics, arrangements: Sequence[Arrangement]) -> TrainingOption:
        """Return the option that misses by the smallest share."""
        request, machine = self.request, self.request.rank_host

        def share(option: TrainingOption) -> float:
            return max(option.device_bytes / self.capacity, option.host_bytes / machine.tensor_bytes)

        shorts = [self.runs.of(request, self._candidate(level, arrangement, 1)) for arrangement in arrangements]
        options = [
            TrainingOption(
                method=method, candidate=short.candidate, device_bytes=short.device_bytes(0),
                host_bytes=short.host_bytes(0), fits=False,
                disk_bytes=arithmetic(request, request.model, short.candidate).disk,
            )
            for short in shorts
        ]  # fmt: skip
        return min(options, key=share)

    def _candidate(self, level: Numerics, arrangement: Arrangement, size: int) -> Candidate:
        return Candidate(
            level=level, arrangement=arrangement, micro_batch_size=size,
            num_micro_batches=self.request.rank_sequences // size, keep_last=0, world=self.request.world.size,
        )  # fmt: skip

    def _may_fit(self, candidate: Candidate) -> bool:
        """Return whether arithmetic does not rule it out."""
        needs, machine = arithmetic(self.request, self.request.model, candidate), self.request.rank_host
        return (
            needs.card <= _ARITHMETIC_ERROR * self.capacity
            and needs.host <= _ARITHMETIC_ERROR * machine.tensor_bytes
            and needs.disk <= machine.disk_bytes
        )

    def _option(self, method: Method, short: ShortRun, kept: int) -> TrainingOption:
        request, seconds = self.request, short.seconds(kept)
        more = short.device_bytes(1) - short.device_bytes(0)
        tokens_per_s = request.tokens_per_step / seconds
        candidate = replace(short.candidate, keep_last=kept, kept_bytes=more, tokens_per_s=tokens_per_s)
        return TrainingOption(
            method=method, candidate=candidate, device_bytes=short.device_bytes(kept),
            host_bytes=short.host_bytes(kept), disk_bytes=arithmetic(request, request.model, candidate).disk,
            fits=True, bound=short.bound(kept), tokens_per_s=tokens_per_s, spread=short.spread,
        )  # fmt: skip


def tiers_of(request: FitRequest, level: Numerics) -> tuple[tuple[Arrangement, ...], ...]:
    """Return groups of arrangements: one is tried where none of the group before has room."""
    # Dropout and experts do not go in tiles.
    is_refused = not request.tries_tiles or request.model.experts or request.model.dropout
    is_long = request.seq_len > TiledMlp().mlp_tile_tokens and not is_refused
    if level.trains_adapters:
        return ((*_ADAPTER_ARRANGEMENTS, *(TILED_ADAPTER_ARRANGEMENTS if is_long else ())),)
    if request.world.size == 1:
        return ((*ARRANGEMENTS, *(TILED_ARRANGEMENTS if is_long else ())), _DISK_ARRANGEMENTS)
    if level.optimizer != "adamw":  # works on whole matrices, which ranks do not cut
        return (tuple(arrangement for arrangement in ARRANGEMENTS if not arrangement.fuses),)
    return (CUT_ARRANGEMENTS,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The chosen option, and those it was chosen from."""

    request: FitRequest
    option: TrainingOption
    """The chosen one, run with every block."""
    options: tuple[TrainingOption, ...]
    """All levels that fit by short runs, the gentlest first."""
    free_share: float
    """Of the card's bytes that stay free, beside the option's ``margin_bytes``."""

    @property
    def chosen(self) -> Candidate:
        """The stack, and how a step is cut into micro-batches."""
        return self.option.candidate

    @property
    def run(self) -> DryRun:
        """Every block; of many micro-batches the first."""
        assert self.option.run is not None, "the chosen option was run"
        return self.option.run


def recommend(
    request: FitRequest, on_try: Callable[[str], None], *, free_share: float = MARGIN_SHARE
) -> Recommendation:
    """Return the fastest stack that fits; a gentler level wins unless a harsher one is 5 % faster.

    ``free_share`` of the card's bytes stays free, beside the range of reserved bytes; ``on_try`` receives each trial.

    Raises:
        OutOfMemoryError: nothing fits; the message says what is missing.
    """
    found = fit(request, methods=("full",), free_share=free_share + _SHORT_RUN_SLACK, on_try=on_try)
    options = tuple(
        sorted((option for option in found if option.fits), key=lambda option: LEVELS.index(option.candidate.level))
    )
    left = list(options)
    while left:
        chosen = _gentlest_fast_option(left)
        on_try(f"{chosen.name}, {chosen.candidate.arrangement.name}: every block")
        whole = confirmed(request, chosen, free_share=free_share, leaves_margin=True)
        if whole.fits:
            option = _with_resident_blocks(request, whole, free_share)
            return Recommendation(request=request, option=option, options=options, free_share=free_share)
        left.remove(chosen)
    raise OutOfMemoryError(_nothing_fits(request, found, free_share))


def _gentlest_fast_option(options: Sequence[TrainingOption]) -> TrainingOption:
    chosen = options[0]
    for before, option in pairwise(options):
        if speed(option) < _WORTH_NEXT_LEVEL * speed(before):
            break
        if speed(option) > _WORTH_HARSHER * speed(chosen):
            chosen = option
    return chosen


def _with_resident_blocks(request: FitRequest, option: TrainingOption, free_share: float) -> TrainingOption:
    """Return the option with as many blocks on the card as there is room for, where the step waits for the bus."""
    candidate, run = option.candidate, option.run
    assert run is not None, "the option was run"
    waits = run.time.seconds_by_bound.get(Bottleneck.TRANSFER, 0.0) > _WAITS * run.time.seconds
    if not candidate.arrangement.streams or not waits:
        return option
    room = (1 - free_share - _SHORT_RUN_SLACK) * request.card.memory_bytes - option.device_bytes - option.margin_bytes
    block = candidate.level.weight_bytes * block_params(request.model)
    resident = min(request.model.num_blocks, floor(room / block))
    while resident > 0:
        trial = replace(option, candidate=replace(candidate, resident_layers=resident))
        found = confirmed(request, trial, free_share=free_share, leaves_margin=True)
        if found.fits and found.candidate.keep_last == candidate.keep_last:
            return max(option, found, key=speed)
        resident -= 1 + resident // 4
    return option


def _nothing_fits(request: FitRequest, options: tuple[TrainingOption, ...], free_share: float) -> str:
    smallest = min(options, key=lambda option: option.host_bytes + option.device_bytes)
    margin = f", {100 * free_share:g} % of the card free" if free_share else ""
    return (
        f"nothing fits: the smallest stack tried takes {format_bytes(round(smallest.device_bytes))} of "
        f"{format_bytes(request.card.memory_bytes)} on the card and {format_bytes(round(smallest.host_bytes))} of "
        f"{format_bytes(request.host.tensor_bytes)} of host memory (estimated{margin}); "
        "take a smaller --seq, a larger card, or more host memory."
    )
