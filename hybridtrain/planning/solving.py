"""The largest micro-batch, the longest sequence, the smallest card, the least host memory with which a model fits.

Each is the last point of a grid on which bytes rise, or room falls. Short runs find it for every offload arrangement,
by bisection that begins where arithmetic puts the limit. Full dry runs then move it until a point fits and the next
does not; reserved bytes are rounded, so that a point beyond may fit by chance. All blocks recompute their activations.
A step has the tokens of the request, in two micro-batches at least, so that gradients wait for the second.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isfinite
from typing import Literal, get_args

from hybridtrain.models.model_config import MOST_TOKENS
from hybridtrain.planning.candidates import Arrangement, Candidate, FitRequest, Numerics
from hybridtrain.planning.dry_runs import Demand
from hybridtrain.planning.fitting import METHODS, Method, TrainingOption, levels_of, precisions, tiers_of
from hybridtrain.planning.plan_bytes import PlanBytes
from hybridtrain.planning.short_run import ShortRuns, arithmetic, batch_bytes
from hybridtrain.units import MIB, format_bytes
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.cards.card import MARGIN_SHARE, Card, card_catalogue

Over = dict[str, float]
"""Bytes beyond the room of card, host and disk, negative where there is room."""
Quantity = Literal["batch", "seq", "card", "host"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
SEQ_STEP, _LONG_SEQ_STEP, _MANY_POSITIONS = 128, 512, 8192
"""Tokens between two lengths that are tried, the second of models with more positions than the third."""
_MICRO_BATCHES = 2
_MOST_HOST_GIB = 4096
_NEXT_TO_NOTHING_GIB = 1 / 64
"""A batch on its way; told as 0 GiB."""
_TRUST = 0.05
"""Of the card's memory: what short runs put farther from the limit is taken as it is."""
_FAST_TRIES = 6
"""Points that the estimate chooses, before halves are taken."""
_CLASS_NAMES = {
    TensorClass.WEIGHT: "weights", TensorClass.MASTER: "master weights", TensorClass.GRAD: "gradients",
    TensorClass.OPTIM_STATE: "optimizer state", TensorClass.BOUNDARY: "block inputs",
    TensorClass.ACTIVATION: "activations", TensorClass.WORKSPACE: "workspaces",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The last point of a grid at which one precision fits."""

    quantity: Quantity
    value: int
    """Sequences of a micro-batch, tokens of a sequence, bytes of the card, or GiB of host memory for tensors."""
    option: TrainingOption
    """There; bytes are planned, or estimated, times estimated."""
    request: FitRequest
    """With the card, the host and the length there."""
    is_planned: bool
    """Whether full dry runs fit here and not at the next point."""
    limit: str
    """What the next point lacks, or why there is none."""
    holders: tuple[tuple[str, float], ...] = ()
    """Of the memory that is too small at the next point: name and bytes, the largest first; empty without a dry run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """Solutions of one precision by what may be offloaded; None: it does not fit."""

    method: Method
    level: Numerics
    resident: Solution | None
    """Nothing offloaded."""
    offloaded: Solution | None
    """What host memory has room for is offloaded; to disk only where no other fits."""

    @property
    def best(self) -> Solution | None:
        """The better one, at equal values without offload."""
        found = [each for each in (self.resident, self.offloaded) if each is not None]
        return max(found, key=_rank, default=None)  # the first of equal ones


def _rank(solution: Solution) -> int:
    return solution.value if solution.quantity in {"batch", "seq"} else -solution.value


def solve(
    request: FitRequest,
    quantity: Quantity,
    *,
    methods: Sequence[str] = METHODS,
    free_share: float = MARGIN_SHARE,
    plans: bool = True,
    runs: ShortRuns | None = None,
    on_try: Callable[[str], None] = lambda _text: None,
) -> tuple[Solved, ...]:
    """Return the solutions of each precision, the best first, then those that do not fit.

    ``plans`` confirms each by full dry runs; without, bytes are estimated. ``card`` tries all cards of the catalogue in
    place of the request's, ``host`` any memory, ``seq`` multiples of ``seq_step`` up to the model's positions,
    ``batch`` any number of sequences.
    """
    solver = _Solver(_axis(request, quantity, free_share), free_share, runs or ShortRuns(), plans)
    found = list[Solved]()
    for method, level in precisions(methods, request.matmul):
        on_try(level.name)
        found.append(solver.solved(method, level))
    return tuple(sorted(found, key=_order))


def _order(solved: Solved) -> tuple[bool, int, bool, float]:
    """Return what sorts the best first, of equal ones those that offload nothing, then the faster."""
    best = solved.best
    if best is None:
        return True, 0, True, 0.0
    is_offloaded = not best.option.candidate.arrangement.is_resident
    return False, -_rank(best), is_offloaded, -(best.option.tokens_per_s or 0.0)


def longest_sequence(
    request: FitRequest, method: Method, level: Numerics | None = None, *, lengths: Sequence[int] = (),
    free_share: float = MARGIN_SHARE, plans: bool = False, runs: ShortRuns | None = None,
) -> Solution | None:  # fmt: skip
    """Return the longest sequence that one precision of a method trains on the request's card; None: not even a step.

    Without ``level`` it is the method's most exact. ``lengths``, rising, are tried in place of multiples of
    ``seq_step``. ``runs`` may be shared with other cards and lengths.
    """
    solver = _Solver(_axis(request, "seq", free_share, lengths), free_share, runs or ShortRuns(), plans)
    return solver.solved(method, level or levels_of(method)[0]).best


def seq_step(request: FitRequest) -> int:
    """Return the tokens between two lengths that are tried for a model."""
    return SEQ_STEP if request.model.max_seq_len <= _MANY_POSITIONS else _LONG_SEQ_STEP


@dataclass(frozen=True, slots=True)
class _Axis:
    """A grid of requests: the first is the easiest, the last the hardest."""

    quantity: Quantity
    count: int
    at: Callable[[int], tuple[FitRequest, int]]
    """The request, and the sequences of a micro-batch, at points 1 to ``count``."""
    value: Callable[[int], int]
    end: str
    """Why there is no point beyond the last."""


def _axis(request: FitRequest, quantity: Quantity, free_share: float, lengths: Sequence[int] = ()) -> _Axis:
    if quantity == "batch":
        most = MOST_TOKENS // request.seq_len // _MICRO_BATCHES // request.world.size
        end = f"a step takes at most {MOST_TOKENS} tokens"
        return _Axis(quantity, max(1, most), lambda i: (request, i), lambda i: i, end)
    if quantity == "seq":
        most, step = request.model.max_seq_len, seq_step(request)
        tried = lengths or [*range(step, most, step), most]

        def with_length(i: int) -> tuple[FitRequest, int]:
            return replace(request, seq_len=tried[i - 1]), 1

        return _Axis(
            quantity, len(tried), with_length, lambda i: tried[i - 1], f"the model's positions ({most})"
        )  # fmt: skip
    if quantity == "card":

        def room(card: Card) -> float:
            return (1 - free_share) * card.memory_bytes - card.context_bytes - card.cublas_workspace_bytes

        cards = sorted(card_catalogue().values(), key=room, reverse=True)
        smallest = "the smallest card of the catalogue"
        return _Axis(
            quantity, len(cards), lambda i: (replace(request, card=cards[i - 1]), 1),
            lambda i: cards[i - 1].memory_bytes, smallest,
        )  # fmt: skip
    reserved = request.host.reserved_gib

    def with_memory(i: int) -> tuple[FitRequest, int]:
        memory = reserved + (_MOST_HOST_GIB - i or _NEXT_TO_NOTHING_GIB)
        return replace(request, host=replace(request.host, memory_gib=memory)), 1

    return _Axis(quantity, _MOST_HOST_GIB, with_memory, lambda i: _MOST_HOST_GIB - i, "no host memory is needed")


@dataclass(frozen=True, slots=True)
class _Solver:
    axis: _Axis
    free_share: float
    runs: ShortRuns
    plans: bool
    demands: dict[Hashable, Demand] = field(default_factory=dict)
    drifts: dict[bool, float] = field(default_factory=dict)
    """Bytes by which the last full dry run was above its short run, for fused updates and for others: it tells where to
    begin, not where to end."""

    def solved(self, method: Method, level: Numerics) -> Solved:
        """Return the solutions of one precision."""
        request, _ = self.axis.at(self.axis.count)  # of sequences the longest
        first, *others = tiers_of(request, level)
        resident = self._best(method, level, [each for each in first if each.is_resident])
        offloaded = self._best(method, level, [each for each in first if not each.is_resident])
        for arrangements in others if offloaded is None else ():
            offloaded = self._best(method, level, arrangements)
        return Solved(method=method, level=level, resident=resident, offloaded=offloaded)

    def _best(self, method: Method, level: Numerics, arrangements: Sequence[Arrangement]) -> Solution | None:
        """Return the solution of the arrangement that goes farthest, of equal ones that which offloads least."""
        searches = [_Search(self, level, arrangement) for arrangement in arrangements]
        best, reached = None, 0
        for search in sorted(searches, key=lambda search: -search.roughly):
            if reached == self.axis.count or (best is not None and search.is_like(best, reached + 1)):
                continue
            found = search.beyond(reached)
            if found > reached:
                best, reached = search, found
        return None if best is None else best.solution(method, reached)


@dataclass(frozen=True, slots=True)
class _Search:
    """Points of one arrangement of one precision. Bytes are above the room where they are positive."""

    solver: _Solver
    level: Numerics
    arrangement: Arrangement

    @property
    def roughly(self) -> int:
        """The last point that fits by arithmetic; 0: none."""
        return _boundary(0, self.solver.axis.count + 1, 1, lambda i: max(self._by_arithmetic(i).values()) <= 0)

    def beyond(self, reached: int) -> int:
        """Return the last point that fits; ``reached``, which another arrangement fits, if it is not beyond.

        Where short runs put the point after ``reached`` far from the room, no full dry run is made.
        """
        count, solver = self.solver.axis.count, self.solver
        request, _ = solver.axis.at(reached + 1)
        trusted = _TRUST * request.card.memory_bytes if solver.plans else 0
        if max(self._by_short_run(reached + 1).values()) > trusted:
            return reached
        if solver.plans and reached and max(self._by_plan(reached + 1).values()) > 0:
            return reached
        estimate = largest(count, self._by_short_run, self._by_arithmetic, max(self.roughly, reached + 1))
        if not solver.plans:
            return estimate
        start, drift = max(estimate, 1), solver.drifts.get(self.arrangement.fuses, 0.0)
        short = self._by_short_run(start)
        over = _predicted(short | {"card": short["card"] + drift}, self._by_arithmetic, start, {})
        start = _boundary(0, count + 1, start, lambda i: over(i) <= 0)
        found = largest(count, self._by_plan, self._by_arithmetic, max(start, reached + 1))
        last = max(found, 1)
        solver.drifts[self.arrangement.fuses] = self._by_plan(last)["card"] - self._by_short_run(last)["card"]
        return found

    def is_like(self, other: "_Search", i: int) -> bool:
        """Return whether a point asks for the same bytes as in another arrangement, which keeps them elsewhere."""
        own, others = (max(each._by_short_run(i).values()) for each in (self, other))
        return abs(own - others) < MIB

    def solution(self, method: Method, i: int) -> Solution:
        """Return the last point that fits as a solution."""
        solver, (asked, candidate) = self.solver, self._at(i)
        needs = self._planned(i) if solver.plans else self._estimated(i)
        count = ceil(max(_MICRO_BATCHES, self._micro_batches(asked, candidate)))
        whole = replace(asked, num_sequences=count * candidate.micro_batch_size * asked.world.size)
        candidate = replace(candidate, num_micro_batches=count)
        short = solver.runs.of(whole, candidate)
        option = TrainingOption(
            method=method, candidate=candidate, device_bytes=needs.card, host_bytes=needs.host, disk_bytes=needs.disk,
            fits=True, tokens_per_s=whole.tokens_per_step / short.seconds(0), bound=short.bound(0),
            spread=short.spread,
        )  # fmt: skip
        axis = solver.axis
        limit, holders = (axis.end, ()) if i == axis.count else self._limit(i + 1)
        return Solution(
            quantity=axis.quantity, value=axis.value(i), option=option, request=whole, is_planned=solver.plans,
            limit=limit, holders=holders,
        )  # fmt: skip

    def _limit(self, i: int) -> tuple[str, tuple[tuple[str, float], ...]]:
        """Return what a point lacks that does not fit, and who holds that memory."""
        plans, (asked, _) = self.solver.plans, self._at(i)
        over = self._over(asked, self._planned(i) if plans else self._estimated(i))
        place = max(over, key=lambda name: over[name])
        told = f"{place} {format_bytes(over[place])} short"
        if not plans or place == "disk":
            return told, ()
        return told, card_holders(self._demand(i)) if place == "card" else host_holders(self._demand(i))

    def _at(self, i: int) -> tuple[FitRequest, Candidate]:
        request, size = self.solver.axis.at(i)
        world = request.world.size
        asked = replace(request, num_sequences=_MICRO_BATCHES * size * world)
        return asked, Candidate(
            level=self.level, arrangement=self.arrangement, micro_batch_size=size, num_micro_batches=_MICRO_BATCHES,
            keep_last=0, world=world,
        )  # fmt: skip

    def _micro_batches(self, asked: FitRequest, candidate: Candidate) -> float:
        """Return how many micro-batches the tokens of the request are, on each card."""
        request, _ = self.solver.axis.at(1)
        return request.tokens_per_step / (candidate.micro_batch_size * asked.seq_len * asked.world.size)

    def _by_arithmetic(self, i: int) -> Over:
        asked, candidate = self._at(i)
        needs, rest = arithmetic(asked, asked.model, candidate), self._rest(asked, candidate)
        card = needs.card + rest.card + asked.card.context_bytes
        return self._over(asked, PlanBytes(card=card, host=needs.host + rest.host, disk=needs.disk))

    def _by_short_run(self, i: int) -> Over:
        return self._over(self._at(i)[0], self._estimated(i))

    def _by_plan(self, i: int) -> Over:
        return self._over(self._at(i)[0], self._planned(i))

    def _over(self, asked: FitRequest, needs: PlanBytes) -> Over:
        """Return the bytes beyond the room of each memory, negative where there is room."""
        machine = asked.rank_host
        return {
            "card": needs.card - (1 - self.solver.free_share) * asked.card.memory_bytes,
            "host": needs.host - machine.tensor_bytes, "disk": needs.disk - machine.disk_bytes,
        }  # fmt: skip

    def _estimated(self, i: int) -> PlanBytes:
        asked, candidate = self._at(i)
        short, rest = self.solver.runs.of(asked, candidate), self._rest(asked, candidate)
        disk = arithmetic(asked, asked.model, candidate).disk
        return PlanBytes(card=short.device_bytes(0) + rest.card, host=short.host_bytes(0) + rest.host, disk=disk)

    def _planned(self, i: int) -> PlanBytes:
        asked, candidate = self._at(i)
        demand, rest = self._demand(i), self._rest(asked, candidate)
        card = demand.reserved_bytes + asked.card.context_bytes + rest.card
        return PlanBytes(card=card, host=demand.host_bytes + rest.host, disk=demand.disk_bytes)

    def _demand(self, i: int) -> Demand:
        asked, candidate = self._at(i)
        card = asked.card
        key = (candidate, asked.seq_len, card.cublas_workspace_bytes, card.has_bfloat16_tensor_cores)
        if key not in self.solver.demands:
            self.solver.demands[key] = asked.demand(candidate)
        return self.solver.demands[key]

    def _rest(self, asked: FitRequest, candidate: Candidate) -> PlanBytes:
        """Return the bytes of the micro-batches of a step beyond the two that are run, by arithmetic."""
        more = max(0.0, self._micro_batches(asked, candidate) - _MICRO_BATCHES)
        two = arithmetic(asked, asked.model, candidate)
        three = arithmetic(asked, asked.model, replace(candidate, num_micro_batches=_MICRO_BATCHES + 1))
        card = batch_bytes(asked, candidate) + three.card - two.card
        return PlanBytes(card=more * card, host=more * (three.host - two.host), disk=more * (three.disk - two.disk))


def card_holders(demand: Demand) -> tuple[tuple[str, float], ...]:
    """Return who holds the reserved bytes of the card at their peak, the largest first."""
    held = {"reserved but unallocated": float(demand.reserved_bytes - demand.peak.allocated_bytes)}
    for (tensor_class, unit), size in demand.peak.by_unit.items():
        is_loss = tensor_class is TensorClass.ACTIVATION and unit == "head"
        name = "logits of the loss" if is_loss else _CLASS_NAMES[tensor_class]
        held[name] = held.get(name, 0.0) + size
    return _largest_first(held)


def host_holders(demand: Demand) -> tuple[tuple[str, float], ...]:
    """Return who holds the bytes of host memory, the largest first."""
    return _largest_first({_CLASS_NAMES[name]: float(size) for name, size in demand.host_by_class.items()})


def _largest_first(held: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(((name, size) for name, size in held.items() if size), key=lambda item: -item[1]))


def largest(count: int, over: Callable[[int], Over], hint: Callable[[int], Over], start: int) -> int:
    """Return the last point from 1 to ``count`` at which no memory is over its room; 0: not even the first.

    Bytes over rise. ``hint`` rises likewise but for a factor, which points tell, and chooses the next one; after a few
    the interval is halved. The point returned and the next one have been tried.
    """
    low, high, guess, scales = 0, count + 1, start, dict[str, float]()
    points = list[tuple[Over, Over]]()
    while high - low > 1:
        if len(points) >= _FAST_TRIES:
            guess = (low + high) // 2 if high <= count else 2 * low
        guess = min(max(guess, low + 1), high - 1)
        found, hinted = over(guess), hint(guess)
        for name, size in found.items() if points else ():
            before, hinted_before = points[-1]
            rise, hinted_rise = size - before[name], hinted[name] - hinted_before[name]
            if hinted_rise and rise / hinted_rise > 0:
                scales[name] = rise / hinted_rise
        points.append((found, hinted))
        low, high = (guess, high) if max(found.values()) <= 0 else (low, guess)
        predicted = _predicted(found, hint, guess, scales)
        guess = _boundary(low, high, guess, lambda i, predicted=predicted: predicted(i) <= 0)  # type: ignore[misc]
    return low


def _predicted(
    found: Over, hint: Callable[[int], Over], at: int, scales: Mapping[str, float]
) -> Callable[[int], float]:
    """Return bytes over at any point: those found at one, and what the hint, times its scale, tells of the way."""
    hinted = hint(at)
    names = [name for name in found if isfinite(found[name]) and isfinite(hinted[name])]  # others have any room

    def over(i: int) -> float:
        there = hint(i)
        return max(found[name] + scales.get(name, 1.0) * (there[name] - hinted[name]) for name in names)

    return over


def _boundary(low: int, high: int, start: int, fits: Callable[[int], bool]) -> int:
    """Return the last point that fits between one that does and one that does not, in growing steps from ``start``."""
    step, start = 1, min(max(start, low + 1), high - 1)
    if high - low <= 1:
        return low
    if fits(start):
        low = start
        while low + step < high and fits(low + step):
            low, step = low + step, 2 * step
        high = min(high, low + step)
    else:
        high = start
        while high - step > low and not fits(high - step):
            high, step = high - step, 2 * step
        low = max(low, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
