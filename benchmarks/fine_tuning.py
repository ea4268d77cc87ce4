"""A small model of transformers, pre-trained here on one text, then fine-tuned on another in four ways.

``python benchmarks/fine_tuning.py`` makes what is missing in results/records/fine-tuning.jsonl, a line for each run,
and writes results/fine-tuning.md and results/plots/fine-tuning.png. It wants a clean tree, and resumes.
``--quick`` is a tenth of it, below runs/. Needs transformers and tokenizers.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from math import exp
from pathlib import Path
from shutil import rmtree
from statistics import fmean, median

import numpy as np
import torch
from matplotlib.figure import Figure
from tabulate import tabulate
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hybridtrain.data.batches import BatchSampler, TokenBatch, validation_batches
from hybridtrain.data.byte_tokens import TokenArray, decode_tokens
from hybridtrain.data.corpus import Corpus, corpus_of_documents, embedded_corpus
from hybridtrain.data.tokenizer import Tokenizer, open_tokenizer
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import Lora, Nf4Weights
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.run.environment import read_environment, uncommitted_files
from hybridtrain.run.program import program_digest
from hybridtrain.sampling import sample_text
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridtrain.units import MIB
from hybridtrain.virtual_gpu.account.ledger import StorageLedger, find_peak
from hybridtrain.weights.adapters import export_adapter, has_adapters
from hybridtrain.weights.export import export_folder
from hybridtrain.weights.hf_source import ONE_FILE, open_folder
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE, BATCH, SEQ_LEN = 1024, 8, 128
SHAPE = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 384, "max_position_embeddings": SEQ_LEN, "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
NEW_BYTES = 2 * MIB
PRETRAIN_LR, CHOOSING_SEED, SEEDS = 3e-3, 100, (0, 1, 2)
EVAL_BATCHES, CURVE_BATCHES, CURVE_EVERY = 16, 8, 0.25
"""Batches of the final evaluations, of each point of a curve; share of a run between two points."""
PROMPT, SAMPLE_TOKENS = "#pragma once\n\nnamespace at {\n", 64
EOS = "<|endoftext|>"
NONE, PRETRAINED = "none", "pre-training"
RANK = 16
METHODS: dict[str, list[Optimization]] = {
    "full": [],
    "LoRA": [Lora(rank=RANK)],
    "DoRA": [Lora(rank=RANK, magnitude=True)],
    "QLoRA": [Lora(rank=RANK), Nf4Weights()],
}
GRIDS = {"full": (1e-3, 3e-3, 1e-2), "LoRA": (3e-3, 1e-2, 3e-2)}
"""Learning rates that are tried; DoRA and QLoRA take LoRA's."""
COLORS = {NONE: "#999999", "full": "#0072b2", "LoRA": "#d55e00", "DoRA": "#009e73", "QLoRA": "#cc79a7"}

