"""Records on disk, the keys that make a run unnecessary, and one whole ``validate`` with real worker processes."""

import json
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.config.decode import decode
from hybridtrain.config.encode import encode, to_json
from hybridtrain.data.corpus import Corpus, corpus_of_documents
from hybridtrain.errors import RecordError
from hybridtrain.optimizations import Int8Optimizer, MixedPrecision
from hybridtrain.virtual_gpu.card import find_card
from hybridvalidation.cli.main import main
from hybridvalidation.judge.verdict import judge_all
from hybridvalidation.records.environment import read_environment
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.record import (
    SCHEMA,
    AccuracyFigures,
    MeasuredFigures,
    MemoryFigures,
    Record,
    RefusedRequest,
    SeedResult,
    StepPeaks,
    Timeline,
)
from hybridvalidation.records.store import RecordStore
from hybridvalidation.runs import job as job_module
from hybridvalidation.runs import runner
from hybridvalidation.runs.job import Job, JobKind, make_job
from hybridvalidation.runs.runner import run_from_records, run_in_process
from hybridvalidation.scenario import (
    AccuracySpec,
    BatchWorkload,
    CardSpec,
    ModelSpec,
    Scenario,
    ScenarioTarget,
    Stack,
)
from hybridvalidation.scenario_files import ScenarioFiles
from tiny_models import GPT2_UNTIED, LLAMA_GROUPED

PROXY = replace(GPT2_UNTIED, vocab_size=256, max_seq_len=16, num_blocks=1, width=32, num_heads=2, num_kv_heads=2)
SCENARIO = Scenario(
    name="mine", says="A tiny model", model=ModelSpec(shape=GPT2_UNTIED), card=CardSpec(name="rtx-3090"),
    workload=BatchWorkload(batch_size=2, seq_len=8), stacks=("vanilla", "lean"),
    accuracy=AccuracySpec(
        proxy=PROXY, seeds=(0, 1, 2), num_steps=3, batch_size=2, seq_len=8, lr=1e-3, validation_batches=2
    ),
)  # fmt: skip
VANILLA = Stack(name="vanilla", says="nothing on")
CORPUS = corpus_of_documents({"a.txt": b"the quick brown fox " * 20}, name="fox", source="a fox")
SIZES = {"weight": 5, "activation": 7}
MEMORY = MemoryFigures(
    num_params=3, fits=False,
    steps=(
        StepPeaks(
            step=1, allocated_bytes=12, active_bytes=12, reserved_bytes=20, by_class=SIZES, stage="backward",
            unit="head",
        ),
    ),
    peak_allocated_bytes=12, peak_reserved_bytes=20, device_used_bytes=30, host_peak_bytes=1, by_class=SIZES,
    by_unit={"weight/head": 12},
    oom=RefusedRequest(
        step=1, stage="backward", unit="head", requested_bytes=9, allocated_bytes=12, reserved_bytes=20,
        capacity_bytes=24, by_class=SIZES, by_unit={"weight/head": 12},
    ),
    step_time_s=0.1 + 0.2, time_by_bound={"memory": 1e-300}, tokens_per_step=16, tokens_per_s=1e15 / 3, bound="memory",
    timeline=Timeline(times_s=(0.0, 1e-6), by_class={"weight": (5, 5), "activation": (0, 7)}),
)  # fmt: skip
ACCURACY = AccuracyFigures(
    num_params=1, num_tokens=2, num_validation_tokens=3, corpus="fox", corpus_digest="d",
    seeds=(SeedResult(seed=0, validation_loss=2 / 3, validation_accuracy=1.0, final_train_loss=0.0),),
)  # fmt: skip
MEASURED = MeasuredFigures(
    peak_allocated_bytes=1, peak_reserved_bytes=2, device_used_bytes=3, num_alloc_retries=0, step_times_s=(0.1,),
    tokens_per_s=7.5, cap_bytes=9,
)  # fmt: skip


