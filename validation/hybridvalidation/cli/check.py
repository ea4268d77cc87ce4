"""Verbs that compare and tell: records, kernels, tables, names, this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from cyclopts import Parameter

from hybridvalidation.cli.verb import (
    COMMON,
    RECORDED,
    Amount,
    Answer,
    Common,
    Count,
    Flag,
    Kind,
    Names,
    Recorded,
    ScenarioName,
    described,
    known_names,
    names_of,
)

if TYPE_CHECKING:
    from hybridvalidation.scenario_files import ScenarioFiles


def gate(
    *names: ScenarioName, accept: Flag = False, reason: str = "", jobs: Count | None = None,
    markdown: Path | None = None, common: Recorded = RECORDED,
) -> Answer:  # fmt: skip
    """Plan again, or compile kernels again, and compare with what is kept, to the byte.

    Exit codes: 0 equal, 3 over budget, 4 regressed, 5 improved, 6 not measured.

    Example: hybridtrain gate 1b-16gb

    Args:
        names: Of scenarios; default: all. 'recorded' and 'peers' plan others' trainers again, where their packages are
            installed ('recorded/peft' those of one file); 'kernels' compiles all Triton kernels for every card
            ('kernels/sm_89' for one).
        accept: Keep today's figures: a new record stands for the one before it.
        reason: Why kept figures may change; --accept needs it, and it stands in the new records.
        jobs: Processes at a time; default: one for each core.
        markdown: Write what was found for a pull request; GitHub's step summary and annotations come by themselves.
    """
    from hybridvalidation.gate.ci_text import write_markdown
    from hybridvalidation.gate.command import GateOrder, gate_all
    from hybridvalidation.scenario_files import scenario_folder

    order = GateOrder(names=names, accept=accept, reason=reason, processes=jobs, progress=not common.json)
    report = gate_all(scenario_folder(common.scenarios), order, common.results)
    write_markdown(report.as_markdown(), markdown)
    text = "\n".join([report.as_text(), *report.annotations()])
    return Answer(text=text, content=report.as_mapping(), code=int(report.exit_code))


def bench(
    what: Literal["kernels", "attention"], /, *,
    only: Names = (), modes: Names = (), quick: Flag = False, minutes: Amount = 10.0, recorded: Flag = False,
    check: Flag = False, accept: Flag = False, choose: Flag = False, common: Recorded = RECORDED,
) -> Answer:  # fmt: skip
    """Time the kernels against other implementations.

    On this machine's CUDA card or, at small shapes, its processor. Exit codes: 0 well, 1 one of ours is wrong or
    failed, 4 slower than the baseline, 6 no baseline.

    Example: hybridtrain bench kernels --only swiglu,rotary --check

    Args:
        what: kernels: timed; attention: what the flash kernel saves by length, planned (takes no other option).
        only: Ops with commas between them; default: all.
        modes: Of forward, backward, both, with commas between them; default: all.
        quick: One shape of each op, fewer samples.
        minutes: Start no case that would end later.
        recorded: Run nothing, take the newest record of each case.
        check: Compare with the baseline of the same card.
        accept: Record the times as the card's new baseline.
        choose: Rewrite hybridkernels/choices.toml from the records.
    """
    from hybridvalidation.kernel_bench.bench import BenchOrder, bench_kernels
    from hybridvalidation.scenario_files import scenario_folder

    if what == "attention":
        return _bench_attention(common)
    order = BenchOrder(
        only=only, modes=modes, quick=quick, limit_s=60 * minutes, recorded=recorded, check=check, accept=accept,
        choose=choose,
    )  # fmt: skip
    targets = scenario_folder(common.scenarios).targets()
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
    from hybridvalidation.scenario_files import scenario_folder
    from hybridvalidation.show.tables import TERMINAL

    targets = scenario_folder(common.scenarios).targets()
    read_attention(common.records)  # a damaged file is told now, not after the run
    record = plan_attention(targets)
    written = [append_attention(common.records, record), *write_attention([record], targets, common.results)]
    paths = names_of(written)
    verdicts = [encode(verdict) for verdict in judge_attention(record, targets)]
    return Answer(
        text=f"{attention_text(record, targets, TERMINAL)}\n\nWritten: {', '.join(paths)}",
        content={"record": encode(record), "verdicts": verdicts, "files": paths},
    )


def report(
    *scenarios: ScenarioName, html: Path | None = None, check: Flag = False, common: Recorded = RECORDED
) -> Answer:
    """Rebuild tables, plots and the figures in a checkout's pages from committed records, nothing is run.

    Exit code 1 when --check finds a text that is not what the records say.

    Example: hybridtrain report 1b-16gb

    Args:
        scenarios: Default: every scenario that has records.
        check: Instead write nothing, and name every table and page that would change.
        html: Instead write everything as pages for a browser into this folder; they need no network and no server.
    """
    from hybridvalidation.scenario_files import scenario_folder
    from hybridvalidation.show.figures import Figures, fill_pages
    from hybridvalidation.show.report import check_report, rebuild

    if check:
        stale = check_report(scenario_folder(common.scenarios), common.results)
        faults = [f"{name}: not what the records say; run: hybridtrain report" for name in stale]
        text = "\n".join(faults) or "every table and page says what the records say"
        return Answer(text=text, content={"stale": stale}, code=1 if stale else 0)
    if html is not None:
        from hybridtrain.errors import ConfigError
        from hybridtrain.units import format_bytes
        from hybridvalidation.show.web.site import write_site

        if scenarios:
            faults = [
                f"--html writes every scenario; leave out {', '.join(scenarios)}, or write Markdown without --html"
            ]
            raise ConfigError("report", faults)
        pages = write_site(scenario_folder(common.scenarios), common.results, html)
        size = sum(path.stat().st_size for path in pages)
        told = f"{pages[0].as_posix()}: open it in a browser; {len(pages)} files, {format_bytes(size)}"
        return Answer(text=told, content={"files": names_of(pages), "bytes": size})
    files = scenario_folder(common.scenarios)
    written = rebuild(files, scenarios, common.results)
    if written and not scenarios:
        written += fill_pages(common.results.parent, Figures(files, common.results))
    paths = names_of(written)
    return Answer(
        text="\n".join(paths) or "no records yet; run: hybridtrain validate SCENARIO", content={"files": paths}
    )


def records(
    *names: ScenarioName, verify: Flag = False, planned: Flag = False, record: Flag = False, prune: Flag = False,
    jobs: Count | None = None, common: Recorded = RECORDED,
) -> Answer:  # fmt: skip
    """Say whether planned records hold: this program plans again what it has not found again before, and compares.

    Exit codes are those of gate: 0 equal, 3 over budget, 4 regressed, 5 improved, 6 not measured. What was executed or
    measured stays evidence of the program that did it, and is told with that.

    Example: hybridtrain records 1b-16gb --verify

    Args:
        names: As of gate.
        verify: Plan all again, found again before or not.
        planned: Tell of planned records alone.
        record: Append to the records that this program found them again.
        prune: Instead drop records that no table shows any more.
        jobs: Processes at a time; default: one for each core.
    """
    from hybridvalidation.gate.command import GateOrder, gate_all
    from hybridvalidation.runs.validate import other_records, prune_records
    from hybridvalidation.scenario_files import evidence_folder, scenario_folder

    files = scenario_folder(common.scenarios)
    if prune:
        count = prune_records(files, names or files.scenario_names(), common.results)
        return Answer(text=f"{count} records dropped that no table shows", content={"dropped": count})
    order = GateOrder(
        names=names, processes=jobs, trusts_verified=not verify, keeps_verified=record, progress=not common.json
    )
    results = common.results if record else evidence_folder(common.results)
    report = gate_all(files, order, results)
    others = [] if names or planned else other_records(files, results)
    return Answer(
        text="\n".join([*others, report.as_text()]), content=report.as_mapping() | {"others": others},
        code=int(report.exit_code),
    )  # fmt: skip


def snapshots(*files: Path, plans: Names = (), record: Flag = False, common: Recorded = RECORDED) -> Answer:
    """Replay memory snapshots that a CUDA card wrote in the allocator model, and say where it differs.

    Exit code 1 when an event or the end is not as recorded.

    Example: hybridtrain snapshots memory_snapshot.pickle

    Args:
        files: Of torch.cuda.memory._dump_snapshot; of a folder those that scenarios/snapshots/public.toml knows.
        plans: Instead, scenarios with commas between them: by how much their plans' reserved bytes can move.
        record: Append what was found to the records, and rebuild the table.
    """
    from hybridtrain.errors import ConfigError
    from hybridvalidation.scenario_files import scenario_folder
    from hybridvalidation.snapshots.replayed import (
        append_snapshots,
        as_mapping,
        differs,
        replay_files,
        snapshots_text,
        write_reserved,
    )

    scenarios = scenario_folder(common.scenarios)
    if plans:
        return _moves_of(scenarios, plans, common, record=record)
    if not files:
        raise ConfigError("snapshots", ["FILES: missing; name snapshots, folders that hold listed ones, or --plans."])
    found = replay_files(files, scenarios.folder)
    paths: list[Path] = []
    if record:
        append_snapshots(common.records, found)
        paths = write_reserved(scenarios.folder, common.results)
    text = "\n".join([snapshots_text(found), *names_of(paths)])
    return Answer(text=text, content=as_mapping(found), code=1 if differs(found) else 0)


def _moves_of(scenarios: "ScenarioFiles", plans: Names, common: Recorded, *, record: bool) -> Answer:
    from hybridtrain.config.encode import encode
    from hybridvalidation.show.tables import TERMINAL
    from hybridvalidation.snapshots.moves import append_moves, moves_text, plan_moves
    from hybridvalidation.snapshots.replayed import write_reserved

    found, paths = [], list[Path]()
    for name in plans:
        found.append(plan_moves(scenarios, scenarios.scenario(name), common.note))
        if record:
            append_moves(common.records, found[-1])
            paths = write_reserved(scenarios.folder, common.results)
    text = "\n".join([moves_text(found, TERMINAL), *names_of(paths)])
    return Answer(text=text, content=[encode(each) for each in found])


def list_names(kind: Kind | None = None, /, *, common: Recorded = RECORDED) -> Answer:
    """Tell the names of scenarios, stacks, optimizations, optimizers, models, cards and targets.

    Targets come with their verdicts, from the records of --results; where there are none, from those that came with
    hybridtrain.

    Example: hybridtrain list targets

    Args:
        kind: One kind of names; default: all but optimizers, who take torch's time to be asked.
    """
    if kind == "targets":
        return _list_targets(common)
    kinds = [each for each in get_args(Kind) if each != "optimizers"] if kind is None else [kind]
    names = {each: known_names(each, common.scenarios) for each in kinds}
    if kind is not None:
        about = described(kind)
        return Answer(text="\n".join(f"{n}: {about[n]}" if n in about else n for n in names[kind]), content=names)
    text = "\n".join(f"{title}:\n  " + "\n  ".join(found) for title, found in names.items())
    return Answer(text=text, content=names)


def _list_targets(common: Recorded) -> Answer:
    from hybridtrain.config.encode import encode
    from hybridvalidation.judge.roll_up import counts
    from hybridvalidation.scenario_files import evidence_folder, scenario_folder
    from hybridvalidation.show.pages.targets import all_targets, targets_text
    from hybridvalidation.show.tables import TERMINAL

    rows = all_targets(scenario_folder(common.scenarios), evidence_folder(common.results))
    content = {"counts": counts(rows), "targets": [encode(row) for row in rows]}
    return Answer(text=targets_text(rows, TERMINAL), content=content)


def doctor(*, log: Annotated[Path | None, Parameter(name="--from")] = None, common: Common = COMMON) -> Answer:
    """Tell what this machine can do, and what is missing; or what a log shows, why, and what to do.

    Exit code 1 when something is there and does not work, or the log has nothing that is known: no trouble, no figures.

    Example: hybridtrain doctor --from run/log.jsonl

    Args:
        log: Output of a run, ours or not: a traceback, losses, speeds; or the folder of a run (--out of train).
    """
    if log is not None:
        return _diagnose(log)
    import os
    import shutil

    import torch

    from hybridkernels.adamw_int8.cpu_build import KernelBuildError, load_cpu_kernel
    from hybridkernels.triton_launch import cuda_backend
    from hybridtrain.config.encode import encode
    from hybridtrain.units import to_gib
    from hybridvalidation.kernel_bench.bench import package_version
    from hybridvalidation.records.environment import read_environment
    from hybridvalidation.scenario_files import scenario_folder

    environment = read_environment()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    broken = ""
    try:
        load_cpu_kernel()
    except KernelBuildError as error:
        broken = f"does not work: {error}"
    checks = {
        "CUDA card": environment.gpu or "none: memory is planned, speed is estimated, accuracy is executed on the CPU",
        "bitsandbytes": package_version("bitsandbytes") or "missing: 8-bit updates on CUDA run as a Triton kernel",
        "8-bit update on the CPU": broken
        or {
            "compiled": "compiled with this machine's C compiler",
            "reference": "no C compiler found: plain torch, about 100 times slower (install gcc)",
        }[environment.int8_update],
        "Memory": f"{to_gib(memory):.1f} GiB, {environment.num_cpus} processors",
        "Free disk here": f"{to_gib(shutil.disk_usage('.').free):.1f} GiB",
        "Scenario files": str(scenario_folder(common.scenarios).folder),
    }
    if torch.cuda.is_available():
        runs = cuda_backend() == "triton"
        checks["Triton"] = "runs on this card" if runs else "cannot run here: kernels are torch's own ops, slower"
    told = [f"{name}: {value}" for name, value in checks.items()]
    told.append(f"python {environment.python}, torch {environment.torch}, {environment.system}, {environment.cpu}")
    content = {"environment": encode(environment), "checks": checks}
    return Answer(text="\n".join(told), content=content, code=1 if broken else 0)


def _diagnose(log: Path) -> Answer:
    from hybridvalidation.troubles import counted, diagnose, diagnosis_text, read_log

    text = read_log(log)
    found, read = diagnose(text), counted(text)
    content = {
        "log": log.as_posix(), "losses": read[0], "speeds": read[1],
        "troubles": [answer.as_mapping() for answer in found],
    }  # fmt: skip
    return Answer(text=diagnosis_text(found, log, read), content=content, code=0 if found or any(read) else 1)
