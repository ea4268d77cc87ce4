"""Run ``hybridtrain evidence`` from a folder with this project, without installing it: no git, no network.

Usage: python benchmarks/card_session.py [OPTIONS of hybridtrain evidence]. Needs Python 3.11 to 3.13, torch 2.11 to
2.13 with CUDA, and the packages that ``[project] dependencies`` in pyproject.toml names; scripts whose packages are
missing are skipped. Another call with ``--only`` goes on. Results lie in results/, or where ``--results`` says.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run the command with the project on the path; return its exit code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    modules = {"docstring-parser": "docstring_parser", "markdown-it-py": "markdown_it"}
    needed = [text.partition(">")[0] for text in project["dependencies"]]
    missing = [name for name in needed if find_spec(modules.get(name, name)) is None]
    if missing:
        print(f"missing: {', '.join(missing)}; install them, or carry them as wheels", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="hybridtrain-metadata-") as folder:
        _write_metadata(Path(folder), project)
        roots = [folder, *(str(ROOT / name) for name in ("kernels", "validation", ""))]
        path = os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "hybridtrain", "evidence", *sys.argv[1:]]
        return subprocess.run(command, env=environment, check=False).returncode


def _write_metadata(folder: Path, project: dict[str, dict[str, dict[str, str]]]) -> None:
    """Write what an installation would tell: name, version, and the verbs that the harness adds."""
    info = folder / f"hybridtrain-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hybridtrain\nVersion: {project['version']}\n")
    group = "hybridtrain.extensions"
    points = "".join(f"{name} = {value}\n" for name, value in project["entry-points"][group].items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{points}")


if __name__ == "__main__":
    raise SystemExit(main())