def record(key: str = "k", **changes: Any) -> Record:
    plain = Record(
        key=key, kind="dry_run", scenario="mine", stack="vanilla", evidence=Evidence.PLANNED, outcome=Outcome.OK,
        started_at="2026-01-01T00:00:00+00:00", duration_s=1.5, environment=read_environment(),
        plan={"weight.codec": "float32"},
    )  # fmt: skip
    return replace(plain, **changes)


RECORDS = {
    "memory": record(memory=MEMORY),
    "accuracy": record(kind="accuracy", accuracy=ACCURACY),
    "measured": record(kind="measured", measured=MEASURED),
    "error": record(outcome=Outcome.ERROR, message='worker said "no"\nand \u00e9\u2028 went'),
}


@pytest.fixture(scope="module", autouse=True)
def _no_card() -> Iterator[None]:
    """Make the same runs, here and in worker processes, with a card and without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "records")


def path_of(store: RecordStore) -> Path:
    return store.folder / "mine.jsonl"


# --- the store --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_comes_back_as_it_was(store: RecordStore, name: str) -> None:
    store.append(RECORDS[name])
    assert store.read("mine") == [RECORDS[name]]
    assert decode(Record, json.loads(json.dumps(encode(RECORDS[name]))), source="text") == RECORDS[name]


def test_records_are_appended_and_never_changed(store: RecordStore) -> None:
    contents = [b""]
    for item in RECORDS.values():
        store.append(item)
        contents.append(path_of(store).read_bytes())
    for before, after in pairwise(contents):
        assert after.startswith(before)
        assert after.count(b"\n") == before.count(b"\n") + 1
    assert store.read("mine") == list(RECORDS.values())


def test_each_scenario_has_its_file(store: RecordStore) -> None:
    store.append(record())
    store.append(record(scenario="other"))
    assert store.scenarios() == ["mine", "other"]
    assert [item.scenario for item in store.read("other")] == ["other"]


def test_without_a_file_there_are_no_records(store: RecordStore) -> None:
    assert (store.read("mine"), store.scenarios(), store.find("mine", "k")) == ([], [], None)


def test_the_newest_record_of_a_key_is_found(store: RecordStore) -> None:
    for item in (record("a", duration_s=1.0), record("b"), record("a", duration_s=2.0)):
        store.append(item)
    found = store.find("mine", "a")
    assert found is not None
    assert found.duration_s == 2.0
    assert store.find("mine", "c") is None


@pytest.mark.parametrize("num_whole", [0, 1, 2])
@pytest.mark.parametrize("cut", [1, 40, -1])
def test_a_record_that_was_cut_short_is_named_and_nothing_follows_it(
    store: RecordStore, num_whole: int, cut: int
) -> None:
    for _ in range(num_whole):
        store.append(record())
    with_cut = b"" if num_whole == 0 else path_of(store).read_bytes()
    store.folder.mkdir(exist_ok=True)
    path_of(store).write_bytes(with_cut + to_json(record()).encode()[:cut])
    before = path_of(store).read_bytes()
    for attempt in (lambda: store.read("mine"), lambda: store.append(record()), lambda: store.find("mine", "k")):
        with pytest.raises(RecordError, match="cut short") as caught:
            attempt()
        assert str(caught.value).startswith(f"{path_of(store)}:{num_whole + 1}: ")
        assert f"delete line {num_whole + 1}" in str(caught.value)
    assert path_of(store).read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"not json",
        b"\xff",
        b"[]",
        b'{"key": "k"}',
        to_json(record()).replace(f'"schema":{SCHEMA}', f'"schema":{SCHEMA + 1}').encode(),
        to_json(record()).replace('"kind"', '"sort"').encode(),
        to_json(record()).replace('"outcome":"ok"', '"outcome":"fine"').encode(),
        to_json(record()).replace("1.5", "NaN").encode(),
        b"[" * 100_000,
        b"9" * 5000,
        to_json(record()).replace('"ok"', '"\\ud800"').encode(),
    ],
    ids=["blank", "text", "bytes", "list", "part", "schema", "field", "enum", "nan", "deep", "digits", "surrogate"],
)
def test_a_line_that_is_no_record_is_named_with_file_and_line(store: RecordStore, line: bytes) -> None:
    store.append(record())
    with path_of(store).open("ab") as file:
        file.write(line + b"\n")
    store.append(record())
    with pytest.raises(RecordError, match="not a record of this version") as caught:
        store.read("mine")
    assert str(caught.value).startswith(f"{path_of(store)}:2: ")


def test_a_record_of_another_schema_says_which_is_read(store: RecordStore) -> None:
    store.folder.mkdir()
    path_of(store).write_text(to_json(record()).replace(f'"schema":{SCHEMA}', '"schema":99') + "\n")
    with pytest.raises(RecordError, match=f"99 must be {SCHEMA}"):
        store.read("mine")


# --- keys -------------------------------------------------------------------------------------------------------


def key(kind: JobKind, scenario: Scenario = SCENARIO, stack: Stack = VANILLA, corpus: Corpus = CORPUS) -> str:
    return make_job(kind, scenario, stack, corpus).key


ACCURACY_CHANGES: dict[str, Any] = {
    "proxy": replace(PROXY, num_blocks=2), "seeds": (0, 1, 3), "num_steps": 4, "batch_size": 4, "seq_len": 9,
    "lr": 2e-3, "validation_batches": 3,
}  # fmt: skip
PLANNED_CHANGES: dict[str, Any] = {
    "model": ModelSpec(preset="gpt2-small"),
    "card": CardSpec(name="rtx-4090"),
    "workload": BatchWorkload(batch_size=4, seq_len=8),
}


@pytest.mark.parametrize("name", PLANNED_CHANGES)
def test_what_a_plan_depends_on_changes_its_key_only(name: str) -> None:
    other = replace(SCENARIO, **{name: PLANNED_CHANGES[name]})
    assert key("dry_run", other) != key("dry_run")
    assert key("accuracy", other) == key("accuracy")


@pytest.mark.parametrize("name", ACCURACY_CHANGES)
def test_what_an_accuracy_depends_on_changes_its_key_only(name: str) -> None:
    other = replace(SCENARIO, accuracy=replace(SCENARIO.accuracy, **{name: ACCURACY_CHANGES[name]}))
    assert key("accuracy", other) != key("accuracy")
    assert key("dry_run", other) == key("dry_run")


def test_a_card_of_ones_own_is_told_apart_by_every_figure() -> None:
    cards = [replace(find_card("rtx-3090"), context_mib=context) for context in (426, 427)]
    keys = {key("dry_run", replace(SCENARIO, card=CardSpec(custom=card))) for card in cards}
    assert len(keys) == 2


@pytest.mark.parametrize("kind", ["dry_run", "accuracy"])
def test_the_stack_changes_the_key(kind: JobKind) -> None:
    stacks = [(), (Int8Optimizer(),), (MixedPrecision(),), (MixedPrecision(master="absent"),)]
    keys = {key(kind, stack=replace(VANILLA, optimizations=stack)) for stack in stacks}
    assert len(keys) == len(stacks)


@pytest.mark.parametrize("kind", ["dry_run", "accuracy"])
@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"says": "Other words"},
        {"targets": (ScenarioTarget(id="t"),)},
        {"stacks": ("lean", "vanilla")},
    ],
    ids=["name", "says", "targets", "order"],
)
def test_names_and_targets_do_not_change_the_key(kind: JobKind, changes: dict[str, Any]) -> None:
    assert key(kind, replace(SCENARIO, **changes)) == key(kind)


@pytest.mark.parametrize("kind", ["dry_run", "accuracy"])
def test_the_name_of_a_stack_and_the_order_of_its_parts_do_not_change_the_key(kind: JobKind) -> None:
    parts = (Int8Optimizer(), MixedPrecision())
    one = Stack(name="one", says="one", optimizations=parts)
    other = Stack(name="other", says="other", optimizations=parts[::-1])
    assert key(kind, stack=one) == key(kind, stack=other)


def test_only_a_run_that_reads_the_corpus_depends_on_it() -> None:
    other = replace(CORPUS, digest="other")
    assert key("accuracy", corpus=other) != key("accuracy")
    assert key("dry_run", corpus=other) == key("dry_run")


@pytest.mark.parametrize("kind", ["dry_run", "accuracy"])
def test_another_source_is_another_run(monkeypatch: pytest.MonkeyPatch, kind: JobKind) -> None:
    before = key(kind)
    monkeypatch.setattr(job_module, "source_digest", lambda: "another")
    assert key(kind) != before


def test_kinds_are_told_apart() -> None:
    assert key("dry_run") != key("accuracy")


# --- workers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crash() -> Record:
    job = replace(make_job("accuracy", SCENARIO, VANILLA, CORPUS), accuracy=None)
    return run_in_process(job)


def test_a_crash_of_a_worker_is_an_outcome_with_its_message(crash: Record) -> None:
    assert crash.outcome is Outcome.ERROR
    assert "worker ended with code 1: " in crash.message
    assert "AssertionError: an accuracy job carries its specification" in crash.message
    assert (crash.kind, crash.scenario, crash.stack) == ("accuracy", "mine", "vanilla")
    assert (crash.memory, crash.accuracy, crash.measured) == (None, None, None)
    assert crash.duration_s > 0


def test_a_crash_is_never_taken_for_a_finished_run(crash: Record, store: RecordStore) -> None:
    store.append(crash)
    assert store.find("mine", key("accuracy")) is None


def test_a_crash_tells_no_path_of_the_machine(crash: Record) -> None:
    assert_no_place(to_json(crash))


def test_every_job_reaches_its_worker_whole() -> None:
    stack = replace(VANILLA, optimizations=(MixedPrecision(), Int8Optimizer()))
    accuracy = replace(SCENARIO.accuracy, proxy=replace(PROXY, family="llama"))
    scenario = replace(SCENARIO, model=ModelSpec(shape=LLAMA_GROUPED), accuracy=accuracy)
    job = make_job("dry_run", scenario, stack, CORPUS)
    done = run_in_process(job)
    assert (done.key, done.kind, done.stack, done.evidence) == (job.key, "dry_run", "vanilla", Evidence.PLANNED)
    assert done.plan["optim_state.codec"] == "int8_blocks"
    assert done.memory is not None
    assert done.memory.num_params == LLAMA_GROUPED.num_params


def assert_no_place(text: str) -> None:
    for place in (str(Path(__file__).parents[3]), str(Path.home()) + "/", "/tmp/", socket.gethostname() + "."):  # noqa: S108
        assert place not in text, place


# --- one whole validate -----------------------------------------------------------------------------------------


SHAPE = """\
family = "gpt2"
vocab_size = 256
max_seq_len = 16
num_blocks = 1
width = 32
num_heads = 2
num_kv_heads = 2
ffn_width = 64
"""
# Ten steps are enough to learn that a blank is the most likely byte: accuracies are above 0.
FILES = {
    "mine.toml": f"""\
