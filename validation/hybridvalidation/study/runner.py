"""Runs a study: processes side by side, every run written down as it ends, so that a stopped study goes on."""

from collections.abc import Callable, Mapping
from pathlib import Path

from hybridtrain.config.decode import load_toml
from hybridtrain.errors import ConfigError, HybridTrainError, RecordError, unknown_name
from hybridvalidation.records.store import append_record, read_lines
from hybridvalidation.runs.child import Child, run_side_by_side
from hybridvalidation.study.protocol import StudyFile, StudyJob, StudyRecord, next_runs
from hybridvalidation.study.run import corpus_of


def read_study_file(folder: Path, name: str) -> StudyFile:
    """Read a study by name, or by path when ``name`` ends in ``.toml``.

    Raises:
        ConfigError: the name is unknown, or the file has faults.
    """
    if name.endswith(".toml"):
        return load_toml(StudyFile, Path(name))
    known = [path.stem for path in (folder / "studies").glob("*.toml")]
    if name not in known:
        raise ConfigError(str(folder / "studies"), [unknown_name("study", name, known)])
    return load_toml(StudyFile, folder / "studies" / f"{name}.toml")


def read_study(results: Path, name: str) -> dict[str, StudyRecord]:
    """Return the runs made so far by key; a later record of a run replaces an earlier one."""
    return {record.key: record for record in read_lines(record_path(results, name), StudyRecord)}


def record_path(results: Path, name: str) -> Path:
    """Return the file of a study's records."""
    return results / "records" / study_file(name)


def study_file(name: str) -> Path:
    """Return the file of a study's records from the folder of records."""
    return Path("studies") / f"{name}.jsonl"


def run_study(
    study: StudyFile, results: Path, *, jobs: int, max_runs: int | None, say: Callable[[str], None]
) -> dict[str, StudyRecord]:
    """Make all runs that are missing, ``jobs`` at a time, and return all records.

    Args:
        study: What to run.
        results: Folder of results.
        jobs: Processes side by side, one thread each.
        max_runs: Stop after so many; None: when the study is complete.
        say: Told of every run.

    Raises:
        RecordError: the runs made so far had another corpus.
        HybridTrainError: a process crashed; what ended before it is written down.
    """
    made = read_study(results, study.name)
    count = 0
    while runs := next_runs(study, made)[: None if max_runs is None else max_runs - count]:
        if not count:
            _check_corpus(study, made, record_path(results, study.name))
        say(f"{study.name}: {len(runs)} runs of this stage are missing")
        work = [StudyJob(study=study, run=run) for run in runs]
        for job, ended in run_side_by_side(work, _start, jobs):
            if ended.answer is None:
                raise HybridTrainError(
                    f"{study.name}: {job.run} has no record: {ended.fault}; runs that ended are kept, the same command "
                    "goes on behind them"
                )
            append_record(results / "records", study_file(study.name), ended.answer)
            made[ended.answer.key] = ended.answer
            count += 1
            say(_told(ended.answer))
    return made


def _start(job: StudyJob) -> Child[StudyRecord]:
    return Child("hybridvalidation.study.run:make_in_child", job, StudyRecord)


def _check_corpus(study: StudyFile, made: Mapping[str, StudyRecord], path: Path) -> None:
    """Refuse to compare runs on different texts: the embedded corpus is that of this machine's Python."""
    digest = corpus_of(study).digest
    others = sorted({record.corpus_digest[:8] for record in made.values()} - {digest[:8]})
    if others:
        raise RecordError(
            f"{path}: its runs had the corpus {', '.join(others)}, this machine has {digest[:8]}; go on with the same "
            "version of Python, or begin anew with other --results"
        )


def _told(record: StudyRecord) -> str:
    run = record.run
    loss = record.message if record.validation_loss is None else f"{record.validation_loss:.4f}"
    return (
        f"{run.method} lr {run.lr:g} betas {run.beta1:g} {run.beta2:g} seed {run.seed} {run.num_steps} steps: "
        f"{loss}, {record.jumps} jumps, {record.cpu_seconds:.0f} s"
    )
