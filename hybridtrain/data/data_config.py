"""The [data] table of a training file: which text, in which tokens, in which rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from hybridtrain.config.rules import AtMost, below_least, faults_above_most
from hybridtrain.data.corpus import VALIDATION_PERCENT

BYTES: Final = "bytes"
"""The tokenizer that needs no file: a token per byte."""

Packing: TypeAlias = Literal["stream", "documents", "none"]
"""How rows are filled."""

_MOST_PERCENT: Final = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The data of a run. Relative paths start at the current folder."""

    path: Path
    """A text file, records (.jsonl, .json, .parquet, .arrow), a folder of both, a token file (.bin), or a folder with
    train.bin and val.bin."""
    tokenizer: str | None = None
    """"bytes", a tokenizer.json, or the folder that holds one; default: that of the folder the model begins with, where
    it has one, else bytes."""
    eos_token: str = ""
    """Token after each document, where the tokenizer's files name none or another is meant."""
    chat_template: str = ""
    """Of messages: "chatml", a name among the tokenizer's own, or a .jinja file; default: the tokenizer's own."""
    loss_on: Literal["answers", "all"] = "answers"
    """Which tokens of prompts with completions, and of messages, are targets; of plain text all are."""
    packing: Packing | None = None
    """stream: random windows over all documents one after the other. documents: rows of whole documents, attention
    inside each. none: a document a row. Default: documents where there are records, else stream."""
    validation: Path | None = None
    """Text to validate on, like ``path``; default: a share of the documents of ``path``."""
    validation_percent: int | None = None
    """Share of the documents, or of one text's tail, that is held out; default: 10, or 0 beside ``validation``."""
    validation_rows: Annotated[int, AtMost(2**24)] = 256
    """Rows that an evaluation looks at, at most."""

    def __post_init__(self) -> None:
        faults = below_least(self, ("validation_rows",)) + faults_above_most(self)
        if self.validation_percent is not None and not 0 <= self.validation_percent <= _MOST_PERCENT:
            faults.append(f"validation_percent: {self.validation_percent} must be in 0 to {_MOST_PERCENT}")
        if self.validation is not None and self.validation_percent:
            faults.append(
                f"validation_percent: {self.validation_percent} beside validation ({self.validation}); give one of them"
            )
        if self.tokenizer == "":
            faults.append(f"tokenizer: '' must be '{BYTES}', a tokenizer.json or the folder that holds one")
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def held_out_percent(self) -> int:
        """Share of ``path`` that is for validation."""
        if self.validation_percent is not None:
            return self.validation_percent
        return VALIDATION_PERCENT if self.validation is None else 0
