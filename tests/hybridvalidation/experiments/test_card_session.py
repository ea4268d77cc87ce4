"""The evidence from a CUDA card, as far as it can be made without one: planning, records, table, arithmetic."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.cli.main import main
from hybridtrain.config.decode import decode
from hybridtrain.config.encode import to_json
from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.errors import ConfigError
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models import model_config
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import OPTIMIZATIONS, OptimizerOffload, WeightStreaming
from hybridtrain.plan.compose import Optimization
from hybridtrain.stacks import Stack
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.units import GIB, MIB
from hybridtrain.virtual_gpu.cards.card import Host, find_card
from hybridtrain.virtual_gpu.cards.kernels import curves_in
from hybridvalidation.child import ChildResult
from hybridvalidation.experiment import missing_package
from hybridvalidation.experiments import measure
from hybridvalidation.experiments.card_session import session as cuda_session
from hybridvalidation.experiments.card_session import train as cuda_train
from hybridvalidation.experiments.card_session import worker as cuda_worker
from hybridvalidation.experiments.card_session.curve_table import curve_table, curves_explained
from hybridvalidation.experiments.card_session.curves import Row, measure_curves
from hybridvalidation.experiments.card_session.parts import (
    CardPart,
    Part,
    ScriptPart,
    all_parts,
    choose_parts,
    effective_cap,
    plain_limit,
    script_parts,
    shortage,
    time_limit,
)
from hybridvalidation.experiments.card_session.plan import PlanJob, PlannedPart, card_under_cap, plan_part
from hybridvalidation.experiments.card_session.record import (
    CardMeasurements,
    Ceilings,
    EvidenceRecord,
    KernelTime,
    MeasuredScript,
    PlannedScript,
    read_evidence,
)
from hybridvalidation.experiments.card_session.session import EvidenceRun, Session, answer_of, start_child
from hybridvalidation.experiments.card_session.table import newest_evidence, write_evidence
from hybridvalidation.experiments.card_session.train import DeviceEvent, TrainJob, copy_overlap, read_chrome_trace
from hybridvalidation.experiments.card_session.worker import Answer
from hybridvalidation.experiments.measure import MeasuredStep
from hybridvalidation.records.outcome import Outcome
from tiny_runs import figures

CARD_BYTES = 143_771 * MIB
TINY = ModelConfig(
    family="llama", vocab_size=256, max_seq_len=64, num_blocks=2, width=32, num_heads=2, num_kv_heads=2, ffn_width=64
)
CEILINGS = Ceilings(
    name="NVIDIA H200", driver="580.1", memory_bytes=CARD_BYTES, compute_capability="9.0", num_sms=132,
    matmul_tflops=780.0, device_copy_gbps=4300.0, in_gbps=55.0, out_gbps=54.0, both_in_gbps=45.0, both_out_gbps=44.0,
    is_pinned=True, pin_gbps=3.0, context_bytes=500 * MIB, context_with_libraries_bytes=600 * MIB + 1,
    forward_workspace_bytes=32 * MIB, backward_workspace_bytes=32 * MIB,
)  # fmt: skip
VANILLA = Stack(name="vanilla", description="nothing on")


def part(name: str = "tiny", **changes: Any) -> Part:
    plain = Part(
        name=name, description="a small part", model="tiny", cap_gib=16, seq_len=16, num_sequences=2, stack=VANILLA,
        num_steps=2, limit_s=100,
    )  # fmt: skip
    return replace(plain, **changes)


def planned(step_time_s: float = 10.0, **changes: Any) -> PlannedPart:
    predicted = figures(
        (900, 1100),
        (2000, 2200),
        device_used_bytes=2200 + 600,
        step_time_s=step_time_s,
        tokens_per_s=3.2,
        bound="compute",
    )
    plain = PlannedPart(
        stack=VANILLA, num_params=10**6, plan={"weight.codec": "float32"}, micro_batch_size=2, accum_steps=1,
        predicted=predicted,
    )  # fmt: skip
    return replace(plain, **changes)


def measured(*seconds: float) -> CardMeasurements:
    steps = tuple(
        MeasuredStep(
            step=step, loss=5.0, grad_norm=1.0, seconds=time, peak_allocated_bytes=1000, peak_reserved_bytes=2000
        )
        for step, time in enumerate(seconds, 1)
    )
    return CardMeasurements(
        build_s=1.0, steps=steps, outside_bytes=800, host_bytes=0, disk_bytes=0, num_alloc_retries=0, overlap=None
    )


@dataclass
class FakeChild:
    """A process that answers after some time of a fake clock."""

    reply: Answer | Callable[[], Answer | None]
    """Or what makes it; None: the process crashes."""
    ready_s: float
    clock: Callable[[], float]
    is_stopped: bool = False
    fault: str = ""

    def poll(self) -> ChildResult[Answer] | None:
        if self.clock() < self.ready_s and not self.fault:
            return None
        if not self.fault and not isinstance(self.reply, Answer):
            made = self.reply()
            self.fault = "" if made is not None else "worker ended with code -11: no message"
            self.reply = made or Answer()
        answer = self.reply if isinstance(self.reply, Answer) and not self.fault else None
        return ChildResult(answer=answer, fault=self.fault, seconds=0.0, peak_rss_bytes=0, log="")

    def stop(self, why: str = "stopped") -> None:
        if not self.is_stopped and self.clock() < self.ready_s:
            self.fault = why
        self.is_stopped = True


@dataclass
class FakeMachine:
    """A machine whose processes take no time but that of a fake clock."""

    plans: dict[str, Answer] = field(default_factory=dict)
    plan_s: dict[str, float] = field(default_factory=dict)
    train_s: float = 30.0
    answers: dict[str, Answer] = field(default_factory=dict)
    ceilings: Answer = field(default_factory=lambda: Answer(ceilings=CEILINGS))
    used_bytes: int | None = 0
    now: float = 0.0
    jobs: list[TrainJob] = field(default_factory=list)
    children: list[FakeChild] = field(default_factory=list)
    records: list[EvidenceRecord] = field(default_factory=list)
    verbs: list[str] = field(default_factory=list)

    def start(self, verb: str, job: Any, limit_s: float) -> FakeChild:
        self.verbs.append(verb)
        if verb == "ceilings":
            reply, seconds = self.ceilings, 10.0
        elif verb not in {"plan", "train"}:
            name = verb if verb in {"curves", "kernels", "models"} else f"{verb} {job.script.stem}"
            reply, seconds = self.answers.get(name, Answer()), self.plan_s.get(name, 5.0)
        elif verb == "plan":
            name = job.part.name
            reply, seconds = self.plans.get(name, Answer(planned=planned())), self.plan_s.get(name, 5.0)
        else:
            self.jobs.append(job)
            reply, seconds = self.answers.get(job.part.name, Answer(measured=measured(9.0, 8.0))), self.train_s
        child = FakeChild(reply, self.now + min(seconds, limit_s), lambda: self.now)
        self.children.append(child)
        return child

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, parts: Sequence[CardPart], minutes: float = 25.0) -> list[tuple[str, Outcome]]:
        run = EvidenceRun(self.session(minutes), parts, Path("results")).run([found.name for found in parts])
        self.records += [record for _, record in run]
        return [(record.part, record.outcome) for record in self.records]

    def session(self, minutes: float, say: Callable[[str], None] = lambda _: None) -> Session:
        return Session(
            card="NVIDIA H200", total_bytes=CARD_BYTES, used_bytes=lambda: self.used_bytes, host_bytes=120 * GIB,
            budget_s=60 * minutes, start=self.start, say=say, clock=lambda: self.now, sleep=self.sleep, num_planners=2,
        )  # fmt: skip


def script(folder: Path, name: str = "tiny", text: str = "import torch\n") -> ScriptPart:
    path = folder / f"{name}.py"
    path.write_text(f'"""Do {name}."""\n{text}', encoding="utf-8")
    return next(found for found in script_parts(folder) if found.path == path)


class TestParts:
    def test_what_tells_most_comes_first_and_the_7b_run_alone_is_profiled(self) -> None:
        parts = list(all_parts([VANILLA]))
        firsts = list(dict.fromkeys(found.name.partition("/")[0] for found in parts))
        assert firsts[:6] == ["curves", "script", "kernels", "7b-24", "1b-16", "7b-16"]
        assert firsts[-3:] == ["13b-24", "50b-24", "50b-24-more"]
        assert [found.name for found in parts if isinstance(found, Part) and found.profiles] == ["7b-24"]
        assert len({found.name for found in parts}) == len(parts)

    def test_parts_are_chosen_by_name_or_all_of_a_kind_at_once(self) -> None:
        parts = list(all_parts([VANILLA]))
        assert [found.name for found in choose_parts(parts, ["13b-24", "7b-24"])] == ["7b-24", "13b-24"]
        pairs = choose_parts(parts, ["pairs"])
        assert pairs
        assert all("/vanilla/" in found.name for found in pairs)
        scripts = choose_parts(parts, ["scripts", "kernels"])
        assert len(scripts) >= 13
        assert all(found.name.startswith("script/") for found in scripts[:-1])
        assert choose_parts(parts, []) == parts
        assert choose_parts(parts, ["ceilings"]) == []

    def test_a_script_tells_its_packages_and_models(self, tmp_path: Path) -> None:
        text = "import torch\nfrom no_such_package.core import Net\nNet('models/llama-3.2-1b')\n"
        found = script(tmp_path, text=text)
        assert (found.description, found.models()) == ("Do tiny", ["llama-3.2-1b"])
        assert (found.packages(), found.missing()) == (("torch", "no_such_package"), "no_such_package")

    def test_a_part_without_an_estimate_needs_its_least_time(self) -> None:
        found = CardPart(name="curves", description="", limit_s=90, least_s=30)
        assert plain_limit(found, 500) == (90, "")
        assert plain_limit(found, 40) == (40, "")
        assert plain_limit(found, 20) == (0.0, "it needs 30 s, 20 s are left")

    def test_an_unknown_part_is_refused_with_the_nearest_name(self) -> None:
        with pytest.raises(ConfigError, match="did you mean '7b-24'"):
            choose_parts(list(all_parts([])), ["7b24"])

    def test_a_cap_shrinks_a_little_for_a_desktop_and_not_for_another_run(self) -> None:
        wanted = part(cap_gib=24)
        assert effective_cap(wanted, 24_564 * MIB, 1000 * MIB) == 23_564 * MIB
        assert effective_cap(wanted, CARD_BYTES, 100 * GIB) == 24 * GIB
        assert effective_cap(wanted, 24_564 * MIB, 10 * GIB) == 0
        assert "in use: other programs use 10.00 GiB" in shortage(wanted, 24_564 * MIB, 10 * GIB)
        assert "too small: it has 16.00 GiB" in shortage(wanted, 16 * GIB, 0)

    def test_a_part_starts_only_when_two_steps_fit_the_remaining_time(self) -> None:
        assert time_limit(part(), step_s=10.0, host_bytes=0, remaining_s=500) == (100, "")
        assert time_limit(part(), step_s=10.0, host_bytes=0, remaining_s=60) == (60, "")
        assert time_limit(part(), step_s=100.0, host_bytes=0, remaining_s=500) == (20 + 2 * 1.6 * 100, "")
        assert "52 s, 50 s are left" in time_limit(part(), step_s=10.0, host_bytes=0, remaining_s=50)[1]
        assert time_limit(part(), step_s=10.0, host_bytes=60 * GIB, remaining_s=60)[1]


class TestRun:
    def test_every_part_is_recorded_when_it_is_over_the_ceilings_first(self) -> None:
        machine = FakeMachine()
        assert machine.run([part("a"), part("b")]) == [
            ("ceilings", Outcome.OK), ("a", Outcome.OK), ("b", Outcome.OK)
        ]  # fmt: skip
        training = machine.records[1].training
        assert training is not None
        assert training.measured == measured(9.0, 8.0)
        assert training.tokens_per_s == 32 / 8.0
        assert all(child.is_stopped for child in machine.children)

    def test_the_cap_leaves_room_for_the_context_that_was_measured(self) -> None:
        machine = FakeMachine(used_bytes=2 * GIB)
        machine.run([part("a")])
        assert machine.jobs[0].cap_bytes == 16 * GIB
        assert machine.jobs[0].context_bytes == 601 * MIB
        assert machine.jobs[0].used_before_bytes == 2 * GIB

    def test_the_card_does_not_wait_for_a_long_search_when_another_plan_is_there(self) -> None:
        machine = FakeMachine(plan_s={"slow": 40.0})
        assert [name for name, _ in machine.run([part("slow"), part("b"), part("c")])] == ["ceilings", "b", "c", "slow"]

    def test_parts_that_do_not_fit_the_time_are_recorded_as_skipped(self) -> None:
        long = Answer(planned=planned(step_time_s=1000.0))
        outcomes = FakeMachine(plans={"long": long}).run([part("long"), part("short")], minutes=5)
        assert outcomes == [("ceilings", Outcome.OK), ("long", Outcome.SKIPPED), ("short", Outcome.OK)]
        machine = FakeMachine(train_s=500.0)
        machine.run([part("a", limit_s=500), part("b")], minutes=9)
        assert "are left" in machine.records[-1].message

    def test_a_plan_that_is_not_ready_in_time_is_a_skipped_part(self) -> None:
        machine = FakeMachine(plan_s={"slow": 1e6})
        assert machine.run([part("slow")], minutes=1)[-1] == ("slow", Outcome.SKIPPED)
        assert "plan was not ready" in machine.records[-1].message
        assert machine.now <= 60

    def test_without_a_plan_or_with_a_fault_nothing_is_started(self) -> None:
        plans = {
            "none": Answer(outcome=Outcome.ERROR, message="nothing fits"),
            "fault": Answer(planned=planned(fault="too little host memory")),
        }
        machine = FakeMachine(plans=plans)
        machine.run([part("none"), part("fault")])
        assert [record.message for record in machine.records[1:]] == ["no plan: nothing fits", "too little host memory"]
        assert not machine.jobs

    def test_a_card_that_is_too_small_or_busy_is_told(self) -> None:
        machine = FakeMachine(used_bytes=CARD_BYTES - 10 * GIB)
        assert machine.run([part("a")])[-1] == ("a", Outcome.SKIPPED)
        assert "the card is in use:" in machine.records[-1].message

    def test_out_of_memory_is_an_outcome_and_the_next_part_runs(self) -> None:
        refused = Answer(outcome=Outcome.OUT_OF_MEMORY, message="CUDA out of memory", measured=measured())
        outcomes = FakeMachine(answers={"a": refused}).run([part("a"), part("b")])
        assert outcomes[1:] == [("a", Outcome.OUT_OF_MEMORY), ("b", Outcome.OK)]

    def test_a_card_that_fails_the_first_part_is_left_alone(self) -> None:
        machine = FakeMachine(ceilings=Answer(outcome=Outcome.ERROR, message="illegal address"))
        assert machine.run([part("a")]) == [("ceilings", Outcome.ERROR), ("a", Outcome.SKIPPED)]
        assert not machine.jobs

    def test_an_interruption_stops_the_processes(self) -> None:
        machine = FakeMachine()
        run = EvidenceRun(machine.session(25.0), [part("a"), part("b")], Path("results")).run(["a", "b"])
        assert [next(run)[0] for _ in range(2)] == ["ceilings", "a"]
        run.close()  # type: ignore[attr-defined]
        assert all(child.is_stopped for child in machine.children)


PLANNED_SCRIPT = PlannedScript(
    fits=True, peak_allocated_bytes=1100, peak_reserved_bytes=2200, device_used_bytes=2800, step_time_s=0.5,
    caveats=("compiled code is planned as eager",),
)  # fmt: skip
MEASURED_SCRIPT = MeasuredScript(
    seconds=9.0, peak_allocated_bytes=1000, peak_reserved_bytes=2000, outside_bytes=800, num_alloc_retries=0,
    step_seconds=(9.0, 0.3, 0.4, 0.5),
)  # fmt: skip


class TestScripts:
    def test_plan_and_measurement_stand_in_one_record_with_their_ratios(self, tmp_path: Path) -> None:
        answers = {
            "plan_script a": Answer(planned_script=PLANNED_SCRIPT),
            "script a": Answer(measured_script=MEASURED_SCRIPT),
        }
        machine = FakeMachine(answers=answers)
        assert machine.run([script(tmp_path, "a")])[1:] == [("script/a", Outcome.OK)]
        run = machine.records[1].script
        assert run is not None
        assert (run.planned, run.measured) == (PLANNED_SCRIPT, MEASURED_SCRIPT)
        assert run.ratios == {
            "peak_allocated_bytes": 1.1, "peak_reserved_bytes": 1.1, "device_used_bytes": 1.0, "step_time_s": 1.25
        }  # fmt: skip
        text = write_evidence(machine.records, tmp_path)[0].read_text()
        assert "| a        | 5       | 0.400    | 0.500 (+25.0 %) |" in text
        assert "- `script/a`: ok, compiled code is planned as eager" in text

    def test_a_script_is_measured_where_its_plan_fails(self, tmp_path: Path) -> None:
        answers = {
            "plan_script a": Answer(outcome=Outcome.ERROR, message="no rule for an op"),
            "script a": Answer(measured_script=MEASURED_SCRIPT),
        }
        machine = FakeMachine(answers=answers)
        machine.run([script(tmp_path, "a")])
        run = machine.records[1].script
        assert run is not None
        assert (run.planned, run.plan_fault, run.ratios) == (None, "no rule for an op", {})
        assert (
            "- `script/a`: ok, no plan: no rule for an op" in write_evidence(machine.records, tmp_path)[0].read_text()
        )

    def test_one_script_has_the_card_and_the_next_one_only_imports(self, tmp_path: Path) -> None:
        parts = [script(tmp_path, name) for name in ("a", "b")]
        machine = FakeMachine(plan_s={"script a": 500.0})
        gone: dict[str, bool] = {}
        start = machine.start

        def note(verb: str, job: Any, limit_s: float) -> FakeChild:
            child = start(verb, job, limit_s)
            if verb == "script":
                child.reply = lambda: replace(Answer(), message=str(gone.setdefault(job.script.stem, job.go.exists())))
                gone[f"{job.script.stem} at start"] = job.go.exists()
            return child

        machine.start = note  # type: ignore[method-assign]
        outcomes = machine.run(parts)
        assert outcomes[1:] == [("script/a", Outcome.ERROR), ("script/b", Outcome.OK)]
        assert "stopped after 60 s, its time limit" in machine.records[1].message
        assert machine.verbs.index("script") < len(machine.verbs) - 1 - machine.verbs[::-1].index("script")
        assert gone == {"a at start": False, "b at start": False, "b": True}

    def test_a_missing_package_or_model_is_a_skipped_part(self, tmp_path: Path) -> None:
        parts = [script(tmp_path, "a", "import no_such\n"), script(tmp_path, "b", "'models/llama-3.2-1b'\n")]
        machine = FakeMachine(answers={"models": Answer(outcome=Outcome.ERROR, message="no transformers")})
        machine.run(parts)
        assert [record.message for record in machine.records[1:]] == ["no_such is not installed", "no transformers"]
        assert machine.verbs == ["models", "ceilings"]

    def test_parts_without_time_say_what_they_need(self, tmp_path: Path) -> None:
        kernels = CardPart(name="kernels", description="", limit_s=130, least_s=40)
        machine = FakeMachine(plan_s={"script a": 50.0})
        assert machine.run([script(tmp_path, "a"), kernels], minutes=1.5)[1:] == [
            ("kernels", Outcome.OK), ("script/a", Outcome.OK)
        ]  # fmt: skip
        machine = FakeMachine()
        machine.run([kernels], minutes=0.9)
        assert machine.records[1].message == "it needs 40 s, 38.8 s are left"


class TestCurves:
    TIME = KernelTime(kind="gemm", op="mm_nt", shape=(8, 8, 8), dtype="bfloat16", seconds=1e-3, spread=1.0)

    def test_the_table_shows_the_share_of_the_cards_peak_by_class(self) -> None:
        card = find_card("h200")
        times = [
            replace(self.TIME, flops=int(card.flops_per_second["bfloat16"] * 0.8e-3)),
            replace(self.TIME, flops=int(card.flops_per_second["bfloat16"] * 0.4e-3)),
            replace(self.TIME, kind="copy", op="to_device", num_bytes=int(card.bus_bytes_per_second * 0.5e-3)),
            replace(self.TIME, kind="launch", op="view", seconds=4e-6),
            replace(self.TIME, kind="quantized", op="adam8bit", seconds=0.0, fault="no bitsandbytes"),
        ]
        lines = [line.split() for line in curve_table(times, CEILINGS, "plain").splitlines()]
        assert [
            "gemm",
            "bfloat16",
            "2",
            "40.0",
            "%",
            "60.0",
            "%",
            "80.0",
            "%",
            "mm_nt",
            "8",
            "x",
            "8",
            "x",
            "8",
        ] in lines
        assert any(line[:5] == ["copy", "bfloat16", "1", "50.0", "%"] for line in lines)
        assert any(line[:5] == ["launch", "bfloat16", "1", "4.0", "us"] for line in lines)
        assert not any("quantized" in line for line in lines)
        assert "- 1 calls did not run (adam8bit): no bitsandbytes" in curves_explained(times, CEILINGS)

    def test_a_card_that_stops_answering_ends_the_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any) -> Any:
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(torch.cuda, "synchronize", refuse)
        rows = [Row(kind="gemm", op=name, shape=(1,), dtype=torch.float32, setup=refuse) for name in ("a", "b")]
        times: list[KernelTime] = []
        told = measure_curves(rows, torch.device("cuda"), end_s=float("inf"), on_row=times.append)
        assert told.startswith("the card stopped answering after gemm a (1,): RuntimeError: an illegal")
        assert [time.op for time in times] == ["a"]
        assert measure_curves(rows, torch.device("cpu"), end_s=0.0, on_row=times.append) == (
            "2 of 2 rows were not timed: no time left"
        )


class TestRecords:
    def test_the_first_step_counts_for_memory_and_not_for_speed(self) -> None:
        figures = measured(30.0, 8.0, 10.0, 9.0)
        assert figures.step_time_s == 9.0
        assert measured(30.0).step_time_s == 30.0
        assert measured().step_time_s is None
        assert figures.device_used_bytes == 2000 + 800

    def test_the_table_shows_measurement_plan_and_error(self, tmp_path: Path) -> None:
        machine = FakeMachine(plans={"c": Answer(outcome=Outcome.ERROR, message="nothing fits")})
        machine.run([part("a"), part("c")])
        (path,) = write_evidence(machine.records, tmp_path)
        text = path.read_text(encoding="ascii")
        assert path == tmp_path / "tables" / "evidence.md"
        assert "780 TFLOP/s" in text
        row = next(line for line in text.splitlines() if line.startswith("| a "))
        assert "| 4 " in row  # 32 tokens in 8 s
        assert "(-20.0 %)" in row  # tokens/s 3.2 against 4
        assert "(+10.0 %)" in row  # allocated 1100 against 1000, reserved 2200 against 2000
        assert "(+0.0 %)" in row  # device 2800 against 2800
        assert "- `c`: skipped, no plan: nothing fits" in text

    def test_without_records_there_is_no_table(self, tmp_path: Path) -> None:
        assert write_evidence([], tmp_path) == []
        assert not list(tmp_path.iterdir())

    def test_a_skipped_repetition_does_not_hide_a_run(self) -> None:
        machine = FakeMachine()
        machine.run([part("a")])
        run = machine.records[1]
        skipped = replace(run, outcome=Outcome.SKIPPED, training=None)
        assert newest_evidence([run, skipped]) == [run]
        assert newest_evidence([skipped, run]) == [run]


class TestOverlap:
    def test_hidden_time_is_what_copies_and_kernels_share(self) -> None:
        overlap = copy_overlap(
            [
                DeviceEvent("gemm", "kernel", 0.0, 4.0),
                DeviceEvent("softmax", "kernel", 3.0, 3.0),  # overlaps the one before
                DeviceEvent("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 5.0, 3.0),  # 1 of 3 hidden
                DeviceEvent("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 7.0, 2.0),  # 1 beside the other copy
                DeviceEvent("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 8.5, 0.5),  # hides half a second
            ]
        )
        assert overlap is not None
        assert overlap.window_s == 9.0
        assert overlap.kernel_s == 6.5
        assert (overlap.copy_in_s, overlap.copy_out_s, overlap.copy_s) == (3.0, 2.0, 4.0)
        assert overlap.hidden_s == 1.5
        assert overlap.hidden_share == 1.5 / 4.0
        assert overlap.pageable_s == 2.0
        assert (overlap.num_kernels, overlap.num_copies) == (3, 2)

    def test_nothing_copied_has_no_share_and_nothing_done_no_overlap(self) -> None:
        overlap = copy_overlap([DeviceEvent("gemm", "kernel", 0.0, 1.0)])
        assert overlap is not None
        assert overlap.hidden_share is None
        assert copy_overlap([]) is None

    def test_a_chrome_trace_is_read_in_seconds_without_the_processors_events(self, tmp_path: Path) -> None:
        events = [
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 2_000_000, "dur": 500_000},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 2},
            {"ph": "M", "name": "process_name"},
        ]
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": events}))
        assert read_chrome_trace(path) == [DeviceEvent("gemm", "kernel", 2.0, 0.5)]


class TestPlan:
    def test_a_known_card_keeps_its_facts_and_gets_cap_and_context(self) -> None:
        card = card_under_cap(CEILINGS, 24 * GIB)
        assert card == replace(find_card("h200"), memory_mib=24 * 1024, context_mib=601)

    def test_an_unknown_card_gets_the_rates_that_were_measured(self) -> None:
        card = card_under_cap(replace(CEILINGS, name="NVIDIA Z1", compute_capability="13.0"), 16 * GIB)
        assert card.tflops_bf16 * curves_in("all").gemm == pytest.approx(780.0)
        assert card.pcie_gbps * 0.8 == pytest.approx(55.0)
        assert card.memory_mib == 16 * 1024

    def test_cards_of_one_name_are_told_apart_by_their_multiprocessors(self) -> None:
        for name in ("rtx-3080-10gb", "rtx-3080-12gb"):
            card = find_card(name)
            found = card_under_cap(replace(CEILINGS, name=card.name, num_sms=card.sms), 8 * GIB)
            assert found == replace(card, memory_mib=8 * 1024, context_mib=601)

    def test_an_unknown_card_without_bfloat16_tensor_cores_has_one_rate(self) -> None:
        card = card_under_cap(replace(CEILINGS, name="Quadro Z1", compute_capability="7.5"), 16 * GIB)
        assert card.tflops_bf16 == card.tflops_fp32 == pytest.approx(780.0 / curves_in("all").gemm)

    def test_a_given_stack_is_run_dry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(model_config.PRESETS, "tiny", TINY)
        job = PlanJob(part=part(), card=find_card("h200"), host=Host(memory_gib=64))
        found = plan_part(job)
        assert (found.fault, found.micro_batch_size, found.accum_steps) == ("", 2, 1)
        assert found.predicted.fits
        assert len(found.predicted.steps) == 2
        assert decode(PlannedPart, json.loads(to_json(found)), source="", unions={Optimization: OPTIMIZATIONS}) == found
        away = Stack(name="away", description="", optimizations=(OptimizerOffload(), WeightStreaming()))
        crowded = Host(memory_gib=4 + 1e-6, reserved_gib=4)
        assert "of host memory" in plan_part(replace(job, part=part(stack=away), host=crowded)).fault

    def test_a_search_ends_in_a_stack_that_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(model_config.PRESETS, "tiny", TINY)
        job = PlanJob(part=part(stack=None), card=find_card("h200"), host=Host(memory_gib=64))
        found = plan_part(job)
        assert found.stack.name == "recommended"
        assert not found.fault
        assert found.micro_batch_size * found.accum_steps == 2

    @pytest.mark.every_case
    def test_a_plan_is_made_in_a_fresh_process(self) -> None:
        small = part(model="gpt2-small", seq_len=64)
        job = PlanJob(part=small, card=find_card("h200"), host=Host(memory_gib=64))
        answer = answer_of(start_child("plan", job, 300.0).wait())
        assert answer.planned is not None, answer.message
        assert answer.planned.predicted.fits

    def test_a_process_that_crashes_or_takes_too_long_gives_an_answer(self) -> None:
        job = PlanJob(part=part(), card=find_card("h200"), host=Host(memory_gib=64))
        late = answer_of(start_child("plan", job, 0.0).wait())
        assert "its time limit" in late.message
        crashed = answer_of(start_child("no_such_verb", job, 300.0).wait())  # type: ignore[arg-type]
        assert crashed.outcome is Outcome.ERROR
        assert "ended with code 1: AttributeError" in crashed.message


@pytest.fixture
def fake_card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let the processor pass for a CUDA card whose allocator holds what the test says."""
    facts: dict[str, Any] = {"allocated": 1000, "reserved": 2000, "free": 70 * GIB, "fraction": None, "resets": 0}

    def reset(_device: object) -> None:
        facts["resets"] += 1

    fakes: dict[str, Callable[..., Any]] = {
        "init": lambda: None,
        "current_device": lambda: 0,
        "synchronize": lambda _device=None: None,
        "mem_get_info": lambda _device: (facts["free"], 80 * GIB),
        "memory_reserved": lambda _device: facts["reserved"],
        "max_memory_allocated": lambda _device: facts["allocated"] + facts["resets"],
        "max_memory_reserved": lambda _device: facts["reserved"],
        "memory_stats": lambda _device: {"num_alloc_retries": 3},
        "reset_peak_memory_stats": reset,
        "set_per_process_memory_fraction": lambda share, _device: facts.update(fraction=share),
        "get_device_properties": lambda _device: type("Properties", (), {"total_memory": 80 * GIB})(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    event = {"action": "alloc", "size": 512, "addr": 0, "frames": [{"filename": "/a/b.py", "line": 3, "name": "f"}]}
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **settings: facts.update(settings))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[event]]})
    for module in (measure, cuda_train):
        monkeypatch.setattr(
            module, "open_transfer", lambda _device, **settings: DirectTransfer(torch.device("cpu"), **settings)
        )

    class Reader:
        def read(self) -> Any:
            return type("Memory", (), {"used_bytes": 5 * GIB})()

        def close(self) -> None:
            facts["closed"] = True

    monkeypatch.setattr(measure, "DeviceReader", lambda _index: Reader())
    monkeypatch.setitem(model_config.PRESETS, "tiny", TINY)
    return facts


