"""What benchmarks/time_model.py does to recorded ops, checked on ops and models small enough to count by hand."""

import importlib
import re
from collections.abc import Iterator
from math import log
from pathlib import Path
from types import ModuleType

import pytest

from hybridtrain.models.model_config import ModelConfig
from hybridtrain.virtual_gpu.card import find_card
from hybridtrain.virtual_gpu.ledger import OpRecord
from hybridtrain.virtual_gpu.observer import Lane, Stage
from hybridtrain.virtual_gpu.roofline import efficiency_of

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


def op(name: str, unit: str = "block.1", stage: Stage = Stage.BACKWARD, **facts: object) -> OpRecord:
    fields: dict[str, object] = {"event": 0, "is_matmul": False, "flops": 0, "bytes_moved": 900, "dtype": "bfloat16"}
    return OpRecord(name=name, unit=unit, stage=stage, **(fields | facts))


def facts_of(**changes: object) -> dict[str, object]:
    return {
        "system": "ml_dataflow", "card": "rtx-4090", "recompute_share": 0.0, "seq_len": 64, "micro_batch_size": 1,
        "head_chunk_tokens": 16, "weights_home": "host", "optimizer_home": "host", "grads_home": "host",
        "embed_head_home": "card", "micro_batches_per_step": 7, "tokens_per_step": 7 * 64,
    } | changes  # fmt: skip


def test_the_recompute_share_is_that_of_the_recorded_ops(peers: ModuleType) -> None:
    done_once = []
    for kept in range(5):
        facts = facts_of(recompute_share=peers.recompute_share(SMALL, kept), head_chunk_tokens=64)
        run = peers.PeerRun(facts, SMALL)
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
    run = peers.PeerRun(facts_of(recompute_share=peers.recompute_share(SMALL, 1)), SMALL)
    steps = run.record(2, 3, 7)
    efficiency = efficiency_of(find_card("rtx-4090"))
    whole = 7 * 64 / run.step_time(steps, 7, efficiency).seconds
    assert run.tokens_per_s(steps, efficiency) == pytest.approx(whole, rel=1e-3)


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


def test_the_fit_finds_the_zero_of_a_rising_error(time_model: ModuleType) -> None:
    assert time_model.solve(lambda matmul: log(matmul / 0.61)) == 0.61
    with pytest.raises(ValueError, match=r"no efficiency between 0\.2 and 2\.0"):
        time_model.solve(lambda matmul: log(matmul / 3))


def test_only_well_known_test_runs_within_the_tolerance_count(peers: ModuleType, time_model: ModuleType) -> None:
    def row(predicted: float, role: str = "test", confidence: str = "high") -> object:
        facts = facts_of(role=role, confidence=confidence, recorded_tokens_per_s=100.0)
        return time_model.Row(
            run=peers.PeerRun(facts, SMALL), tokens_per_s={"peers": predicted}, bound="compute", device_bytes=0,
            host_bytes=0,
        )  # fmt: skip

    good = [row(119.0), row(81.0, confidence="medium")]
    bad = [row(121.0), row(79.0), row(100.0, role="calibration"), row(100.0, confidence="low")]
    assert time_model.counted([*good, *bad], {"tolerance": 0.2}) == good


def test_fitted_runs_are_small_and_predicted_ones_large(peers: ModuleType) -> None:
    _, runs = peers.load_runs(ROOT / "benchmarks" / "peer_runs.toml")
    assert len({run.facts["id"] for run in runs}) == len(runs) == 33
    assert sum(run.is_test for run in runs) == 22
    assert all((run.model.num_params > 5e9) is run.is_test for run in runs)


def test_the_shipped_efficiencies_are_the_fitted_ones() -> None:
    text = (ROOT / "results" / "time-model.md").read_text(encoding="utf-8")
    fitted = dict(re.findall(r"^\| (geforce|data_center) \| (0\.\d{3}|1\.\d{3}) \|", text, re.MULTILINE))
    shipped = {find_card(name).family: efficiency_of(find_card(name)).matmul for name in ("rtx-3090", "h100-sxm")}
    assert {family: float(matmul) for family, matmul in fitted.items()} == shipped