_HEADER = """\
# Fine-tuning, to look at

Made by `python benchmarks/fine_tuning.py` from results/records/fine-tuning.jsonl. Everything is **executed**, on a CPU,
by our trainer in float32. A model so small shows how the ways work and compare here, not how they compare at 8B.

- Model: transformers' LlamaForCausalLM, {params:,} parameters ({shape}), random weights, saved by transformers; a BPE
  of {vocab:,} tokens made of the old text by tokenizers.
- Pre-trained by our trainer (`init_from`) on the old text: {old} (digest
  {old_digest}), {pre_steps} steps of {tokens:,} tokens ({batch} rows of {seq}), learning rate {lr}: loss on held-out
  old text {begin:.3f} before, {end:.3f} after. Exported as a Hugging Face folder.
- From that folder fine-tuned on the new text: {new} (digest
  {new_digest}), {steps} steps of the same tokens for all, AdamW without weight decay, warm-up and cosine.
  full: all parameters. LoRA, DoRA: rank {rank}, alpha 32, all matrices of the blocks. QLoRA: LoRA over NF4 with double
  quantization. none: no fine-tuning.
- Seeds {seeds} of batches and adapters. Learning rates are chosen on seed {seed} by some batches of the held-out new
  text, DoRA and QLoRA take LoRA's; the losses of the first table are of other batches ({num_eval:,} tokens), nats per
  token.
- Python {python}, torch {torch}, transformers {transformers}, tokenizers {tokenizers}, one thread of
  {cpu}; commit {commits}.
"""
_COSTS = """
- kept, peak: bytes on the device between two steps, and the most within one, counted by the ledger while the steps ran;
  a model so small keeps mostly activations at its peak.
- saved: the safetensors file, float32: the model, or the adapters alone.
- s of steps: median of the seeds, other programs had the cores too.
- logits: largest difference between ours and those of transformers' from_pretrained on the exported folder, adapters
  merged, as a share of the largest logit.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Record):
    """A line of the records. Losses are nats per token."""

    recipe: str
    """Digest of the settings above, versions, texts and, but for pre-training, the weights that the run began with."""
    method: str
    lr: float
    seed: int
    num_steps: int
    num_params: int
    trained_params: int
    curve_steps: tuple[int, ...]
    curve_losses: tuple[float, ...]
    """At these steps, on the part of the held-out text that rates are chosen by."""
    new_loss: float
    """On the other part of the held-out new text."""
    old_loss: float
    """On the held-out old text."""
    sample: str
    kept_bytes: int
    """Live on the device between two steps, by the ledger."""
    peak_bytes: int
    """Of a step, by the ledger."""
    peak_by_class: dict[str, int]
    saved_bytes: int
    """Of the safetensors file: the model, or the adapters."""
    logit_gap: float
    """Largest difference to the logits of transformers' model of the exported (merged) folder, of the largest logit."""
    step_seconds: float
    """Of all steps together, without evaluations."""
    weights: str
    """Digest of the weights that came out, merged."""
    evidence: Evidence = Evidence.EXECUTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text in tokens."""

    corpus: Corpus
    train: TokenArray
    choose: Sequence[TokenBatch]
    """From all over what is held out."""
    report: Sequence[TokenBatch]
    """Likewise; none of the others'."""

    @classmethod
    def of(cls, corpus: Corpus, tokenizer: Tokenizer) -> "Text":
        """Encode a corpus, an end-of-text token after each document."""
        train, held_out = (_encode(part, tokenizer) for part in (corpus.train, corpus.validation))
        batches = list(validation_batches(held_out, micro_batch_size=BATCH, seq_len=SEQ_LEN, max_batches=held_out.size))
        return cls(
            corpus=corpus, train=train, choose=_spread_out(batches[::2], CURVE_BATCHES),
            report=_spread_out(batches[1::2], EVAL_BATCHES),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Everything that runs share."""

    work: Path
    records: Path
    tokenizer: Tokenizer
    old: Text
    new: Text
    pretrain_steps: int
    tune_steps: int
    seeds: tuple[int, ...]
    base_recipe: str

    @property
    def base(self) -> Path:
        """The pre-trained folder."""
        return self.work / "base"

    def recipe(self, method: str) -> str:
        """Return what tells runs of this program, machine and base from others."""
        return self.base_recipe if method == PRETRAINED else _digest(self.base_recipe, _file_digest(self.base))

    def append(self, run: Run) -> None:
        """Add a run to the records, behind the program that made it."""
        append_record(self.records.parent, self.records.name, run)

    def find(self, method: str, lr: float, seed: int) -> Run | None:
        """Return a run that is done."""
        wanted = (self.recipe(method), method, lr, seed)
        found = (run for run in read_lines(self.records, Run) if (run.recipe, run.method, run.lr, run.seed) == wanted)
        return next(found, None)


def main() -> None:
    """Make what is missing; write page and plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps and one seed, below runs/")
    is_quick = parser.parse_args().quick
    changed = uncommitted_files()
    if changed and not is_quick:
        raise SystemExit(
            f"{', '.join(changed)}: not committed; a record names the commit that made it, so commit first"
        )
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    results = ROOT / "runs" / "fine-tuning-quick" if is_quick else ROOT / "results"
    study = prepare(results, is_quick=is_quick)
    pretrain(study)
    for method in METHODS:
        chosen = choose(study, method)
        for seed in study.seeds:
            tune(study, method, chosen, seed)
    unchanged(study)
    (results / "plots").mkdir(parents=True, exist_ok=True)
    draw(study).savefig(results / "plots" / "fine-tuning.png", dpi=110)
    (results / "fine-tuning.md").write_text(page(study), encoding="utf-8")


def prepare(results: Path, *, is_quick: bool) -> Study:
    """Make tokenizer, texts and the untrained folder; all are the same at every call."""
    work = ROOT / "runs" / ("fine-tuning-quick" if is_quick else "fine-tuning")
    old, new = embedded_corpus(), header_corpus()
    made = work / "made"
    rmtree(made, ignore_errors=True)
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(_documents(old.train), trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS).save_pretrained(made)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(made)
    tokenizer = open_tokenizer(str(made), vocab_size=VOCAB_SIZE)
    steps = (20, 4) if is_quick else (800, 60)
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "tokenizers")]
    settings = (
        SHAPE,
        BATCH,
        SEQ_LEN,
        EVAL_BATCHES,
        CURVE_BATCHES,
        CURVE_EVERY,
        METHODS,
        GRIDS,
        PROMPT,
        SAMPLE_TOKENS,
        steps,
    )
    recipe = _digest(
        repr(settings), *versions, old.digest, new.digest, tokenizer.digest, _file_digest(made)
    )  # fmt: skip
    return Study(
        work=work, records=results / "records" / "fine-tuning.jsonl", tokenizer=tokenizer,
        old=Text.of(old, tokenizer), new=Text.of(new, tokenizer), pretrain_steps=steps[0], tune_steps=steps[1],
        seeds=SEEDS[:1] if is_quick else SEEDS, base_recipe=recipe,
    )  # fmt: skip


