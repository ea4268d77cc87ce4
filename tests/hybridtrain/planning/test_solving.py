"""The largest batch, longest sequence, smallest card, least host memory: what a search of every point finds."""

from dataclasses import replace
from math import inf
from typing import NamedTuple

import pytest

from hybridtrain.models.model_config import ModelConfig
from hybridtrain.planning import fitting, solving
from hybridtrain.planning.candidates import LEVELS, Arrangement, Candidate, FitRequest, Numerics
from hybridtrain.planning.fitting import Method, levels_of, tiers_of
from hybridtrain.planning.short_run import ShortRuns
from hybridtrain.planning.solving import SEQ_STEP, Quantity, largest, longest_sequence, solve
from hybridtrain.virtual_gpu.cards.card import MARGIN_SHARE, Card, Host
from hybridtrain.virtual_gpu.cards.links import World

MODEL = ModelConfig(
    family="llama", vocab_size=512, max_seq_len=2000, num_blocks=2, width=256, num_heads=4, num_kv_heads=4,
    ffn_width=688,
)  # fmt: skip
LARGE = replace(MODEL, width=3072, num_heads=24, num_kv_heads=24, ffn_width=8192)
"""Its state takes whole GiB."""
GPT = replace(MODEL, family="gpt2", max_seq_len=1024, ffn_width=1024)


def card(memory_mib: int) -> Card:
    return Card(
        name=f"{memory_mib} MiB", memory_mib=memory_mib, compute_capability="8.9", tflops_bf16=10.0, tflops_fp32=5.0,
        memory_gbps=200.0, pcie_gbps=16.0, context_mib=64,
    )  # fmt: skip


CARDS = {f"card-{size}": card(size) for size in (90, 110, 130, 150, 180, 220, 260, 300, 400, 800)}


class Case(NamedTuple):
    quantity: Quantity
    name: str
    """Of the precision."""
    card_mib: int = 220
    host_gib: float = 8.0
    model: ModelConfig = MODEL
    world: int = 1


CASES = [  # every fifth runs always: one of each quantity
    Case("batch", "exact", 150),
    Case("batch", "exact", 190, 4.05),
    Case("batch", "bf16", 135),
    Case("batch", "bf16-int8-state", 140),
    Case("batch", "int8-factored", 130),
    Case("seq", "lora", 110),
    Case("batch", "lora", 125),
    Case("batch", "qlora", 120),
    Case("batch", "int8-state", 165, model=GPT),
    Case("batch", "bf16", 135, world=2),
    Case("card", "qlora", model=GPT),
    Case("seq", "exact", 130),
    Case("seq", "int8-state", 118),
    Case("seq", "bf16-factored", 115),
    Case("seq", "qlora", 112, model=GPT),
    Case("host", "bf16", 2200, model=LARGE),
    Case("card", "exact"),
    Case("card", "bf16"),
    Case("host", "exact", 3000, model=LARGE),
    Case("host", "lora", 1200, model=LARGE),
]


def request(case: Case) -> FitRequest:
    host = Host(memory_gib=case.host_gib, reserved_gib=4.0)
    return FitRequest(case.model, card(case.card_mib), host, SEQ_STEP, 2 * case.world, World(size=case.world))


def precision(name: str) -> tuple[Method, Numerics]:
    return next((method, level) for method in fitting.METHODS for level in levels_of(method) if level.name == name)


def fits(asked: FitRequest, level: Numerics, arrangement: Arrangement, size: int) -> bool:
    """Run every block of two micro-batches on the card, as ``fit`` confirms its options."""
    asked = replace(asked, num_sequences=2 * size * asked.world.size)
    run = asked.run(
        Candidate(
            level=level, arrangement=arrangement, micro_batch_size=size, num_micro_batches=2, keep_last=0,
            world=asked.world.size,
        )
    )  # fmt: skip
    reserved = max(step.reserved_bytes for step in run.uncapped.steps)
    within = reserved + asked.card.context_bytes <= (1 - MARGIN_SHARE) * asked.card.memory_bytes
    return within and run.host_peak_bytes <= asked.rank_host.tensor_bytes


