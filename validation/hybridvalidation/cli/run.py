"""Verbs that run something: dry runs and training beside each other, on the processor or a card."""

import sys
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from hybridvalidation.cli.verb import (
    COMMON,
    RECORDED,
    Amount,
    Answer,
    Common,
    Count,
    Flag,
    ModelName,
    Names,
    Recorded,
    ScenarioName,
    StackName,
    names_of,
)


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
    """Run a scenario under all its stacks and judge its targets; what has a valid record is not run again.

    Committed results do not change: new records, tables and plots go into a folder of their own. Exit code 1 when a
    run failed.

    Example: hybridtrain validate 1b-16gb

    Args:
        scenario: Name of a scenario, or a .toml file.
        fresh: Repeat runs that have a record already.
        record: Write new records, tables and plots into --results.
        planned: Make dry runs alone, in seconds; proxies keep the records they have, of whatever program.
        out: Or into this folder; default: runs/validate-SCENARIO.
    """
    from hybridtrain.config.encode import encode
    from hybridvalidation.judge.verdict import judge_all
    from hybridvalidation.records.outcome import Outcome
    from hybridvalidation.runs.validate import validate as validate_scenario
    from hybridvalidation.scenario_files import scenario_folder
    from hybridvalidation.show.report import TERMINAL, report_text

    files = scenario_folder(common.scenarios)
    done = validate_scenario(
        files,
        scenario,
        common.results,
        fresh=fresh,
        record=record,
        out=out,
        planned=planned,
        progress=not common.json,
    )
    run, paths, targets = done.run, names_of(done.written), files.targets()
    written = f" Written: {', '.join(paths)}" if paths else ""
    content = {
        "scenario": run.scenario.name,
        "records": [encode(record) for record in run.records.values()],
        "verdicts": [encode(verdict) for verdict in judge_all(run, targets)],
        "num_cached": run.num_cached,
        "files": paths,
    }
    return Answer(
        text=f"{report_text(run, targets, TERMINAL)}\n\n{run.num_made} runs made, {run.num_cached} read from records."
        + written,
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
    disk: Path | None = None,
    host_limit_gib: Amount | None = None,
    common: Recorded = RECORDED,
) -> Answer:
    """Train a few steps on the CPU, count what a card would hold, and compare with the dry run of the same steps.

    Exit code 1 when they differ.

    Example: hybridtrain execute --model gpt2-small --stack tight --micro-batch 1 --seq 256 --steps 2

    Args:
        model: Name of a model, or a .toml file with its shape.
        stack: Name of a stack, or a .toml file.
        micro_batch: Sequences per micro-batch.
        seq: Tokens per sequence.
        steps: Optimizer steps.
        accum: Micro-batches per step; default: the stack's.
        lr: Learning rate.
        cycle: Run WARMUP, FULL, PREDICT, CORRECT in turn, a phase a step.
        disk: Folder where a stack with disk tiers may make files.
        host_limit_gib: Host memory for offloaded tensors; default: what is available.
    """
    from hybridtrain.config.encode import encode
    from hybridtrain.data.corpus import open_corpus
    from hybridtrain.models.model_config import Workload
    from hybridtrain.units import GIB
    from hybridvalidation.records.executed import append_executed, read_executed
    from hybridvalidation.runs.dry_run_report import read_model
    from hybridvalidation.runs.execute import ExecuteSpec
    from hybridvalidation.runs.execute import execute as run_steps
    from hybridvalidation.scenario_files import scenario_folder
    from hybridvalidation.show.pages.executed import equality_line, executed_table, write_executed
    from hybridvalidation.show.report import TERMINAL

    shape = read_model(model)
    chosen = scenario_folder(common.scenarios).stack(stack)
    spec = ExecuteSpec(
        model=Path(model).stem if model.endswith(".toml") else model,
        shape=shape, stack=chosen.name, plan=chosen.plan(accum),
        workload=Workload(micro_batch_size=micro_batch, seq_len=seq), num_steps=steps,
        lr=lr, optimizer=chosen.optimizer, disk_folder=disk,
        host_limit_bytes=None if host_limit_gib is None else int(host_limit_gib * GIB),
        runs_cycle=cycle,
    )  # fmt: skip
    read_executed(common.records)  # a damaged file is told now, not after the run
    run = run_steps(spec, open_corpus(None, vocab_size=shape.vocab_size), common.say)
    written = [append_executed(common.records, run), *write_executed(read_executed(common.records), common.results)]
    paths = names_of(written)
    return Answer(
        text=f"\n{executed_table([run], TERMINAL)}\n\n{equality_line(run)}\nWritten: {', '.join(paths)}",
        content=encode(run) | {"is_equal": run.is_equal, "files": paths},
        code=0 if run.is_equal else 1,
    )


