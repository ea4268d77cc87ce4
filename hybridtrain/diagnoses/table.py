"""The table of troubles, and the guide's page of it."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from hybridtrain.config.decode import decode
from hybridtrain.diagnoses.measures import MEASURES

Topic = Literal["Out of memory", "Crash", "Slow", "Accuracy", "Profiler silent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A known problem of training, with signs, cause and remedies."""

    name: str
    topic: Topic
    shows: str
    """What the user observes."""
    cause: str
    do: tuple[str, ...]
    """Remedies, the first one first."""
    commands: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    """Regular expressions for its lines."""
    measures: tuple[str, ...] = ()
    """Names in ``MEASURES``."""
    variant_of: tuple[str, ...] = ()
    """Names of the general troubles of this variant: their signs must match too, and it replaces them."""
    alone: bool = False
    """Whether a measure suffices for this variant, without a sign of the general trouble."""
    frames: tuple[str, ...] = ()
    """Regular expressions for the failure's traceback; the first matching variant wins."""
    figures: tuple[str, ...] = ()
    """Regular expressions for further lines to show, the last match of each."""

    def __post_init__(self) -> None:
        faults = [f"measures: '{name}' must be one of {', '.join(MEASURES)}" for name in {*self.measures} - {*MEASURES}]
        for sign in (*self.signs, *self.frames, *self.figures):
            try:
                re.compile(sign)
            except re.error as error:
                faults.append(f"'{sign}' must be a regular expression ({error})")
        if faults:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    trouble: tuple[Trouble, ...]

    def __post_init__(self) -> None:
        with_signs = {trouble.name for trouble in self.trouble if trouble.signs}
        unknown = sorted({name for trouble in self.trouble for name in trouble.variant_of} - with_signs)
        if unknown:
            raise ValueError(f"variant_of: {', '.join(unknown)} must be a trouble with signs")


@cache
def troubles() -> tuple[Trouble, ...]:
    """Return all troubles, in order of rank."""
    text = resources.files("hybridtrain.diagnoses").joinpath("troubles.toml").read_text(encoding="utf-8")
    return decode(_Table, tomllib.loads(text), source="troubles.toml").trouble


def signs_of(name: str) -> tuple[str, ...]:
    """Return the signs of a trouble of that name."""
    return next(trouble.signs for trouble in troubles() if trouble.name == name)


def troubles_page() -> str:
    """Return the table as Markdown, by topic."""
    topics = dict.fromkeys(trouble.topic for trouble in troubles())
    return "\n\n".join(
        f"## {topic}\n\n" + "\n\n".join(_section(each) for each in troubles() if each.topic == topic)
        for topic in topics
    )


def _section(trouble: Trouble) -> str:
    steps = "\n".join(f"{number}. {what}" for number, what in enumerate(trouble.do, 1))
    commands = "\n".join(["```sh", *trouble.commands, "```"]) if trouble.commands else ""
    title = trouble.name.replace("-", " ")
    return "\n\n".join(filter(None, [f"### {title}", f"*{trouble.shows}*", trouble.cause, steps, commands]))
