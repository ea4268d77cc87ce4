"""``hybridtrain execute`` on tiny models: what it counts, compares, records, tables, and how it refuses."""

import json
import resource
import shutil
import socket
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from command import Command
from hybridtrain.config.decode import decode
from hybridtrain.config.encode import encode
from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.memory.tier import TierAccount
from hybridtrain.memory.transfer import DirectTransfer, VirtualTransfer
from hybridtrain.optimizations import GradientCheckpointing
from hybridtrain.plan.compose import compose
from hybridtrain.plan.placement import Placement
from hybridtrain.planning.dry_runs import record_steps
from hybridtrain.reports.tables import TERMINAL
from hybridtrain.units import GIB
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StepMark
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridvalidation.experiments import executed as execute_run
from hybridvalidation.experiments.executed import ExecutedRun, first_difference, read_executed
from hybridvalidation.show.pages.executed import executed_pages, executed_table
from tiny_files import shape_file
from tiny_models import GPT2_UNTIED, random_steps

ROOT = Path(__file__).parents[3]
STACK_FOLDER = ROOT / "scenarios" / "stacks"
GPT2 = shape_file(num_blocks=3, tied=True)
LLAMA = """\
family = "llama"
vocab_size = 300
max_seq_len = 16
num_blocks = 3
width = 64
num_heads = 4
num_kv_heads = 2
ffn_width = 96
"""
DISK_STACK = "stream-int8-disk"
HOST_STACK = "stream-bf16"
STACKS = ["vanilla", "mixed", "tight", HOST_STACK, DISK_STACK]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads gain nothing on tiny tensors and wait for each other on a shared machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with two models and the project's own stacks."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STACK_FOLDER, tmp_path / "scenarios" / "stacks")
    (tmp_path / "gpt2.toml").write_text(GPT2)
    (tmp_path / "llama.toml").write_text(LLAMA)
    return tmp_path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def arguments(model: str = "gpt2.toml", stack: str = "vanilla", seq: int = 8, steps: int = 2, *more: str) -> list[str]:
    return [
        "execute", "--model", model, "--stack", stack, "--micro-batch", "2", "--seq", str(seq), "--steps", str(steps),
        "--lr", "1e-2", *more,
    ]  # fmt: skip


def records() -> list[ExecutedRun]:
    return read_executed(Path("results/records"))


# --- a run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_dry_run_equals_the_execution(command: Command, model: str, stack: str) -> None:
    found = command.json(*arguments(f"{model}.toml", stack, 8, 3, "--disk", "disk"))
    assert found["is_equal"] is True
    assert found["difference"] == ""
    assert found["num_events"] > 1000
    assert found["executed"] == found["planned"]
    assert (found["planned"]["host_bytes"] > 0) == stack.startswith("stream")
    assert (found["planned"]["disk_bytes"] > 0) == (stack == DISK_STACK)
    for step in found["steps"]:
        assert step["device_peak_bytes"] == step["planned_device_peak_bytes"]
    assert max(step["device_peak_bytes"] for step in found["steps"]) <= found["executed"]["device_bytes"]
    assert list(Path("disk").glob("*")) == [] if Path("disk").exists() else stack != DISK_STACK


PARTS = """
[[optimizations]]
kind = "grad_accumulation"
grad_accum_steps = 4
[[optimizations]]
kind = "optimizer_offload"
[[optimizations]]
kind = "{kind}"
{setting}
"""


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize(("kind", "setting"), [("pipeline", "stages = 2"), ("zero", "stage = 2")])
def test_each_rank_equals_its_own_dry_run(command: Command, folder: Path, kind: str, setting: str) -> None:
    text = f'name = "parts"\ndescription = "cut in two"\n{PARTS.format(kind=kind, setting=setting)}'
    (folder / "scenarios/stacks/parts.toml").write_text(text)
    alone = command.json(*arguments("llama.toml", "parts", 8, 2))
    found = command.json(*arguments("llama.toml", "parts", 8, 2, "--world", "2"))
    assert found["is_equal"] is True
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["num_events"] == sum(rank["num_events"] for rank in found["ranks"])
    for rank in found["ranks"]:
        assert rank["executed"] == rank["planned"]
        assert 0 < rank["executed"]["device_bytes"] < alone["executed"]["device_bytes"]
        assert 0 < rank["executed"]["host_bytes"] < alone["executed"]["host_bytes"]
    both = found["ranks"]
    assert [step["loss"] for step in both[0]["steps"]] == [step["loss"] for step in both[1]["steps"]]
    if kind == "pipeline":  # no sum is made in another order
        assert [step["loss"] for step in found["steps"]] == [step["loss"] for step in alone["steps"]]
    assert alone["key"] != found["key"]
    assert "parts on 2 ranks" in Path("results/tables/executed.md").read_text()


