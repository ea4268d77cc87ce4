"""What benchmarks/time_model.py does to recorded ops, checked on ops and models small enough to count by hand."""

import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from math import exp
from pathlib import Path
from statistics import fmean
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hybridtrain.models.model_config import ModelConfig
from hybridtrain.virtual_gpu.account.op_record import Lane, OpRecord, Stage
from hybridtrain.virtual_gpu.cards.card import Host, find_card
from hybridtrain.virtual_gpu.cards.kernels import KernelTimes, curves_of
from hybridtrain.virtual_gpu.cards.roofline import time_errors

ROOT = Path(__file__).resolve().parents[3]
SMALL = ModelConfig(
    family="llama", vocab_size=96, max_seq_len=64, num_blocks=4, width=32, num_heads=4, num_kv_heads=2, ffn_width=48
)


@pytest.fixture(scope="module")
def peers() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("peer_runs")


@pytest.fixture(scope="module")
def time_model(peers: ModuleType) -> ModuleType:  # noqa: ARG001  it must be importable
    return importlib.import_module("time_model")


def op(name: str, unit: str = "block.1", stage: Stage = Stage.BACKWARD, **facts: Any) -> OpRecord:
    fields: dict[str, Any] = {"event": 0, "is_matmul": False, "flops": 0, "bytes_moved": 900, "dtype": "bfloat16"}
    return OpRecord(name=name, unit=unit, stage=stage, **(fields | facts))


def facts_of(**changes: object) -> dict[str, object]:
    return {
        "system": "ml_dataflow", "card": "rtx-4090", "recompute_share": 0.0, "seq_len": 64, "micro_batch_size": 1,
        "head_chunk_tokens": 16, "weights_home": "host", "optimizer_home": "host", "grads_home": "host",
        "embed_head_home": "card", "micro_batches_per_step": 7, "tokens_per_step": 7 * 64,
        "resident_layers": 4, "vram_used_gib": 0.0, "host_layers_full": 0, "host_layers_inp_attn": 0,
        "host_layers_inp_only": 0,
    } | changes  # fmt: skip


def made(peers: ModuleType, facts: dict[str, object]) -> Any:
    return peers.PeerRun(facts, SMALL, find_card("rtx-4090"), Host())


def test_the_recompute_share_is_that_of_the_recorded_ops(peers: ModuleType) -> None:
    done_once = []
    for kept in range(5):
        facts = facts_of(recompute_share=peers.recompute_share(SMALL, kept), head_chunk_tokens=64)
        run = made(peers, facts)
        assert run.kept_blocks == kept
        ops = run.record(2).ops[2]
        done_once.append(sum(op.flops for op in ops) * (1 - peers.recompute_share(SMALL, kept)))
    assert done_once == pytest.approx([done_once[0]] * 5, rel=1e-9)


def test_all_that_is_kept_leaves_flash_attentions_second_scores(peers: ModuleType) -> None:
    _, runs = peers.load_runs(ROOT / "benchmarks" / "peer_runs.toml")
    full = next(run for run in runs if run.facts["id"] == "mdf-1b-5090-16g-s1024")
    assert full.kept_blocks == 16
    assert peers.recompute_share(full.model, 16) == pytest.approx(full.facts["recompute_share"], rel=1e-3)


def test_an_extrapolated_step_takes_as_long_as_a_whole_one(peers: ModuleType) -> None:
    run = made(peers, facts_of(recompute_share=peers.recompute_share(SMALL, 1)))
    steps = run.record(2, 3, 7)
    whole = 7 * 64 / run.step_time(steps, 7).seconds
    assert run.tokens_per_s(steps) == pytest.approx(whole, rel=1e-3)


