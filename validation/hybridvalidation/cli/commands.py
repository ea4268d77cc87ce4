"""What each verb of the command does."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

from hybridkernels.triton_launch import cuda_backend
from hybridtrain.config.decode import load_toml
from hybridtrain.config.encode import encode
from hybridtrain.data.corpus import open_corpus
from hybridtrain.dry_run import Workload
from hybridtrain.models.model_config import PRESETS
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.plan.compose import Optimization
from hybridtrain.units import GB, GIB, to_gib
from hybridtrain.virtual_gpu.card import card_catalogue
from hybridvalidation.card_session.record import read_evidence
from hybridvalidation.card_session.table import write_evidence
from hybridvalidation.judge.verdict import judge_all
from hybridvalidation.kernel_bench.attention_plan import read_attention
from hybridvalidation.kernel_bench.attention_table import write_attention
from hybridvalidation.kernel_bench.record import read_kernels
from hybridvalidation.kernel_bench.table import write_kernels
from hybridvalidation.recommend.command import parse_host
from hybridvalidation.records.environment import read_environment
from hybridvalidation.records.executed import append_executed, read_executed
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.records.store import RecordStore
from hybridvalidation.runs.dry_run_report import plan_run, read_model
from hybridvalidation.runs.execute import ExecuteSpec, execute
from hybridvalidation.runs.run_monitor import Monitoring
from hybridvalidation.runs.runner import ScenarioRun, run_from_records, run_scenario
from hybridvalidation.runs.train import train
from hybridvalidation.runs.train_file import TrainFile
from hybridvalidation.scenario_files import ScenarioFiles, scenario_folder
from hybridvalidation.show.executed_table import equality_line, executed_table, write_executed
from hybridvalidation.show.report import TERMINAL, report_text, write_report
from hybridvalidation.study.command import write_studies


def validate(options: argparse.Namespace) -> int:
    """Run a scenario, print its report, write tables and plots."""
    files = scenario_folder(options.scenarios)
    scenario = files.scenario(options.scenario)
    stacks = [files.stack(name) for name in scenario.stacks]
    store = RecordStore(options.results / "records")
    run = run_scenario(scenario, stacks, store, fresh=options.fresh, progress=not options.json)
    paths = write_report(run, files.targets(), options.results)
    if options.json:
        _print_json(_run_summary(run, files) | {"files": [path.as_posix() for path in paths]})
    else:
        _print(report_text(run, files.targets(), TERMINAL))
        made = len(run.records) - run.num_cached
        written = ", ".join(path.as_posix() for path in paths)
        _print(f"\n{made} runs made, {run.num_cached} read from records. Written: {written}")
    return 1 if any(record.outcome is Outcome.ERROR for record in run.records.values()) else 0


def dry_run_command(options: argparse.Namespace) -> int:
    """Plan one configuration and print where its memory goes."""
    report = plan_run(
        scenario_folder(options.scenarios), model=options.model, stack=options.stack, card=options.card,
        micro_batch_size=options.micro_batch, seq_len=options.seq, accum_steps=options.accum,
        host=None if options.host_memory is None else parse_host(options.host_memory),
        expandable_segments=options.expandable_segments,
        snapshot=options.snapshot, trace=options.trace,
    )  # fmt: skip
    if options.json:
        _print_json(report.as_mapping())
    else:
        _print(report.as_text())
    return 0 if report.fits else 1


def execute_command(options: argparse.Namespace) -> int:
    """Train on the CPU, compare with the dry run, record both."""
    shape = read_model(options.model)
    stack = scenario_folder(options.scenarios).stack(options.stack)
    limit = options.host_limit_gib
    spec = ExecuteSpec(
        model=Path(options.model).stem if options.model.endswith(".toml") else options.model,
        shape=shape, stack=stack.name, plan=stack.plan(options.accum),
        workload=Workload(micro_batch_size=options.micro_batch, seq_len=options.seq), num_steps=options.steps,
        lr=options.lr, disk_folder=options.disk, host_limit_bytes=None if limit is None else int(limit * GIB),
        runs_cycle=options.cycle,
    )  # fmt: skip
    read_executed(options.results / "records")  # a damaged file is told now, not after the run
    corpus = open_corpus(None, vocab_size=shape.vocab_size)
    run = execute(spec, corpus, (lambda _: None) if options.json else _print)
    paths = [append_executed(options.results / "records", run)]
    paths += write_executed(read_executed(options.results / "records"), options.results)
    if options.json:
        _print_json(encode(run) | {"is_equal": run.is_equal, "files": [path.as_posix() for path in paths]})
    else:
        written = ", ".join(path.as_posix() for path in paths)
        _print(f"\n{executed_table([run], TERMINAL)}\n\n{equality_line(run)}\nWritten: {written}")
    return 0 if run.is_equal else 1


def train_command(options: argparse.Namespace) -> int:
    """Train a model on text."""
    file = load_toml(TrainFile, options.config, unions={Optimization: OPTIMIZATIONS})
    corpus = open_corpus(options.data, vocab_size=file.model.resolve().vocab_size)
    said: list[str] = []
    monitoring = Monitoring(
        profile_csv=options.profile_memory, profile_every=options.profile_every,
        alert_bytes=int(options.alert_gb * GB), tensorboard=options.tensorboard, wandb_project=options.wandb,
    )  # fmt: skip
    limit = options.host_limit_gib
    result = train(
        file, corpus, options.out, resume=options.resume, say=said.append if options.json else _print,
        progress=not options.json, monitoring=monitoring, disk_folder=options.disk,
        host_limit_bytes=None if limit is None else int(limit * GIB),
    )  # fmt: skip
    if options.json:
        found = {
            "last_step": encode(result.last), "corpus": corpus.name, "said": said, "out": options.out.as_posix(),
        }  # fmt: skip
        _print_json(found if result.statistics is None else found | {"hybrid": result.statistics.state_dict()})
    else:
        _print(f"{result.last.step} steps, loss {result.loss:.3f}; log and state in {options.out}")
    return 0


def report_command(options: argparse.Namespace) -> int:
    """Rebuild tables and plots from records."""
    files = scenario_folder(options.scenarios)
    store = RecordStore(options.results / "records")
    names = options.names or [name for name in store.scenarios() if name in files.scenario_names()]
    written = []
    for name in names:
        scenario = files.scenario(name)
        run = run_from_records(scenario, [files.stack(stack) for stack in scenario.stacks], store)
        written += write_report(run, files.targets(), options.results)
    if not options.names:
        records = options.results / "records"
        written += write_executed(read_executed(records), options.results)
        written += write_evidence(read_evidence(records), options.results)
        written += write_studies(files.folder, options.results)
        kernels, attention = read_kernels(records), read_attention(records)
        if kernels or attention:  # a folder of scenarios need not state targets
            targets = files.targets()
            written += write_kernels(kernels, options.results, read_evidence(records), targets)
            written += write_attention(attention, targets, options.results)
    if options.json:
        _print_json({"files": [path.as_posix() for path in written]})
    else:
        _print("\n".join(path.as_posix() for path in written) or "no records yet; run: hybridtrain validate SCENARIO")
    return 0


def list_names(options: argparse.Namespace) -> int:
    """Print every name that files and arguments may use."""
    files = scenario_folder(options.scenarios)
    names: dict[str, list[str]] = {
        "scenarios": files.scenario_names(),
        "stacks": files.stack_names(),
        "optimizations": sorted(OPTIMIZATIONS),
        "models": list(PRESETS),
        "cards": list(card_catalogue()),
        "targets": list(files.targets()),
    }
    if options.json:
        _print_json(names)
    else:
        _print("\n".join(f"{kind}:\n  " + "\n  ".join(values) for kind, values in names.items()))
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Print what this machine can do."""
    environment = read_environment()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    checks = {
        "CUDA card": environment.gpu or "none: memory is planned, speed is estimated, accuracy is executed on the CPU",
        "bitsandbytes": _version("bitsandbytes") or "missing: 8-bit updates on CUDA run as a Triton kernel",
        "8-bit update on the CPU": {
            "compiled": "compiled with this machine's C compiler",
            "reference": "no C compiler found: plain torch, about 100 times slower (install gcc)",
        }[environment.int8_update],
        "Memory": f"{to_gib(memory):.1f} GiB, {environment.num_cpus} processors",
        "Free disk here": f"{to_gib(shutil.disk_usage('.').free):.1f} GiB",
        "Scenario files": str(scenario_folder(options.scenarios).folder),
    }
    if torch.cuda.is_available():
        runs = cuda_backend() == "triton"
        checks["Triton"] = "runs on this card" if runs else "cannot run here: kernels are torch's own ops, slower"
    if options.json:
        _print_json({"environment": encode(environment), "checks": checks})
    else:
        _print("\n".join(f"{name}: {value}" for name, value in checks.items()))
        _print(f"python {environment.python}, torch {environment.torch}, {environment.system}, {environment.cpu}")
    return 0


def _run_summary(run: ScenarioRun, files: ScenarioFiles) -> dict[str, object]:
    return {
        "scenario": run.scenario.name,
        "records": [encode(record) for record in run.records.values()],
        "verdicts": [encode(verdict) for verdict in judge_all(run, files.targets())],
        "num_cached": run.num_cached,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _print_json(mapping: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(mapping, allow_nan=False) + "\n")
