"""Verbs that run something: dry runs and training beside each other, on the processor or a card."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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

if TYPE_CHECKING:
    pass


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
    from hybridvalidation.judge.joint import judge_all, judge_jointly
    from hybridvalidation.records.outcome import Outcome
    from hybridvalidation.runs.validate import validate as validate_scenario
    from hybridvalidation.scenario_files import scenario_folder
    from hybridvalidation.show.report import TERMINAL, report_text
    from hybridvalidation.study.quality import ladder_verdicts, stack_quality

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
    elsewhere = ladder_verdicts(files, common.results)
    joint = judge_jointly(run, targets, elsewhere)
    content = {
        "scenario": run.scenario.name,
        "records": [encode(record) for record in run.records.values()],
        "verdicts": [encode(verdict) for verdict in judge_all(run, targets, elsewhere)],
        "joint": "" if joint is None else joint.sentence,
        "num_cached": run.num_cached,
        "files": paths,
    }
    told = report_text(run, targets, TERMINAL, elsewhere, stack_quality(files, common.results))
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
    disk: Path | None = None,
    host_limit_gib: Amount | None = None,
    world: Count = 1,
    common: Recorded = RECORDED,
) -> Answer:
    """Train a few steps on the CPU, count what a card would hold, and compare with the dry run of the same steps.

    Exit code 1 when they differ.

    Example: hybridtrain execute --model gpt2-small --stack tight --micro-batch 1 --seq 256 --steps 2

    Args:
        model: A preset, a .toml file with a shape, a Hugging Face folder or config.json, or a name on the hub.
        stack: Name of a stack, or a .toml file.
        micro_batch: Sequences per micro-batch.
        seq: Tokens per sequence.
        steps: Optimizer steps.
        accum: Micro-batches per step; default: the stack's.
        lr: Learning rate.
        cycle: Run WARMUP, FULL, PREDICT, CORRECT in turn, a phase a step.
        disk: Folder where a stack with disk tiers may make files.
        host_limit_gib: Host memory for offloaded tensors; default: what is available.
        world: Ranks that train together, a process each.
    """
    from hybridtrain.config.encode import encode
    from hybridtrain.data.corpus import open_corpus
    from hybridtrain.models.find_model import find_model
    from hybridtrain.models.model_config import asked_workload
    from hybridtrain.units import GIB
    from hybridvalidation.records.executed import append_executed, read_executed
    from hybridvalidation.runs.execute import ExecuteSpec
    from hybridvalidation.runs.execute import execute as run_steps
    from hybridvalidation.scenario_files import scenario_folder
    from hybridvalidation.show.pages.executed import equality_line, executed_table, write_executed
    from hybridvalidation.show.tables import TERMINAL

    shape = find_model(model)
    chosen = scenario_folder(common.scenarios).stack(stack)
    spec = ExecuteSpec(
        model=Path(model).stem if model.endswith(".toml") else model,
        shape=shape, stack=chosen, grad_accum_steps=accum,
        workload=asked_workload(micro_batch, seq), num_steps=steps,
        lr=lr, disk_folder=disk,
        host_limit_bytes=None if host_limit_gib is None else int(host_limit_gib * GIB),
        runs_cycle=cycle, world=world,
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
    study: str, /, *, jobs: Count = 1, max_runs: Count | None = None, rung: str | None = None, forecasts: Flag = False,
    verify: Flag = False, common: Recorded = RECORDED,
) -> Answer:  # fmt: skip
    """Compare ways to train, time to loss or quality, by a registered protocol; what is missing is run.

    Example: hybridtrain study tuned-0.1m --jobs 2 --max-runs 4

    Args:
        study: Name of a study, of a ladder of quality, or a .toml file of a study.
        jobs: Runs side by side.
        max_runs: Stop after so many; the study can go on later.
        rung: Of a ladder: make the runs of this model size alone, whether those before it are finished or not.
        forecasts: Score the loss forecasters on the recorded losses.
        verify: Of a ladder: run nothing, compute the first steps of one record of every configuration again, and
            compare every stack with the configuration whose runs it shares; exit code 1 when something differs.
    """
    from hybridtrain.config.encode import encode
    from hybridtrain.errors import ConfigError, unknown_name
    from hybridvalidation.scenario_files import scenario_folder
    from hybridvalidation.show.tables import TERMINAL
    from hybridvalidation.study.forecast import forecast_text, score_study, write_forecasts
    from hybridvalidation.study.protocol import StudyFile, check_targets, read_study_file
    from hybridvalidation.study.report import study_text, verdict_sentence, write_study
    from hybridvalidation.study.runner import run_study, verify_ladder

    def tell(line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    files, results = scenario_folder(common.scenarios), common.results
    found, targets = read_study_file(files.folder, study), files.targets()
    given = {"--forecasts": forecasts, "--verify": verify, "--rung": rung is not None}
    own, this, other = ({"--verify", "--rung"}, "ladder", "study")
    if isinstance(found, StudyFile):
        own, this, other = ({"--forecasts"}, "study", "ladder")
    elif rung is not None and rung not in (names := [size.name for size in found.rungs]):
        raise ConfigError(study, [f"--rung: {unknown_name('model size', rung, names)}"])
    if wrong := [name for name in given if given[name] and name not in own]:
        raise ConfigError(study, [f"{wrong[0]}: only a {other} has it, and this is a {this}; leave it out."])
    check_targets(found, targets)  # now, not after the runs
    if verify and not isinstance(found, StudyFile):
        stacks = [files.stack(name) for name in files.stack_names()]
        replays, num_held, astray = verify_ladder(found, stacks, results, jobs=jobs, say=tell)
        told = f"Stacks that compute something else than their configuration: {', '.join(astray) or 'none'}."
        return Answer(
            text=f"{num_held} of {len(replays)} records are what this program computes. {told}",
            content={"replays": [encode(one) for one in replays], "stacks_astray": astray},
            code=0 if num_held == len(replays) and not astray else 1,
        )
    made = run_study(found, results, jobs=jobs, max_runs=max_runs, size=rung, say=tell)
    if forecasts and isinstance(found, StudyFile):
        scores = score_study(found, made, results, tell)
        paths = names_of(write_forecasts(results))
        return Answer(
            text=f"{forecast_text(scores, TERMINAL)}\n\nWritten: {', '.join(paths)}",
            content={"runs": [encode(score) for score in scores], "files": paths},
        )
    paths = names_of(write_study(found, made, targets, results)) if made else []
    return Answer(
        text=f"{study_text(found, made, targets, results, TERMINAL)}\n\nWritten: {', '.join(paths)}",
        content={"study": found.name, "verdict": verdict_sentence(found, made), "runs": len(made), "files": paths},
    )


@Parameter(name="*", group="Monitoring (the first four also print a memory report at the end)")
@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What watches a training run."""

    profile_memory: Path | None = None
    """Write the memory after each step of this call to a .csv file."""
    tensorboard: Path | None = None
    """Folder for metrics and memory, for tensorboard --logdir."""
    wandb: str | None = None
    """Log both to this project of Weights & Biases; WANDB_MODE=offline keeps them on this machine."""
    mlflow: Path | None = None
    """Folder of MLflow for both, for mlflow ui --backend-store-uri."""
    profile_every: Count = 1
    """Steps between memory snapshots."""
    alert_gb: Count = 45
    """Say at once when more memory than this is used; the default is for cards of 48 GB."""
    spike_percent: Amount = 10.0
    """Report a memory snapshot as a spike where it is so much above the one before."""


