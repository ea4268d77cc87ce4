"""``hybridtrain study``: protocols that take long, resumable, judged by what was registered before."""

import argparse
import json
import sys
from pathlib import Path

from hybridtrain.config.decode import load_toml
from hybridtrain.config.encode import encode
from hybridtrain.errors import ConfigError, unknown_name
from hybridvalidation.scenario_files import ScenarioFiles, default_folder
from hybridvalidation.show.tables import TERMINAL
from hybridvalidation.study.forecast import forecast_text, score_study, write_forecasts
from hybridvalidation.study.plan import Made
from hybridvalidation.study.protocol import StudyFile
from hybridvalidation.study.report import study_text, verdict_sentence, write_study
from hybridvalidation.study.runner import read_study, run_study
from hybridvalidation.study.targets import check_targets


def study_command(options: argparse.Namespace) -> int:
    """Run what is missing of a study and show it."""
    folder: Path = options.scenarios or default_folder()
    study = read_study_file(folder, options.study)
    targets = ScenarioFiles(folder).targets()
    check_targets(study, targets)  # now, not after the runs
    made = run_study(study, options.results, jobs=options.jobs, max_runs=options.max_runs, say=_say)
    if options.forecasts:
        return _forecasts(study, made, options)
    paths = [path.as_posix() for path in write_study(study, made, targets, options.results)] if made else []
    if options.json:
        content = {"study": study.name, "verdict": verdict_sentence(study, made), "runs": len(made), "files": paths}
        sys.stdout.write(json.dumps(content) + "\n")
    else:
        sys.stdout.write(f"{study_text(study, made, targets, TERMINAL)}\n\nWritten: {', '.join(paths)}\n")
    return 0


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


def _forecasts(study: StudyFile, made: Made, options: argparse.Namespace) -> int:
    """Score the loss forecasters on what the study recorded."""
    records = score_study(study, made, options.results, _say)
    paths = [path.as_posix() for path in write_forecasts(options.results)]
    if options.json:
        sys.stdout.write(json.dumps({"runs": [encode(record) for record in records], "files": paths}) + "\n")
    else:
        sys.stdout.write(f"{forecast_text(records, TERMINAL)}\n\nWritten: {', '.join(paths)}\n")
    return 0


def write_studies(folder: Path, results: Path) -> list[Path]:
    """Rebuild tables and pictures of every study that has records."""
    written: list[Path] = []
    paths = sorted((folder / "studies").glob("*.toml"))
    targets = ScenarioFiles(folder).targets() if paths else {}
    for path in paths:
        study = load_toml(StudyFile, path)
        made = read_study(results, study.name)
        if made:
            written += write_study(study, made, targets, results)
    return written + write_forecasts(results)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
