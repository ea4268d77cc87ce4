"""Diagnosis of a log by the table of troubles."""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Final

from hybridtrain.diagnoses.allocation import failed_allocation
from hybridtrain.diagnoses.measures import ENOUGH, MEASURES
from hybridtrain.diagnoses.table import Trouble, signs_of, troubles
from hybridtrain.errors import ConfigError

_MOST_BYTES: Final = 64 * 2**20
"""Largest part of a log that is read: its end, where errors are."""
_EXAMPLES: Final = ("llama-7b", "rtx-4090")
"""Model and card in the table's commands, replaced by the reader's."""
_SHOWN: Final = 160
_MOST_ANSWERS: Final = 3
_FAILED_ALLOCATIONS: Final = {"card-too-small", "host-allocation"}
"""Troubles whose diagnosis shows the message's figures, variants included."""
_LONGEST_TRACEBACK: Final = 400
"""Lines."""
_HEADER: Final = "Traceback (most recent call last)"
_FRAME: Final = re.compile(r"\bFile |\.py[:,]|\.py in ")
_RANK: Final = re.compile(r"\[rank\d+\]:")
_CONTEXT: Final = re.compile(r"(?:\[[^\]]*\]:?|\([^)]*\))?[\s\u2502]*\d+[\s\u2502]")
"""Lines of code around a frame's own, in tracebacks of rich and IPython."""
_CLOSURE: Final = re.compile(r"\bclosure\(\)|\bin closure\b")
"""Frames outside of a closure belong to the optimizer that calls it."""
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_HARMLESS: Final = re.compile(
    r"\w+Warning\b|\bWARNING\b|\bINFO\b|\[[WI]\d|\bignor(?:ed|ing)\b|\bretry|try again|"
    r"faulthandler|signals_to_handle|handlers? installed",
    re.IGNORECASE,
)
"""Lines that do not tell of a crash."""
_FAILURES: Final = {"Out of memory", "Crash"}
"""Topics that explain an exception."""
_IGNORED: Final = "Exception ignored in"
_ERROR: Final = re.compile(
    r"(?:\[rank\d+\]: ?|\([^)]*pid=\d+\) )?(?:\w{1,99}\.){0,9}[A-Z]\w{0,99}(?:Error|Exception)\b(?::|$)"
)
"""The last line of a traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A diagnosis: a trouble, and the line that shows it."""

    trouble: Trouble
    line: int | None
    """Line number, from 1; None: the figures of the whole log show it."""
    found: str
    """The line, or a summary of its figures."""
    figures: str = ""
    """Further figures of the log on its extent."""

    def as_mapping(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return {
            "trouble": self.trouble.name, "topic": self.trouble.topic, "line": self.line, "found": self.found,
            "figures": self.figures, "cause": self.trouble.cause, "do": list(self.trouble.do),
            "commands": list(self.trouble.commands),
        }  # fmt: skip


def read_log(path: Path) -> str:
    """Return the text of a log; of a run's folder, its log.jsonl.

    Raises:
        ConfigError: there is no such file.
    """
    path = path / "log.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            "--from", [f"{path} is not a file; give a log, or the folder of a training run (--out of train)"]
        )
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MOST_BYTES))
        return file.read().decode("utf-8", errors="replace")


def diagnose(log: str) -> list[Answer]:
    """Diagnose a log: return up to three troubles, the likeliest first."""
    return list(islice(_Log(log).answers(), _MOST_ANSWERS))


def unknown_error(log: str, answers: Sequence[Answer]) -> str:
    """Return the last Python exception of a log with its line number; "" if there is none or an answer tells why."""
    if any(answer.trouble.topic in _FAILURES for answer in answers):
        return ""
    lines = _COLOURS.sub("", log).splitlines()
    errors = (at for at in range(len(lines) - 1, -1, -1) if _ERROR.match(lines[at]))
    at = next((at for at in errors if not _is_ignored(lines, at)), None)
    return "" if at is None else f"line {at + 1} of the log: {lines[at][:_SHOWN]}"


def _is_ignored(lines: Sequence[str], at: int) -> bool:
    """Whether a line is of an exception that Python only reported, such as of a destructor."""
    header = next((up for up in range(at - 1, 0, -1) if not lines[up].startswith(" ")), 0)
    return header > 0 and _HEADER in lines[header] and lines[header - 1].startswith(_IGNORED)


def diagnosis_text(answers: Sequence[Answer], path: Path, read: tuple[int, int] = (0, 0), error: str = "") -> str:
    """Format the diagnoses, the first in full; ``read``: numbers of losses and speeds; ``error``: an unknown one."""
    unknown = [f"{path}: an error that is not among the {len(troubles())} known problems:\n  {error}"] if error else []
    if not answers and error:
        return unknown[0]
    if not answers and any(read):
        few = f"; fewer than {ENOUGH} steps show no trend" if max(read) < ENOUGH else ""
        return f"{path}: no problem found in {read[0]} losses and {read[1]} speeds, nor in any other line{few}"
    if not answers:
        return (
            f"{path}: no known problem found. Give a whole traceback, a run's log.jsonl or its memory profile; the "
            f"guide's page on troubleshooting lists all {len(troubles())} troubles."
        )
    first, *others = answers
    return "\n\n".join([_paragraph(first), *(_summary(answer) for answer in others), *unknown])


def _paragraph(answer: Answer) -> str:
    trouble = answer.trouble
    found = f"T{answer.found[1:]}" if answer.line is None else f"Line {answer.line} of the log: {answer.found}"
    figures = [f"  Figures: {answer.figures}"] if answer.figures else []
    steps = [f"  {number}. {what}" for number, what in enumerate(trouble.do, 1)]
    examples = [name for name in _EXAMPLES if any(name in command for command in trouble.commands)]
    note = [f"  with your own in place of {' and '.join(examples)}:"] if examples else []
    commands = [f"     $ {command}" for command in trouble.commands]
    return "\n".join([_title(trouble), f"  {found}", *figures, *steps, *note, *commands])