def every_point(case: Case, level: Numerics, arrangement: Arrangement, beyond: int) -> int | None:
    """Return the best value at which an arrangement fits, all values tried one after the other; None: none."""
    asked = request(case)

    if case.quantity == "batch":
        tried = [(size, (asked, size)) for size in range(beyond, 0, -1)]
    elif case.quantity == "seq":
        lengths = {*range(SEQ_STEP, case.model.max_seq_len, SEQ_STEP), case.model.max_seq_len}
        tried = [(length, (replace(asked, seq_len=length), 1)) for length in sorted(lengths, reverse=True)]
    elif case.quantity == "card":
        tried = [(one.memory_bytes, (replace(asked, card=one), 1)) for one in CARDS.values()]
    else:
        hosts = [(gib, replace(asked.host, memory_gib=4.0 + (gib or 1 / 64))) for gib in range(24)]
        tried = [(gib, (replace(asked, host=host), 1)) for gib, host in hosts]
    return next((value for value, (one, size) in tried if fits(one, level, arrangement, size)), None)


@pytest.mark.sample(one_in=5)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.quantity}-{case.name}-{case.world}")
def test_a_search_of_every_point_finds_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "card_catalogue", lambda: CARDS)
    method, level = precision(case.name)
    monkeypatch.setattr(fitting, "LEVELS", (level,) if method == "full" else LEVELS)
    (solved,) = solve(request(case), case.quantity, methods=[method])
    arrangements, *_ = tiers_of(request(case), level)
    better = max if case.quantity in {"batch", "seq"} else min
    for found, kinds in (
        (solved.resident, [each for each in arrangements if each.is_resident]),
        (solved.offloaded, [each for each in arrangements if not each.is_resident]),
    ):
        value = None if found is None or found.option.candidate.arrangement.on_disk else found.value
        every = [one for each in kinds if (one := every_point(case, level, each, 8 + (value or 0))) is not None]
        assert value == (better(every) if every else None)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("limit", [0, 1, 2, 37, 499, 500])
def test_the_last_point_is_found_by_a_poor_hint_and_few_tries(limit: int, factor: float) -> None:
    tried = list[int]()

    def over(i: int) -> dict[str, float]:
        tried.append(i)
        uneven = i - limit - 0.5 + 0.2 * (i % 3)  # as reserved bytes are
        return {"card": uneven, "host": (i - limit) / 100 - 0.005, "disk": -inf}

    def hint(i: int) -> dict[str, float]:
        return {"card": factor * i - 100, "host": i / 100, "disk": -inf}

    for start in (1, 30, 500):
        tried.clear()
        assert largest(500, over, hint, start) == limit
        assert limit in {0, *tried}
        assert limit + 1 in {501, *tried}
        assert len(tried) <= 16


def test_cards_share_the_runs_of_the_longest_sequence() -> None:
    runs, found = ShortRuns(), list[int]()
    for size in (105, 125):
        asked = replace(request(Case("seq", "lora")), card=card(size))
        shared, alone = (longest_sequence(asked, "lora", runs=each) for each in (runs, ShortRuns()))
        assert shared == alone
        found.append(0 if shared is None else shared.value)
        assert shared is None or shared.value % SEQ_STEP == 0 or shared.limit == "the model's positions (2000)"
    assert found == sorted(found)
    assert len(set(found)) > 1


def test_the_longest_sequence_is_reached_in_tiles() -> None:
    long = replace(MODEL, max_seq_len=2**15, ffn_width=2752)
    asked = replace(request(Case("seq", "lora", 700)), model=long)
    tiled, whole = (longest_sequence(replace(asked, tries_tiles=tries), "lora") for tries in (True, False))
    assert tiled is not None
    assert whole is not None
    assert tiled.option.candidate.arrangement.tiles
    assert not whole.option.candidate.arrangement.tiles
    assert tiled.value > 1.2 * whole.value


def test_the_best_comes_first_and_of_equal_ones_that_which_offloads_nothing() -> None:
    asked = request(Case("seq", "exact", 4000))
    solved = solve(asked, "seq", plans=False)
    assert len(solved) == len(LEVELS) + 2
    for each in solved:
        assert each.best is each.resident
        assert each.best is not None
        assert (each.best.value, each.best.is_planned) == (MODEL.max_seq_len, False)
        assert each.best.option.candidate.arrangement.is_resident
    speeds = [each.best.option.tokens_per_s or 0.0 for each in solved if each.best is not None]
    assert speeds == sorted(speeds, reverse=True)
    (nothing,) = solve(replace(asked, card=card(70)), "seq", methods=["lora"], plans=False)
    assert nothing.best is None


def test_a_step_of_more_micro_batches_has_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "LEVELS", LEVELS[2:3])
    asked = replace(request(Case("batch", "bf16", 150)), num_sequences=128)
    (solved,) = solve(asked, "batch", methods=["full"])
    assert solved.resident is not None
    found = solved.resident.option
    assert found.candidate.num_micro_batches * found.candidate.micro_batch_size >= 128
    assert solved.resident.request.run(found.candidate).device_used_bytes <= 0.95 * asked.card.memory_bytes
