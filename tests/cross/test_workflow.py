"""The workflows run .ci/run on every supported Python, and that runs every session that nox runs by itself."""

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")
RUN = ROOT / ".ci/run"


def job_of(name: str) -> dict[str, Any]:
    """Return the only job of a workflow."""
    (job,) = yaml.safe_load((ROOT / ".github/workflows" / f"{name}.yml").read_text(encoding="utf-8"))["jobs"].values()
    assert isinstance(job, dict)
    return job


def commands_of(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def sessions_in(text: str) -> set[str]:
    """Return the sessions that lines of a shell script run by nox."""
    named = re.findall(r"^(?!#).*nox (?:--no-venv )?-s (.*?)(?: -- .*)?$", text, re.MULTILINE)
    return {name.partition("(")[0] for names in named for name in shlex.split(names)}


def test_every_supported_python_runs_all_of_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    job = job_of("ci")
    supported = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert job["strategy"]["matrix"]["python"] == supported
    assert commands_of(job) == [".ci/run"]
    assert os.access(RUN, os.X_OK)


def test_what_is_run_are_sessions_and_all_usual_ones() -> None:
    usual = re.search(r"sessions = \[(.*)\]", NOXFILE)
    assert usual is not None
    ran = sessions_in(RUN.read_text(encoding="utf-8"))
    assert ran > set(re.findall(r'"([\w-]+)"', usual[1]))
    names = {*re.findall(r"^def (\w+)\(session", NOXFILE, re.MULTILINE), *re.findall(r'name="([\w-]+)"', NOXFILE)}
    scenarios = {f"validate-{path.stem}" for path in (ROOT / "scenarios").glob("*.toml")}
    assert ran <= names | scenarios


def test_the_site_that_is_published_is_the_one_that_nox_builds() -> None:
    job = job_of("pages")
    assert sessions_in("\n".join(commands_of(job))) == {"docs"}
    uploads = [step["with"]["path"] for step in job["steps"] if "upload" in step.get("uses", "")]
    assert uploads == ["build/site"]
    assert "site_dir: build/site" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
