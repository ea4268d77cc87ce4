"""What a log shows of the table of troubles."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hybridtrain.errors import ConfigError
from hybridvalidation.troubles.measures import ENOUGH, MEASURES
from hybridvalidation.troubles.table import Trouble, troubles

_MOST_BYTES: Final = 64 * 2**20
"""Of a log; of a longer one the end is read, where errors stand."""
_EXAMPLES: Final = ("llama-7b", "rtx-4090")
"""What commands of the table name in place of the reader's."""
_SHOWN: Final = 160
"""Characters of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One trouble that a log shows."""

    trouble: Trouble
    line: int | None
    """Where, counted from 1; None: the figures of the whole log show it."""
    found: str
    """The line, or what its figures say."""

    def as_mapping(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return {
            "trouble": self.trouble.name, "topic": self.trouble.topic, "line": self.line, "found": self.found,
            "cause": self.trouble.cause, "do": list(self.trouble.do), "commands": list(self.trouble.commands),
        }  # fmt: skip


def read_log(path: Path) -> str:
    """Return a log's text; of the folder of a run its log.jsonl.

    Raises:
        ConfigError: there is no such file.
    """
    path = path / "log.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            "--from", [f"{path} is no file; give a log, or the folder of a training run (--out of train)"]
        )
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MOST_BYTES))
        return file.read().decode("utf-8", errors="replace")


def diagnose(log: str) -> list[Answer]:
    """Return every trouble that a log shows, in the table's order; of one topic a measured one comes first."""
    lines = log.splitlines()
    return [answer for trouble in troubles() if (answer := _look(trouble, log, lines)) is not None]


def diagnosis_text(answers: Sequence[Answer], path: Path, read: tuple[int, int] = (0, 0)) -> str:
    """Return the answers for a reader.

    Args:
        answers: What the log shows.
        path: Of the log.
        read: How many losses and speeds it has.
    """
    if not answers and any(read):
        return (
            f"{path}: nothing wrong found in {read[0]} losses and {read[1]} speeds, nor in any line; of fewer than "
            f"{ENOUGH} steps a course says little"
        )
    if not answers:
        names = ", ".join(trouble.name for trouble in troubles())
        return (
            f"{path}: nothing in it is known. Known are: {names}. The guide's page on troubleshooting has each; a "
            "whole traceback, the log.jsonl of a run or its memory profile say most."
        )
    return "\n\n".join(_paragraph(answer) for answer in answers)


def _paragraph(answer: Answer) -> str:
    trouble = answer.trouble
    where = answer.found if answer.line is None else f"line {answer.line}: {answer.found}"
    steps = [f"  {number}. {what}" for number, what in enumerate(trouble.do, 1)]
    commands = [f"     $ {command}" for command in trouble.commands]
    if any(name in command for command in trouble.commands for name in _EXAMPLES):
        commands.insert(0, f"  with your own model and card in place of {' and '.join(_EXAMPLES)}:")
    return "\n".join([f"{trouble.topic}: {trouble.name} ({where})", f"  {trouble.cause}", *steps, *commands])


def _look(trouble: Trouble, log: str, lines: Sequence[str]) -> Answer | None:
    for name in trouble.measures:
        values = MEASURES[name](log)
        if values is not None:
            told = ", ".join(f"{key} {value}" for key, value in values.items()) or name.replace("_", " ")
            return Answer(trouble=trouble, line=None, found=f"the figures say: {told}")
    if not trouble.signs:
        return None
    sign = re.compile("|".join(f"(?:{sign})" for sign in trouble.signs), re.IGNORECASE)
    for number, line in enumerate(lines, 1):
        if sign.search(line):
            return Answer(trouble=trouble, line=number, found=line.strip()[:_SHOWN])
    return None