name = "mine"
says = "A tiny model"
stacks = ["vanilla", "lean"]

[model.shape]
{SHAPE}
[card.custom]
name = "Tiny card"
memory_mib = 64
compute_capability = "8.9"
tflops_bf16 = 100.0
tflops_fp32 = 50.0
memory_gbps = 500.0
pcie_gbps = 30.0
context_mib = 1

[workload]
batch_size = 2
seq_len = 8

[accuracy]
seeds = [0, 1, 2]
num_steps = 10
batch_size = 4
seq_len = 16
lr = 1e-2
validation_batches = 4

[accuracy.proxy]
{SHAPE}
[[targets]]
id = "small"
stacks = ["lean", "any"]

[[targets]]
id = "unknown-metric"
stacks = ["lean"]
""",
    "targets.toml": """\
[[target]]
id = "small"
source = ["000"]
says = "a tiny model trains in 1 GiB"
metric = "peak_vram_gib"
direction = "max"
value = 1.0

[[target]]
id = "unknown-metric"
source = ["000"]
says = "it is kind"
metric = "kindness_pct"
direction = "min"
value = 1.0
""",
    "stacks/vanilla.toml": 'name = "vanilla"\nsays = "nothing on"\n',
    "stacks/lean.toml": """\
name = "lean"
says = "bfloat16, in two pieces"

