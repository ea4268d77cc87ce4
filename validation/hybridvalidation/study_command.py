"""``hybridtrain study``: protocols that take long, resumable, judged by what was registered before."""

import argparse
import sys
from pathlib import Path

from hybridtrain.config.decode import load_toml
from hybridvalidation.scenario_files import default_folder
from hybridvalidation.study import StudyFile
from hybridvalidation.study_runner import run_study


def study_command(options: argparse.Namespace) -> int:
    """Run what is missing of a study and show it."""
    folder: Path = options.scenarios or default_folder()
    path = Path(options.study) if options.study.endswith(".toml") else folder / "studies" / f"{options.study}.toml"
    study = load_toml(StudyFile, path)
    run_study(study, options.results, jobs=options.jobs, max_runs=options.max_runs, say=_say)
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
