"""Trainers of others beside ours: their files, what a row is made of, and what the command says."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hybridtrain.cli.main import main
from hybridtrain.errors import ConfigError, DivergenceError
from hybridtrain.models.model_config import BatchWorkload, ModelConfig, Workload
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.reports.tables import TERMINAL
from hybridtrain.run.environment import read_environment
from hybridtrain.virtual_gpu.cards.card import Host, find_card
from hybridtrain.virtual_gpu.cards.roofline import time_errors
from hybridvalidation.engines import torch as plain
from hybridvalidation.engines.task import ENGINES, Task, engine_of, train
from hybridvalidation.experiments import peer_runs as peer_run
from hybridvalidation.experiments import peers as peers_command
from hybridvalidation.experiments.peers import (
    KINDS,
    PeerFigures,
    PeerRecord,
    PeerRun,
    _compiles,
    append_peer_record,
    jobs_of,
    peer_table,
    read_peers,
    row_mapping,
    rows_of,
    versions_lines,
)
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.pages.peers import SOURCE, spread_text
from hybridvalidation.show.results import Results
from inline_child import InlineChild
from tiny_runs import MEASURED

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
FILES = ScenarioFiles(Path("scenarios"))
TINY = ModelConfig(
    family="llama", vocab_size=101, max_seq_len=32, num_blocks=2, width=64, num_heads=4, num_kv_heads=2, ffn_width=96
)
ADAMW = '{"optimizer": "torch.optim.AdamW"}'
FILE = """
title = "Tiny models on a small card"
precision = "bf16"
[model.shape]
family = "llama"
vocab_size = 101
max_seq_len = 32
num_blocks = 2
width = 64
num_heads = 4
num_kv_heads = 2
ffn_width = 96
[card]
name = "rtx-3090"
[workload]
batch_size = 2
seq_len = 16
"""
RUNS = f"""
[[runs]]
id = "AdamW"
engine = "torch"
config = '{ADAMW}'
[[runs]]
id = "ours"
engine = "hybridtrain"
config = '{{"stack": "balanced"}}'
[[runs]]
id = "elsewhere"
engine = "torch"
needs = ["no-such-package"]
config = '{{"optimizer": "elsewhere.AdamW"}}'
[[runs]]
id = "ZeRO"
engine = "deepspeed"
left_out = "native code"
"""


def task(engine: str = "torch", config: str = ADAMW, **changes: object) -> Task:
    plain_task = Task(engine=engine, model=TINY, workload=BatchWorkload(batch_size=4, seq_len=16), config=config)
    return replace(plain_task, **changes)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Scenario files with a file of peers, and the stacks of the project."""
    found = tmp_path / "scenarios"
    (found / "peers").mkdir(parents=True)
    for name in ("stacks", "targets.toml"):
        (found / name).symlink_to(FILES.folder.resolve() / name)
    (found / "peers" / "tiny.toml").write_text(FILE + RUNS)
    return found


# Engines.


@pytest.mark.parametrize("precision", ["bf16", "mixed"])
@pytest.mark.parametrize("extra", [{}, {"gradient_checkpointing": True}, {"update_in_backward": True}], ids="".join)
def test_the_plain_loop_trains_and_is_planned(precision: str, extra: dict[str, bool]) -> None:
    found = task(config=json.dumps(json.loads(ADAMW) | extra), precision=precision)
    losses = peer_run.execute(found.small()).losses
    assert len(losses) == 5
    figures = peer_run.plan(found, find_card("rtx-3090"), Host())
    assert (figures.num_params, figures.fits, figures.without_gradient) == (TINY.num_params, True, 0)
    size = 2 if precision == "bf16" else 4
    # Weights and two moments at least; gradients too unless each is dropped by its own update.
    tensors = 3 if extra.get("update_in_backward") else 4
    assert tensors * size * TINY.num_params < figures.peak_allocated_bytes < figures.peak_reserved_bytes
    assert figures.step_time_s > 0


def test_checkpointing_and_updates_in_the_backward_pass_take_less() -> None:
    wide = replace(TINY, num_blocks=8, width=256, ffn_width=768)

    def peak(batch_size: int, **settings: object) -> int:
        config = json.dumps({"optimizer": "torch.optim.SGD", **settings})
        found = task(config=config, model=wide, workload=BatchWorkload(batch_size=batch_size, seq_len=32))
        return peer_run.plan(found, find_card("rtx-3090"), Host()).peak_allocated_bytes

    assert peak(64, gradient_checkpointing=True) < 0.8 * peak(64)
    weights = 2 * wide.num_params  # bytes; gradients take as many, where they are there all at once
    workspaces = 2 * find_card("rtx-3090").cublas_workspace_bytes
    assert peak(1, update_in_backward=True) - workspaces < 1.5 * weights < 2 * weights < peak(1) - workspaces


