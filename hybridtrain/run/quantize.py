"""``hybridtrain quantize``: the perplexity of a trained model with matrices in fewer bits.

Only the blocks' matrices are rounded, once, without calibration; arithmetic is float32, so that differences are due to
the format. Memory: one model plus one matrix.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional

from hybridtrain.config.decode import decode
from hybridtrain.config.encode import encode
from hybridtrain.data.corpus import embedded_corpus, open_corpus
from hybridtrain.data.data_config import DataConfig
from hybridtrain.data.tokenizer import ByteTokenizer
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.memory.cuda_transfer import open_transfer
from hybridtrain.memory.formats import CODE_FORMATS
from hybridtrain.models.hf_config import model_config_from_hf
from hybridtrain.models.linear import Linear
from hybridtrain.models.model_config import BatchWorkload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.models.ternary import int8_activation, ternary_weight
from hybridtrain.optimizations.bitnet import Bitnet
from hybridtrain.optimizations.chunked_loss import ChunkedLoss
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import LinearKind
from hybridtrain.plan.placement import Codec
from hybridtrain.run.export import export_run
from hybridtrain.run.run_folder import is_run, read_run_files
from hybridtrain.run.train_data import RunData, open_run_data, with_data_table
from hybridtrain.run.train_log import Say
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.training_file import TrainFile
from hybridtrain.units import format_bytes, format_count
from hybridtrain.weights.hf_source import HfSource, open_folder

_BATCH = 4
"""Rows per batch."""
_LARGEST_SEQ_LEN = 512
_CHUNK_TOKENS = 1024
_TERNARY_PER_BYTE = 5
"""Five ternary values per byte (3 ** 5 = 243): 1.6 bits per value; the minimum is log2(3) = 1.58."""
_STORED = "as stored"
_CORPUS, _CORPUS_FILE = "embedded", "embedded.txt"
"""Name of the embedded corpus, and of its file for another tokenizer."""


@dataclass(frozen=True, slots=True)
class MatrixFormat:
    """A storage format of matrices."""

    num_bytes: Callable[[tuple[int, ...]], int]
    """Bytes of a matrix of a given shape, scales included."""
    rounded: Callable[[Tensor], Tensor]
    """(..., F, D) float32 values -> the float32 values after quantization."""


def _coded(codec: Codec) -> MatrixFormat:
    codes = CODE_FORMATS[codec]

    def num_bytes(shape: tuple[int, ...]) -> int:
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in codes.specs(shape))

    def rounded(value: Tensor) -> Tensor:
        stored = [
            torch.empty(spec.shape, dtype=spec.dtype, device=value.device) for spec in codes.specs(tuple(value.shape))
        ]
        codes.encode(value.view(-1), stored)
        found = torch.empty_like(value)
        codes.widen(stored, found.view(-1))
        return found

    return MatrixFormat(num_bytes, rounded)


def _ternary(value: Tensor) -> Tensor:
    """Round each matrix by its own mean magnitude; experts are one matrix each."""
    matrices = value.view(-1, *value.shape[-2:])
    return torch.stack([ternary_weight(matrix_FD) for matrix_FD in matrices]).view(value.shape)


FORMATS: Final[Mapping[str, MatrixFormat]] = {
    "bfloat16": MatrixFormat(lambda shape: 2 * math.prod(shape), lambda value: value.bfloat16().float()),
    "int8": _coded(Codec.INT8_BLOCKS),
    "nf4": _coded(Codec.NF4),
    "ternary": MatrixFormat(
        lambda shape: -(-math.prod(shape) // _TERNARY_PER_BYTE) + 4 * math.prod(shape[:-2]), _ternary
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedFigures:
    """Results of a model in one format, executed on this machine."""

    format: str
    matrix_bits: float
    """Bits per value of the blocks' matrices, scales included."""
    param_bits: float
    """Bits per parameter of the whole model."""
    model_bytes: int
    loss: float
    """Mean loss over all targets, in nats."""
    perplexity: float | None
    """Perplexity; None if it overflows."""
    loss_difference: float
    """Loss minus that of the stored model; positive is worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport:
    """The loss of a model under each format."""

    model: str
    num_params: int
    num_matrix_params: int
    stored_dtypes: tuple[str, ...]
    text: str
    """Name of the evaluated text."""
    num_targets: int
    is_bitnet: bool
    """Whether it was trained with BitNet: matrices are rounded when used, activations to 8 bits, in any format."""
    rows: tuple[QuantizedFigures, ...]

    def as_mapping(self) -> Mapping[str, object]:
        """Return plain figures."""
        names = {"num_params": "params", "num_matrix_params": "matrix_params", "rows": "formats"}
        return {names.get(name, name): value for name, value in encode(self).items()} | {"evidence": "executed"}

    def table(self, style: str) -> str:
        """Return a row per format."""
        rows = [
            [
                row.format, f"{row.matrix_bits:.2f}", f"{row.param_bits:.2f}", format_bytes(row.model_bytes),
                f"{row.loss:.4f}", "beyond 1e308" if row.perplexity is None else f"{row.perplexity:,.3f}",
                "" if row.format == _STORED else f"{row.loss_difference:+.4f}",
            ]
            for row in self.rows
        ]  # fmt: skip
        headers = ["matrices", "bits per value", "bits per parameter", "model", "loss", "perplexity", "nats lost"]
        return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)

    def as_text(self, style: str = "simple") -> str:
        """Return the table and what it means."""
        share = 100 * self.num_matrix_params / self.num_params
        lines = [
            (
                f"{self.model}: {format_count(self.num_params)} parameters, {share:.0f} % of them in the blocks' "
                f"matrices, which are stored as {' and '.join(self.stored_dtypes)}; {self.num_targets:,} targets of "
                f"{self.text}\n"
            ),
            self.table(style),
            (
                "\nOnly matrices of blocks are rounded, to nearest, once, without calibration or further training; "
                "arithmetic is float32 (executed)."
            ),
        ]
        if self.is_bitnet:
            lines.append(
                "Trained with BitNet: in every row matrices are rounded to three values when used, and activations to "
                "8 bits; ternary stores exactly these values."
            )
        return "\n".join(lines)


def quantize(path: Path, *, formats: Sequence[str], data: Path | None, seq_len: int | None, say: Say) -> QuantizeReport:
    """Evaluate a model on held-out text with its matrices in each format (default: all).

    ``path`` is a Hugging Face folder, or a training run's, whose newest checkpoint is used. ``data`` defaults to the
    run's or the embedded corpus. Rows have the run's length, or 512.

    Raises:
        ConfigError: unknown format, or no model. DataError: the text cannot be used, or nothing is held out.
    """
    faults = [f"--formats: {unknown_name('format', name, FORMATS)}" for name in formats if name not in FORMATS]
    if faults:
        raise ConfigError("quantize", faults)
    if not path.is_dir():
        fault = "is not a folder; give a Hugging Face folder with weights, or the --out of hybridtrain train"
        raise ConfigError(str(path), [f"{fault}: check the path"])
    with TemporaryDirectory(prefix="hybridtrain-quantize-") as place:
        folder, linear = path, LinearKind.FULL
        if is_run(path):
            folder = Path(place, "model")
            # On its way through a folder the optimizer's state is left behind, and adapters are merged.
            export_run(path, folder, dtype="float32", merge=True, say=say)
            file = _file_of_run(path, data, seq_len)
            linear = compose(file.optimizations).for_phase(Phase.FULL).linear
        else:
            file = _file_of_folder(path, data, seq_len, Path(place))
        file = with_data_table(file, data)
        corpus = None if file.data is not None else open_corpus(data, vocab_size=file.model.resolve().vocab_size)
        text = open_run_data(replace(file, eval_every=1), corpus, 1, Path(place, "tokens"), lambda _: None)
        name = "the embedded corpus" if text.name in {_CORPUS, _CORPUS_FILE} else text.name
        source = open_folder(folder, file.model.resolve())
        if source.left_out:
            say(f"{folder}: {source.left_out}")
        return _measure(path, source, file, (text, name), formats, linear, say)


def _file_of_run(path: Path, data: Path | None, seq_len: int | None) -> TrainFile:
    file, settings = read_run_files(path)
    if file.data is None and data is None and settings.get("data.name") != _CORPUS:
        fault = f"was trained on {settings.get('data.name')}, which its training file does not state; give --data"
        raise ConfigError(str(path), [fault])
    if file.data is not None and data is not None:
        file = replace(file, data=replace(file.data, path=data, validation=None, validation_percent=None))
    return replace(file, workload=_workload(seq_len or file.workload.seq_len), hybrid=None)


def _workload(seq_len: int) -> BatchWorkload:
    return decode(BatchWorkload, {"batch_size": _BATCH, "seq_len": seq_len}, source="workload")


def _file_of_folder(path: Path, data: Path | None, seq_len: int | None, place: Path) -> TrainFile:
    """Return a file that names the folder's model and the text; the embedded corpus becomes a file in ``place``."""
    shape = model_config_from_hf(path)
    text = DataConfig(path=place / _CORPUS_FILE, validation=place / _CORPUS_FILE)
    if data is None:
        held_out = ByteTokenizer().decode(embedded_corpus().validation.tolist()).replace("\0", "\n")
        (place / _CORPUS_FILE).write_text(held_out, encoding="utf-8")
    else:
        text = DataConfig(path=data)
    try:
        return TrainFile(
            model=ModelSpec(init_from=path), data=text,
            workload=_workload(seq_len or min(_LARGEST_SEQ_LEN, shape.max_seq_len)),
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(str(path), str(error).splitlines()) from error


def _measure(
    path: Path,
    source: HfSource,
    file: TrainFile,
    text: tuple[RunData, str],
    formats: Sequence[str],
    linear: LinearKind,
    say: Say,
) -> QuantizeReport:
    is_bitnet = linear is LinearKind.TERNARY
    stack: list[Optimization] = [ChunkedLoss(loss_chunk_tokens=_CHUNK_TOKENS), *([Bitnet()] if is_bitnet else [])]
    data, text_name = text
    with closing(open_transfer(_device(file))) as transfer:
        trainer = Trainer(file.model.resolve(), compose(stack), TrainerConfig(), transfer, source=source)
        parameters = dict(trainer.model.named_unit_parameters())
        stored = {name: (value.shape, source.read(name, slice(0, 1)).dtype) for name, value in parameters.items()}
        # the stores keep as codes every parameter of a block with more than one dimension
        matrices = {name: value for name, value in parameters.items() if name.startswith("block.") and value.dim() > 1}
        dtypes = {dtype for _, dtype in stored.values()}
        chosen = [name for name in formats or FORMATS if name != "bfloat16" or formats or torch.float32 in dtypes]
        num_params = sum(shape.numel() for shape, _ in stored.values())
        num_matrix = sum(parameter.numel() for parameter in matrices.values())
        rest_bytes = sum(
            shape.numel() * dtype.itemsize for name, (shape, dtype) in stored.items() if name not in matrices
        )
        rows: list[QuantizedFigures] = []
        linears = [module for module in trainer.model.blocks.modules() if isinstance(module, Linear)]
        for name in (_STORED, *chosen):
            say(f"{name} ...")
            if name == _STORED:
                matrix_bytes = sum(stored[each][0].numel() * stored[each][1].itemsize for each in matrices)
            else:
                matrix_bytes = sum(FORMATS[name].num_bytes(tuple(each.shape)) for each in matrices.values())
                _write(matrices, source, FORMATS[name])
            for layer in linears:
                layer.adapter = _RoundedActivations() if is_bitnet and name == "ternary" else None
            seen = data.evaluate(trainer)
            num_bytes = matrix_bytes + rest_bytes
            row = QuantizedFigures(
                format=name, matrix_bits=8 * matrix_bytes / num_matrix, param_bits=8 * num_bytes / num_params,
                model_bytes=num_bytes, loss=seen.validation_loss, perplexity=seen.perplexity,
                loss_difference=seen.validation_loss - (rows[0].loss if rows else seen.validation_loss),
            )  # fmt: skip
            rows.append(row)
    return QuantizeReport(
        model=path.resolve().name, num_params=num_params, num_matrix_params=num_matrix, text=text_name,
        stored_dtypes=tuple(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
        num_targets=seen.num_targets, is_bitnet=is_bitnet, rows=tuple(rows),
    )  # fmt: skip


def _device(file: TrainFile) -> torch.device:
    """Return the card where it has room for the model in float32, else the processor."""
    if torch.cuda.is_available():
        free_bytes, _ = torch.cuda.mem_get_info()
        if 6 * file.model.resolve().num_params < free_bytes:  # and half as much for what passes through
            return torch.device("cuda")
    return torch.device("cpu")


@torch.no_grad()
def _write(matrices: Mapping[str, nn.Parameter], source: HfSource, found: MatrixFormat) -> None:
    """Replace matrices by the values that a format makes of the stored ones, one after the other."""
    for name, parameter in matrices.items():
        value = source.read(name, slice(0, parameter.numel())).to(parameter.device, torch.float32)
        parameter.copy_(found.rounded(value.view(parameter.shape)))


class _RoundedActivations(nn.Module):
    """In a layer's place: BitNet's arithmetic with matrices that have their three values already.

    Rounded once more they would get another mean magnitude.
    """

    def forward(self, x: Tensor, linear: Linear, *, computes_output: bool) -> Tensor:  # noqa: ARG002  as an adapter
        return functional.linear(int8_activation(x), linear.weight, linear.bias)