def test_ranks_that_cannot_be_are_refused_before_they_start(command: Command, folder: Path) -> None:
    text = f'name = "parts"\ndescription = "three"\n{PARTS.format(kind="pipeline", setting="stages = 3")}'
    (folder / "scenarios/stacks/parts.toml").write_text(text)
    assert command(*arguments("llama.toml", "parts", 8, 2, "--world", "2")) == 2
    assert "needs 3 ranks" in command.err


@pytest.mark.parametrize("stack", [HOST_STACK, DISK_STACK])
def test_a_streamed_run_learns(command: Command, stack: str) -> None:
    found = command.json(*arguments("llama.toml", stack, 16, 12, "--disk", "disk"))
    losses = [step["loss"] for step in found["steps"]]
    assert losses[0] == pytest.approx(5.7, abs=0.3)  # ln(300) = 5.7: nothing is known yet
    assert sum(losses[-3:]) / 3 < losses[0] - 0.5
    assert all(step["grad_norm"] > 0 and step["seconds"] > 0 for step in found["steps"])


def test_the_record_holds_everything(command: Command) -> None:
    found = command.json(*arguments("llama.toml", HOST_STACK, 8, 2, "--host-limit-gib", "0.01"))
    (run,) = records()
    assert encode(run) | {"is_equal": True, "files": found["files"]} == found
    assert (run.model, run.stack, run.evidence) == ("llama", HOST_STACK, "executed")
    assert (run.micro_batch_size, run.seq_len, run.accum_steps, run.lr) == (2, 8, 1, 1e-2)
    assert run.num_params == run.shape.num_params
    assert (run.plan["weight.placement"], run.plan["optim_state.codec"]) == ("host", "int8_blocks")
    assert (run.corpus, run.corpus_digest) == ("embedded", embedded_corpus().digest)
    assert [step.step for step in run.steps] == [1, 2]
    assert run.num_threads == 1
    assert run.duration_s > run.build_s > 0
    assert run.environment.torch == torch.__version__
    assert run.started_at.endswith("+00:00")
    assert decode(ExecutedRun, json.loads(json.dumps(encode(run))), source="text") == run


def test_the_process_peak_is_the_systems(command: Command) -> None:
    command(*arguments())
    (run,) = records()
    # The kernel counts resident pages per thread in batches: both figures lag by some hundred KiB.
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert run.process_peak_bytes == pytest.approx(now, rel=0.05)


def test_the_record_tells_no_host_and_no_path(command: Command, folder: Path) -> None:
    assert command(*arguments(str(folder / "gpt2.toml"), DISK_STACK, 8, 1, "--disk", str(folder / "disk"))) == 0
    text = Path("results/records/executed.jsonl").read_text()
    for place in (str(ROOT), str(Path.home()) + "/", "/tmp/", str(folder), socket.gethostname() + "."):  # noqa: S108
        assert place not in text


def test_the_text_tells_steps_and_the_answer(command: Command) -> None:
    assert command(*arguments("gpt2.toml", "tight")) == 0
    lines = command.out.splitlines()
    assert lines[0].startswith("planned: device ")
    assert [line.split(":")[0] for line in lines[1:3]] == ["step 1/2 full", "step 2/2 full"]
    (run,) = records()
    assert f"dry run equals execution: yes, {run.num_events} events" in lines
    assert lines[-1] == "Written: results/records/executed.jsonl, results/tables/executed.md"


