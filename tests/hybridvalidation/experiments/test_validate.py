"""One whole ``validate`` with a real worker process: what is run, what is read, and what is written where."""

import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from hybridtrain.cli.main import main
from hybridtrain.config.encode import to_json
from hybridtrain.run.environment import read_environment
from hybridvalidation import validate as validate_module
from hybridvalidation.child import Child, ChildResult
from hybridvalidation.experiments import stack_runs as runner
from hybridvalidation.experiments.stack_runs import Job, make_job, run_from_records
from hybridvalidation.judge.joint import judge_all
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.records.stack_run import StackRun
from hybridvalidation.records.store import RecordStore
from hybridvalidation.scenario_files import ScenarioFiles
from inline_child import InlineChild
from tiny_files import scenario_file, shape_file
from tiny_runs import ACCURACY, record


@pytest.fixture(scope="module", autouse=True)
def _no_card_and_a_clean_checkout() -> Iterator[None]:
    """Make the same runs, here and in worker processes, with a card and without; let them be recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(validate_module, "uncommitted_files", list)
        yield


def assert_no_place(text: str) -> None:
    for place in (str(Path(__file__).parents[3]), str(Path.home()) + "/", "/tmp/", socket.gethostname() + "."):  # noqa: S108
        assert place not in text, place


TARGETS = """
[[targets]]
id = "small"
stacks = ["lean"]

[[targets]]
id = "small"

[[targets]]
id = "unknown-metric"
stacks = ["lean"]
"""
# Ten steps are enough to learn that a blank is the most likely byte: accuracies are above 0.
FILES = {
    "mine.toml": scenario_file(["vanilla", "lean"], shape_file(num_blocks=1), seq_len=8, num_steps=10, targets=TARGETS),
    "targets.toml": """\
[[target]]
id = "small"
source = ["000"]
description = "a tiny model trains in 1 GiB"
metric = "peak_vram_gib"
direction = "max"
value = 1.0

[[target]]
id = "unknown-metric"
source = ["000"]
description = "it is kind"
metric = "kindness_pct"
direction = "min"
value = 1.0
""",
    "stacks/vanilla.toml": 'name = "vanilla"\ndescription = "nothing on"\n',
    "stacks/lean.toml": """\
name = "lean"
description = "bfloat16, in two pieces"

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
    """One ``validate`` for all tests below; they do not write here. One of two workers is a process of its own."""
    place = Place(tmp_path_factory.mktemp("validated"))
    for name, text in FILES.items():
        path = place.root / "scenarios" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def worker(work: str, job: Job, answer: type[StackRun]) -> Child[StackRun] | InlineChild:
        return (Child if job.stack.name == "lean" else InlineChild)(work, job, answer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Child", worker)
        assert place.run("validate", "mine", "--record") == 0
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

    def note(job: Job) -> StackRun:
        jobs.append(job)
        seeds = tuple(replace(ACCURACY.seeds[0], seed=seed) for seed in (0, 1, 2))
        figures = replace(ACCURACY, seeds=seeds) if job.kind == "accuracy" else None
        return record(
            job.key, kind=job.kind, scenario=job.scenario, stack=job.stack.name, accuracy=figures, asked=job.asked
        )

    class Noted:
        def __init__(self, _work: str, job: Job, _answer: type) -> None:
            self.record = note(job)

        def poll(self) -> ChildResult[StackRun]:
            return ChildResult(answer=self.record, fault="", seconds=1.0, peak_rss_bytes=0, log="")

        def stop(self) -> None:
            pass

    monkeypatch.setattr(runner, "Child", Noted)
    monkeypatch.setattr(runner, "plan_all", lambda jobs: [(job, note(job)) for job in jobs])
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
    assert text.startswith("# A tiny model\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert [row[:2] for row in rows if row[0] in {"vanilla", "lean"}][:2] == [["vanilla", "yes"], ["lean", "yes"]]
    place = next(number for number, row in enumerate(rows) if "top-1 kept %" in row)
    head, baseline = rows[place], next(row for row in rows[place:] if row[0] == "vanilla")
    assert baseline[head.index("top-1 kept %")] == "100.00 [100.00, 100.00]"
    evidence = next(row for row in rows if row[:2] == ["target", "verdict"]).index("evidence")
    verdicts = [[*row[:2], row[evidence]] for row in rows if row[0] in {"small", "unknown-metric"}]
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
        assert height > 200, path.name
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
    before = {path: path.read_bytes() for path in [copied.table, *copied.plots, *copied.store.folder.iterdir()]}
    assert copied.run("validate", "mine", "--record") == 0
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
    copied.run("validate", "mine", "--fresh", "--record")
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
        ("mine.toml", 'description = "A tiny model"', 'description = "Other words"', set()),
        ("mine.toml", "memory_mib = 64", "memory_mib = 65", {"dry_run"}),
        ("stacks/lean.toml", "in two pieces", "in halves", set()),
    ],
    ids=["workload", "lr", "words", "card", "stack-words"],
)
def test_what_changed_is_run_again_and_nothing_else(
    copied: Place, no_worker: list[Job], name: str, old: str, new: str, kinds: set[str]
) -> None:
    copied.change(name, old, new)
    copied.run("validate", "mine", "--record")
    assert {job.kind for job in no_worker} == kinds
    assert len(no_worker) == 2 * len(kinds)


