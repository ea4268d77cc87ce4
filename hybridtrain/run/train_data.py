"""The data of a training run: batches of a corpus or of packed text, a probe split, rows to validate on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from hybridtrain.config.encode import JsonMapping
from hybridtrain.data.batches import IGNORED, BatchSampler
from hybridtrain.data.byte_tokens import TokenArray
from hybridtrain.data.corpus import Corpus, is_token_path
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
"""Probe split for training in CORRECT: at K of 10 its tokens are seen as often as all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLog:
    """Log line on the data of a run."""

    step: int = 0
    data: str
    packing: str
    train_documents: int
    train_tokens: int
    """Tokens of the training part, without padding."""
    rows: int | None
    """Rows per epoch; None for a stream, whose windows are drawn with replacement."""
    fill_percent: float
    """Percent of positions without padding."""
    dropped_pieces: int
    """Parts of documents dropped because no target in them counts."""
    documents_cut: int
    """Training documents longer than a row, whose answers are trained without their prompts."""
    validation_documents: int
    validation_tokens: int
    validation_rows: int

    def as_text(self) -> str:
        """Return a summary: tokens, documents, packing, dropped and held-out parts."""
        text = (
            f"{self.data}: {self.train_tokens:,} tokens of {self.train_documents:,} training documents, packing "
            f"'{self.packing}'"
        )
        if self.rows is not None:
            text += f", {self.rows:,} rows per epoch, {self.fill_percent:.1f} % filled"
        if self.dropped_pieces:
            text += f"; {self.dropped_pieces:,} documents or parts without any counted target are dropped"
        if self.documents_cut:
            text += (
                f"; warning: {self.documents_cut:,} documents exceed workload.seq_len, so some answers are trained "
                f"without their prompts: raise seq_len, or give shorter documents"
            )
        if not self.validation_tokens:
            return f"{text}; nothing held out for validation"
        return f"{text}; {self.validation_tokens:,} tokens of {self.validation_documents} documents held out"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationLog:
    """Log line of an evaluation on held-out text."""

    step: int
    validation_loss: float
    """Mean loss over all targets, in nats."""
    perplexity: float | None
    """exp(loss); None if it overflows."""
    num_targets: int

    def as_metrics(self) -> dict[str, float | None]:
        """Return the metrics to log, by name."""
        return {"loss": self.validation_loss, "perplexity": self.perplexity}

    def as_text(self) -> str:
        """Return it as a line of output."""
        shown = "beyond 1e308" if self.perplexity is None else f"{self.perplexity:,.3f}"
        return (
            f"validation loss {self.validation_loss:.4f}, perplexity {shown} after step {self.step} "
            f"({self.num_targets:,} targets)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Batches of a run, and the settings that identify them."""

    name: str
    load_batches: LoadBatches
    load_probe: LoadBatches | None
    validation: PackedRows | None
    """Validation rows; None: the run has no evaluations."""
    validation_rows: int
    """Number of rows of ``validation`` to evaluate."""
    micro_batch_size: int
    tokenizer: Tokenizer
    tokenizer_name: str
    """Name or path of ``tokenizer``; empty: a token file of an unknown tokenizer."""
    template: str
    """The chat template, if it is not the tokenizer's own."""
    settings: JsonMapping
    log: DataLog | None
    """Log line of a run with a [data] table."""
    samplers: tuple[RowSampler, ...] = ()
    """Samplers of training and probe split, for packed rows."""

    def state(self, numbers: Sequence[int]) -> JsonMapping:
        """Return the state to checkpoint, given the numbers of the next training and probe batches."""
        return {"rows_seen": [sampler.first_row(n) for sampler, n in zip(self.samplers, numbers, strict=False)]}

    def load(self, state: JsonMapping, saved: JsonMapping, now: JsonMapping, numbers: Sequence[int], say: Say) -> None:
        """Restore the position in the rows, given the settings of the saved run and of this one.

        If rows were packed anew, a new epoch starts. Old checkpoints have no position.

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
            raise ConfigError("checkpoint of the data", [f"{error}; use an older one, or start a new run"]) from error
        for sampler, number, row in zip(self.samplers, numbers, rows, strict=False):
            first = -(-row // sampler.num_rows) * sampler.num_rows if is_new else row
            sampler.position = RowPosition(number, first)
        if is_new and self.samplers:
            say(
                f"rows were packed anew: a new epoch of {self.samplers[0].num_rows:,} begins, and what the epoch "
                "before may repeat"
            )

    def evaluate(self, trainer: Trainer) -> ValidationLog:
        """Evaluate loss and perplexity on held-out text; weights and random streams are unchanged."""
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
    """Open the training, probe and validation data of a run: ``corpus``, or the [data] table of the file.

    ``accum_steps``: micro-batches per step. Encoded text is stored in ``folder``.

    Raises:
        DataError: the text cannot be used.
    """
    if file.data is None:
        assert corpus is not None, "neither a corpus nor a [data] table"
        text = _corpus_text(corpus, wants_validation=file.eval_every > 0)
    else:
        config = replace(file.data, tokenizer=tokenizer_of(file, file.data))
        text = open_text(config, vocab_size=file.model.resolve().vocab_size, folder=folder, say=say)
    if file.eval_every and text.validation is None:
        raise DataError(
            f"{text.name}: eval_every is {file.eval_every} but a single document leaves nothing to hold out; give "
            f"several, set data.validation, or set eval_every = 0"
        )
    batch_size, seq_len = file.workload.batch_size, file.workload.seq_len
    rows = None if text.packing == "stream" else _packed(text, "training", file)
    validation = None if text.validation is None else _packed(text, "validation", file)
    log = None if file.data is None else _log(text, rows, validation)
    if log is not None:
        say(log.as_text())
    samplers, num_probe = _samplers(text, rows, file, accum_steps, say)
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
            say(f"warning: the built-in text is read as bytes, not by the model's tokenizer {name}; give --data")
        name = BYTES
    return RunData(
        name=text.name, tokenizer_name=name, template=text.template,
        load_batches=load_batches, load_probe=next(iter(load_probe), None), validation=validation,
        samplers=tuple(sampler for sampler in samplers if isinstance(sampler, RowSampler)),
        validation_rows=(file.data or DataConfig(path=Path())).validation_rows,
        micro_batch_size=batch_size // accum_steps, tokenizer=text.tokenizer, settings=settings, log=log,
    )  # fmt: skip


def with_data_table(file: TrainFile, data: Path | None) -> TrainFile:
    """Return the training file with a [data] table for ``--data``: of records, or of text for the model's tokenizer."""
    if file.data is not None or data is None:
        return file
    is_tokenized = tokenizer_of(file, None) != BYTES and not is_token_path(data)
    return replace(file, data=DataConfig(path=data)) if is_tokenized or holds_records(data) else file


def tokenizer_of(file: TrainFile, config: DataConfig | None) -> str:
    """Return the tokenizer of a training file, else the one in its folder of weights or shape."""
    if config is not None and config.tokenizer is not None:
        return config.tokenizer
    folders = [folder for folder in (file.model.init_from, file.model.folder) if folder is not None]
    holding = (folder for folder in folders if any((folder / name).is_file() for name in TOKENIZER_FILES))
    return next(map(str, holding), BYTES)


def _corpus_text(corpus: Corpus, *, wants_validation: bool) -> TextData:
    """Return a corpus as text of one document, in a stream."""

    def whole(tokens: TokenArray) -> EncodedDocuments:
        return EncodedDocuments(tokens=tokens, ends=np.array([tokens.size], dtype=np.int64))

    return TextData(
        name=corpus.name, train=whole(corpus.train),
        validation=whole(corpus.validation) if wants_validation else None, tokenizer=ByteTokenizer(), packing="stream",
        settings={"data.digest": corpus.digest, "data.name": corpus.name}, source=corpus.source,
        is_tokens=not corpus.num_documents,
    )  # fmt: skip


def _packed(text: TextData, part: Literal["training", "validation"], file: TrainFile) -> PackedRows:
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
"""Samplers of training and probe split (if there is one), and the probe split's tokens."""


def _samplers(text: TextData, rows: PackedRows | None, file: TrainFile, accum_steps: int, say: Say) -> Loaded:
    """Return samplers of a stream's windows (``rows`` None) or of packed rows; the end of either is the probe split."""
    batch_size, seq_len, tokens = file.workload.batch_size, file.workload.seq_len, text.train.tokens
    seeds = file.seed, random_key(file.seed, _PROBE_STREAM)
    percent = 0
    if file.hybrid is not None and file.hybrid.needs_probe:
        percent = _LEARNED_PROBE_PERCENT if file.hybrid.correction == "probe_gradients" else _PROBE_PERCENT
    if rows is None:
        windows, num_probe = [tokens], 0
        if percent:
            num_probe = max(int(tokens.size) * percent // 100, seq_len + 1)
            say(f"{num_probe:,} of {tokens.size:,} training tokens are reserved as probe split")
            windows = [tokens[:-num_probe], tokens[-num_probe:]]
        micro_batch_size = batch_size // accum_steps
        return [
            BatchSampler(part, micro_batch_size=micro_batch_size, seq_len=seq_len, seed=seed)
            for part, seed in zip(windows, seeds, strict=False)
        ], num_probe
    parts, num_rows = [rows], rows.num_rows
    if percent:
        if num_rows < 2:
            raise DataError(f"{num_rows} row is too few: hybrid training reserves one as a probe; give more documents")
        begin = num_rows - max(num_rows * percent // 100, 1)
        say(f"{num_rows - begin:,} of {num_rows:,} rows are reserved as probe split")
        parts = [rows.part(0, begin), rows.part(begin, num_rows)]
    return [
        RowSampler(part, batch_size=batch_size, micro_batch_size=batch_size // accum_steps, seed=seed)
        for part, seed in zip(parts, seeds, strict=False)
    ], sum(part.num_tokens for part in parts[1:])


def _loader(sampler: BatchSampler | RowSampler, accum_steps: int) -> LoadBatches:
    return lambda number: [sampler.batch(number, micro_batch) for micro_batch in range(accum_steps)]
