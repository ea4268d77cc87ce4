"""``hybridtrain fit --solve``: the largest batch, longest sequence, smallest card or least host memory, its limit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

from hybridtrain.errors import ConfigError
from hybridtrain.planning.candidates import FitRequest
from hybridtrain.planning.solving import Quantity, Solution, Solved, seq_step, solve
from hybridtrain.planning.time_error import TIME_ERROR, WAITING_ERROR
from hybridtrain.reports.fit_arguments import FitArguments
from hybridtrain.reports.fit_text import CLIPPED, PERCENT, chosen_methods, columns, free_share, in_blocks, short_name
from hybridtrain.units import format_bytes, to_gib
from hybridtrain.virtual_gpu.cards.card import Card, card_catalogue

_ASKED: dict[Quantity, str] = {
    "batch": "Largest micro-batch", "seq": "Longest sequence", "card": "Smallest card",
    "host": "Least host memory without disk",
}  # fmt: skip
_HEADS: dict[Quantity, str] = {"batch": "sequences", "seq": "tokens", "card": "card", "host": "GiB of host"}
_RULES: dict[Quantity, str] = {
    "batch": "Any number of sequences; the largest is not always the fastest",
    "seq": "Multiples of {step} tokens, micro-batches of 1",
    "card": "All cards of the catalogue, micro-batches of 1",
    "host": "Whole GiB for tensors, micro-batches of 1, nothing on disk",
}
SOLVED_METHODS = ("exact", "int8-factored", "lora", "qlora")
"""What is solved for by default: full training at its most exact and at its smallest, and adapters."""
_ANY_CARD = "rtx-4090"
"""In a request whose card is sought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveReport:
    """The solutions of each precision, as text and as JSON."""

    request: FitRequest
    arguments: FitArguments
    quantity: Quantity
    solved: tuple[Solved, ...]
    free_percent: float

    @property
    def fits(self) -> bool:
        """Whether any precision does."""
        return self.solved[0].best is not None

    def as_mapping(self) -> dict[str, object]:
        """Return plain figures, bytes and seconds."""
        request = self.request
        return {
            "model": str(self.arguments.model),
            "params": request.model.num_params,
            "card": None if self.quantity == "card" else request.card.name,
            "card_bytes": None if self.quantity == "card" else request.card.memory_bytes,
            "world": request.world.size,
            "host_tensor_bytes": None if self.quantity == "host" else request.host.tensor_bytes,
            "seq_len": None if self.quantity == "seq" else request.seq_len,
            "tokens_per_step": request.tokens_per_step,
            "free_percent": self.free_percent,
            "solve": self.quantity,
            "solutions": [
                {
                    "method": each.method, "precision": each.level.name, "label": each.level.label,
                    "resident": self._mapping(each.resident), "offloaded": self._mapping(each.offloaded),
                }
                for each in self.solved
            ],
        }  # fmt: skip

    def _mapping(self, solution: Solution | None) -> dict[str, object] | None:
        if solution is None:
            return None
        option, ranks = solution.option, self.request.world.local_size
        return {
            "value": solution.request.card.name if self.quantity == "card" else solution.value,
            "offload": option.candidate.arrangement.offload, "arrangement": option.candidate.arrangement.name,
            "micro_batch_size": option.candidate.micro_batch_size, "seq_len": solution.request.seq_len,
            "device_used_bytes": round(option.device_bytes), "host_peak_bytes": round(ranks * option.host_bytes),
            "disk_peak_bytes": round(ranks * option.disk_bytes), "tokens_per_s": option.tokens_per_s,
            "limit": solution.limit, "holders": {name: round(size) for name, size in solution.holders},
            "evidence": {"memory": self._evidence(solution), "time": "estimated"},
        }  # fmt: skip

    @staticmethod
    def _evidence(solution: Solution) -> str:
        return "planned" if solution.is_planned else "estimated"

    def as_text(self, width: int = 100) -> str:
        """Return the same for a reader, in lines of so many columns."""
        asked, best = _ASKED[self.quantity], self.solved[0].best
        if best is None:
            first = f"{asked}: none; no method fits. Take other methods, a smaller --seq, or more --host-memory."
            return "\n".join([*wrap(first, width), *self._notes(width)])
        arrangement = best.option.candidate.arrangement
        placed = "no offload" if arrangement.is_resident else arrangement.offload
        first = f"{asked}: {self._told(best)} ({self.solved[0].level.label}, {placed})."
        return in_blocks([wrap(first, width), self._table(width), self._limits(width), self._notes(width)])

    def _told(self, solution: Solution) -> str:
        if self.quantity == "card":
            card = solution.request.card
            return f"{_key_of(card)}, {to_gib(card.memory_bytes):.2f} GiB"
        if self.quantity == "host":
            memory = max(1, solution.value) + solution.request.host.reserved_gib
            return f"{solution.value} GiB for tensors, --host-memory {memory:g}GiB"
        return f"{solution.value} {'sequences' if self.quantity == 'batch' else 'tokens'}"

    def _cell(self, solution: Solution | None) -> str:
        if solution is None:
            return "-"
        return _key_of(solution.request.card) if self.quantity == "card" else str(solution.value)

    def _table(self, width: int) -> list[str]:
        """Return a row for each precision: the value without and with offload, and figures of the better one."""
        head = _HEADS[self.quantity]
        headers = ["method", "offload", f"{head}, no offload", "with offload", "card GiB", "host GiB", "tokens/s"]
        long, short = [list[list[str]]() for _ in range(2)]
        for each in self.solved:
            values, best = [self._cell(each.resident), self._cell(each.offloaded)], each.best
            if best is None:
                long.append([each.level.label, "-", *values, "-", "-", "no fit"])
                short.append(long[-1])
                continue
            option, mark = best.option, "" if best.is_planned else "~"
            sizes = (option.device_bytes, self.request.world.local_size * option.host_bytes)
            rest = [*(f"{mark}{to_gib(size):.2f}" for size in sizes), f"{option.tokens_per_s or 0:,.0f}"]
            long.append([each.level.label, option.candidate.arrangement.offload, *values, *rest])
            short.append([each.level.label, option.candidate.arrangement.tiers, *values, *rest])
        tables = [
            (headers, long),
            ([*headers[:2], "no offload", *headers[3:]], short),
            (["method", "offload", "without", "with", "card", "host", "tokens/s"], short),
            (
                ["method", "no offload", "with", "card", "tokens/s"],
                [[row[i] for i in (0, 2, 3, 4, 6)] for row in short],
            ),
        ]
        drawn = [columns(*each) for each in tables]
        return next((lines for lines in drawn if len(lines[0]) <= width), drawn[-1])

    def _limits(self, width: int) -> list[str]:
        by_limit = dict[tuple[str, ...], list[str]]()
        for each in self.solved:
            if each.best is not None:
                by_limit.setdefault(_limits_told(each.best), []).append(each.level.label)
        beyond = "on the next smaller card" if self.quantity == "card" else "at the next value"
        lines = [f"Limit, and who holds most {beyond}:"]
        for limits, labels in by_limit.items():
            head = "all" if len(by_limit) == 1 else "; ".join(labels)
            told = [f"  {head}: {limit}" for limit in limits]
            lines += wrap(next((one for one in told if len(one) <= width), told[-1]), width, subsequent_indent="    ")
        return lines

    def _notes(self, width: int) -> list[str]:
        request, asked = self.request, list[str]()
        if self.quantity != "seq":
            asked.append(f"{request.seq_len} tokens")
        asked.append(f"about {request.tokens_per_step} tokens/step")
        world, free = request.world.size, f"{self.free_percent:g} % free"
        cards = "" if world == 1 else f"{world} x "
        memory = f"{short_name(request.card)}: {to_gib(request.card.memory_bytes):.2f} GiB"
        places = [f"{cards}any card, {free}" if self.quantity == "card" else f"{cards}{memory}, {free}"]
        if self.quantity != "host":
            places.append(f"host: {format_bytes(request.host.tensor_bytes)} for tensors")
        found = [each.best for each in self.solved if each.best is not None]
        is_planned = all(each.is_planned for each in found)
        how = "planned on both sides of the limit" if is_planned else "bytes are extrapolated (~)"
        told = (
            f"{_RULES[self.quantity].format(step=seq_step(request))}, all recomputed, 2 micro-batches or more; {how}.",
            f"{self.arguments.model}, {', '.join(asked)}; {'; '.join(places)}.",
            f"Speeds: estimated, {TIME_ERROR:.0%} off on average; {WAITING_ERROR:.0%} where PCIe is the bottleneck.",
            *([CLIPPED] if request.clip == "previous" else []),
        )
        return [line for text in told for line in wrap(text, width)]