def test_accumulation_can_be_changed(command: Command) -> None:
    found = command.json(*arguments("gpt2.toml", "tight", 8, 1, "--accum", "3"))
    assert found["accum_steps"] == 3
    assert found["plan"]["grad_accum_steps"] == "3"


def test_a_model_of_the_catalogue_is_recorded_by_its_name(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtrain.models.find_model.find_model", lambda _: replace(GPT2_UNTIED, vocab_size=256))
    command(*arguments("gpt2-1b"))
    assert [run.model for run in records()] == ["gpt2-1b"]


# --- a run that differs -----------------------------------------------------------------------------------------


def test_a_run_that_differs_is_recorded_and_told(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def upload(transfer: DirectTransfer, values: npt.NDArray[np.int64]) -> Tensor:
        uploads.append(values)
        if len(uploads) == 3:  # inputs and targets of step 1 came before
            torch.empty(1000)
        return plain(transfer, values)

    uploads: list[npt.NDArray[np.int64]] = []
    plain = DirectTransfer.upload
    monkeypatch.setattr(DirectTransfer, "upload", upload)
    assert command(*arguments()) == 1
    (run,) = records()
    assert "the execution allocates 3.91 KiB (4000 bytes) of " in run.difference
    assert run.difference.endswith("in step 2")
    assert f"dry run equals execution: no, {run.difference}" in command.out
    table = Path("results/tables/executed.md").read_text()
    assert "| NO " in table
    assert f"The dry run differs: {run.difference}." in table


def test_tiers_are_compared_too(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def peak_bytes(account: TierAccount, place: Placement) -> int:
        is_virtual = account.host_limit_bytes is None
        return plain(account, place) + (place is Placement.HOST and is_virtual)

    plain = TierAccount.peak_bytes
    monkeypatch.setattr(TierAccount, "peak_bytes", peak_bytes)
    found = command.json(*arguments("gpt2.toml", HOST_STACK), code=1)
    assert found["difference"].startswith("peaks: the dry run device ")


PLANNED = record_steps(
    GPT2_UNTIED, compose([GradientCheckpointing(recompute_every=2)]), random_steps(GPT2_UNTIED, 2), VirtualTransfer()
)


def changed(trace: LedgerTrace, name: str, index: int, value: object) -> LedgerTrace:
    items = list(getattr(trace, name))
    items[index] = value
    return replace(trace, **{name: tuple(items)})


def swapped(trace: LedgerTrace) -> LedgerTrace:
    events = list(trace.events)
    place = next(i for i in range(len(events)) if events[i] < 0 and events[i + 1] < 0)
    events[place], events[place + 1] = events[place + 1], events[place]
    return replace(trace, events=tuple(events))


DIFFERENT: dict[str, Callable[[LedgerTrace], LedgerTrace]] = {
    "size": lambda trace: changed(trace, "sizes", 40, 1),
    "class": lambda trace: changed(trace, "classes", 40, TensorClass.MASTER),
    "unit": lambda trace: changed(trace, "units", 40, "nowhere"),
    "order": swapped,
    "shorter": lambda trace: replace(trace, events=trace.events[:-1]),
    "step": lambda trace: changed(trace, "steps", 1, replace(trace.steps[1], event=trace.steps[1].event + 1)),
    "steps": lambda trace: replace(trace, steps=trace.steps[:1]),
    "empty step": lambda trace: replace(trace, steps=(*trace.steps, StepMark(len(trace.events), 0))),
}


def test_equal_traces_do_not_differ() -> None:
    assert first_difference(PLANNED, PLANNED) == ""


@pytest.mark.parametrize("name", DIFFERENT)
def test_every_difference_is_found(name: str) -> None:
    other = DIFFERENT[name](PLANNED)
    assert first_difference(PLANNED, other)
    assert first_difference(other, PLANNED)


def test_the_first_difference_names_both_sides() -> None:
    storage = next(index for index, unit in enumerate(PLANNED.units) if unit == "block.1")
    event = PLANNED.events.index(storage) + 1
    told = first_difference(PLANNED, changed(PLANNED, "sizes", storage, 2048))
    assert told.startswith(f"event {event}: the dry run allocates ")
    assert "the execution allocates 2.00 KiB (2048 bytes) of " in told
    assert " of block.1 " in told


def test_a_missing_event_is_told() -> None:
    told = first_difference(PLANNED, replace(PLANNED, events=PLANNED.events[:-1]))
    assert told.endswith("the execution has ended")


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (arguments("gpt2-1bb"), "model 'gpt2-1bb' is unknown; did you mean 'gpt2-1b'?"),
        (arguments("gpt.toml"), "gpt.toml: 1 fault\n  does not exist; did you mean 'gpt2.toml'?"),
        (arguments("gpt2.toml", "stream-bf32"), "stack 'stream-bf32' is unknown; did you mean 'stream-bf16'?"),
        (arguments(seq=17), "seq_len: 17 is above the model's max_seq_len (16)"),
        (arguments(stack=DISK_STACK), f"--disk: 1 fault\n  stack '{DISK_STACK}' keeps "),
        (arguments(stack=DISK_STACK), "on disk; give --disk FOLDER"),
        ([*arguments(), "--lr", "0"], "argument --lr: 0 must be a finite number above 0"),
        ([*arguments(), "--lr", "inf"], "argument --lr: inf must be a finite number above 0"),
        ([*arguments(), "--lr", "fast"], "argument --lr: 'fast' must be a number above 0"),
        ([*arguments(), "--host-limit-gib", "-1"], "argument --host-limit-gib: -1 must be"),
        (arguments(steps=0), "argument --steps: 0 must be at least 1"),
        (["execute"], "--model, --stack, --micro-batch, --seq, --steps"),
    ],
)
def test_a_wrong_argument_is_told(command: Command, chosen: list[str], words: str) -> None:
    assert command(*chosen) == 2
    assert words in command.err
    assert command.err.startswith("hybridtrain: ")
    assert command.out == ""
    assert not Path("results").exists()


def test_a_vocabulary_below_the_bytes_is_refused(command: Command) -> None:
    Path("gpt2.toml").write_text(GPT2.replace("256", "255"))
    assert command(*arguments()) == 2
    assert "256 byte tokens, but the model's vocab_size is 255" in command.err


def test_too_low_a_host_limit_is_told_before_anything_is_built(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute_run, "DirectTransfer", lambda *_, **__: pytest.fail("nothing may be built"))
    assert command(*arguments("llama.toml", HOST_STACK, 8, 1, "--host-limit-gib", "1e-5")) == 1
    assert f"host memory: llama under '{HOST_STACK}' offloads " in command.err
    assert "10.49 KiB are allowed; raise --host-limit-gib" in command.err
    assert not Path("results").exists()


def test_memory_for_the_cards_tensors_is_asked_for_too(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute_run, "available_host_bytes", lambda: 100_000)
    assert command(*arguments()) == 1
    assert "card tensors included (planned)" in command.err
    assert "97.66 KiB are available" in command.err


def test_a_machine_that_does_not_tell_its_memory_may_try(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute_run, "available_host_bytes", lambda: None)
    assert command(*arguments("gpt2.toml", HOST_STACK, 8, 1)) == 0


def test_a_full_disk_is_told_before_anything_is_built(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")  # noqa: PYI024  stands in for shutil's
    monkeypatch.setattr(execute_run.shutil, "disk_usage", lambda _: usage(1, 1, 0))
    found = command.json(*arguments("gpt2.toml", DISK_STACK, 8, 1, "--disk", "new/disk"), code=1)
    assert found["error"] == "DiskSpaceError"
    assert found["message"].startswith(f"new/disk: stack '{DISK_STACK}' keeps ")
    assert "0 B are free" in found["message"]
    assert not Path("new").exists()


def test_a_disk_folder_that_is_a_file_is_told(command: Command) -> None:
    Path("file").write_text("")
    assert command(*arguments("gpt2.toml", DISK_STACK, 8, 1, "--disk", "file")) == 1
    assert "file" in command.err
    assert not Path("results").exists()


def test_a_run_that_diverges_leaves_no_record_and_no_file(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtrain.memory.transfer.DirectTransfer.read", lambda *_: float("nan"))
    found = command.json(*arguments("gpt2.toml", DISK_STACK, 8, 1, "--disk", "disk"), code=1)
    assert found["error"] == "DivergenceError"
    assert list(Path("disk").glob("*")) == []
    assert not Path("results").exists()


def test_a_damaged_record_file_is_told_before_the_run(command: Command) -> None:
    path = Path("results/records/executed.jsonl")
    path.parent.mkdir(parents=True)
    path.write_text("{}\n")
    assert command(*arguments()) == 1
    assert "executed.jsonl:1: not a record of this version" in command.err
    assert path.read_text() == "{}\n"


# --- records and table ------------------------------------------------------------------------------------------


@pytest.fixture
def run(command: Command) -> ExecutedRun:
    command(*arguments())
    return records()[0]


def test_a_record_of_another_schema_or_without_steps_is_refused(run: ExecutedRun) -> None:
    for changes, words in (({"schema": 99}, "99 must be 2"), ({"steps": ()}, "steps: empty")):
        with pytest.raises(ValueError, match=words):
            replace(run, **changes)


def test_the_same_run_again_replaces_its_row(command: Command, run: ExecutedRun) -> None:
    table = Path("results/tables/executed.md")
    rows = table.read_text().count("| gpt2 (")
    command(*arguments())
    assert len(records()) == 2
    assert table.read_text().count("| gpt2 (") == rows == 2  # in both tables, what it did and what it held
    command(*arguments(steps=3))
    assert table.read_text().count("| gpt2 (") == 4
    assert run in records()


def test_the_table_tells_the_figures(run: ExecutedRun) -> None:
    big = replace(
        run, executed=replace(run.executed, device_bytes=3 * GIB, host_bytes=5 * GIB), process_peak_bytes=9 * GIB
    )
    row = executed_table([big], TERMINAL).splitlines()[-1]
    losses = f"{run.steps[0].loss:.3f} to {run.steps[-1].loss:.3f}"
    for cell in ("gpt2", "vanilla", "1 x 2 x 8", losses, "3.00", "5.00", "9.00", f"yes, {run.num_events} events"):
        assert cell in row


def test_the_table_tells_every_step_and_where_it_was_made(run: ExecutedRun) -> None:
    (page,) = executed_pages([run])
    text = page.text
    for step in run.steps:
        assert f"| {step.step} " in text
        assert f"{step.loss:.4f}" in text
    assert run.environment.cpu in text
    assert "Executed: " in text


def test_a_report_rebuilds_the_same_bytes(command: Command) -> None:
    command(*arguments())
    command(*arguments("llama.toml", HOST_STACK))
    table = Path("results/tables/executed.md")
    before = table.read_bytes()
    table.unlink()
    assert command("report") == 0
    assert command.out == "results/tables/executed.md\n"
    assert table.read_bytes() == before


def test_without_runs_there_is_no_table(command: Command) -> None:
    assert command("report") == 2
    assert "results/records: no such folder" in command.err
    assert list(executed_pages([])) == []
    assert not Path("results/tables").exists()


# --- what is committed ------------------------------------------------------------------------------------------


def test_committed_runs_are_equal_to_their_dry_runs() -> None:
    committed = read_executed(ROOT / "results" / "records")
    assert committed
    assert [run.difference for run in committed] == [""] * len(committed)
    assert all(run.executed == run.planned for run in committed)


def test_the_committed_table_follows_from_committed_records() -> None:
    committed = read_executed(ROOT / "results" / "records")
    (page,) = executed_pages(committed)
    assert f"{page.text}\n" == (ROOT / "results" / "tables" / "executed.md").read_text()