_WATCH = Watch()


def train(
    config: Path, /, *,
    data: Path | None = None, out: Path = Path("run"), resume: Flag = False, change: Names = (),
    allow_data_change: Flag = False, disk: Path | None = None,
    host_limit_gib: Amount | None = None, rank_timeout_s: Amount = 600.0, watch: Watch = _WATCH,
    common: Common = COMMON,
) -> Answer:  # fmt: skip
    """Train a model on your own text.

    SIGINT and SIGTERM end a run after the step at work, saved; a second one ends it at once. Exit code 0 when the run
    is done or was done before, 75 when a signal ended it and --resume goes on, 130 when a second one did.

    On several cards: torchrun --nproc-per-node 2 -m hybridtrain train train.toml; the first rank writes log and states.

    Example: hybridtrain train train.toml --data my-text/ --out run --profile-memory memory.csv

    Args:
        config: A training .toml file.
        data: Text file, folder of text, token file (.bin), or records (.jsonl), read as by a [data] table; default:
            what [data] in the file names, else the embedded corpus.
        out: Folder for log and saved state.
        resume: Continue the run saved in --out; its stack may be another one.
        change: With --resume, settings that may be others than the saved run's, with commas between them: optimizer.lr,
            schedule.
        allow_data_change: With --resume, go on with other data.
        disk: Folder where tensors placed on disk get their files.
        host_limit_gib: Host memory for offloaded tensors; default: what is available.
        world: Ranks that train together, a process each.
        rank_timeout_s: Of several ranks, how long one waits for another before it ends.
    """
    from hybridtrain.data.corpus import open_corpus
    from hybridtrain.errors import ConfigError
    from hybridtrain.training_file import load_config
    from hybridtrain.units import GB, GIB
    from hybridvalidation.runs.train import train as train_model
    from hybridvalidation.runs.train_data import with_records
    from hybridvalidation.runs.train_log import Monitoring

    file = load_config(config)
    if data is not None and file.data is not None:
        faults = [f"[data] names {file.data.path} and --data {data}; give one of them"]
        raise ConfigError(str(config), faults)
    corpus, file = None, with_records(file, data)
    if file.data is None:
        corpus = open_corpus(data, vocab_size=file.model.resolve().vocab_size)
    said: list[str] = []
    monitoring = Monitoring(
        profile_csv=watch.profile_memory, profile_every=watch.profile_every, alert_bytes=watch.alert_gb * GB,
        spike_fraction=watch.spike_percent / 100, tensorboard=watch.tensorboard, wandb_project=watch.wandb,
        mlflow=watch.mlflow,
    )  # fmt: skip
    result = train_model(
        file, corpus, out, resume=resume, say=said.append if common.json else common.say,
        progress=not common.json, monitoring=monitoring, disk_folder=disk,
        host_limit_bytes=None if host_limit_gib is None else int(host_limit_gib * GIB),
        allowed=(*change, *(["data"] if allow_data_change else [])), rank_timeout_s=rank_timeout_s,
    )  # fmt: skip
    content = result.as_mapping() | {"corpus": result.corpus, "said": said, "out": out.as_posix()}
    return Answer(text=result.as_text(out), content=content, code=result.exit_code)