def header_corpus() -> Corpus:
    """Return C++ headers of the installed torch, in the order of a hash of their path, as far as there is room."""
    root = Path(torch.__path__[0]) / "include"
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.h"))
    documents, room = {}, NEW_BYTES
    for path in sorted(paths, key=lambda name: sha256(name.encode()).digest()):
        content = (root / path).read_bytes()
        if 0 < len(content) <= room and b"\0" not in content and _is_text(content):
            documents[path] = content
            room -= len(content)
    source = f"{len(documents)} of the {len(paths)} C++ headers of torch {version('torch')}, chosen by a hash of path"
    return corpus_of_documents(documents, name="headers", source=source)


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _documents(tokens: TokenArray) -> list[str]:
    return decode_tokens(tokens).decode().removesuffix("\0").split("\0")


def _encode(tokens: TokenArray, tokenizer: Tokenizer) -> TokenArray:
    encoded = tokenizer.encode(_documents(tokens))
    return np.concatenate([np.append(one.ids, tokenizer.eos_ids) for one in encoded]).astype(np.uint16)


def _digest(*parts: str) -> str:
    return sha256("\n".join(parts).encode()).hexdigest()


def _file_digest(folder: Path) -> str:
    file = folder / ONE_FILE
    return sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def pretrain(study: Study) -> None:
    """Pre-train the folder that transformers made, and leave the next one, unless that is there."""
    done = study.find(PRETRAINED, PRETRAIN_LR, 0)
    if done is not None and _file_digest(study.base) == done.weights:
        return
    rmtree(study.base, ignore_errors=True)
    found = train(study, PRETRAINED, PRETRAIN_LR, 0, study.work / "made", study.pretrain_steps, keep=study.base)
    if done is None:
        study.append(found)
    elif done.weights != found.weights:
        raise SystemExit(f"{study.records}: pre-training came out otherwise than recorded; remove the file, start anew")