[[optimizations]]
kind = "mixed_precision"

[[optimizations]]
kind = "grad_accumulation"
grad_accum_steps = 2
""",
}


@dataclass(frozen=True)
class Place:
    """A folder of scenarios and one of results."""

    root: Path

    def run(self, verb: str, *arguments: str) -> int:
        folders = ["--scenarios", str(self.root / "scenarios"), "--results", str(self.root / "results")]
        return main([verb, *arguments, *folders])

    @property
    def store(self) -> RecordStore:
        return RecordStore(self.root / "results" / "records")

    @property
    def table(self) -> Path:
        return self.root / "results" / "tables" / "mine.md"

    @property
    def plots(self) -> list[Path]:
        return sorted((self.root / "results" / "plots").iterdir())

    def change(self, name: str, old: str, new: str) -> None:
        path = self.root / "scenarios" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One ``validate`` with four worker processes, for all tests below; they do not write here."""
    place = Place(tmp_path_factory.mktemp("validated"))
    for name, text in FILES.items():
        path = place.root / "scenarios" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert place.run("validate", "mine") == 0
    return place


@pytest.fixture
def copied(validated: Place, tmp_path: Path) -> Place:
    """The same, for tests that write."""
    place = Place(tmp_path / "copy")
    shutil.copytree(validated.root, place.root)
    return place


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Note every job that would be run instead of running it."""
    jobs: list[Job] = []

    def note(job: Job) -> Record:
        jobs.append(job)
        seeds = tuple(replace(ACCURACY.seeds[0], seed=seed) for seed in (0, 1, 2))
        figures = replace(ACCURACY, seeds=seeds) if job.kind == "accuracy" else None
        return record(key=job.key, kind=job.kind, scenario=job.scenario, stack=job.stack.name, accuracy=figures)

    monkeypatch.setattr(runner, "run_in_process", note)
    return jobs


def test_every_kind_and_stack_has_one_record(validated: Place) -> None:
    records = validated.store.read("mine")
    places = sorted((item.kind, item.stack, item.outcome, item.evidence) for item in records)
    assert places == [
        ("accuracy", "lean", "ok", "executed"),
        ("accuracy", "vanilla", "ok", "executed"),
        ("dry_run", "lean", "ok", "planned"),
        ("dry_run", "vanilla", "ok", "planned"),
    ]
    assert len({item.key for item in records}) == 4


def test_records_are_evidence(validated: Place) -> None:
    for item in validated.store.read("mine"):
        assert item.environment == replace(read_environment(), dirty=item.environment.dirty)
        assert item.duration_s > 0
        assert item.started_at.endswith("+00:00")
        assert item.plan["compute_dtype"] == ("bfloat16" if item.stack == "lean" else "float32")
        if item.kind == "dry_run":
            assert item.memory is not None
            assert item.memory.timeline is not None
            assert sum(item.memory.by_class.values()) == item.memory.peak_allocated_bytes
        else:
            assert item.accuracy is not None
            assert [seed.seed for seed in item.accuracy.seeds] == [0, 1, 2]
            assert (item.accuracy.num_tokens, item.accuracy.num_validation_tokens) == (10 * 4 * 16, 4 * 4 * 16)
            assert item.accuracy.corpus == "embedded"


def test_no_record_tells_host_or_path(validated: Place) -> None:
    assert_no_place((validated.store.folder / "mine.jsonl").read_text())


def test_seeds_differ_and_stacks_start_alike(validated: Place) -> None:
    by_stack = {item.stack: item.accuracy for item in validated.store.read("mine") if item.accuracy is not None}
    for figures in by_stack.values():
        assert len({seed.final_train_loss for seed in figures.seeds}) == 3
    for own, other in zip(by_stack["lean"].seeds, by_stack["vanilla"].seeds, strict=True):
        # Same weights, same batches, ten steps: apart by bfloat16's 8 bits in a loss below ln(256) = 5.5.
        assert own.final_train_loss == pytest.approx(other.final_train_loss, abs=0.1)
        assert own.final_train_loss != other.final_train_loss


def test_the_table_tells_stacks_figures_and_verdicts(validated: Place) -> None:
    text = validated.table.read_text()
    assert text.startswith("# A tiny model: ")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert [row[:2] for row in rows if row[0] in {"vanilla", "lean"}][:2] == [["vanilla", "yes"], ["lean", "yes"]]
    head, baseline = rows[0], next(row for row in rows if row[0] == "vanilla")
    assert baseline[head.index("top-1 kept %")] == "100.00 [100.00, 100.00]"
    verdicts = [row[:3] for row in rows if row[0] in {"small", "unknown-metric"}]
    assert verdicts == [
        ["small", "holds", "planned"],
        ["small", "holds", "planned"],
        ["unknown-metric", "unproven", "-"],
    ]
    for word in ("planned", "estimated", "executed"):
        assert word in text


def test_every_picture_of_the_table_is_there(validated: Place) -> None:
    names = [path.name for path in validated.plots]
    assert names == ["mine-accuracy.png", "mine-peak.png", "mine-timeline.png"]
    text = validated.table.read_text()
    assert all(f"](../plots/{name})" in text for name in names)


def test_pictures_are_whole_pngs_of_some_size(validated: Place) -> None:
    for path in validated.plots:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert content.endswith(b"IEND\xaeB`\x82")
        width, height = struct.unpack(">II", content[16:24])
        assert width > 600, path.name
        assert height > 300, path.name
        assert len(content) > 8_000, "an empty picture of this size has fewer bytes"


def test_verdicts_follow_from_records(validated: Place) -> None:
    files = ScenarioFiles(validated.root / "scenarios")
    scenario = files.scenario("mine")
    run = run_from_records(scenario, [files.stack(name) for name in scenario.stacks], validated.store)
    verdicts = judge_all(run, files.targets())
    assert [(item.target, item.status) for item in verdicts] == [
        ("small", "holds"),
        ("small", "holds"),
        ("unknown-metric", "unproven"),
    ]


def test_a_second_validate_runs_nothing_and_writes_the_same(
    copied: Place, no_worker: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in [copied.table, *copied.plots, copied.store.folder / "mine.jsonl"]}
    assert copied.run("validate", "mine") == 0
    assert no_worker == []
    assert "0 runs made, 4 read from records" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in before} == before


def test_a_report_rebuilds_the_same_bytes_from_records_alone(copied: Place, no_worker: list[Job]) -> None:
    files = [copied.table, *copied.plots]
    before = {path: path.read_bytes() for path in files}
    for path in files:
        path.unlink()
    assert copied.run("report") == 0
    assert {path: path.read_bytes() for path in files} == before
    assert no_worker == []


def test_fresh_repeats_every_run(copied: Place, no_worker: list[Job]) -> None:
    copied.run("validate", "mine", "--fresh")
    assert sorted((job.kind, job.stack.name) for job in no_worker) == [
        ("accuracy", "lean"),
        ("accuracy", "vanilla"),
        ("dry_run", "lean"),
        ("dry_run", "vanilla"),
    ]
    assert len(copied.store.read("mine")) == 8


@pytest.mark.parametrize(
    ("name", "old", "new", "kinds"),
    [
        ("mine.toml", "\nseq_len = 8\n\n", "\nseq_len = 9\n\n", {"dry_run"}),
        ("mine.toml", "lr = 1e-2", "lr = 2e-2", {"accuracy"}),
        ("mine.toml", 'says = "A tiny model"', 'says = "Other words"', set()),
        ("mine.toml", "memory_mib = 64", "memory_mib = 65", {"dry_run"}),
        ("stacks/lean.toml", "in two pieces", "in halves", set()),
    ],
    ids=["workload", "lr", "words", "card", "stack-words"],
)
def test_what_changed_is_run_again_and_nothing_else(
    copied: Place, no_worker: list[Job], name: str, old: str, new: str, kinds: set[str]
) -> None:
    copied.change(name, old, new)
    copied.run("validate", "mine")
    assert {job.kind for job in no_worker} == kinds
    assert len(no_worker) == 2 * len(kinds)


def test_a_changed_stack_is_run_again_alone(copied: Place, no_worker: list[Job]) -> None:
    copied.change("stacks/lean.toml", "steps = 2", 'steps = 2\naccumulator = "bfloat16"')
    copied.run("validate", "mine")
    assert {job.stack.name for job in no_worker} == {"lean"}


def rename_stack(place: Place) -> None:
    folder = place.root / "scenarios" / "stacks"
    (folder / "lean.toml").rename(folder / "slim.toml")
    place.change("stacks/slim.toml", 'name = "lean"', 'name = "slim"')
    place.change("mine.toml", '"lean"', '"slim"')


def change_back_and_forth(place: Place) -> None:
    place.change("mine.toml", "memory_mib = 64", "memory_mib = 128")
    assert place.run("validate", "mine") == 0
    place.change("mine.toml", "memory_mib = 128", "memory_mib = 64")


@pytest.mark.parametrize("edit", [rename_stack, change_back_and_forth])
def test_a_report_says_what_validate_said(copied: Place, edit: Callable[[Place], None], no_worker: list[Job]) -> None:
    edit(copied)
    num_noted = len(no_worker)
    assert copied.run("validate", "mine") == 0
    assert len(no_worker) == num_noted, "nothing was left to run"
    table = copied.table.read_bytes()
    assert copied.run("report", "mine") == 0
    assert copied.table.read_bytes() == table


def test_a_report_does_not_tell_old_figures_under_a_new_headline(copied: Place) -> None:
    # The scenario file names another card now; the records are of the old one.
    copied.change("mine.toml", 'name = "Tiny card"\nmemory_mib = 64', 'name = "Huge card"\nmemory_mib = 65536')
    copied.run("report", "mine")
    text = copied.table.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| vanilla"))  # of the first table, the summary
    assert "Huge card" not in text or row.split("|")[2].strip() == "unknown"


def test_a_scenario_of_the_baseline_alone_has_pictures_too(copied: Place) -> None:
    # No accuracy to compare; pytest turns warnings into errors, the command would print them.
    copied.change("mine.toml", '["vanilla", "lean"]', '["vanilla"]')
    copied.change("mine.toml", 'stacks = ["lean", "any"]', 'stacks = ["any"]')
    copied.change("mine.toml", 'stacks = ["lean"]', 'stacks = ["vanilla"]')
    assert copied.run("report", "mine") == 0


def test_a_report_without_any_figures_has_pictures_too(copied: Place) -> None:
    # As after a validate whose every worker crashed.
    path = copied.store.folder / "mine.jsonl"
    path.write_text(to_json(record(key="", outcome=Outcome.ERROR, message="no memory")) + "\n")
    assert copied.run("report", "mine") == 0
    assert "vanilla: dry_run ended as error: no memory" in copied.table.read_text()
