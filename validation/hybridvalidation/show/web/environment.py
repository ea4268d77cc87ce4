"""Environments of all records: machines, libraries, programs."""

import json
from pathlib import Path

from hybridtrain.config.decode import decode
from hybridtrain.reports.tables import MARKDOWN, table
from hybridtrain.run.environment import Environment

_HEADERS = ("records of", "records", "commit", "days", "torch, Python", "processor", "CUDA card")


def environment_text(folder: Path) -> str:
    """Return a page with a row for each file of records and each environment that made some of it."""
    days: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")  # a writer may be at work behind it
        for record in map(json.loads, whole.splitlines()):
            if "environment" not in record:
                continue
            made = decode(Environment, record["environment"], source=str(path))
            row = (
                path.relative_to(folder).with_suffix("").as_posix(),
                (made.commit[:8] or "of no checkout") + (", with changes" if made.dirty else ""),
                f"{made.torch}, {made.python}", f"{made.cpu}, {made.num_cpus} cores, {made.system}", made.gpu or "none",
            )  # fmt: skip
            days.setdefault(row, []).append(record["started_at"][:10])
    rows = [
        [name, str(len(of_row)), commit, " to ".join(dict.fromkeys((min(of_row), max(of_row)))), *rest]
        for (name, commit, *rest), of_row in sorted(days.items())
    ]
    count, num_files = sum(map(len, days.values())), len({name for name, *_ in days})
    about = f"{count} records in {num_files} files, by where they were made."
    return "\n\n".join(["# Environment", about, table(_HEADERS, rows, MARKDOWN)])