def choose(study: Study, method: str) -> float:
    """Return the learning rate with the least loss on the part for choosing."""
    found = tries(study, method if method in GRIDS else "LoRA")
    return min(found, key=lambda run: run.curve_losses[-1]).lr


def tries(study: Study, method: str) -> list[Run]:
    """Return the runs of all learning rates of a grid."""
    return [tune(study, method, lr, CHOOSING_SEED) for lr in GRIDS[method]]


def tune(study: Study, method: str, lr: float, seed: int) -> Run:
    """Return a run of fine-tuning, recorded or made now."""
    found = study.find(method, lr, seed)
    if found is None:
        found = train(study, method, lr, seed, study.base, study.tune_steps)
        study.append(found)
    return found


def unchanged(study: Study) -> Run:
    """Return what the pre-trained model does on both texts: a run of no step."""
    found = study.find(NONE, 0.0, 0)
    if found is None:
        found = train(study, NONE, 0.0, 0, study.base, 0)
        study.append(found)
    return found


def train(
    study: Study, method: str, lr: float, seed: int, source: Path, num_steps: int, *, keep: Path | None = None
) -> Run:
    """Train from a folder, look at both texts, export, compare with transformers; return all of it."""
    started_at, began = datetime.now(tz=UTC).isoformat(timespec="seconds"), time.perf_counter()
    make = partial(_trainer, source, METHODS.get(method, []), lr or 1e-3, seed, num_steps)
    text = study.old if method == PRETRAINED else study.new
    sampler = BatchSampler(text.train, micro_batch_size=BATCH, seq_len=SEQ_LEN, seed=seed)
    trainer, seconds = make(), 0.0
    every = max(1, round(num_steps * CURVE_EVERY / (4 if method == PRETRAINED else 1)))
    curve = {0: trainer.loss(text.choose)}
    for step in range(num_steps):
        begin = time.perf_counter()
        trainer.step([sampler.batch(step, 0)])
        seconds += time.perf_counter() - begin
        if (step + 1) % every == 0:
            curve[step + 1] = trainer.loss(text.choose)
    kept_bytes, peak_bytes, by_class = _memory(make, [sampler.batch(step, 0) for step in range(2)])
    out, adapters = keep or study.work / "merged", study.work / "adapters"
    for folder in (out, adapters):
        rmtree(folder, ignore_errors=True)
    export_folder(trainer, out, dtype=torch.float32, source_folder=source)
    saved = out / ONE_FILE
    if has_adapters(trainer):
        saved = next(path for path in export_adapter(trainer, adapters, base="") if path.suffix == ".safetensors")
    found = Run(
        key=f"{method} lr {lr:g} seed {seed}", recipe=study.recipe(method), method=method, lr=lr, seed=seed,
        num_steps=num_steps,
        num_params=trainer.model.config.num_params,
        trained_params=sum(p.numel() for _, p in trainer.model.named_unit_parameters() if p.requires_grad),
        curve_steps=tuple(curve), curve_losses=tuple(curve.values()),
        new_loss=trainer.loss(study.new.report),
        old_loss=trainer.loss(study.old.report),
        sample=sample_text(trainer, PROMPT, num_tokens=SAMPLE_TOKENS, seed=0, tokenizer=study.tokenizer),
        kept_bytes=kept_bytes, peak_bytes=peak_bytes, peak_by_class=by_class, saved_bytes=saved.stat().st_size,
        logit_gap=_logit_gap(trainer, out, text.choose[0]), step_seconds=seconds, weights=_file_digest(out),
        started_at=started_at, environment=read_environment(), program=program_digest(),
        duration_s=round(time.perf_counter() - began, 3),
    )  # fmt: skip
    print(
        f"{method:12} lr {lr:g} seed {seed}: {found.curve_losses[0]:.4f} -> {found.curve_losses[-1]:.4f}, "
        f"new {found.new_loss:.4f}, old {found.old_loss:.4f}, {seconds:.0f} s of steps",
        flush=True,
    )
    return found


