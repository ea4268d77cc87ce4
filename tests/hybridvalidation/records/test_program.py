"""The program of a record: its sources, wherever they lie, and nothing else."""

import subprocess
import sys
from pathlib import Path

import hybridtrain
from hybridtrain.run.program import PACKAGES, program_digest, torch_series

_DIGEST = "from hybridtrain.run.program import program_digest; print(program_digest())"


def digest_of(*folders: Path) -> str:
    """Return the digest that a fresh process finds, whose packages are looked for in ``folders`` first."""
    program = f"import sys; sys.path[:0] = {list(map(str, folders))!r}; {_DIGEST}"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def copied(folder: Path) -> list[Path]:
    """Copy what decides a digest, for an edit, as links."""
    root = Path(hybridtrain.__file__).parents[1]
    found = [root / "hybridtrain", root / "kernels/hybridkernels", root / "validation/hybridvalidation"]
    assert [path.name for path in found] == list(PACKAGES)
    for package in found:
        for path in package.rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                target = folder / package.name / path.relative_to(package)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(path)
    return [folder]


def test_the_digest_is_that_of_the_sources_wherever_they_lie(tmp_path: Path) -> None:
    place = copied(tmp_path)
    assert digest_of(*place) == digest_of() == program_digest()
    cache = tmp_path / "hybridtrain" / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "other.cpython-311.pyc").write_bytes(b"1")
    assert digest_of(*place) == program_digest()
    table = tmp_path / "hybridtrain/virtual_gpu/cards/hardware.toml"
    text = table.read_text()
    table.unlink()
    table.write_text(text + "\n")
    assert digest_of(*place) != program_digest()


def test_of_torch_the_series_matters() -> None:
    assert torch_series("2.13.1+cu130") == torch_series("2.13.0") == "2.13"
    assert torch_series().count(".") == 1
