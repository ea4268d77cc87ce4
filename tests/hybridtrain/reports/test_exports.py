import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from hybridtrain.models.model_config import Workload
from hybridtrain.optimizations import GradAccumulation
from hybridtrain.plan.compose import compose
from hybridtrain.planning.dry_runs import DryRun, dry_run
from hybridtrain.reports.exports import write_run_snapshot, write_run_trace
from hybridtrain.units import GIB
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.cards.kernels import curves_of
from tiny_models import GPT2_UNTIED

CLASSES = {item.value for item in TensorClass}


@pytest.fixture(scope="module")
def run() -> DryRun:
    workload = Workload(micro_batch_size=2, seq_len=16)
    plan = compose([GradAccumulation(grad_accum_steps=2)])
    return dry_run(GPT2_UNTIED, plan, find_card("rtx-3090"), workload, record_history=True)


@pytest.fixture(scope="module")
def snapshot(run: DryRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("snapshot") / "new folder" / "run.pickle"
    write_run_snapshot(run, path, AllocatorConfig())
    return dict(pickle.loads(path.read_bytes()))  # noqa: S301  our own file


@pytest.fixture(scope="module")
def trace(run: DryRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("trace") / "new folder" / "run.json"
    write_run_trace(run, path)
    return dict(json.loads(path.read_text(encoding="utf-8")))


def allocations(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("page", ["trace", "segsum", "trace_plot", "segment_plot"])
def test_torchs_viewer_opens_the_snapshot(snapshot: dict[str, Any], page: str) -> None:
    assert len(getattr(_memory_viz, page)(snapshot)) > 500  # a page with content


def test_every_storage_of_the_run_is_in_the_snapshot(run: DryRun, snapshot: dict[str, Any]) -> None:
    workspace = 8_519_680
    sizes = sorted(entry["size"] for entry in allocations(snapshot))
    assert sizes == sorted([*run.trace.sizes, workspace, workspace])


def test_every_allocation_has_its_tensor_class(run: DryRun, snapshot: dict[str, Any]) -> None:
    found = allocations(snapshot)
    assert {entry["category"] for entry in found} <= CLASSES
    by_class = {name: sum(entry["size"] for entry in found if entry["category"] == name) for name in CLASSES}
    for item in TensorClass:
        own = zip(run.trace.sizes, run.trace.classes, strict=True)
        expected = sum(size for size, tensor_class in own if tensor_class is item)
        library = 2 * 8_519_680 if item is TensorClass.WORKSPACE else 0
        assert by_class[item.value] == expected + library, item


def test_frames_name_unit_and_op(snapshot: dict[str, Any]) -> None:
    frames = [entry["frames"][0] for entry in allocations(snapshot) if entry["frames"]]
    units = {frame["filename"] for frame in frames}
    assert {"embedding", "block.0", "block.3", "head"} <= units
    of_block = {frame["name"] for frame in frames if frame["filename"] == "block.2"}
    assert any("addmm" in name for name in of_block)
    assert any("causal_attention" in name for name in of_block)


def test_settings_are_shown(run: DryRun, tmp_path: Path) -> None:
    path = tmp_path / "run.pickle"
    write_run_snapshot(run, path, AllocatorConfig(garbage_collection_threshold=0.5))
    settings = pickle.loads(path.read_bytes())["allocator_settings"]  # noqa: S301  our own file
    assert settings["PYTORCH_CUDA_ALLOC_CONF"] == "garbage_collection_threshold:0.5"


def test_the_trace_is_in_order_of_time(trace: dict[str, Any]) -> None:
    times = [event["ts"] for event in trace["traceEvents"] if "ts" in event]
    assert len(times) > 100
    assert times == sorted(times)


def test_ops_follow_each_other_and_end_with_the_step(run: DryRun, trace: dict[str, Any]) -> None:
    compute = [event for event in events(trace, "X") if event["cat"] != "transfer"]
    assert len(compute) == len(run.time.ops)
    ends = [event["ts"] + event["dur"] for event in compute]
    starts = [event["ts"] for event in compute]
    # Microseconds in float64: sums of a few hundred terms agree to far less than a nanosecond.
    gaps = [start - end for start, end in zip(starts[1:], ends[:-1], strict=True)]
    assert min(gaps) > -1e-6
    assert max(gaps) < curves_of(run.card).launch_seconds * 1e6
    assert ends[-1] == pytest.approx(run.time.seconds * 1e6, abs=1e-6)
    assert {event["args"]["stage"] for event in compute} == {"forward", "backward", "update", "load"} - (
        set() if any(item.op.stage == "load" for item in run.time.ops) else {"load"}
    )


def test_the_upload_has_a_row_of_its_own(run: DryRun, trace: dict[str, Any]) -> None:
    (upload,) = [event for event in events(trace, "X") if event["cat"] == "transfer"]
    assert (upload["ts"], upload["dur"]) == (0.0, run.time.upload_seconds * 1e6)
    rows = {event["tid"]: event["args"]["name"] for event in events(trace, "M") if event["name"] == "thread_name"}
    compute = next(event for event in events(trace, "X") if event["cat"] != "transfer")
    assert rows[upload["tid"]] == "copy in"
    assert rows[compute["tid"]] == "compute"
    assert compute["ts"] == upload["dur"]


def test_counters_reach_the_peak_of_the_step(run: DryRun, trace: dict[str, Any]) -> None:
    counters = events(trace, "C")
    assert {event["name"] for event in counters} == {"allocated GiB"}
    assert all(set(event["args"]) == CLASSES for event in counters)
    times = [event["ts"] for event in counters]
    assert len(set(times)) == len(times)
    # The last value of each op is kept, so the peak may fall between two of them by what an op itself frees.
    largest = max(sum(event["args"].values()) for event in counters)
    assert largest <= run.steps[-1].allocated_bytes / GIB
    assert largest == pytest.approx(run.steps[-1].allocated_bytes / GIB, rel=0.01)


def test_the_process_is_the_virtual_card(trace: dict[str, Any]) -> None:
    names = [event["args"]["name"] for event in events(trace, "M") if event["name"] == "process_name"]
    assert names == ["virtual NVIDIA GeForce RTX 3090"]