def evidence(*, minutes: Amount = 25.0, only: Names = (), common: Recorded = RECORDED) -> Answer:
    """Measure on this machine's CUDA card what is planned elsewhere, in minutes.

    Exit code 1 without a card or when a part failed.

    Example: hybridtrain evidence --minutes 10 --only 1b-16,pairs

    Args:
        minutes: Stop after so many; parts that do not fit any more are recorded as skipped.
        only: Parts with commas between them: 7b-24, 1b-16, 7b-16, 13b-24, 50b-24, 50b-24-more, pairs, or one pair;
            default: all.
    """
    from hybridtrain.config.encode import encode
    from hybridvalidation.card_session.session import measure_card
    from hybridvalidation.card_session.table import evidence_table, newest_evidence
    from hybridvalidation.records.outcome import Outcome
    from hybridvalidation.show.tables import TERMINAL

    made, written = measure_card(
        minutes=minutes, only=only, scenarios=common.scenarios, results=common.results, say=common.note
    )
    paths = names_of(written)
    return Answer(
        text=f"{evidence_table(newest_evidence(made), TERMINAL)}\n\nWritten: {', '.join(paths)}",
        content={"records": [encode(record) for record in made], "files": paths},
        code=1 if any(record.outcome is Outcome.ERROR for record in made) else 0,
    )


def study(
    study: str, /, *, jobs: Count = 1, max_runs: Count | None = None, forecasts: Flag = False,
    common: Recorded = RECORDED,
) -> Answer:  # fmt: skip
    """Compare ways to train, time to loss, by a registered protocol; what is missing is run.

    Example: hybridtrain study tuned-0.1m --jobs 2 --max-runs 4

    Args:
        study: Name of a study, or a .toml file.
        jobs: Runs side by side.
        max_runs: Stop after so many; the study can go on later.
        forecasts: Score the loss forecasters on the recorded losses.
    """
    from hybridtrain.config.encode import encode
    from hybridvalidation.scenario_files import scenario_folder
    from hybridvalidation.show.tables import TERMINAL
    from hybridvalidation.study.figures import check_targets
    from hybridvalidation.study.forecast import forecast_text, score_study, write_forecasts
    from hybridvalidation.study.report import study_text, verdict_sentence, write_study
    from hybridvalidation.study.runner import read_study_file, run_study

    def tell(line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    files = scenario_folder(common.scenarios)
    found, targets = read_study_file(files.folder, study), files.targets()
    check_targets(found, targets)  # now, not after the runs
    made = run_study(found, common.results, jobs=jobs, max_runs=max_runs, say=tell)
    if forecasts:
        scores = score_study(found, made, common.results, tell)
        paths = names_of(write_forecasts(common.results))
        return Answer(
            text=f"{forecast_text(scores, TERMINAL)}\n\nWritten: {', '.join(paths)}",
            content={"runs": [encode(score) for score in scores], "files": paths},
        )
    paths = names_of(write_study(found, made, targets, common.results)) if made else []
    verdict = verdict_sentence(found, made)
    return Answer(
        text=f"{study_text(found, made, targets, TERMINAL)}\n\nWritten: {', '.join(paths)}",
        content={"study": found.name, "verdict": verdict, "runs": len(made), "files": paths},
    )


@Parameter(name="*", group="Monitoring (the first three also print a memory report at the end)")
@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What watches a training run."""

    profile_memory: Path | None = None
    """Write the memory after each step of this call to a .csv file."""
    tensorboard: Path | None = None
    """Folder for metrics and memory, for tensorboard --logdir."""
    wandb: str | None = None
    """Log both to this project of Weights & Biases; WANDB_MODE=offline keeps them on this machine."""
    profile_every: Count = 1
    """Steps between memory snapshots."""
    alert_gb: Count = 45
    """Say at once when more memory than this is used; the default is for cards of 48 GB."""


_WATCH = Watch()


def train(
    config: Path, /, *,
    data: Path | None = None, out: Path = Path("run"), resume: Flag = False, disk: Path | None = None,
    host_limit_gib: Amount | None = None, watch: Watch = _WATCH, common: Common = COMMON,
) -> Answer:  # fmt: skip
    """Train a model on your own text.

    Example: hybridtrain train train.toml --data my-text/ --out run --profile-memory memory.csv

    Args:
        config: A training .toml file.
        data: Text file, folder of text, or token file (.bin); default: the embedded corpus.
        out: Folder for log and saved state.
        resume: Continue the run saved in --out.
        disk: Folder where tensors placed on disk get their files.
        host_limit_gib: Host memory for offloaded tensors; default: what is available.
    """
    from hybridtrain.data.corpus import open_corpus
    from hybridtrain.training_file import load_config
    from hybridtrain.units import GB, GIB
    from hybridvalidation.runs.train import train as train_model
    from hybridvalidation.runs.train_log import Monitoring

    file = load_config(config)
    corpus = open_corpus(data, vocab_size=file.model.resolve().vocab_size)
    said: list[str] = []
    monitoring = Monitoring(
        profile_csv=watch.profile_memory, profile_every=watch.profile_every, alert_bytes=watch.alert_gb * GB,
        tensorboard=watch.tensorboard, wandb_project=watch.wandb,
    )  # fmt: skip
    result = train_model(
        file, corpus, out, resume=resume, say=said.append if common.json else common.say,
        progress=not common.json, monitoring=monitoring, disk_folder=disk,
        host_limit_bytes=None if host_limit_gib is None else int(host_limit_gib * GIB),
    )  # fmt: skip
    content = result.as_mapping() | {"corpus": corpus.name, "said": said, "out": out.as_posix()}
    return Answer(text=result.as_text(out), content=content, code=result.exit_code)
