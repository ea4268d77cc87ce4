"""Where all records were made: machines, libraries, programs."""

import json
from collections import Counter
from pathlib import Path

from tabulate import tabulate

from hybridtrain.config.decode import decode
from hybridtrain.reports.tables import MARKDOWN
from hybridtrain.run.environment import Environment

_HEADERS = ("records of", "records", "commit", "days", "torch", "Python", "processor", "CUDA card")


def environment_text(folder: Path) -> str:
    """Return a page with a row for each file of records and each environment that made some of it."""
    counts: Counter[tuple[str, ...]] = Counter()
    days: dict[tuple[str, ...], set[str]] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")  # a writer may be at work behind it
        for line in whole.splitlines():
            record = json.loads(line)
            if "environment" not in record:
                continue
            made = decode(Environment, record["environment"], source=str(path))
            row = (
                path.relative_to(folder).with_suffix("").as_posix(),
                (made.commit[:8] or "of no checkout") + (", with changes" if made.dirty else ""),
                made.torch, made.python, f"{made.cpu}, {made.num_cpus} cores, {made.system}", made.gpu or "none",
            )  # fmt: skip
            counts[row] += 1
            days.setdefault(row, set()).add(record["started_at"][:10])
    rows = [
        [name, str(count), commit, _span(days[name, commit, *rest]), *rest]
        for (name, commit, *rest), count in sorted(counts.items())
    ]
    parts = [
        "# Environment", f"{counts.total()} records in {len({row[0] for row in rows})} files, by where they were made.",
        tabulate(rows, headers=_HEADERS, tablefmt=MARKDOWN, disable_numparse=True),
    ]  # fmt: skip
    return "\n\n".join(parts)


def _span(days: set[str]) -> str:
    first, last = min(days), max(days)
    return first if first == last else f"{first} to {last}"