def test_a_changed_stack_is_run_again_alone(copied: Place, no_worker: list[Job]) -> None:
    copied.change("stacks/lean.toml", "grad_accum_steps = 2", 'grad_accum_steps = 2\naccumulator = "bfloat16"')
    copied.run("validate", "mine", "--record")
    assert {job.stack.name for job in no_worker} == {"lean"}


def rename_stack(place: Place) -> None:
    folder = place.root / "scenarios" / "stacks"
    (folder / "lean.toml").rename(folder / "slim.toml")
    place.change("stacks/slim.toml", 'name = "lean"', 'name = "slim"')
    place.change("mine.toml", '"lean"', '"slim"')


def change_back_and_forth(place: Place) -> None:
    place.change("mine.toml", "memory_mib = 64", "memory_mib = 128")
    assert place.run("validate", "mine", "--record") == 0
    place.change("mine.toml", "memory_mib = 128", "memory_mib = 64")


@pytest.mark.parametrize("edit", [rename_stack, change_back_and_forth])
def test_a_report_says_what_validate_said(copied: Place, edit: Callable[[Place], None], no_worker: list[Job]) -> None:
    edit(copied)
    num_noted = len(no_worker)
    assert copied.run("validate", "mine", "--record") == 0
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
    copied.change("mine.toml", 'stacks = ["lean"]', 'stacks = ["vanilla"]')
    assert copied.run("report", "mine") == 0


def test_a_report_without_any_figures_has_pictures_too(copied: Place) -> None:
    # As after a validate whose every worker crashed.
    path = copied.store.folder / "mine.jsonl"
    files = ScenarioFiles(copied.root / "scenarios")
    job = make_job("dry_run", files.scenario("mine"), files.stack("vanilla"))
    path.write_text(to_json(record(job.key, outcome=Outcome.ERROR, message="no memory")) + "\n")
    assert copied.run("report", "mine") == 0
    assert "vanilla: dry_run ended as error: no memory" in copied.table.read_text()


def results_of(place: Place) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (place.root / "results").rglob("*") if path.is_file()}


def test_a_validate_that_is_not_told_to_record_changes_no_result(
    copied: Place, no_worker: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copied.root)
    before = results_of(copied)
    copied.change("mine.toml", "memory_mib = 64", "memory_mib = 65")
    assert copied.run("validate", "mine") == 0
    assert len(no_worker) == 2
    assert results_of(copied) == before
    own = copied.root / "runs" / "validate-mine"
    assert sorted(path.name for path in own.iterdir()) == ["plots", "records", "tables"]
    assert len(RecordStore(own / "records").read("mine")) == 2
    assert copied.run("validate", "mine") == 0
    assert len(no_worker) == 2, "what was found before is read again"