def _limits_told(solution: Solution) -> tuple[str, ...]:
    """Return a limit with its three largest holders, and in shorter forms."""
    held = [f"{name} {format_bytes(size)}" for name, size in solution.holders]
    return *(f"{solution.limit}: {', '.join(held[:i])}" for i in (3, 2, 1) if i <= len(held)), solution.limit


def solve_command(
    arguments: FitArguments, quantity: Quantity, *, methods: Sequence[str] = SOLVED_METHODS,
    margin: float | None = None, confirm: bool = True, say: Callable[[str], None] = lambda _line: None,
    unused: Sequence[str] = (),
) -> SolveReport:  # fmt: skip
    """Solve for a quantity; ``confirm`` by full dry runs. ``unused`` names other options that were given in vain.

    Raises:
        ConfigError: names, sizes or methods are wrong, or an option says what is sought.
    """
    chosen, free = chosen_methods(methods), free_share(margin)
    sought = {"card": arguments.card is not None, "seq": arguments.seq is not None}
    faults = [f"{name}: --solve {quantity} does without it; leave it out" for name in unused]
    if sought.get(quantity):
        faults.append(f"--{quantity}: --solve {quantity} finds it; leave it out")
    if faults:
        raise ConfigError("--solve", faults)
    if quantity == "card":
        arguments = replace(arguments, card=_ANY_CARD)
    request = arguments.resolve()
    solved = solve(
        request, quantity, methods=chosen, free_share=free, plans=confirm, on_try=lambda text: say(f"solving {text}")
    )
    return SolveReport(
        request=request, arguments=arguments, quantity=quantity, solved=solved, free_percent=PERCENT * free
    )


def _key_of(card: Card) -> str:
    """Return a card's name in the catalogue: cards of one name differ in memory."""
    return next((key for key, known in card_catalogue().items() if known == card), short_name(card))
