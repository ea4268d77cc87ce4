import json
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridtrain.config.encode import to_json
from hybridvalidation.records import environment
from hybridvalidation.records.environment import read_environment, source_digest


def fake_package(root: Path, name: str) -> SimpleNamespace:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "a.py").write_text("one = 1\n")
    return SimpleNamespace(__name__=name, __file__=str(folder / "__init__.py"))


def digest_of(monkeypatch: pytest.MonkeyPatch, root: Path) -> str:
    packages = {
        name: SimpleNamespace(__name__=name, __file__=str(root / name / "__init__.py"))
        for name in ("hybridtrain", "hybridkernels")
    }
    for name, package in packages.items():
        monkeypatch.setattr(environment, name, package)
    return source_digest.__wrapped__()


def test_the_environment_is_this_process() -> None:
    found = read_environment()
    assert found.python == sys.version.split()[0]
    assert found.torch == torch.__version__
    assert found.num_cpus >= 1
    assert found.cpu
    assert found.int8_update in {"compiled", "reference"}
    assert (found.gpu != "") == torch.cuda.is_available()
    assert found.source_digest == source_digest()


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
    found = read_environment()
    assert (found.commit, found.dirty) == ("", False)


def test_the_digest_follows_every_file_that_can_change_a_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("hybridtrain", "hybridkernels"):
        fake_package(tmp_path, name)
    kernels = tmp_path / "hybridkernels"
    digests = [digest_of(monkeypatch, tmp_path)]
    changes = {
        kernels / "a.py": "one = 2\n",
        kernels / "k.c": "int one;\n",
        tmp_path / "hybridtrain" / "sub" / "hardware.toml": "x = 1\n",
    }
    for path, content in changes.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        digests.append(digest_of(monkeypatch, tmp_path))
    (kernels / "k.c").rename(kernels / "m.c")
    digests.append(digest_of(monkeypatch, tmp_path))
    assert len(set(digests)) == len(digests)
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in digests)


@pytest.mark.parametrize("name", ["accuracy.py", "figures.py", "measure.py", "worker.py"])
def test_the_digest_follows_the_code_that_makes_the_figures_of_a_record(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # Otherwise records made by the old code are taken for those of the new one: nothing is run again.
    before = source_digest.__wrapped__()
    changed = Path(environment.__file__).with_name(name)
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(path) + b"# edited" * (path == changed))
    assert source_digest.__wrapped__() != before


def test_the_digest_ignores_what_cannot_change_a_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("hybridtrain", "hybridkernels"):
        fake_package(tmp_path / "one", name)
        fake_package(tmp_path / "two", name)
    (tmp_path / "two" / "hybridtrain" / "notes.md").write_text("idle thoughts")
    (tmp_path / "two" / "hybridtrain" / "a.pyc").write_bytes(b"\0")
    assert digest_of(monkeypatch, tmp_path / "one") == digest_of(monkeypatch, tmp_path / "two")