def test_micro_batches_make_the_same_step() -> None:
    def losses(count: int) -> list[float]:
        torch.manual_seed(0)  # weights are drawn anew
        return train(task(micro_batches=count, device="cpu", precision="mixed"))

    assert losses(1) == pytest.approx(losses(4), rel=2e-3)  # autocast's bf16 rounds sums of other lengths otherwise


def test_our_engine_is_a_dry_run_of_the_stack_at_the_same_tokens() -> None:
    stack = FILES.stack("balanced")
    found = task("hybridtrain", '{"stack": "balanced"}', stack=stack)
    card, host = find_card("rtx-3090"), Host(memory_gib=64.0)
    figures = peer_run.plan(found, card, host)
    run = engine_of(found).run_dry(found, card, host)
    assert run.tokens_per_step == 4 * 16
    assert (figures.peak_allocated_bytes, figures.step_time_s) == (run.peak.allocated_bytes, run.time.seconds)
    vanilla = task("hybridtrain", '{"stack": "vanilla"}', stack=FILES.stack("vanilla"))
    alone = dry_run(TINY, FILES.stack("vanilla").plan(), card, Workload(micro_batch_size=4, seq_len=16))
    assert peer_run.plan(vanilla, card, host).peak_allocated_bytes == alone.peak.allocated_bytes
    assert peer_run.execute(found.small()).losses


def test_a_stack_that_cuts_the_batch_finer_than_it_is_cuts_it_less() -> None:
    stack = FILES.stack("best-7b-24gb")  # 16 micro-batches
    found = task("hybridtrain", stack=stack)
    run = engine_of(found).run_dry(found, find_card("rtx-3090"), Host())
    assert run.tokens_per_step == 4 * 16