def export(
    run: Path, target: Path, /, *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32", merge: Flag = False, disk: Path | None = None,
    host_limit_gib: Amount | None = None, common: Common = COMMON,
) -> Answer:  # fmt: skip
    """Write a trained model as a folder that transformers' from_pretrained loads; of adapters a folder of PEFT's.

    Example: hybridtrain export run my-model --dtype bfloat16

    Args:
        run: Folder of a training run (--out of train).
        target: New folder.
        dtype: Of the weights; float32 is exact. Adapters are always float32.
        merge: Add adapters to the weights beside them, and write the whole model.
        disk: Folder where tensors placed on disk get their files.
        host_limit_gib: Host memory for offloaded tensors; default: what is available.
        world: Ranks that train together, a process each.
    """
    from hybridtrain.units import GIB, format_bytes
    from hybridvalidation.runs.export import export_run

    said: list[str] = []
    files, steps = export_run(
        run, target, dtype=dtype, merge=merge, say=said.append if common.json else common.say, disk_folder=disk,
        host_limit_bytes=None if host_limit_gib is None else int(host_limit_gib * GIB),
    )  # fmt: skip
    num_bytes = sum(file.stat().st_size for file in files)
    return Answer(
        text=f"{target}: the model after {steps} steps, {format_bytes(num_bytes)} in {len(files)} files",
        content={"steps_done": steps, "files": names_of(files), "bytes": num_bytes, "said": said},
    )


def quantize(
    model: Path, /, *,
    formats: Names = (), data: Path | None = None, seq: Count | None = None, common: Common = COMMON,
) -> Answer:  # fmt: skip
    """Tell what a trained model loses when its matrices are stored in fewer bits: loss and perplexity by format.

    Nothing is written. Weights alone are rounded, without calibration.

    Example: hybridtrain quantize my-model --formats int8,nf4 --data my-texts/

    Args:
        model: A Hugging Face folder with weights, or the folder of a training run (--out of train).
        formats: Of bfloat16, int8, nf4, ternary, with commas between them; default: all.
        data: Text, of which the held-out part is looked at; default: the run's own, or the embedded corpus.
        seq: Tokens per row; default: those of the run, or 512.
    """
    from hybridvalidation.runs.quantize import quantize as quantize_model

    report = quantize_model(model, formats=formats, data=data, seq_len=seq, say=common.note)
    return Answer(text=report.as_text(), content=report.as_mapping())
