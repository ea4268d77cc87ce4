"""Verbs that compare and tell: baselines, kernels, tables, names, this machine."""

from typing import Literal, get_args

from hybridvalidation.cli.verb import (
    COMMON,
    RECORDED,
    Amount,
    Answer,
    Common,
    Flag,
    Kind,
    Names,
    Recorded,
    ScenarioName,
    known_names,
    names_of,
)


def gate(*scenarios: ScenarioName, accept: Flag = False, common: Recorded = RECORDED) -> Answer:
    """Compare dry runs, or compiled kernels, with baselines.

    Exit codes: 0 equal, 3 over budget, 4 regressed, 5 improved, 6 not measured.

    Example: hybridtrain gate 1b-16gb

    Args:
        scenarios: Default: every scenario, and 'recorded', the errors of committed plans of what others measured;
            'kernels' compiles all Triton kernels for every card.
        accept: Record today's figures as the new baselines.
    """
    from hybridvalidation.gate.command import gate_all
    from hybridvalidation.scenario_files import scenario_folder

    report = gate_all(
        scenario_folder(common.scenarios), scenarios, common.results / "baselines", accept=accept,
        progress=not common.json,
    )  # fmt: skip
    return Answer(text=report.as_text(), content=report.as_mapping(), code=int(report.exit_code))


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


def report(*scenarios: ScenarioName, common: Recorded = RECORDED) -> Answer:
    """Rebuild tables and plots from committed records, nothing is run.

    Example: hybridtrain report 1b-16gb

    Args:
        scenarios: Default: every scenario that has records.
    """
    from hybridvalidation.scenario_files import scenario_folder
    from hybridvalidation.show.report import rebuild

    paths = names_of(rebuild(scenario_folder(common.scenarios), scenarios, common.results))
    return Answer(
        text="\n".join(paths) or "no records yet; run: hybridtrain validate SCENARIO", content={"files": paths}
    )


def records(
    *scenarios: ScenarioName, planned: Flag = False, prune: Flag = False, common: Recorded = RECORDED
) -> Answer:
    """Say which records do not hold for the program as it is.

    Exit code 1 when there are some.

    Example: hybridtrain records 1b-16gb

    Args:
        scenarios: Default: every scenario.
        planned: Ask of dry runs alone: proxies take minutes to hours of a processor without bfloat16.
        prune: Instead drop records that no table shows any more.
    """
    from hybridvalidation.runs.validate import prune_records, stale_records
    from hybridvalidation.scenario_files import scenario_folder

    files = scenario_folder(common.scenarios)
    names = scenarios or files.scenario_names()
    if prune:
        count = prune_records(files, names, common.results)
        return Answer(text=f"{count} records dropped that no table shows", content={"dropped": count})
    stale = stale_records(files, names, common.results, planned=planned)
    told = [*stale, f"{len(stale)} records of {len(names)} scenarios are stale"]
    return Answer(text="\n".join(told), content={"stale": stale}, code=1 if stale else 0)


def list_names(kind: Kind | None = None, /, *, common: Common = COMMON) -> Answer:
    """Tell the scenarios, stacks, optimizations, models, cards and targets that arguments and files may name.

    Example: hybridtrain list cards

    Args:
        kind: One kind of names; default: all.
    """
    names = {each: known_names(each, common.scenarios) for each in (get_args(Kind) if kind is None else (kind,))}
    if kind is not None:
        return Answer(text="\n".join(names[kind]), content=names)
    text = "\n".join(f"{title}:\n  " + "\n  ".join(found) for title, found in names.items())
    return Answer(text=text, content=names)


def doctor(*, common: Common = COMMON) -> Answer:
    """Tell what this machine can do, and what is missing.

    Example: hybridtrain doctor
    """
    import os
    import shutil

    import torch

    from hybridkernels.triton_launch import cuda_backend
    from hybridtrain.config.encode import encode
    from hybridtrain.units import to_gib
    from hybridvalidation.kernel_bench.bench import package_version
    from hybridvalidation.records.environment import read_environment
    from hybridvalidation.scenario_files import scenario_folder

    environment = read_environment()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    checks = {
        "CUDA card": environment.gpu or "none: memory is planned, speed is estimated, accuracy is executed on the CPU",
        "bitsandbytes": package_version("bitsandbytes") or "missing: 8-bit updates on CUDA run as a Triton kernel",
        "8-bit update on the CPU": {
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
    return Answer(text="\n".join(told), content={"environment": encode(environment), "checks": checks})
