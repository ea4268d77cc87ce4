"""The workflow runs sessions that noxfile.py has, on every Python that the project supports."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKFLOW = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")


def test_every_supported_python_is_tested_and_no_other() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    found = re.search(r"python: \[(.*)\]", WORKFLOW)
    assert found is not None
    assert re.findall(r"3\.\d+", found[1]) == supported


def test_the_workflow_runs_the_sessions_that_nox_runs_by_itself() -> None:
    ran = {
        name for line in re.findall(r"nox -s ([\w -]+?)(?: -- .*)?$", WORKFLOW, re.MULTILINE) for name in line.split()
    }
    usual = re.search(r"sessions = \[(.*)\]", NOXFILE)
    assert usual is not None
    assert set(re.findall(r'"([\w-]+)"', usual[1])) <= ran
    scenarios = {f"validate-{path.stem}" for path in (ROOT / "scenarios").glob("*.toml")}
    sessions = set(re.findall(r"^def (\w+)\(session", NOXFILE, re.MULTILINE)) | scenarios
    assert ran <= sessions
