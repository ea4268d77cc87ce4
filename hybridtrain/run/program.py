"""The program behind a record: provenance, and no reason to call a record stale. A record holds by its result."""

from functools import cache
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("hybridtrain", "hybridkernels", "hybridvalidation")
"""The project's own."""
_LENGTH = 16
"""Hex characters kept of a SHA-256."""
_NO_SOURCE = {".pyc", ".so"}


@cache
def program_digest() -> str:
    """Return 16 hex characters for the path and content of every source file of the project, as first asked.

    It is the same in a checkout, with changes or without, and in an installed wheel; ``Environment.commit`` tells where
    a checkout stood.
    """
    total = sha256()
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None, f"{package} is part of what is installed"
        assert spec.origin is not None, f"{package} has an __init__.py"
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
