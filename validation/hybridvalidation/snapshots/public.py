"""The list of public snapshots: where each was found and the digest that it is known by; none of their content."""

from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path

from hybridtrain.config.decode import load_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicSnapshot:
    """One file in a public repository."""

    blob: str
    """SHA-1 that git gives its content."""
    repository: str
    """On github.com."""
    path: str
    licence: str
    """Of the repository."""
    left_out: str = ""
    """Why it is not replayed; empty: it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicSnapshots:
    """The whole file."""

    snapshots: tuple[PublicSnapshot, ...]


def read_public(scenarios: Path) -> dict[str, PublicSnapshot]:
    """Return all by their blob; raises ``ConfigError`` for a faulty file."""
    found = load_toml(PublicSnapshots, scenarios / "snapshots" / "public.toml").snapshots
    return {snapshot.blob: snapshot for snapshot in found}


def blob_of(path: Path) -> str:
    """Return what ``git hash-object`` says of a file."""
    content = path.read_bytes()
    return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