def test_a_gradient_is_fetched_when_its_blocks_visit_begins(peers: ModuleType) -> None:
    first = 100
    ops = [
        op("mm", "block.1"),  # 100, the visit that stores
        op("copy out", "block.1", lane=Lane.COPY_OUT, waits=(100,)),
        op("mm", "block.1", Stage.FORWARD),  # 102
        op("copy out", "block.1", Stage.FORWARD, lane=Lane.COPY_OUT, waits=(102,)),  # a block input
        op("mm", "block.1"),  # 104, the visit that adds
        op("copy in", "block.1", lane=Lane.COPY_IN, waits=(104, 103)),  # the block input
        op("copy in", "block.0", lane=Lane.COPY_IN, waits=(104, 7)),  # weights, stored in the step before
        op("mm", "block.1"),  # 107
        op("copy in", "block.1", lane=Lane.COPY_IN, waits=(107, 101)),  # the gradient
        op("add_", "block.1", waits=(108,)),
    ]
    changed = peers.peers_schedule(ops, first, embed_head_share=0.25)
    assert changed[8].waits == (104, 101)
    assert [new for i, new in enumerate(changed) if i != 8] == [old for i, old in enumerate(ops) if i != 8]


def test_embedding_and_head_stay_on_the_card_where_the_peers_do_so(peers: ModuleType) -> None:
    ops = [
        op("mm", "head"),
        op("copy out", "head", lane=Lane.COPY_OUT, waits=(0,)),
        op("copy in", "", Stage.BUILD, lane=Lane.COPY_IN, waits=(0,)),
    ]
    kept = peers.peers_schedule(ops, 0, embed_head_share=0.25)
    assert (kept[1].lane, kept[1].bytes_moved, kept[1].waits) == (Lane.COMPUTE, 0, ())
    assert kept[2].bytes_moved == 675
    assert peers.peers_schedule(ops, 0, embed_head_share=0.0) == ops


def test_fused_kernels_move_their_share(peers: ModuleType) -> None:
    ops = [
        op("mul"), op("mm"), op("copy in", lane=Lane.COPY_IN),
        op("mul", stage=Stage.UPDATE, bytes_moved=600), op("sqrt", stage=Stage.UPDATE, bytes_moved=200),
        op("copy out", stage=Stage.UPDATE, lane=Lane.COPY_OUT),
    ]  # fmt: skip
    fused = peers.fuse(ops, {"mul": 1 / 3}, update_bytes=80)
    assert [new.bytes_moved for new in fused] == [300, 900, 900, 60, 20, 900]


def test_activations_go_to_the_host_and_come_back(peers: ModuleType) -> None:
    first = 100
    ops = [
        op("mm", "block.0", Stage.FORWARD),  # 100
        op("mm", "block.1", Stage.FORWARD, waits=(100,)),
        op("mm", "head", Stage.FORWARD),
        op("mm", "block.1"),
        op("mm", "block.0", waits=(103, 7)),
        op("mm", "embedding"),
    ]
    changed = peers.send_activations(ops, first, blocks=1, slots=1, num_bytes=77)
    copies = [
        (i + first, new.lane, new.unit, new.bytes_moved, new.waits)
        for i, new in enumerate(changed)
        if new.lane is not Lane.COMPUTE
    ]
    assert copies == [
        (101, Lane.COPY_OUT, "block.0", 77, (100,)),
        (105, Lane.COPY_IN, "block.0", 77, (104,)),  # its place is free once block 1 is done
    ]
    assert changed[2].waits == (100, 101)  # the forward visit that takes the place
    assert changed[6].waits == (104, 7, 105)


def test_gradients_are_cut_after_every_micro_batch_beside_compute(peers: ModuleType) -> None:
    first = 100
    ops = [
        op("mm", "block.1"),  # 100
        op("mm", "block.1", waits=(100,)),
        op("copy out", "block.1", lane=Lane.COPY_OUT, waits=(101,)),
        op("mm", "block.0"),  # 103, the end of block 1's first visit
        op("mm", "embedding"),
        op("mm", "block.1", Stage.FORWARD, waits=(104,)),
        op("mm", "block.1"),
        op("copy in", "block.1", lane=Lane.COPY_IN, waits=(106, 102)),  # the gradient
        op("mm", "block.1", waits=(107,)),
        op("all-to-all", "block.1", lane=Lane.LINK, waits=(108,)),  # the last sum, as it is recorded
        op("mm", "block.0"),
        op("mm", "", Stage.UPDATE),
    ]
    changed = peers.sum_each_micro_batch(ops, first, num_bytes={"block.1": 77, "block.0": 55}, ranks=4)
    links = [
        (i + first, new.unit, new.bytes_moved, new.waits) for i, new in enumerate(changed) if new.lane is Lane.LINK
    ]
    assert links == [(102, "block.1", 77, (101,)), (105, "block.0", 55, (104,)), (111, "block.1", 900, (110,))]
    copies = [new for new in changed if new.lane in {Lane.COPY_IN, Lane.COPY_OUT}]
    assert [(new.bytes_moved, new.waits) for new in copies] == [(225, (101,)), (225, (108, 103))]
    assert [new.bytes_moved for new in changed if new.lane is Lane.COMPUTE] == [900] * 9


