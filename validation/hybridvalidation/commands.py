"""The harness's extension of the command: verbs, names of files, notes on quality (EXTENSION)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hybridtrain.cli.shared import (
    RECORDED,
    Amount,
    Answer,
    Count,
    DiskFolder,
    Flag,
    HostLimit,
    ModelName,
    Names,
    Recorded,
    ScenarioName,
    StackName,
    limit_bytes,
    names_of,
)
from hybridtrain.extension import Extension, QualityNote, ScenarioRequest
from hybridtrain.reports.tables import TERMINAL
from hybridtrain.units import GB, GIB

if TYPE_CHECKING:
    from hybridtrain.planning.candidates import Candidate
    from hybridvalidation.scenario import Scenario, Target
    from hybridvalidation.scenario_files import ScenarioFiles


def _files(folder: Path | None) -> "ScenarioFiles":
    from hybridvalidation.scenario_files import scenario_folder

    return scenario_folder(folder)


def _written(text: str, content: Mapping[str, object], paths: Sequence[Path], code: int = 0) -> Answer:
    """Return an answer that ends with the files that were written."""
    names = names_of(paths)
    return Answer(text=f"{text}\n\nWritten: {', '.join(names)}", content={**content, "files": names}, code=code)


def gate(
    *names: ScenarioName, accept: Flag = False, reason: str = "", jobs: Count | None = None,
    markdown: Path | None = None, common: Recorded = RECORDED,
) -> Answer:  # fmt: skip
    """Plan scenarios (or compile kernels) again, and compare with the accepted results byte by byte.

    Exit codes: 0 equal, 3 over budget, 4 regressed, 5 improved, 6 not measured.

    Example: hybridtrain gate 1b-16gb

    Args:
        names: Scenarios (default: all, and atlas: a few of its cells), or: recorded and peers (other trainers, if
            installed; one file: recorded/peft), kernels (Triton kernels compiled for every card; one card:
            kernels/sm_89).
        accept: Accept today's figures: a new record replaces the previous one.
        reason: Reason for changed figures, stored in the new records; --accept requires it to replace figures.
        jobs: Parallel processes; default: one per core.
        markdown: File for a Markdown report for a pull request; GitHub's step summary and annotations are automatic.
    """
    from hybridvalidation.gate.command import gate_all
    from hybridvalidation.gate.gate import Order, write_markdown

    order = Order(names=names, accept=accept, reason=reason, processes=jobs, progress=not common.json)
    report = gate_all(_files(common.scenarios), order, common.results)
    write_markdown(report.as_markdown(), markdown)
    text = "\n".join([report.as_text(), *report.annotations()])
    return Answer(text=text, content=report.as_mapping(), code=int(report.exit_code))


def bench(
    what: Literal["kernels", "attention"], /, *,
    only: Names = (), modes: Names = (), quick: Flag = False, minutes: Amount = 10.0, recorded: Flag = False,
    check: Flag = False, accept: Flag = False, choose: Flag = False, common: Recorded = RECORDED,
) -> Answer:  # fmt: skip
    """Time the kernels against other implementations.

    On this machine's CUDA card or, at small shapes, its CPU. Exit codes: 0 ok, 1 one of our kernels is wrong or failed,
    4 slower than the baseline, 6 no baseline.

    Example: hybridtrain bench kernels --only swiglu,rotary --check

    Args:
        what: kernels: time the kernels; attention: plan what the flash kernel saves by sequence length (without other
            options).
        only: Comma-separated ops; default: all.
        modes: Comma-separated modes: forward, backward, both; default: all.
        quick: One shape of each op, fewer samples.
        minutes: Time limit; cases that would exceed it are not started.
        recorded: Run nothing; use the newest record of each case.
        check: Compare with the baseline of the same card.
        accept: Record the times as the card's new baseline.
        choose: Rewrite hybridkernels/choices.toml from the records.
    """
    from hybridvalidation.kernel_bench.bench import BenchOrder, bench_kernels

    if what == "attention":
        return _bench_attention(common)
    order = BenchOrder(
        only=only, modes=modes, quick=quick, limit_s=60 * minutes, recorded=recorded, check=check, accept=accept,
        choose=choose,
    )  # fmt: skip
    targets = _files(common.scenarios).targets()
    report = bench_kernels(order, common.results, targets, common.note)
    return Answer(text=report.as_text(), content=report.as_mapping(), code=report.exit_code)


def _bench_attention(common: Recorded) -> Answer:
    from hybridtrain.config.encode import encode
    from hybridvalidation.kernel_bench.attention_lengths import (
        append_attention,
        attention_text,
        judge_attention,
        plan_attention,
        read_attention,
        write_attention,
    )

    targets = _files(common.scenarios).targets()
    read_attention(common.records)  # a damaged file is told now, not after the run
    record = plan_attention(targets)
    written = [append_attention(common.records, record), *write_attention([record], targets, common.results)]
    verdicts = list(map(encode, judge_attention(record, targets)))
    text = attention_text(record, targets, TERMINAL)
    return _written(text, {"record": encode(record), "verdicts": verdicts}, written)


def report(
    *scenarios: ScenarioName, html: Path | None = None, check: Flag = False, common: Recorded = RECORDED
) -> Answer:
    """Rebuild tables, plots and the figures in a checkout's pages from committed records; nothing is run.

    Exit code 1 if --check finds an outdated page.

    Example: hybridtrain report 1b-16gb

    Args:
        scenarios: Default: every scenario that has records.
        check: Write nothing; list the tables and pages that would change.
        html: Write an HTML site into this folder instead; it needs no network and no server.
    """
    from hybridtrain.errors import ConfigError
    from hybridvalidation.guide.figures import Figures, check_report, fill_pages
    from hybridvalidation.show.report import rebuild

    files = _files(common.scenarios)
    if html is None and not common.records.is_dir():
        for name in scenarios or files.scenario_names():
            files.scenario(name)  # faults of its own come first
        advice = "keep records there (hybridtrain validate SCENARIO --record), or see those that came with hybridtrain"
        raise ConfigError("report", [f"{common.records}: no such folder; {advice} (hybridtrain report --html FOLDER)"])
    if check:
        stale = check_report(files, common.results)
        faults = [f"{name}: outdated; run: hybridtrain report" for name in stale]
        text = "\n".join(faults) or "all tables and pages are up to date"
        return Answer(text=text, content={"stale": stale}, code=1 if stale else 0)
    if html is not None:
        from hybridtrain.units import format_bytes
        from hybridvalidation.show.web.site import write_site

        if scenarios:
            faults = [f"--html writes every scenario; remove {', '.join(scenarios)}, or write Markdown without --html"]
            raise ConfigError("report", faults)
        pages = write_site(files, common.evidence, html)
        size = sum(path.stat().st_size for path in pages)
        told = f"{pages[0].as_posix()}: open this page in a browser; {len(pages)} files, {format_bytes(size)}"
        return Answer(text=told, content={"files": names_of(pages), "bytes": size})
    written = rebuild(files, scenarios, common.results)
    if written and not scenarios:
        written += fill_pages(common.results.parent, Figures(files, common.results))
    paths = names_of(written)
    return Answer(text="\n".join(paths), content={"files": paths})


def records(
    *names: ScenarioName, verify: Flag = False, planned: Flag = False, record: Flag = False, prune: Flag = False,
    jobs: Count | None = None, common: Recorded = RECORDED,
) -> Answer:  # fmt: skip
    """Verify planned records: plan again those not yet verified by this program version, and compare.

    Exit codes are those of gate: 0 equal, 3 over budget, 4 regressed, 5 improved, 6 not measured. Executed and measured
    records are not repeated; they are listed with the program that made them.

    Example: hybridtrain records 1b-16gb --verify

    Args:
        names: As for gate.
        verify: Plan all again, including verified ones.
        planned: List planned records only.
        record: Record the verification by this program version.
        prune: Delete records that no table shows any more, instead.
        jobs: Parallel processes; default: one per core.
    """
    from hybridvalidation.gate.command import gate_all
    from hybridvalidation.gate.gate import Order
    from hybridvalidation.validate import other_records, prune_records

    files = _files(common.scenarios)
    if prune:
        count = prune_records(files, names or files.scenario_names(), common.results)
        return Answer(text=f"{count} records deleted that no table shows", content={"dropped": count})
    order = Order(
        names=names, processes=jobs, trusts_verified=not verify, keeps_verified=record, progress=not common.json
    )
    results = common.results if record else common.evidence
    report = gate_all(files, order, results)
    others = [] if names or planned else other_records(files, results)
    return Answer(
        text="\n".join([*others, report.as_text()]), content=report.as_mapping() | {"others": others},
        code=int(report.exit_code),
    )  # fmt: skip


def snapshots(*files: Path, plans: Names = (), record: Flag = False, common: Recorded = RECORDED) -> Answer:
    """Replay memory snapshots of a CUDA card in the allocator model, and report differences.

    Exit code 1 if an event or the final state differs from the record.

    Example: hybridtrain snapshots memory_snapshot.pickle

    Args:
        files: Pickles of torch.cuda.memory._dump_snapshot, or folders with files listed in
            scenarios/snapshots/public.toml.
        plans: Comma-separated scenarios: report how much reserved bytes of their plans can vary, instead.
        record: Append the results to the records, and rebuild the table.
    """
    from hybridtrain.errors import ConfigError
    from hybridvalidation.experiments.snapshots import (
        SNAPSHOTS_FILE,
        as_mapping,
        differs,
        replay_files,
        snapshots_text,
        write_reserved,
    )
    from hybridvalidation.records.store import append_record

    scenarios = _files(common.scenarios)
    if plans:
        return _moves_of(scenarios, plans, common, record=record)
    if not files:
        raise ConfigError("snapshots", ["FILES is missing; give snapshots, folders with listed ones, or --plans."])
    found = replay_files(files, scenarios.folder)
    paths: list[Path] = []
    if record:
        append_record(common.records, SNAPSHOTS_FILE, found)
        paths = write_reserved(scenarios.folder, common.results)
    text = "\n".join([snapshots_text(found), *names_of(paths)])
    return Answer(text=text, content=as_mapping(found), code=1 if differs(found) else 0)


def _moves_of(scenarios: "ScenarioFiles", plans: Names, common: Recorded, *, record: bool) -> Answer:
    from hybridtrain.config.encode import encode
    from hybridvalidation.experiments.snapshots import MOVES_FILE, moves_text, plan_moves, write_reserved
    from hybridvalidation.records.store import append_record

    found, paths = [], list[Path]()
    for name in plans:
        found.append(plan_moves(scenarios, scenarios.scenario(name), common.note))
        if record:
            append_record(common.records, MOVES_FILE, found[-1])
            paths = write_reserved(scenarios.folder, common.results)
    text = "\n".join([moves_text(found, TERMINAL), *names_of(paths)])
    return Answer(text=text, content=list(map(encode, found)))


def _list_targets(common: Recorded) -> Answer:
    from hybridtrain.config.encode import encode
    from hybridvalidation.judge.roll_up import counts
    from hybridvalidation.show.pages.targets import all_targets, targets_text
    from hybridvalidation.show.results import Results

    rows = all_targets(Results(_files(common.scenarios), common.evidence))
    content = {"counts": counts(rows), "targets": list(map(encode, rows))}
    return Answer(text=targets_text(rows, TERMINAL), content=content)


def validate(
    scenario: ScenarioName,
    /,
    *,
    fresh: Flag = False,
    record: Flag = False,
    planned: Flag = False,
    out: Path | None = None,
    common: Recorded = RECORDED,
) -> Answer:
    """Run a scenario under all its stacks and judge its targets; runs with a valid record are not repeated.

    Committed results do not change: new records, tables and plots go into a separate folder. Exit code 1 if a run
    failed.

    Example: hybridtrain validate 1b-16gb

    Args:
        scenario: Name of a scenario, or a .toml file.
        fresh: Repeat runs that already have a record.
        record: Write new records, tables and plots into --results.
        planned: Make dry runs only, in seconds; proxies keep their existing records.
        out: Output folder; default: runs/validate-SCENARIO.
    """
    from hybridtrain.config.encode import encode
    from hybridvalidation.judge.joint import judge_all, judge_jointly
    from hybridvalidation.records.outcome import Outcome
    from hybridvalidation.show.pages.scenario import report_text, scenario_page
    from hybridvalidation.show.results import Results
    from hybridvalidation.validate import validate as validate_scenario

    files, known = _files(common.scenarios), common.results if record else common.evidence
    done = validate_scenario(
        files, scenario, known, fresh=fresh, record=record, out=out, planned=planned, progress=not common.json
    )
    run, results = done.run, Results(files, known)
    paths = [] if done.folder is None else names_of(scenario_page(run, results).write(done.folder))
    written = f" Written: {', '.join(paths)}" if paths else ""
    joint = judge_jointly(run, results.targets, results.elsewhere)
    content = {
        "scenario": run.scenario.name,
        "records": list(map(encode, run.records.values())),
        "verdicts": list(map(encode, judge_all(run, results.targets, results.elsewhere))),
        "joint": "" if joint is None else joint.sentence,
        "num_cached": run.num_cached,
        "files": paths,
    }
    told = report_text(run, results, TERMINAL)
    return Answer(
        text=f"{told}\n\n{run.num_made} runs made, {run.num_cached} read from records.{written}",
        content=content,
        code=1 if any(record.outcome is Outcome.ERROR for record in run.records.values()) else 0,
    )


def execute(
    *,
    model: ModelName,
    stack: StackName,
    micro_batch: Count,
    seq: Count,
    steps: Count,
    accum: Count | None = None,
    lr: Amount = 3e-4,
    cycle: Flag = False,
    disk: DiskFolder = None,
    host_limit_gib: HostLimit = None,
    world: Count = 1,
    common: Recorded = RECORDED,
) -> Answer:
    """Train a few steps on the CPU, count would-be card memory, and compare with the dry run of these steps.

    Exit code 1 if they differ.

    Example: hybridtrain execute --model gpt2-small --stack tight --micro-batch 1 --seq 256 --steps 2

    Args:
        micro_batch: Sequences per micro-batch.
        seq: Tokens per sequence.
        steps: Optimizer steps.
        accum: Micro-batches per step; default: the stack's.
        lr: Learning rate.
        cycle: Run WARMUP, FULL, PREDICT, CORRECT in turn, one phase per step.
        world: Number of ranks, one process each.
    """
    from hybridtrain.config.encode import encode
    from hybridtrain.data.corpus import open_corpus
    from hybridtrain.models.find_model import find_model
    from hybridtrain.models.model_config import asked_workload
    from hybridvalidation.experiments.executed import ExecuteSpec, append_executed, read_executed
    from hybridvalidation.experiments.executed import execute as run_steps
    from hybridvalidation.show.pages.executed import equality_line, executed_table
    from hybridvalidation.show.report import write_pages

    shape = find_model(model)
    files = _files(common.scenarios)
    spec = ExecuteSpec(
        model=Path(model).stem if model.endswith(".toml") else model,
        shape=shape, stack=files.stack(stack), grad_accum_steps=accum,
        workload=asked_workload(micro_batch, seq), num_steps=steps, lr=lr, disk_folder=disk,
        host_limit_bytes=limit_bytes(host_limit_gib), runs_cycle=cycle, world=world,
    )  # fmt: skip
    read_executed(common.records)  # a damaged file is told now, not after the run
    run = run_steps(spec, open_corpus(None, vocab_size=shape.vocab_size), common.say)
    written = [append_executed(common.records, run), *write_pages("executed", files, common.results)]
    text = f"\n{executed_table([run], TERMINAL)}\n\n{equality_line(run)}"
    return _written(text, encode(run) | {"is_equal": run.is_equal}, written, code=0 if run.is_equal else 1)


def evidence(*, minutes: Amount = 12.0, only: Names = (), common: Recorded = RECORDED) -> Answer:
    """Measure planned figures on this machine's CUDA card, within minutes.

    Each part is recorded when it ends; another call with --only makes those that are missing. Exit code 1 without a
    card, or if a part failed.

    Example: hybridtrain evidence --minutes 9 --only 1b-16,pairs

    Args:
        minutes: Time limit; parts that do not fit are recorded as skipped.
        only: Comma-separated parts, here by priority: curves, scripts (or script/NAME), kernels, 7b-24, 1b-16, 7b-16,
            pairs (or one pair), 13b-24, 50b-24, 50b-24-more; default: all.
    """
    from hybridtrain.config.encode import encode
    from hybridvalidation.experiments.card_session.session import measure_card
    from hybridvalidation.experiments.card_session.table import evidence_text, newest_evidence
    from hybridvalidation.records.outcome import Outcome

    made, written = measure_card(
        minutes=minutes, only=only, scenarios=common.scenarios, results=common.results, say=common.note
    )
    failed = any(record.outcome is Outcome.ERROR for record in made)
    text = evidence_text(newest_evidence(made), TERMINAL)
    return _written(text, {"records": list(map(encode, made))}, written, code=int(failed))


def study(
    study: str, /, *, jobs: Count = 1, max_runs: Count | None = None, rung: str | None = None, forecasts: Flag = False,
    verify: Flag = False, common: Recorded = RECORDED,
) -> Answer:  # fmt: skip
    """Compare training methods by final loss, or by cost to reach a loss, under a preregistered protocol.

    Missing runs are made.

    Example: hybridtrain study tuned-0.1m --jobs 2 --max-runs 4

    Args:
        study: Name of a study or a quality ladder, or a .toml file of a study.
        jobs: Parallel runs.
        max_runs: Most runs in this call; the study can be continued.
        rung: Ladders only: make only the runs of this model size, even if smaller sizes are unfinished.
        forecasts: Score the loss forecasters on recorded losses.
        verify: Ladders only: make no new runs. Repeat the first steps of one recorded run per configuration, and check
            that each stack still equals the configuration whose runs it shares. Exit code 1 on a difference.
    """
    from hybridtrain.config.encode import encode
    from hybridtrain.errors import ConfigError, unknown_name
    from hybridvalidation.study.forecast import forecast_text, score_study, write_forecasts
    from hybridvalidation.study.protocol import StudyFile, check_targets, read_study_file
    from hybridvalidation.study.report import study_text, verdict_sentence, write_study
    from hybridvalidation.study.runner import run_study, verify_ladder

    files, results, tell = _files(common.scenarios), common.results, replace(common, json=False).note
    found, targets = read_study_file(files.folder, study), files.targets()
    given = {"--forecasts": forecasts, "--verify": verify, "--rung": rung is not None}
    own, this, other = ({"--verify", "--rung"}, "ladder", "study")
    if isinstance(found, StudyFile):
        own, this, other = ({"--forecasts"}, "study", "ladder")
    elif rung is not None and rung not in (names := [size.name for size in found.rungs]):
        raise ConfigError(study, [f"--rung: {unknown_name('model size', rung, names)}"])
    if wrong := [name for name in given if given[name] and name not in own]:
        raise ConfigError(study, [f"{wrong[0]}: is for a {other} only, but this is a {this}; remove it."])
    check_targets(found, targets)  # now, not after the runs
    if verify and not isinstance(found, StudyFile):
        stacks = [files.stack(name) for name in files.stack_names()]
        replays, num_held, astray = verify_ladder(found, stacks, results, jobs=jobs, say=tell)
        others = f"Stacks that differ from their configuration: {', '.join(astray) or 'none'}."
        return Answer(
            text=f"{num_held} of {len(replays)} records are reproduced by this program. {others}",
            content={"replays": list(map(encode, replays)), "stacks_astray": astray},
            code=0 if num_held == len(replays) and not astray else 1,
        )
    made = run_study(found, results, jobs=jobs, max_runs=max_runs, size=rung, say=tell)
    if forecasts and isinstance(found, StudyFile):
        scores = score_study(found, made, results, tell)
        runs = {"runs": list(map(encode, scores))}
        return _written(forecast_text(scores, TERMINAL), runs, write_forecasts(results))
    written = write_study(found, made, targets, results) if made else []
    content = {"study": found.name, "verdict": verdict_sentence(found, made), "runs": len(made)}
    return _written(study_text(found, made, targets, results, TERMINAL), content, written)


def recorded(
    source: str | None = None, /, *, record: Flag = False, jobs: Count = 1, common: Recorded = RECORDED
) -> Answer:
    """Plan runs that others measured on CUDA, and print measured value, planned value and error.

    Existing records are read; missing plans need the packages of their source.

    Example: hybridtrain recorded peft

    Args:
        source: Name of a file in scenarios/recorded/; default: all.
        record: Append new plans to the records, and rebuild table and picture.
        jobs: Parallel processes.
    """
    from hybridvalidation.experiments.recorded import recorded_command
    from hybridvalidation.show.report import write_pages

    files = _files(common.scenarios)
    text, rows = recorded_command(
        scenarios=files.folder, results=common.results if record else common.evidence, source=source, record=record,
        jobs=jobs, say=common.note,
    )  # fmt: skip
    paths = write_pages("recorded", files, common.results) if record else []
    return Answer(text="\n".join([text, *names_of(paths)]), content=rows)


def peers(
    scenario: str | None = None,
    /,
    *,
    planned: Flag = False,
    record: Flag = False,
    jobs: Count = 1,
    common: Recorded = RECORDED,
) -> Answer:
    """Compare other trainers with ours: planned on the virtual card, executed small, measured if there is a card.

    Existing records are read; missing runs need the packages of their engine.

    Example: hybridtrain peers 8b-full-24gb

    Args:
        scenario: Name of a file in scenarios/peers/; default: all.
        planned: Only plan; execute and measure nothing.
        record: Append new runs to the records, and rebuild the tables.
        jobs: Parallel processes.
    """
    from hybridvalidation.experiments.peers import peers_command
    from hybridvalidation.show.report import write_pages

    files = _files(common.scenarios)
    text, rows = peers_command(
        files=files, results=common.results if record else common.evidence, scenario=scenario, planned=planned,
        record=record, jobs=jobs, say=common.note,
    )  # fmt: skip
    paths = write_pages("peers", files, common.results) if record else []
    return Answer(text="\n".join([text, *names_of(paths)]), content=rows)


def atlas(
    *models: ModelName,
    record: Flag = False,
    jobs: Count = 1,
    max_runs: Count | None = None,
    common: Recorded = RECORDED,
) -> Answer:
    """Show the smallest card for each model and method, from committed records.

    Example: hybridtrain atlas llama-3.1-8b qwen3-8b

    Args:
        models: Default: all of scenarios/atlas/atlas.toml. With --json, every cell of the named ones.
        record: Fit what has no record yet on every card, run the commands of some cells again, append both to the
            records and rebuild the page. The same command goes on after an interruption.
        jobs: Models at a time.
        max_runs: Stop after so many models or commands.
    """
    from hybridtrain.config.encode import encode
    from hybridtrain.errors import ConfigError, unknown_name
    from hybridvalidation.experiments.atlas import read_atlas, read_atlas_file
    from hybridvalidation.experiments.atlas_runs import make_atlas
    from hybridvalidation.show.pages.atlas import atlas_text
    from hybridvalidation.show.report import write_pages

    files = _files(common.scenarios)
    known = [model.name for model in read_atlas_file(files.folder).models]
    if faults := [unknown_name("model of the atlas", name, known) for name in models if name not in known]:
        raise ConfigError("atlas", faults)
    if record:
        make_atlas(files.folder, common.records, models=models, width=jobs, max_runs=max_runs, say=common.note)
    records = (common.results if record else common.evidence) / "records"
    found = read_atlas(files.folder, records)
    if found is None:
        raise ConfigError("atlas", [f"{records}: no records of the atlas; make them: hybridtrain atlas --record"])
    paths = write_pages("atlas", files, common.results) if record else []
    shown = found.of(models or known)
    cells = [encode(cell) | {"command": cell.command} for one in shown.records.values() for cell in one.cells()]
    return Answer(
        text="\n".join([atlas_text(shown, TERMINAL), *names_of(paths)]),
        content={"models": list(shown.records), "cells": cells if models else [], "files": names_of(paths)},
    )


_BUDGETS = {"peak_vram_gib": GIB, "peak_vram_gb": GB}
"""Metrics that limit the card's memory, with their units."""