def _summary(answer: Answer) -> str:
    first = "".join(f"\n     $ {command}" for command in answer.trouble.commands[:1])
    return f"Or {_title(answer.trouble)}\n  1. {answer.trouble.do[0]}{first}"


def _title(trouble: Trouble) -> str:
    return f"{trouble.topic}: {trouble.name.replace('-', ' ')}. {trouble.cause}"


class _Log:
    def __init__(self, log: str) -> None:
        self.lines = _COLOURS.sub("", log).splitlines() or [""]
        self.text = "\n".join(self.lines)
        self.lower = self.text.lower()
        self.places = dict[str, int | None]()
        """First line of each sign."""

    def answers(self) -> Iterator[Answer]:
        by_frames, with_variants = set[str](), set[str]()
        """Troubles with a variant that matched, by frames or otherwise."""
        for trouble in troubles():
            if trouble.name in with_variants or (trouble.frames and by_frames.intersection(trouble.variant_of)):
                continue
            answer = self._variant(trouble) if trouble.variant_of else self._look(trouble)
            if answer is not None:
                with_variants.update(trouble.variant_of)
                by_frames.update(trouble.variant_of if trouble.frames else ())
                yield answer

    def _look(self, trouble: Trouble) -> Answer | None:
        told = self._measured(trouble)
        if told is not None:
            return Answer(
                trouble=trouble, line=None, found=f"the figures say: {told or trouble.name.replace('-', ' ')}"
            )
        at = self._first(trouble.signs, skips_harmless=trouble.topic == "Crash")
        return None if at is None else self._answer(trouble, at)

    def _variant(self, trouble: Trouble) -> Answer | None:
        own = self._first(trouble.signs)
        if own is not None:
            return self._answer(trouble, own)
        failure = self._first(tuple(sign for name in trouble.variant_of for sign in signs_of(name)))
        if failure is None:
            return self._look(trouble) if trouble.alone else None
        if trouble.frames:
            sign = _any(trouble.frames)
            at = next((line for line in self._traceback(failure) if sign.search(self.lines[line])), None)
            return None if at is None else self._answer(trouble, at)
        told = self._measured(trouble)
        return None if told is None else self._answer(trouble, failure, told)

    def _measured(self, trouble: Trouble) -> str | None:
        for name in trouble.measures:
            values = MEASURES[name](self.text)
            if values is not None:
                return ", ".join(f"{key} {value}" for key, value in values.items())
        return None

    def _answer(self, trouble: Trouble, at: int, told: str = "") -> Answer:
        figures = [told] if told else []
        allocation = failed_allocation(self.text)
        if allocation is not None and not _FAILED_ALLOCATIONS.isdisjoint({trouble.name, *trouble.variant_of}):
            figures.append(str(allocation))
        for pattern in trouble.figures:
            figures += [match[0] for match in deque(re.finditer(pattern, self.text), maxlen=1)]
        return Answer(trouble=trouble, line=at + 1, found=self.lines[at].strip()[:_SHOWN], figures="; ".join(figures))

    def _first(self, signs: tuple[str, ...], *, skips_harmless: bool = False) -> int | None:
        for sign in signs:
            if sign not in self.places:
                self.places[sign] = self._find(sign, skips_harmless=skips_harmless)
        return min((at for sign in signs if (at := self.places[sign]) is not None), default=None)

    def _find(self, sign: str, *, skips_harmless: bool) -> int | None:
        """Search lines that have the sign's plain part, which is found much faster."""
        part, pattern = plain_part(sign), _any((sign,))
        line = begin = 0
        while (found := self.lower.find(part, begin)) >= 0:
            line += self.lower.count("\n", begin, found)
            if pattern.search(self.lines[line]) and not (skips_harmless and self._is_harmless(line)):
                return line
            line, begin = line + 1, self.lower.find("\n", found) + 1
            if begin == 0:
                return None
        return None

    def _is_harmless(self, line: int) -> bool:
        return bool(_HARMLESS.search(self.lines[line])) or _is_ignored(self.lines, line)

    def _traceback(self, failure: int) -> Iterator[int]:
        """Yield the failure's line and its traceback, the innermost first; some programs print it after the message."""
        rank = _RANK.match(self.lines[failure])
        begin = max(0, failure - _LONGEST_TRACEBACK)
        prefix = rank[0] if rank else ""
        headers = (at for at in range(failure, begin - 1, -1) if _HEADER in self.lines[at])
        block = range(next((at for at in headers if self.lines[at].startswith(prefix)), begin), failure)
        if not any(_FRAME.search(self.lines[at]) for at in block):
            block = range(failure + 1, min(failure + _LONGEST_TRACEBACK, len(self.lines)))
        for at in (failure, *reversed(block)):
            line = self.lines[at]
            if _CLOSURE.search(line):
                return
            if line.startswith(prefix) and not _CONTEXT.match(line):
                yield at


@cache
def plain_part(sign: str) -> str:
    """Return the longest literal, in lower case, that each match of a regular expression contains."""
    breaks = re.sub(r"\\.|\[[^]]*\]", "\0", sign)
    while breaks != (outer := re.sub(r"\([^()]*\)", "\0", breaks)):
        breaks = outer
    parts = re.split(r"[\0.^$+]", re.sub(r".(?:[*?]|\{[^}]*\})", "\0", breaks))
    return "" if "|" in breaks else max(parts, key=len).lower()


@cache
def _any(signs: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{sign})" for sign in signs), re.IGNORECASE)