def test_a_run_on_several_cards_takes_its_cards_part(peers: ModuleType) -> None:
    alone = facts_of(recompute_share=peers.recompute_share(SMALL, 1))
    one, four = made(peers, alone), made(peers, alone | {"world": 4})
    steps = {run.world.size: run.record(2) for run in (one, four)}
    assert not any(op.lane is Lane.LINK for op in steps[1].ops[2])
    on_link = four.step_time(steps[4], 2).busy_seconds[Lane.LINK]
    assert on_link > 0
    state = {
        world: sum(op.bytes_moved for op in found.ops[2] if op.stage is Stage.UPDATE and op.lane is Lane.COMPUTE)
        for world, found in steps.items()
    }
    assert state[4] < state[1] / 2  # a quarter of the update, and what is gathered


def test_what_a_block_keeps_is_what_the_recorded_host_memory_says(peers: ModuleType) -> None:
    _, runs = peers.load_runs(ROOT / "benchmarks" / "peer_runs.toml")
    run = next(run for run in runs if run.facts["id"] == "mdf-1b-h100-24g-s1024")
    recorded = (13.054142 - 8.354191) * 2**30 / 6 / 16384  # used GiB with 6 blocks on the host, and with none
    assert run.bytes_of_level["full"] == pytest.approx(recorded, rel=1e-3)
    assert not run.is_streamed


@pytest.fixture(scope="module")
def curves(time_model: ModuleType) -> Any:
    return time_model.kernel_curves


def timed_at(curves: ModuleType, card: str, shape: tuple[int, int, int], truth: Any, source: str = "one") -> Any:
    """Return a product that takes exactly as long as given curves say."""
    known = importlib.import_module("kernel_times")
    time = known.KernelTime(
        source=source, card=card, kind="gemm", op="nn", shape=shape, dtype="bf16", passes="forward", seconds=1.0,
        software="", note="",
    )  # fmt: skip
    made = curves.Timed(time, find_card(card), curves.ops_of(time), "fit")
    seconds = max(KernelTimes(made.card, truth).seconds(made.ops[0])[:2])
    return replace(made, time=replace(time, seconds=seconds))


def test_the_fit_finds_the_shares_that_made_the_times(curves: ModuleType) -> None:
    shapes = [(size, size, size) for size in (4096, 8192, 16384)]
    share = {"rtx-4090": 1.0, "rtx-4080": 0.9, "h100-sxm": 0.6}
    rows = [
        timed_at(curves, card, shape, replace(curves.BASE, gemm=value))
        for card, value in share.items()
        for shape in shapes
    ]
    pooled = curves.pool((row.card, row.error(curves.BASE)) for row in rows)
    found = {card: exp(curves.look_up(pooled, find_card(card))) for card in (*share, "rtx-4070", "l4")}
    assert found["h100-sxm"] < found["rtx-4070"] < found["rtx-4080"] < found["rtx-4090"]  # a generation is drawn to all
    assert found["h100-sxm"] == pytest.approx(0.6, rel=0.1)  # drawn to the others by one of four
    assert found["l4"] == pytest.approx((0.6 * (1.0 * 0.9) ** 0.5) ** 0.5)  # of no generation: of all generations