def _scenario_request(name: str, folder: Path | None) -> ScenarioRequest:
    from hybridtrain.planning.candidates import FitRequest

    files = _files(folder)
    scenario, targets = files.scenario(name), files.targets()
    model, card, work = scenario.model.resolve(), scenario.card.resolve(), scenario.workload
    request = FitRequest(model, card, scenario.host, work.seq_len, work.batch_size)
    return ScenarioRequest(name=scenario.name, request=request, budget_bytes=stated_budget(scenario, targets))


def _quality_notes(candidates: Iterable["Candidate"], folder: Path | None, results: Path) -> Mapping[str, QualityNote]:
    from hybridvalidation.study.quality_notes import ladder_notes

    return ladder_notes(candidates, _files(folder), results)


def stated_budget(scenario: "Scenario", targets: Mapping[str, "Target"]) -> int | None:
    """Return the smallest memory limit that a scenario's rows state, in bytes; None without such a row."""
    rows = [targets[item.id] for item in scenario.targets if not item.stacks]
    bounds = [
        int(row.value * _BUDGETS[row.metric])
        for row in rows
        if row.metric in _BUDGETS and row.direction == "max" and row.value is not None
    ]
    return min(bounds, default=None)


EXTENSION = Extension(
    verbs={
        "validate": validate, "execute": execute, "evidence": evidence, "bench": bench, "study": study,
        "recorded": recorded, "peers": peers, "atlas": atlas, "gate": gate, "report": report, "records": records,
        "snapshots": snapshots,
    },
    names={
        "scenarios": lambda folder: _files(folder).scenario_names(),
        "targets": lambda folder: list(_files(folder).targets()),
    },
    listings={"targets": _list_targets},
    scenario_request=_scenario_request,
    quality_notes=_quality_notes,
)  # fmt: skip
