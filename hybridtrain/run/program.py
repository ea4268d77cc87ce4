"""Digest of the program behind a record, for provenance only; records stay valid when the program changes."""

from functools import cache
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("hybridtrain", "hybridkernels", "hybridvalidation")
_LENGTH = 16
"""Hex characters kept of a SHA-256."""
_NO_SOURCE = {".pyc", ".so"}


@cache
def program_digest() -> str:
    """Return 16 hex characters for paths and contents of the project's source files, at the first call.

    It is equal for equal files, in a checkout or an installed wheel; ``Environment.commit`` is the checkout's commit.
    """
    total = sha256()
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None, f"{package} is not installed"
        assert spec.origin is not None, f"{package} has no __init__.py"
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix not in _NO_SOURCE:
                total.update(f"{package}/{path.relative_to(folder).as_posix()}\0".encode())
                total.update(sha256(path.read_bytes()).digest())
    return total.hexdigest()[:_LENGTH]


def torch_series(version: str | None = None) -> str:
    """Return major and minor version of torch, of the installed one by default.

    >>> torch_series("2.13.0+cpu")
    '2.13'
    """
    return ".".join((version or metadata.version("torch")).split(".")[:2])