def test_what_does_not_fit_is_told_with_what_it_would_take() -> None:
    found = task(model=replace(TINY, vocab_size=50_000, width=256, ffn_width=512), precision="mixed")
    card = find_card("rtx-3090")
    roomy = peer_run.plan(found, card, Host())
    small = replace(card, memory_mib=card.context_mib + roomy.peak_allocated_bytes // 2**20 - 100)
    tight = peer_run.plan(found, small, Host())
    assert (roomy.fits, tight.fits) == (True, False)
    assert tight.shortage.startswith("out of memory at step 1, ")
    assert (tight.peak_allocated_bytes, tight.step_time_s) == (roomy.peak_allocated_bytes, roomy.step_time_s)
    poor = peer_run.plan(found, card, Host(memory_gib=0.05, reserved_gib=0.01))
    assert poor.shortage.startswith("host memory: ")


def test_what_does_not_train_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    still = task(config='{"optimizer": "torch.optim.SGD", "arguments": {"lr": 0.0}}').small()
    with pytest.raises(DivergenceError, match="must be finite and decrease;"):
        peer_run.execute(still)
    monkeypatch.setattr(plain, "train", lambda _task: [2.0, float("nan")])
    with pytest.raises(DivergenceError, match="nan"):
        peer_run.execute(replace(still, num_steps=2))


def test_on_a_card_allocator_and_clock_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for CUDA, with torch.cuda made up: five steps are timed from the first update's end to the last's."""
    clock = iter(range(1000))
    made_up: dict[str, Callable[..., object]] = {
        "current_device": lambda: 0, "synchronize": lambda *_: None, "max_memory_allocated": lambda *_: 11,
        "max_memory_reserved": lambda *_: 22,
    }  # fmt: skip
    for name, value in made_up.items():
        monkeypatch.setattr(torch.cuda, name, value)
    caps: list[int] = []
    monkeypatch.setattr(peer_run, "cap_memory", lambda _device, cap: caps.append(cap))
    monkeypatch.setattr(peer_run.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(peer_run, "train", lambda given: train(replace(given, device="cpu")))
    card = find_card("rtx-3090")
    for settings, updates in (({}, 1), ({"update_in_backward": True}, len(list(_parameters())))):
        found = peer_run.measure(task(config=json.dumps(json.loads(ADAMW) | settings)), card)
        assert (found.peak_allocated_bytes, found.peak_reserved_bytes, found.fits) == (11, 22, True)
        assert found.step_time_s == updates  # each update is a tick
    assert caps == [card.allocator_capacity_bytes] * 2
    monkeypatch.setattr(peer_run, "train", _refuse)
    assert peer_run.measure(task(), card).shortage == "too small"


def test_on_a_card_our_engine_is_measured_as_in_every_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_run, "measure_on_cuda", lambda *_: MEASURED)
    found = task("hybridtrain", stack=FILES.stack("balanced"))
    figures = peer_run.measure(found, find_card("rtx-3090"))
    assert (figures.fits, figures.peak_reserved_bytes) == (True, MEASURED.peak_reserved_bytes)
    assert figures.step_time_s == MEASURED.step_times_s[0]
    monkeypatch.setattr(peer_run, "measure_on_cuda", lambda *_: _refuse(found))
    assert peer_run.measure(found, find_card("rtx-3090")).shortage == "too small"


def _parameters() -> list[nn.Parameter]:
    from hybridvalidation.engines.hf_model import build_model  # noqa: PLC0415

    return list(build_model(task()).parameters())


def _refuse(_task: Task) -> list[float]:
    raise torch.OutOfMemoryError("too small")


# Files.


def test_every_file_is_read_and_names_engines_that_are_there() -> None:
    found = read_peers(FILES)
    assert {"8b-full-24gb", "8b-lora-24gb", "8b-qlora-16gb", "1b-16gb", "7b-24gb"} <= found.keys()
    folder = Path(plain.__file__ or "").parent
    assert ENGINES.keys() <= {path.stem for path in folder.glob("*.py")}
    for scenario in found.values():
        assert {"hybridtrain"} < {run.engine for run in scenario.runs}
        assert len(jobs_of(scenario, FILES, KINDS)) == 3 * sum(not run.left_out for run in scenario.runs)


def test_what_a_file_leaves_out_is_that_of_the_scenario_with_its_stacks() -> None:
    found, base = read_peers(FILES, "1b-16gb")["1b-16gb"], FILES.scenario("1b-16gb")
    assert (found.model, found.card, found.workload) == (base.model, base.card, base.workload)
    ours = [run for run in found.runs if run.engine == "hybridtrain"]
    assert [run.stack for run in ours] == list(base.stacks)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('engine = "torch"', 'engine = "troch"', r"engine 'troch' is unknown; did you mean 'torch'\? Known: hybr"),
        (f"config = '{ADAMW}'", "config = '['", r"config: '\[' must be a JSON object; write it as"),
        ('{"stack": "balanced"}', "{}", "config: '{}' must name a stack; write it as"),
        ('{"stack": "balanced"}', '{"stack": "balancd"}', "stack 'balancd' is unknown; did you mean 'balanced'"),
        ('id = "ours"', 'id = "AdamW"', "runs: id 'AdamW' appears twice; make ids unique"),
        ('id = "ours"', 'id = "ours"\nmicro_batches = 0', "micro_batches: 0 must be at least 1"),
        ('id = "ours"', 'id = "ours"\nmicro_batches = 3', r"'ours': micro_batches: 3 must divide the batch \(2\)"),
        ('precision = "bf16"', 'precision = "bf8"', "precision: 'bf8'"),
        ('[card]\nname = "rtx-3090"\n', "", "card: missing, and there is no scenarios/tiny.toml to inherit it"),
    ],
)  # fmt: skip
def test_faults_of_a_file_are_told(folder: Path, old: str, new: str, message: str) -> None:
    text = FILE + RUNS
    assert old in text
    (folder / "peers" / "tiny.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        read_peers(ScenarioFiles(folder))


def test_an_unknown_scenario_is_told() -> None:
    with pytest.raises(ConfigError, match="scenario with peers '8b-full-24' is unknown; did you mean '8b-full-24gb'"):
        read_peers(FILES, "8b-full-24")


# Rows.


def record(run: PeerRun, key: str, evidence: Evidence, outcome: Outcome = Outcome.OK, **figures: object) -> PeerRecord:
    return PeerRecord(
        key=key, evidence=evidence, outcome=outcome, message="why not", started_at="2026-11-22T00:00:00+00:00",
        duration_s=1.0, environment=read_environment(), scenario="tiny", run=run.id, packages={"torch": "2"},
        figures=PeerFigures(**figures) if outcome is Outcome.OK else None,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_row_shows_each_kind_of_evidence_or_why_there_is_none(folder: Path) -> None:
    files = ScenarioFiles(folder)
    scenario = read_peers(files)["tiny"]
    runs = {run.id: run for run in scenario.runs}
    jobs = {(job.run, job.evidence): (runs[job.run], job.key) for job in jobs_of(scenario, files, KINDS)}
    fits = {"peak_allocated_bytes": 2**30, "peak_reserved_bytes": 2**31, "fits": True, "step_time_s": 0.5}
    records = [
        record(*jobs["AdamW", Evidence.PLANNED], Evidence.PLANNED, peak_allocated_bytes=7),
        record(*jobs["AdamW", Evidence.PLANNED], Evidence.PLANNED, **fits, bound="memory", without_gradient=3),
        record(*jobs["AdamW", Evidence.MEASURED], Evidence.MEASURED, **fits | {"fits": False, "shortage": "full"}),
        record(*jobs["AdamW", Evidence.EXECUTED], Evidence.EXECUTED, losses=(6.0, 5.5)),
        record(*jobs["ours", Evidence.PLANNED], Evidence.PLANNED, Outcome.ERROR),
        replace(
            record(*jobs["ours", Evidence.EXECUTED], Evidence.EXECUTED, losses=(6.0, 5.5)), key="of another recipe"
        ),
    ]
    rows = rows_of(scenario, files, records)
    assert versions_lines(rows) == ["torch: torch 2.", "hybridtrain: torch 2."]
    lines = peer_table(rows, TERMINAL).splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["torch", "torch", "hybridtrain", "torch", "deepspeed"]
    assert "1.00" in lines[0]  # of the newest record
    assert "64 " in lines[0]  # 2 x 16 tokens in half a second
    assert "planned, times estimated; executed small, loss 6.00 to 5.50" in lines[0]
    assert "3 trainable parameters without gradient" in lines[0]
    assert "NO" in lines[1]
    assert "measured" in lines[1]
    assert "planned: why not" in lines[2]
    assert "executed" not in lines[2]
    assert "not planned yet" in lines[3]
    assert "native code" in lines[4]
    mapping = row_mapping("tiny", rows[0])
    planned = mapping["planned"]
    assert isinstance(planned, dict)
    assert (planned["tokens_per_s"], planned["fits"], mapping["executed"]) == (64.0, True, {"losses": [6.0, 5.5]})
    assert row_mapping("tiny", rows[2])["why"] == {"planned": "not planned yet", "executed": "not executed yet"}


def test_the_command_runs_what_is_missing_and_writes_the_page(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers_command, "Child", InlineChild)
    common = ["--scenarios", str(folder), "--results", str(tmp_path / "results")]
    assert main(["peers", "tiny", "--json", *common]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in rows] == ["AdamW", "ours", "elsewhere", "ZeRO"]
    assert [row["planned"] is not None for row in rows] == [True, True, False, False]
    assert rows[0]["executed"]["losses"][-1] < rows[0]["executed"]["losses"][0]
    assert main(["peers", "tiny", "--planned", "--json", *common]) == 0
    assert [row["executed"] for row in json.loads(capsys.readouterr().out)] == [None] * 4
    assert not (tmp_path / "results").exists()
    assert main(["peers", "--record", *common]) == 0
    out = capsys.readouterr().out
    assert "tiny elsewhere: not planned: no-such-package is not installed (pip install" in out
    assert "4 new runs" in out
    page = (tmp_path / "results" / "tables" / "peers-tiny.md").read_text()
    assert "# Tiny models on a small card" in page
    assert "32 tokens per step" in page
    assert main(["peers", "--record", *common]) == 0
    assert "0 new runs" in capsys.readouterr().out
    assert (tmp_path / "results" / "tables" / "peers-tiny.md").read_text() == page


def test_a_record_that_was_appended_is_read(tmp_path: Path) -> None:
    found = record(PeerRun(id="a", engine="torch"), "k", Evidence.EXECUTED, losses=(2.0, 1.0))
    append_peer_record(tmp_path, found)
    assert peers_command.read_peer_records(tmp_path) == [found]


def test_the_committed_pages_are_what_the_records_give() -> None:
    pages = {f"{page.name}.md": f"{page.text}\n" for page in SOURCE.pages(Results(FILES, Path("results")))}
    assert pages == {path.name: path.read_text() for path in Path("results/tables").glob("peers-*.md")}


def test_two_recipes_are_told_apart_by_the_error_of_recorded_ratios() -> None:
    error = time_errors()["ratio"]
    assert f"({error.runs:,} pairs of {error.sources} repositories)" in spread_text()
    assert f"was {100 * error.mean_absolute:.0f} % off on average" in spread_text()


@pytest.mark.parametrize(("settings", "compiles"), [
    ({"optim": "adafactor"}, False),
    ({"trainer": {"torch_compile": True}}, True),
    ({"overrides": {"compile": True}}, True),
    ({"torch_compile": False}, False),
])  # fmt: skip
def test_a_recipe_is_compiled_where_its_settings_say_so(settings: dict[str, Any], *, compiles: bool) -> None:
    assert _compiles(settings) is compiles
