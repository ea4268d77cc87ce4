"""What a training run loads: batches of a corpus or of packed text, a probe split, rows to validate on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from hybridtrain.config.encode import JsonMapping
from hybridtrain.data.batches import IGNORED, BatchSampler
from hybridtrain.data.byte_tokens import TokenArray
from hybridtrain.data.corpus import Corpus
from hybridtrain.data.data_config import BYTES, DataConfig
from hybridtrain.data.documents import holds_records
from hybridtrain.data.packing import EncodedDocuments, PackedRows, RowPosition, RowSampler, pack
from hybridtrain.data.text_data import TextData, open_text
from hybridtrain.data.tokenizer import TOKENIZER_FILES, ByteTokenizer, Tokenizer
from hybridtrain.engine.random_key import random_key
from hybridtrain.errors import ConfigError, DataError
from hybridtrain.hybrid.cycle import LoadBatches
from hybridtrain.run.train_log import Say
from hybridtrain.trainer import Trainer
from hybridtrain.training_file import TrainFile

_PROBE_STREAM = 1
_PROBE_PERCENT = 2
_LEARNED_PROBE_PERCENT = 10
"""Where CORRECT learns from the probe split: at K of 10 its tokens are then seen as often as all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLog:
    """The line of the log that says what a run trains on."""

    step: int = 0
    data: str
    """Name of the file or folder."""
    packing: str
    train_documents: int
    train_tokens: int
    """Of the training part, without padding."""
    rows: int | None
    """Of an epoch; None in a stream, whose windows are drawn with replacement."""
    fill_percent: float
    """Share of a batch's positions that are no padding."""
    dropped_pieces: int
    """Of documents, without a target that counts."""
    documents_cut: int
    """Of the training part: longer than a row, so that answers are trained without what they answer."""
    validation_documents: int
    validation_tokens: int
    validation_rows: int

    def as_text(self) -> str:
        """Return a summary: tokens, documents, packing, what is left out and held out."""
        held_out = (
            f"; {self.validation_tokens:,} tokens of {self.validation_documents} documents held out"
            if self.validation_tokens
            else "; nothing held out for validation"
        )
        rows = "" if self.rows is None else f", {self.rows:,} rows an epoch, {self.fill_percent:.1f} % filled"
        dropped = (
            f"; {self.dropped_pieces:,} documents or parts without a target that counts are left out"
            if self.dropped_pieces
            else ""
        )
        dropped += (
            f"; warning: {self.documents_cut:,} documents are longer than workload.seq_len and have answers behind the "
            "cut, which are trained without what stands before it: raise it, or give shorter documents"
            if self.documents_cut
            else ""
        )
        return (
            f"{self.data}: {self.train_tokens:,} tokens of {self.train_documents:,} documents to train on, packing "
            f"'{self.packing}'{rows}{dropped}{held_out}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationLog:
    """The line of the log of an evaluation on what is held out."""

    step: int
    validation_loss: float
    """Mean over all targets that count, in nats."""
    perplexity: float | None
    """exp of it; None beyond what a float can hold."""
    num_targets: int

    def as_metrics(self) -> dict[str, float | None]:
        """Return the metrics to log, by name."""
        return {"loss": self.validation_loss, "perplexity": self.perplexity}

    def as_text(self) -> str:
        """Return it for a reader."""
        shown = "beyond 1e308" if self.perplexity is None else f"{self.perplexity:,.3f}"
        return (
            f"validation loss {self.validation_loss:.4f}, perplexity {shown} after step {self.step} "
            f"({self.num_targets:,} targets)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """How batches are loaded, and what tells them from others."""

    name: str
    """Of the corpus, file or folder."""
    load_batches: LoadBatches
    load_probe: LoadBatches | None
    validation: PackedRows | None
    """None: the run has no evaluations."""
    validation_rows: int
    """Of ``validation``, those that are looked at."""
    micro_batch_size: int
    tokenizer: Tokenizer
    tokenizer_name: str
    """What ``tokenizer`` was opened by; nothing: tokens came as they are, and nobody tells of which tokenizer."""
    template: str
    """The chat template, where it is another one than the tokenizer's own."""
    settings: JsonMapping
    log: DataLog | None
    """Of a run with a [data] table."""
    samplers: tuple[RowSampler, ...] = ()
    """Of training and of the probe split, where batches are packed rows."""

    def state(self, numbers: Sequence[int]) -> JsonMapping:
        """Return the state to checkpoint, given the numbers of the next batches of training and probe."""
        return {"rows_seen": [sampler.first_row(n) for sampler, n in zip(self.samplers, numbers, strict=False)]}

    def load(self, state: JsonMapping, saved: JsonMapping, now: JsonMapping, numbers: Sequence[int], say: Say) -> None:
        """Go on at the rows that a saved run had come to.

        Rows that were packed anew are others in another order: an epoch of them begins.

        Args:
            state: What ``state`` returned; one of before rows were counted has nothing.
            saved: All settings of the saved run.
            now: Those of this one.
            numbers: Of the next batches of training and probe.
            say: Is told of a new epoch.

        Raises:
            ConfigError: the state is damaged.
        """
        changed = {name for name in {**saved, **now} if saved.get(name) != now.get(name)} - {"data.name"}
        is_new = any(name in {"seed", "workload.seq_len"} or name.startswith("data.") for name in changed)
        seen = state.get("rows_seen") or [number * int(str(saved["workload.batch_size"])) for number in numbers]
        try:
            assert isinstance(seen, list)
            rows = [int(str(row)) for row in seen]
        except (AssertionError, ValueError) as error:
            raise ConfigError("saved state of the data", [f"{error}; use an older one, or start anew"]) from error
        for sampler, number, row in zip(self.samplers, numbers, rows, strict=False):
            first = -(-row // sampler.num_rows) * sampler.num_rows if is_new else row
            sampler.position = RowPosition(number, first)
        if is_new and self.samplers:
            say(
                f"rows are packed anew: an epoch of all {self.samplers[0].num_rows:,} begins, and what the epoch "
                "before had seen of the same documents is seen again"
            )

    def evaluate(self, trainer: Trainer) -> ValidationLog:
        """Return loss and perplexity on what is held out; weights and random streams stay."""
        assert self.validation is not None, "asked for"
        total, num_targets = 0.0, 0
        batches = self.validation.batches(micro_batch_size=self.micro_batch_size, max_rows=self.validation_rows)
        for batch in batches:
            count = int((batch.target_ids_BT != IGNORED).sum())
            total += trainer.loss([batch]) * count
            num_targets += count
        loss = total / num_targets
        try:
            perplexity = math.exp(loss)
        except OverflowError:
            perplexity = None
        return ValidationLog(
            step=trainer.steps_done, validation_loss=loss, perplexity=perplexity, num_targets=num_targets
        )


def open_run_data(file: TrainFile, corpus: Corpus | None, accum_steps: int, folder: Path, say: Say) -> RunData:
    """Open the training, probe and validation data of a run.

    Args:
        file: What to train; its [data] table says on what, unless ``corpus`` does.
        corpus: On what, where the file has no [data] table.
        accum_steps: Micro-batches of a step.
        folder: Where encoded text is kept.
        say: Is told how much there is.

    Raises:
        DataError: the text cannot be used.
    """
    if file.data is None:
        assert corpus is not None, "one of the two"
        text = _corpus_text(corpus, wants_validation=file.eval_every > 0)
    else:
        config = replace(file.data, tokenizer=tokenizer_of(file, file.data))
        text = open_text(config, vocab_size=file.model.resolve().vocab_size, folder=folder, say=say)
    if file.eval_every and text.validation is None:
        raise DataError(
            f"{text.name}: eval_every is {file.eval_every} and nothing is held out, for there is one document alone; "
            "give several, name data.validation, or set eval_every = 0"
        )
    batch_size, seq_len = file.workload.batch_size, file.workload.seq_len
    rows = None if text.packing == "stream" else _packed(text, "training", file)
    validation = None
    if text.validation is not None:
        validation = _packed(text, "validation", file)
    log = None if file.data is None else _log(text, rows, validation)
    if log is not None:
        say(log.as_text())
    probe_percent = 0
    if file.hybrid is not None and file.hybrid.needs_probe:
        probe_percent = _LEARNED_PROBE_PERCENT if file.hybrid.correction == "probe_gradients" else _PROBE_PERCENT
    samplers, num_probe = (
        _stream(text.train.tokens, file, accum_steps, probe_percent, say)
        if rows is None
        else _rows(rows, file, accum_steps, probe_percent, say)
    )
    load_batches, *load_probe = (_loader(sampler, accum_steps) for sampler in samplers)
    settings: JsonMapping = text.settings | {
        "data.train_tokens": int(text.train.tokens.size), "data.probe_tokens": num_probe,
        "workload.batch_size": batch_size, "workload.seq_len": seq_len,
    }  # fmt: skip
    name = tokenizer_of(file, file.data)
    if text.is_tokens and name == BYTES and (file.data is None or file.data.tokenizer is None):
        name = ""
    elif file.data is None and not text.is_tokens:
        if name != BYTES:
            say(
                f"warning: {text.name} is read as bytes, and not in the tokens of {name}, which the model knows; name "
                "the text in a [data] table for those"
            )
        name = BYTES
    return RunData(
        name=text.name, tokenizer_name=name, template=text.template,
        load_batches=load_batches, load_probe=next(iter(load_probe), None), validation=validation,
        samplers=tuple(sampler for sampler in samplers if isinstance(sampler, RowSampler)),
        validation_rows=(file.data or DataConfig(path=Path())).validation_rows,
        micro_batch_size=batch_size // accum_steps, tokenizer=text.tokenizer, settings=settings, log=log,
    )  # fmt: skip


def with_records(file: TrainFile, data: Path | None) -> TrainFile:
    """Return a file with a [data] table for what ``--data`` names, if those are records and no stream of bytes."""
    if file.data is not None or data is None or not holds_records(data):
        return file
    return replace(file, data=DataConfig(path=data))


def tokenizer_of(file: TrainFile, config: DataConfig | None) -> str:
    """Return the tokenizer that a file names, else the one beside the weights or the shape that it names."""
    if config is not None and config.tokenizer is not None:
        return config.tokenizer
    folders = [folder for folder in (file.model.init_from, file.model.folder) if folder is not None]
    holding = (folder for folder in folders if any((folder / name).is_file() for name in TOKENIZER_FILES))
    return next(map(str, holding), BYTES)


def _corpus_text(corpus: Corpus, *, wants_validation: bool) -> TextData:
    """Return a corpus as text of one document, in a stream."""
    return TextData(
        name=corpus.name, train=_whole(corpus.train),
        validation=_whole(corpus.validation) if wants_validation else None, tokenizer=ByteTokenizer(), packing="stream",
        settings={"data.digest": corpus.digest, "data.name": corpus.name}, source=corpus.source,
        is_tokens=not corpus.num_documents,
    )  # fmt: skip


def _whole(tokens: TokenArray) -> EncodedDocuments:
    return EncodedDocuments(tokens=tokens, ends=np.array([tokens.size], dtype=np.int64))


def _packed(text: TextData, part: Literal["training", "validation"], file: TrainFile) -> PackedRows:
    """Return the documents of a part in rows."""
    documents = text.train if part == "training" else text.validation
    assert documents is not None, "asked for"
    joins = text.packing == "documents"
    if text.packing == "stream":  # one document after the other, in windows that follow each other
        documents = replace(documents, ends=np.array([documents.tokens.size], dtype=np.int64))
    return pack(
        documents, seq_len=file.workload.seq_len, seed=file.seed, joins_documents=joins,
        what=f"{text.name}, {part} part", pad_id=text.tokenizer.pad_id,
    )  # fmt: skip


def _log(text: TextData, rows: PackedRows | None, validation: PackedRows | None) -> DataLog:
    return DataLog(
        data=text.name, packing=text.packing, train_documents=text.train.num_documents,
        train_tokens=int(text.train.tokens.size),
        rows=None if rows is None else rows.num_rows, fill_percent=100.0 if rows is None else 100 * rows.fill,
        dropped_pieces=0 if rows is None else rows.num_dropped, documents_cut=0 if rows is None else rows.num_cut,
        validation_documents=0 if text.validation is None else text.validation.num_documents,
        validation_tokens=0 if text.validation is None else int(text.validation.tokens.size),
        validation_rows=0 if validation is None else validation.num_rows,
    )  # fmt: skip


Loaded: TypeAlias = tuple[list[BatchSampler] | list[RowSampler], int]
"""Samplers of training and, where there is one, of the probe split, and the tokens of the latter."""


def _stream(tokens: TokenArray, file: TrainFile, accum_steps: int, probe_percent: int, say: Say) -> Loaded:
    """Return windows of a stream, whose end is the probe split."""
    batch_size, seq_len = file.workload.batch_size, file.workload.seq_len

    def sampler(part: TokenArray, seed: int) -> BatchSampler:
        return BatchSampler(part, micro_batch_size=batch_size // accum_steps, seq_len=seq_len, seed=seed)

    if not probe_percent:
        return [sampler(tokens, file.seed)], 0
    num_probe = max(int(tokens.size) * probe_percent // 100, seq_len + 1)
    say(f"{num_probe:,} of {tokens.size:,} training tokens are the probe split")
    seed = random_key(file.seed, _PROBE_STREAM)
    return [sampler(tokens[:-num_probe], file.seed), sampler(tokens[-num_probe:], seed)], num_probe


def _rows(rows: PackedRows, file: TrainFile, accum_steps: int, probe_percent: int, say: Say) -> Loaded:
    """Return packed rows, the last of which are the probe split."""
    batch_size = file.workload.batch_size

    def sampler(part: PackedRows, seed: int) -> RowSampler:
        return RowSampler(part, batch_size=batch_size, micro_batch_size=batch_size // accum_steps, seed=seed)

    if not probe_percent:
        return [sampler(rows, file.seed)], 0
    num_rows = rows.num_rows
    num_probe = max(num_rows * probe_percent // 100, 1)
    if num_rows < 2:
        raise DataError(f"{num_rows} row is too few: hybrid training keeps one apart as a probe; give more documents")
    say(f"{num_probe:,} of {num_rows:,} rows are the probe split")
    probe = rows.part(num_rows - num_probe, num_rows)
    seed = random_key(file.seed, _PROBE_STREAM)
    return [sampler(rows.part(0, num_rows - num_probe), file.seed), sampler(probe, seed)], probe.num_tokens


def _loader(sampler: BatchSampler | RowSampler, accum_steps: int) -> LoadBatches:
    return lambda number: [sampler.batch(number, micro_batch) for micro_batch in range(accum_steps)]
