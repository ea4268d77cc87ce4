"""Verbs that train, and what is done with a trained model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cyclopts import Parameter

from hybridtrain.cli.shared import (
    COMMON,
    Amount,
    Answer,
    Common,
    Count,
    DiskFolder,
    Flag,
    HostLimit,
    Names,
    limit_bytes,
    names_of,
)


@Parameter(name="*", group="Monitoring (the first four also print a memory report at the end)")
@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What watches a training run."""

    profile_memory: Path | None = None
    """Write the memory after each step of this call to a .csv file."""
    tensorboard: Path | None = None
    """Log metrics and memory to this folder, for tensorboard --logdir."""
    wandb: str | None = None
    """Log metrics and memory to this project of Weights & Biases; WANDB_MODE=offline keeps them on this machine."""
    mlflow: Path | None = None
    """Log metrics and memory to this folder, for mlflow ui --backend-store-uri."""
    profile_every: Count = 1
    """Steps between memory snapshots."""
    alert_gb: Count = 45
    """Warn when more memory than this is used; the default suits cards of 48 GB."""
    spike_percent: Amount = 10.0
    """Report a spike where a memory snapshot is above the one before by this much."""


_WATCH = Watch()


def train(
    config: Path, /, *,
    data: Path | None = None, out: Path = Path("run"), resume: Flag = False, change: Names = (),
    allow_data_change: Flag = False, disk: DiskFolder = None,
    host_limit_gib: HostLimit = None, rank_timeout_s: Amount = 600.0, watch: Watch = _WATCH,
    common: Common = COMMON,
) -> Answer:  # fmt: skip
    """Train a model on your own text.

    On SIGINT or SIGTERM the run finishes the current step, saves and ends. A second signal ends it at once.
    Exit code 0 when the run is done or was done before, 75 after a signal (--resume goes on), 130 or 143 after two.

    On several cards: torchrun --nproc-per-node 2 -m hybridtrain train train.toml; the first rank writes log and states.

    Example: hybridtrain train train.toml --data my-text/ --out run --profile-memory memory.csv

    Args:
        config: A training .toml file.
        data: Your text: a file, a folder, a token file (.bin) or records (.jsonl). Default: the path of [data] in the
            training file; without one, a small text that comes with hybridtrain.
        out: Folder for the log and the checkpoints.
        resume: Continue the run in --out; the stack may differ.
        change: With --resume, settings that may differ from the saved run's, with commas between them, as
            optimizer.lr,schedule.
        allow_data_change: With --resume, accept other data.
        rank_timeout_s: Seconds that a rank waits for another one before it fails.
    """
    from hybridtrain.data.corpus import open_corpus
    from hybridtrain.errors import ConfigError
    from hybridtrain.run.train import train as train_model
    from hybridtrain.run.train_data import with_data_table
    from hybridtrain.run.train_log import Monitoring
    from hybridtrain.training_file import load_config
    from hybridtrain.units import GB

    file = load_config(config)
    if data is not None and file.data is not None:
        faults = [f"[data] names {file.data.path} and --data {data}; give one of them"]
        raise ConfigError(str(config), faults)
    corpus, file = None, with_data_table(file, data)
    if file.data is None:
        corpus = open_corpus(data, vocab_size=file.model.resolve().vocab_size)
    said: list[str] = []
    monitoring = Monitoring(
        profile_csv=watch.profile_memory, profile_every=watch.profile_every, alert_bytes=watch.alert_gb * GB,
        spike_fraction=watch.spike_percent / 100, tensorboard=watch.tensorboard, wandb_project=watch.wandb,
        mlflow=watch.mlflow,
    )  # fmt: skip
    result = train_model(
        file, corpus, out, resume=resume, say=said.append if common.json else common.say,
        progress=not common.json, monitoring=monitoring, disk_folder=disk,
        host_limit_bytes=limit_bytes(host_limit_gib),
        allowed=(*change, *(["data"] if allow_data_change else [])), rank_timeout_s=rank_timeout_s,
    )  # fmt: skip
    content = result.as_mapping() | {"corpus": result.corpus, "said": said, "out": out.as_posix()}
    return Answer(text=result.as_text(out), content=content, code=result.exit_code)


def export(
    run: Path, target: Path, /, *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32", merge: Flag = False, disk: DiskFolder = None,
    host_limit_gib: HostLimit = None, common: Common = COMMON,
) -> Answer:  # fmt: skip
    """Write a trained model as a folder that transformers' from_pretrained loads; of adapters a folder of PEFT's.

    Example: hybridtrain export run my-model --dtype bfloat16

    Args:
        run: Folder of a training run (--out of train).
        target: New folder.
        dtype: Of the weights; float32 is exact. Adapters are always float32.
        merge: Add adapters to the weights beside them, and write the whole model.
    """
    from hybridtrain.run.export import export_run
    from hybridtrain.units import format_bytes

    said: list[str] = []
    files, steps = export_run(
        run, target, dtype=dtype, merge=merge, say=said.append if common.json else common.say, disk_folder=disk,
        host_limit_bytes=limit_bytes(host_limit_gib),
    )  # fmt: skip
    num_bytes = sum(file.stat().st_size for file in files)
    return Answer(
        text=f"{target}: the model after {steps} steps, {format_bytes(num_bytes)} in {len(files)} files",
        content={"steps_done": steps, "files": names_of(files), "bytes": num_bytes, "said": said},
    )


def quantize(
    model: Path, /, *,
    formats: Names = (), data: Path | None = None, seq: Count | None = None, common: Common = COMMON,
) -> Answer:  # fmt: skip
    """Measure what a trained model loses when its matrices are stored in fewer bits: loss and perplexity by format.

    Nothing is written. Weights alone are rounded, without calibration.

    Example: hybridtrain quantize my-model --formats int8,nf4 --data my-texts/

    Args:
        model: A Hugging Face folder with weights, or the folder of a training run (--out of train).
        formats: Of bfloat16, int8, nf4, ternary, with commas between them; default: all.
        data: Text, of which the held-out part is looked at; default: the run's own, or the embedded corpus.
        seq: Tokens per row; default: those of the run, or 512.
    """
    from hybridtrain.run.quantize import quantize as quantize_model

    report = quantize_model(model, formats=formats, data=data, seq_len=seq, say=common.note)
    return Answer(text=report.as_text(), content=report.as_mapping())
