import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridtrain.config.encode import to_json
from hybridtrain.run import environment
from hybridtrain.run.environment import read_environment


def test_the_environment_is_this_process() -> None:
    found = read_environment()
    assert found.python == sys.version.split()[0]
    assert found.torch == torch.__version__
    assert found.num_cpus >= 1
    assert found.cpu
    assert found.int8_update in {"compiled", "reference"}
    assert (found.gpu != "") == torch.cuda.is_available()


def test_no_host_name_and_no_path_is_told() -> None:
    values = json.loads(to_json(read_environment()))
    text = json.dumps(values)
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    assert str(Path.home()) not in text
    assert str(Path.cwd()) not in text
    assert not any(isinstance(value, str) and value.startswith(("/", "~")) for value in values.values())


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_allocators_settings_are_told(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert read_environment().allocator_conf == ""
    monkeypatch.setenv(variable, "expandable_segments:True")
    assert read_environment().allocator_conf == "expandable_segments:True"


def test_a_commit_is_a_whole_hash_or_nothing() -> None:
    assert re.fullmatch(r"([0-9a-f]{40})?", read_environment().commit)


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment, "_asked_git", environment._asked_git.__wrapped__)
    found = read_environment()
    assert (found.commit, found.dirty) == ("", False)


def test_a_package_inside_of_somebody_elses_repository_has_no_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As where it is installed into .venv of a project of theirs: the commit there is not this program's.
    subprocess.run(["git", "init", "-q", tmp_path], check=True)  # noqa: S607
    package = tmp_path / "site-packages" / "hybridtrain" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text("")
    monkeypatch.setattr(environment.hybridtrain, "__file__", str(package))
    assert not environment.is_checkout()
    assert (read_environment().commit, environment.uncommitted_files()) == ("", [])


def test_asking_for_the_checkout_leaves_its_index_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "hybridtrain" / "__init__.py"
    package.parent.mkdir()
    package.write_text("")
    for arguments in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)  # noqa: S607
    os.utime(package, (1, 1))  # now git would write the index anew, under a lock
    monkeypatch.setattr(environment.hybridtrain, "__file__", str(package))
    before = (tmp_path / ".git/index").read_bytes()
    assert environment.uncommitted_files() == ["hybridtrain/__init__.py"]
    assert (tmp_path / ".git/index").read_bytes() == before
