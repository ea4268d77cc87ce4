"""What storing a trained model in fewer bits costs: a plain one, and one that BitNet trained, on the same tokens.

``python benchmarks/quantization.py --write results/quantization.md`` trains both on the embedded corpus and stores the
matrices of each in every format (``hybridtrain quantize``). Two models of one seed: an illustration, no study.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.models.model_config import BatchWorkload, ModelConfig
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations.bitnet import Bitnet
from hybridtrain.plan.compose import Optimization
from hybridtrain.reports.tables import MARKDOWN
from hybridtrain.run.environment import read_environment
from hybridtrain.run.quantize import QuantizeReport, quantize
from hybridtrain.run.train import train
from hybridtrain.trainer_config import LrSchedule
from hybridtrain.training_file import TrainFile
from hybridtrain.units import format_count

MODEL = ModelConfig(
    family="llama", vocab_size=256, max_seq_len=128, num_blocks=4, width=128, num_heads=4, num_kv_heads=4, ffn_width=344
)
BATCH = BatchWorkload(batch_size=8, seq_len=128)
LR = 4e-3


def trained(stack: tuple[Optimization, ...], num_steps: int, out: Path) -> Path:
    """Train one model; return the run's folder."""
    file = TrainFile(
        model=ModelSpec(shape=MODEL), workload=BATCH, optimizations=stack, optimizer=AdamWConfig(lr=LR),
        schedule=LrSchedule(warmup_steps=num_steps // 20, total_steps=num_steps), num_steps=num_steps,
        save_every=num_steps, sample_tokens=0,
    )  # fmt: skip
    train(file, embedded_corpus(), out, resume=False, say=print, progress=False)
    return out


def page(plain: QuantizeReport, bitnet: QuantizeReport, num_steps: int) -> str:
    """Return the Markdown of both tables."""
    environment = read_environment()
    changed = ", with changes" if environment.dirty else ""
    tokens = format_count(num_steps * BATCH.batch_size * BATCH.seq_len)
    share = 100 * plain.num_matrix_params / plain.num_params
    before, after = plain.rows[0].loss, bitnet.rows[0].loss
    ternary = [next(row for row in report.rows if row.format == "ternary") for report in (plain, bitnet)]
    return f"""\
# What fewer bits cost after training

Made by `python benchmarks/quantization.py --steps {num_steps} --write results/quantization.md` at commit
{environment.commit[:8]}{changed}; executed on the CPU with torch {environment.torch}.

A LLaMA of {format_count(plain.num_params)} parameters, {share:.0f} % of them in the blocks' matrices, was trained twice
on {tokens} byte tokens of the embedded corpus: same first values, same batches, AdamW at a learning rate of {LR:g},
once plain and once with `bitnet` (absmean ternary matrices and 8-bit activations, gradients straight through). Then the
matrices were stored in each format, weights only, to the nearest, without calibration; the rest stays float32. Losses
are nats a byte on {plain.num_targets:,} held-out targets; `hybridtrain quantize` makes such a table of any run or
Hugging Face folder.

## Trained plain

{plain.table(MARKDOWN)}

## Trained with BitNet

{bitnet.table(MARKDOWN)}

Every row of this one computes as it was trained: matrices rounded to three values where they are used, activations in 8
bits. Stored ternary, it is what was trained.

- Stored in three values the plain model loses {ternary[0].loss_difference:.3f} nats, the BitNet one
  {ternary[1].loss_difference:.3f}: {ternary[0].loss:.3f} against {ternary[1].loss:.3f}.
- Training with BitNet has a price of its own: {after:.3f} against {before:.3f} before anything is stored otherwise
  ({after - before:+.3f} nats).
- One seed and a small model: nothing here says what larger ones lose.
"""


def main() -> None:
    """Train, quantize, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for name, stack in (("plain", ()), ("bitnet", (Bitnet(),))):
            out = trained(stack, arguments.steps, Path(folder, name))
            reports.append(quantize(out, formats=(), data=None, seq_len=None, say=lambda _: None))
    text = page(reports[0], reports[1], arguments.steps)
    print(text)
    if arguments.write is not None:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
