"""Writing a file so that a reader sees the old content or the new one, never a part."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` beside ``path`` and move it there in one step; errors leave ``path`` as it was."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