def test_what_is_all_committed_writes_nothing(
    copied: Place, no_worker: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(copied.root)
    assert copied.run("validate", "mine") == 0
    told = capsys.readouterr().out
    assert "0 runs made, 4 read from records." in told
    assert "Written" not in told
    assert no_worker == []
    assert not (copied.root / "runs").exists()


def test_a_folder_may_be_named(copied: Place, no_worker: list[Job]) -> None:
    assert copied.run("validate", "mine", "--fresh", "--out", str(copied.root / "mine")) == 0
    assert len(no_worker) == 4
    assert (copied.root / "mine" / "tables" / "mine.md").exists()


def test_a_record_names_a_commit_that_has_its_program(
    copied: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validate_module, "uncommitted_files", lambda: ["hybridtrain/trainer.py"])
    before = results_of(copied)
    assert copied.run("validate", "mine", "--record", "--fresh") == 2
    assert "hybridtrain/trainer.py: uncommitted" in capsys.readouterr().err
    assert results_of(copied) == before


def test_another_program_reads_the_records_and_another_torch_makes_its_own(copied: Place, no_worker: list[Job]) -> None:
    path = copied.store.folder / "mine.jsonl"
    program = {found.program for found in copied.store.read("mine")}.pop()
    path.write_text(path.read_text().replace(program, "0123456789abcdef"))
    copied.run("validate", "mine", "--record")
    assert no_worker == []
    path.write_text(path.read_text().replace(f'"torch":"{torch.__version__}"', '"torch":"1.13.0"'))
    copied.run("validate", "mine", "--record")
    assert len(no_worker) == 4


def test_a_record_says_what_was_asked_in_values(copied: Place) -> None:
    run = next(found for found in copied.store.read("mine") if found.kind == "dry_run")
    assert run.asked["card.memory_mib"] == "64"
    assert (run.asked["model.num_blocks"], run.asked["optimizer.kind"]) == ("1", "adamw")
    assert run.asked["workload.seq_len"] == "8"
    assert not [path for path in run.asked if path.startswith(("link", "world"))], "one card has no link"


def test_proxies_of_another_text_are_made_again_with_the_one_that_is_missing(
    copied: Place, no_worker: list[Job]
) -> None:
    # The text is the standard library of whatever Python runs here; stacks are compared on one text.
    path = copied.store.folder / "mine.jsonl"
    digests = {run.accuracy.corpus_digest for run in copied.store.read("mine") if run.accuracy is not None}
    path.write_text(path.read_text().replace(digests.pop(), "another"))
    copied.run("validate", "mine", "--record")
    assert no_worker == []
    copied.change("stacks/lean.toml", "grad_accum_steps = 2", 'grad_accum_steps = 2\naccumulator = "bfloat16"')
    copied.run("validate", "mine", "--record")
    assert sorted((job.kind, job.stack.name) for job in no_worker) == [
        ("accuracy", "lean"),
        ("accuracy", "vanilla"),
        ("dry_run", "lean"),
    ]


def test_what_was_executed_is_told_with_its_commits(copied: Place, capsys: pytest.CaptureFixture[str]) -> None:
    other = copied.store.folder / "executed.jsonl"
    line = to_json(record(environment=replace(read_environment(), commit="0123456789"))) + "\n"
    other.write_text(2 * line + line[:40])  # somebody writes
    assert copied.run("records") == 0
    assert "executed: 2 records, from 1 commits, the newest 2026-01-01, commit 01234567" in capsys.readouterr().out
    assert copied.run("records", "--planned") == 0
    assert "executed" not in capsys.readouterr().out
    other.write_text(line[:40] + "\n")
    assert copied.run("records") == 1
    assert "executed.jsonl: a line is not JSON" in capsys.readouterr().err


def test_records_that_no_table_shows_can_be_dropped(copied: Place, no_worker: list[Job]) -> None:
    copied.run("validate", "mine", "--record", "--fresh")
    table = copied.table.read_bytes()
    assert copied.run("records", "--prune") == 0
    assert len(copied.store.read("mine")) == len(no_worker) == 4
    copied.run("report", "mine")
    assert copied.table.read_bytes() == table