def _trainer(
    source: Path, stack: list[Optimization], lr: float, seed: int, num_steps: int, observer: StorageLedger | None = None
) -> Trainer:
    config = ModelSpec(init_from=source).resolve()
    warmup = max(1, num_steps // 10)
    settings = TrainerConfig(
        optimizer=AdamWConfig(lr=lr, weight_decay=0.0),
        schedule=LrSchedule(warmup_steps=warmup, total_steps=max(num_steps, warmup + 1)), seed=seed,
    )  # fmt: skip
    transfer = DirectTransfer(torch.device("cpu"))
    return Trainer(config, compose(stack), settings, transfer, observer, source=open_folder(source, config))


def _spread_out(batches: Sequence[TokenBatch], count: int) -> list[TokenBatch]:
    """Return some batches at equal distances."""
    assert len(batches) >= count, "the held-out texts are longer"
    return [batches[number * len(batches) // count] for number in range(count)]


def _memory(make: Callable[..., Trainer], batches: Sequence[TokenBatch]) -> tuple[int, int, dict[str, int]]:
    """Return bytes between steps, at the peak of the last of these steps, and who holds those, of a trainer apart."""
    with StorageLedger() as ledger:
        trainer = make(ledger)
        for batch in batches:
            ledger.begin_step()
            trainer.step([batch])
    trace = ledger.trace()
    peak = find_peak(trace, trace.step_range(len(batches) - 1))
    return ledger.live_bytes, peak.total_bytes, {str(name): size for name, size in peak.by_class.items()}


@torch.no_grad()
def _logit_gap(trainer: Trainer, folder: Path, batch: TokenBatch) -> float:
    tokens_BT = torch.from_numpy(batch.token_ids_BT)
    trainer.model.eval()
    ours, theirs = trainer.executor.forward(tokens_BT), LlamaForCausalLM.from_pretrained(folder)(tokens_BT).logits
    trainer.model.train()
    return float((ours - theirs).abs().max() / theirs.abs().max())


def page(study: Study) -> str:
    """Return the whole page."""
    base, before = study.find(PRETRAINED, PRETRAIN_LR, 0), unchanged(study)
    assert base is not None, "made before"
    groups = {NONE: [before]} | {name: _seeds(study, name) for name in METHODS}
    runs = [base, *(run for group in groups.values() for run in group)]
    environment = base.environment
    commits = ", ".join(dict.fromkeys(run.environment.commit[:12] for run in runs))
    lines = [
        _HEADER.format(
            params=base.num_params, old=study.old.corpus.source.removesuffix(", as byte tokens"),
            old_digest=study.old.corpus.digest[:16],
            new=study.new.corpus.source, new_digest=study.new.corpus.digest[:16], vocab=VOCAB_SIZE,
            pre_steps=base.num_steps, steps=study.tune_steps, tokens=BATCH * SEQ_LEN, batch=BATCH, seq=SEQ_LEN,
            lr=f"{PRETRAIN_LR:g}", rank=RANK, seeds=", ".join(map(str, study.seeds)), seed=CHOOSING_SEED,
            python=environment.python, torch=environment.torch, transformers=version("transformers"),
            tokenizers=version("tokenizers"), cpu=environment.cpu, commits=commits, shape=_shape(),
            begin=base.curve_losses[0],
            end=base.curve_losses[-1], num_eval=EVAL_BATCHES * BATCH * SEQ_LEN,
        ),
        "## Losses\n", tabulate(
            [_loss_row(name, group) for name, group in groups.items()],
            ["fine-tuning", "new text: loss", "perplexity", "old text: loss", "perplexity"],
            tablefmt="github", disable_numparse=True,
        ),
        "\n![curves](plots/fine-tuning.png)\n", "## Costs\n", tabulate(
            [_cost_row(name, group) for name, group in groups.items() if name != NONE],
            ["fine-tuning", "trained parameters", "kept, MiB", "peak, MiB", "saved, MiB", "s of steps", "logits"],
            tablefmt="github", disable_numparse=True,
        ),
        _COSTS, "## Learning rates\n", tabulate(
            [_rates_row(study, name) for name in GRIDS],
            ["fine-tuning", "lowest rate: loss", "middle", "highest", "chosen", ""], tablefmt="github",
            disable_numparse=True,
        ),
        "\n## Samples\n", f"Of seed {study.seeds[0]}, {SAMPLE_TOKENS} tokens at temperature 0.8, the same draws.\n",
        *(f"{name}:\n\n{_indented(group[0].sample)}\n" for name, group in groups.items()),
    ]  # fmt: skip
    return "\n".join(lines)


def _seeds(study: Study, method: str) -> list[Run]:
    lr = choose(study, method)
    return [tune(study, method, lr, seed) for seed in study.seeds]


def _shape() -> str:
    return f"{SHAPE['num_hidden_layers']} blocks, width {SHAPE['hidden_size']}"


def _spread(values: Sequence[float]) -> str:
    """Return the mean, and what lies between the least and the largest."""
    mean = f"{fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def _loss_row(name: str, runs: Sequence[Run]) -> list[str]:
    new, old = [run.new_loss for run in runs], [run.old_loss for run in runs]
    return [
        name, _spread(new), f"{exp(fmean(new)):.1f}", _spread(old), f"{exp(fmean(old)):.1f}",
    ]  # fmt: skip


def _cost_row(name: str, runs: Sequence[Run]) -> list[str]:
    first = runs[0]
    share = 100 * first.trained_params / first.num_params
    sizes = [f"{size / MIB:.2f}" for size in (first.kept_bytes, first.peak_bytes, first.saved_bytes)]
    gap = max(run.logit_gap for run in runs)
    return [
        name, f"{first.trained_params:,} ({share:.1f} %)", *sizes, f"{median(run.step_seconds for run in runs):.0f}",
        f"{gap:.1e}",
    ]  # fmt: skip


def _rates_row(study: Study, method: str) -> list[str]:
    rates, chosen = GRIDS[method], choose(study, method)
    found = (f"{run.lr:g}: {run.curve_losses[-1]:.4f}" for run in tries(study, method))
    return [method, *found, f"{chosen:g}", "at the edge of the grid" if chosen in {min(rates), max(rates)} else ""]


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def draw(study: Study) -> Figure:
    """Return the curves of all seeds, and what is learned against what is forgotten."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    before = unchanged(study)
    right.scatter([before.new_loss], [before.old_loss], color=COLORS[NONE], marker="s", label=NONE)
    for name in METHODS:
        runs, color = _seeds(study, name), COLORS[name]
        for run in runs:
            left.plot(
                run.curve_steps, run.curve_losses, color=color, linewidth=1, label=name if run is runs[0] else None
            )
        new, old = [run.new_loss for run in runs], [run.old_loss for run in runs]
        right.scatter(new, old, color=color, s=18, label=name)
    left.set_xlabel(f"step of {BATCH * SEQ_LEN:,} tokens")
    left.set_ylabel("loss on held-out new text, nats per token")
    right.set_xlabel("loss on held-out new text, nats per token")
    right.set_ylabel("loss on held-out old text")
    left.set_title("Learning (executed, a line per seed)", fontsize=11)
    right.set_title("Learned against forgotten: lower left is better", fontsize=11)
    for axes in (left, right):
        axes.legend(fontsize=9)
        axes.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    main()