def test_a_sources_rows_are_not_fitted_on_when_they_are_predicted(
    time_model: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[set[str]] = []

    def row(name: str, role: str) -> Any:
        source = SimpleNamespace(repository=name, role=role)
        planned = SimpleNamespace(
            name=name, source=source, card=find_card("h100-sxm"), flops=1e12, recorded_s=1.0, key=name
        )
        return SimpleNamespace(planned=planned, error=lambda _factors: 0.0)

    def fit(rows: Any) -> dict[str, float]:
        used.append({one.planned.name for one in rows})
        return {}

    monkeypatch.setattr(time_model, "fit", fit)
    found = time_model.left_out([row("a", "fit"), row("b", "fit"), row("c", "predict")])
    assert [one.planned.name for one, _, _ in found] == ["c", "a", "b"]
    assert used == [{"a", "b"}, {"b"}, {"a"}]


def test_the_residual_widens_intervals_until_four_of_five_hold(time_model: ModuleType) -> None:
    rows = [
        SimpleNamespace(
            planned=SimpleNamespace(name="a", card=find_card("h100-sxm")), parts=SimpleNamespace(kernels={"gemm": 1.0})
        )
        for _ in range(10)
    ]
    found = [(row, 0.05 * number, 0.0) for number, row in enumerate(rows)]
    intervals = time_model.fitted_intervals(found, lambda _card: {"gemm": 0.0})
    assert intervals.residual == pytest.approx(0.35 / time_model.WIDTH_OF_80, rel=1e-6)
    assert intervals.coverage(found) == 0.8


def test_runs_are_of_many_cards_and_sizes(peers: ModuleType) -> None:
    _, runs = peers.load_runs(ROOT / "benchmarks" / "peer_runs.toml")
    assert len({run.facts["id"] for run in runs}) == len(runs) == 97
    cross = [run for run in runs if run.facts["role"] == "cross" and run.facts["confidence"] != "low"]
    assert len(cross) == 61
    assert len({run.card.name for run in cross}) == 8
    assert sum(run.facts["role"] == "transfer" for run in runs) == 5
    world = [run for run in runs if run.facts["role"] == "world"]
    assert (len(world), {run.world.size for run in world}) == (30, {4, 8})


def test_the_table_tells_the_errors_that_the_program_has() -> None:
    text = (ROOT / "results" / "time-model.md").read_text(encoding="utf-8")
    told = re.search(r"(\d+) steps of (\d+) repositories .* each the same: \*\*([\d.]+)%\*\*", text)
    assert told is not None
    error = time_errors()["source_out"]
    assert (error.runs, error.sources) == (int(told[1]), int(told[2]))
    assert error.mean_absolute == pytest.approx(float(told[3]) / 100, abs=0.0006)  # told with one decimal
    rows = [line.split("|") for line in text.split("### ")[0].splitlines() if re.match(r"\| \S+/\S+ \|", line)]
    assert len(rows) == error.sources
    means = [float(row[4].strip(" %")) / 100 for row in rows]
    assert sum(means) / len(means) == pytest.approx(error.mean_absolute, abs=0.001)
    assert max(means) == pytest.approx(error.largest, abs=0.001)


def test_the_null_model_is_beaten_in_every_table() -> None:
    text = (ROOT / "results" / "time-model.md").read_text(encoding="utf-8")
    (all_of_them,) = [line.split("|") for line in text.splitlines() if line.startswith("| **all** | ") and "%" in line][
        :1
    ]
    assert float(all_of_them[4].strip(" %")) < float(all_of_them[7].strip(" %"))


def test_every_curve_is_held_to_times_that_it_was_not_fitted_on(curves: ModuleType) -> None:
    """Each against what a share of one says: the curve must know more of the sources left out than the peak rate."""
    rows = [row for row in curves.load() if row.role == "left out" and curves.is_long(row)]
    kinds = {row.kind for row in rows}
    assert {"gemm", "gemm_float32", "attention", "attention_new", "memory", "normalization"} <= kinds
    for kind in ("gemm", "gemm_float32", "attention", "attention_new", "normalization"):
        own, peak = (
            fmean(abs(row.error(known(row.card))) for row in rows if row.kind == kind)
            for known in (curves_of, lambda _card: curves.BASE)
        )
        assert own < peak, kind
