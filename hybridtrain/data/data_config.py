"""The [data] table of a training file: text, tokenizer, packing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from hybridtrain.config.rules import AtMost, below_least, faults_above_most
from hybridtrain.data.corpus import VALIDATION_PERCENT

BYTES: Final = "bytes"
"""The built-in tokenizer: one token per byte."""

Packing: TypeAlias = Literal["stream", "documents", "none"]
"""How rows are filled with documents."""

_MOST_PERCENT: Final = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The data of a run. Relative paths start at the current folder."""

    path: Path
    """A text file, records (.jsonl, .json, .parquet, .arrow), a folder of both, a token file (.bin), or a folder with
    train.bin and val.bin."""
    tokenizer: str | None = None
    """"bytes", a tokenizer.json or its folder; default: the tokenizer of the model's folder, else bytes."""
    eos_token: str = ""
    """Token after each document; default: the tokenizer's own end-of-text token."""
    chat_template: str = ""
    """Chat template for messages: "chatml", one of the tokenizer's templates by name, or a .jinja file; default: the
    tokenizer's default template."""
    loss_on: Literal["answers", "all"] = "answers"
    """Which tokens of prompts and messages the loss counts: answers or all; plain text always counts all."""
    packing: Packing | None = None
    """stream: random windows over concatenated documents. documents: packed rows of whole documents, attention inside
    each. none: one document per row. Default: documents for records, else stream."""
    validation: Path | None = None
    """Validation text, in the same forms as ``path``; default: a part of ``path``'s documents."""
    validation_percent: int | None = None
    """Percent of the documents, or of a single text's end, that is held out; default: 10, or 0 beside
    ``validation``."""
    validation_rows: Annotated[int, AtMost(2**24)] = 256
    """Rows per evaluation, at most."""

    def __post_init__(self) -> None:
        faults = below_least(self, ("validation_rows",)) + faults_above_most(self)
        if self.validation_percent is not None and not 0 <= self.validation_percent <= _MOST_PERCENT:
            faults.append(f"validation_percent: {self.validation_percent} must be in 0 to {_MOST_PERCENT}")
        if self.validation is not None and self.validation_percent:
            faults.append(
                f"validation_percent: {self.validation_percent} excludes validation ({self.validation}); give one of "
                f"them"
            )
        if self.tokenizer == "":
            faults.append(f"tokenizer: '' must be '{BYTES}', a tokenizer.json or the folder that holds one")
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def held_out_percent(self) -> int:
        """Percent of ``path`` that is held out for validation."""
        if self.validation_percent is not None:
            return self.validation_percent
        return VALIDATION_PERCENT if self.validation is None else 0