def train_job(**changes: Any) -> TrainJob:
    job = TrainJob(
        part=part(num_steps=3), planned=planned(), cap_bytes=16 * GIB, context_bytes=GIB, host_limit_bytes=GIB,
        used_before_bytes=4 * GIB, limit_s=1e6,
    )  # fmt: skip
    return replace(job, **changes)


class TestTrain:
    def test_steps_are_measured_one_by_one_under_the_cap(self, fake_card: dict[str, Any]) -> None:
        answer = cuda_worker.train(train_job())
        assert (answer.outcome, answer.message) == (Outcome.OK, "")
        assert answer.measured is not None
        assert [step.step for step in answer.measured.steps] == [1, 2, 3]
        assert [step.peak_allocated_bytes for step in answer.measured.steps] == [1001, 1002, 1003]
        assert answer.measured.outside_bytes == GIB - 2000
        assert fake_card["fraction"] == 15 / 80
        assert fake_card["closed"]

    def test_a_part_without_time_keeps_the_steps_it_has(self, fake_card: dict[str, Any]) -> None:  # noqa: ARG002
        answer = cuda_worker.train(train_job(limit_s=0.0))
        assert answer.measured is not None
        assert len(answer.measured.steps) == 1
        assert answer.message == "1 of 3 steps; no time for more"

    def test_a_refused_request_keeps_the_steps_before_it(
        self, fake_card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_step = cuda_train.run_step

        def refuse(*arguments: Any) -> Any:
            if fake_card["resets"] == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return run_step(*arguments)

        monkeypatch.setattr(cuda_train, "run_step", refuse)
        answer = cuda_worker.train(train_job())
        assert answer.outcome is Outcome.OUT_OF_MEMORY
        assert answer.measured is not None
        assert len(answer.measured.steps) == 1
        assert answer.measured.outside_bytes == GIB - 2000

    def test_a_busy_card_is_an_error_that_says_so(self, fake_card: dict[str, Any]) -> None:
        fake_card["free"] = 5 * GIB
        answer = cuda_worker.train(train_job())
        assert answer.outcome is Outcome.ERROR
        assert "end other programs" in answer.message

    def test_a_step_that_cannot_be_profiled_leaves_the_others(
        self, fake_card: dict[str, Any], monkeypatch: pytest.MonkeyPatch  # noqa: ARG002
    ) -> None:  # fmt: skip
        def refuse(**_settings: Any) -> Any:
            raise RuntimeError("CUPTI is not permitted")

        monkeypatch.setattr(torch.profiler, "profile", refuse)
        answer = cuda_worker.train(train_job(part=part(num_steps=2, profiles=True)))
        assert (answer.outcome, answer.message) == (Outcome.OK, "not profiled: CUPTI is not permitted")
        assert answer.measured is not None
        assert len(answer.measured.steps) == 2

    def test_validate_counts_each_micro_batch_and_the_context(self, fake_card: dict[str, Any]) -> None:
        fake_card["free"] = 14 * GIB
        card = replace(find_card("h200"), memory_mib=16 * 1024, context_mib=1024)
        workload = measure.BatchWorkload(batch_size=3, seq_len=16)
        figures = measure.measure_on_cuda(TINY, VANILLA.plan(), card, workload, embedded_corpus(), TrainerConfig())
        assert len(figures.step_times_s) == 5
        assert figures.peak_allocated_bytes == 1007
        assert figures.device_used_bytes == 0 + 2000
        assert figures.num_alloc_retries == 3
        assert figures.cap_bytes == 14 * GIB  # a little less than 15 was free


class TestCommand:
    def test_without_a_card_one_sentence_and_nothing_is_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert main(["evidence", "--results", str(tmp_path)]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith("hybridtrain: no CUDA card: nothing was measured;")
        assert captured.err.count("\n") == 1
        assert not captured.out
        assert not list(tmp_path.iterdir())

    def test_without_a_card_json_says_the_same(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert main(["evidence", "--json", "--results", str(tmp_path)]) == 1
        assert json.loads(capsys.readouterr().out)["message"] == cuda_session.NO_CARD

    def test_an_unknown_part_is_a_wrong_argument(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["evidence", "--only", "7b-25"]) == 2
        assert "part '7b-25' is unknown" in capsys.readouterr().err

    def test_a_full_card_is_told_before_anything_runs(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        machine = FakeMachine(used_bytes=CARD_BYTES - GIB)
        monkeypatch.setattr(cuda_session, "_session", machine.session)
        assert main(["evidence", "--results", str(tmp_path)]) == 1
        assert "are in use, and the smallest part needs" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_records_and_table_are_written_and_a_second_call_adds_to_them(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
        monkeypatch.setattr(cuda_session, "_session", FakeMachine().session)
        arguments = ["evidence", "--results", str(tmp_path), "--only", "7b-24,50b-24"]
        assert main(arguments) == 0
        assert main([*arguments, "--json"]) == 0
        said = capsys.readouterr()
        assert "7b-24: llama-7b under 24 GiB" in said.err
        summary = json.loads(said.out.splitlines()[-1])
        assert [record["part"] for record in summary["records"]] == ["ceilings", "7b-24", "50b-24"]
        assert len(read_evidence(tmp_path / "records")) == 6
        assert "| 7b-24" in (tmp_path / "tables" / "evidence.md").read_text()


TINY_SCRIPT = """
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
layer = torch.nn.Linear(64, 64).to(device)
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(4):
    layer(torch.ones(8, 64, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OUT_OF_MEMORY = "import torch\nraise torch.OutOfMemoryError('CUDA out of memory')\n"


class Rehearsal(FakeMachine):
    """A machine that does the work of the processes in this one, when they are asked for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: dict[str, Callable[[], None]]) -> None:
        super().__init__(used_bytes=5 * GIB)
        self._patch, self._ends = monkeypatch, ends

    def start(self, verb: str, job: Any, limit_s: float) -> FakeChild:
        child = super().start(verb, job, limit_s)
        name = f"{verb} {job.script.stem}" if hasattr(job, "script") else verb
        if verb not in {"ceilings", "kernels"}:
            child.reply = lambda: self._do(name, verb, job)
        return child

    def _do(self, name: str, verb: str, job: Any) -> Answer | None:
        if name in self._ends:
            self._ends[name]()
            return None
        with self._patch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            answer = getattr(cuda_worker, verb)(job)
        return decode(Answer, json.loads(to_json(answer)), source=verb, unions={Optimization: OPTIMIZATIONS})


@pytest.mark.usefixtures("fake_card")
class TestRehearsal:
    """The whole session, with the processor as its card."""

    @pytest.fixture(autouse=True)
    def parts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CardPart]:
        folder = tmp_path / "scripts"
        folder.mkdir()
        import_module("torch._dynamo")  # while nothing is replaced: optimizers import it at their first step
        monkeypatch.chdir(tmp_path)  # scripts leave it
        monkeypatch.setattr(cuda_worker, "_BEGIN_S", float("inf"))  # no process starts here
        for name, text in {"ok": TINY_SCRIPT, "full": OUT_OF_MEMORY, "crash": "", "slow": "", "wrong": "1 / 0"}.items():
            script(folder, name, text)
        whole = {found.name: found for found in all_parts([])}
        parts: list[CardPart] = [whole["curves"], *script_parts(folder), whole["kernels"], part(num_steps=1)]
        monkeypatch.setattr(cuda_session, "all_parts", lambda _stacks: parts)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
        return parts

    def test_each_part_ends_as_it_must_and_the_records_tell(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        machine = Rehearsal(monkeypatch, {"script crash": lambda: None})
        machine.plan_s["script slow"] = 100.0
        monkeypatch.setattr(cuda_session, "_session", machine.session)
        assert main(["evidence", "--results", str(tmp_path)]) == 1  # some parts failed
        found = {record.part: record for record in read_evidence(tmp_path / "records")}
        assert {name: record.outcome.value for name, record in found.items()} == {
            "ceilings": "ok", "curves": "ok", "script/ok": "ok", "script/full": "out_of_memory",
            "script/crash": "error", "script/slow": "error", "script/wrong": "error", "kernels": "ok", "tiny": "ok",
        }  # fmt: skip
        assert all(record.evidence == "measured" and record.versions["torch"] for record in found.values())
        assert found["script/crash"].message == "worker ended with code -11: no message"
        assert "its time limit" in found["script/slow"].message
        assert found["script/wrong"].message == "ZeroDivisionError at wrong.py:2: division by zero"
        run = found["script/ok"].script
        assert run is not None
        assert run.planned is not None
        assert run.planned.fits
        assert run.measured is not None
        assert len(run.measured.step_seconds) == 3
        assert set(run.ratios) == {"peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "step_time_s"}
        times = found["curves"].curves
        assert len({time.kind for time in times}) == 11
        refused = {"scaled_mm_fp8_rowwise"}  # torch 2.11 has none on a processor
        assert {time.op for time in times if time.fault and time.kind != "quantized"} <= refused
        assert {time.fault for time in times if time.kind == "quantized"} == (
            {"ModuleNotFoundError: No module named 'bitsandbytes'"} if missing_package(("bitsandbytes",)) else {""}
        )
        assert (tmp_path / "records" / "curves.jsonl").exists()
        assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
            "full.json.gz", "ok.json.gz", "wrong.json.gz"
        ]  # fmt: skip
        table = (tmp_path / "tables" / "evidence.md").read_text()
        assert "| gemm " in table
        assert "| ok " in table
        assert "| tiny " in table
        assert "gemm" in capsys.readouterr().out

    def test_a_killed_session_keeps_what_it_has_and_another_call_goes_on(
        self, parts: list[CardPart], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def kill() -> None:
            raise KeyboardInterrupt

        parts[:] = [found for found in parts if found.name in {"script/full", "script/ok", "script/wrong"}]
        machine = Rehearsal(monkeypatch, {"script ok": kill, "plan_script full": lambda: None})
        monkeypatch.setattr(cuda_session, "_session", machine.session)
        arguments = ["evidence", "--results", str(tmp_path)]
        assert main(arguments) == 130
        assert [record.part for record in read_evidence(tmp_path / "records")] == ["ceilings", "script/full"]
        assert all(child.is_stopped for child in machine.children)
        monkeypatch.setattr(cuda_session, "_session", Rehearsal(monkeypatch, {}).session)
        assert main([*arguments, "--only", "script/ok"]) == 0
        assert "| full " in (tmp_path / "tables" / "evidence.md").read_text()
        assert [record.part for record in read_evidence(tmp_path / "records")][-1] == "script/ok"

    def test_the_kernels_of_the_command_are_one_part(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        told: dict[str, Any] = {"records": [1, 2], "not_run": ["c"], "faults": [], "lost_card": ""}

        def bench(arguments: Sequence[str]) -> int:
            assert list(arguments[:3]) == ["bench", "kernels", "--quick"]
            print(json.dumps(told))  # noqa: T201  what the command answers
            return 0

        monkeypatch.setattr(cuda_worker, "main", bench)
        job = cuda_worker.KernelsJob(results=tmp_path, limit_s=60.0)
        assert cuda_worker.kernels(job) == Answer(message="2 cases, 1 had no time")
        told["faults"] = ["swiglu: ours is wrong"]
        assert cuda_worker.kernels(job).outcome is Outcome.WRONG
        told["message"] = "results/records/kernels.jsonl:3: not a record"
        assert cuda_worker.kernels(job).outcome is Outcome.ERROR
