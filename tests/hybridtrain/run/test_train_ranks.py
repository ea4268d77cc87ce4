"""``hybridtrain train`` on ranks that were not given the same: all of them say what differs, and none trains."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_folders import save_model, transformers_model
from hybridtrain.cli.main import main
from hybridtrain.data.corpus import open_corpus
from hybridtrain.data.data_config import DataConfig
from hybridtrain.errors import ConfigError, RankError
from hybridtrain.memory.group import TorchGroup
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.optim import AdamWConfig
from hybridtrain.run import train as train_module
from hybridtrain.run.train import train
from hybridtrain.training_file import TrainFile, load_config
from ranks import CPU, on_ranks
from tiny_files import training_file
from tiny_models import LLAMA_GROUPED
from tiny_tokenizers import write_lines

ACCUMULATION = '[[optimizations]]\nkind = "grad_accumulation"\ngrad_accum_steps = 2\n'
TEXT = "the quick brown fox jumps over the lazy dog\n" * 40
SHAPE = replace(LLAMA_GROUPED, vocab_size=256, num_blocks=1)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the same runs with a card and without
    Path("text.txt").write_text(TEXT)
    Path("other.txt").write_text(TEXT.replace("fox", "hen"))
    for name in ("lines", "others", "held"):
        write_lines(Path(f"{name}.jsonl"), *[{"text": f"{n} {name[0]}"} for n in range(40)])
    Path("train.toml").write_text(training_file(more=ACCUMULATION))


def with_data(file: TrainFile, name: str) -> TrainFile:
    data = DataConfig(path=Path(name), validation=Path("held.jsonl"), validation_percent=0)
    return replace(file, data=data, eval_every=2)


def with_weights(file: TrainFile, name: str) -> TrainFile:
    return replace(file, model=ModelSpec(init_from=Path(name)))


CASES: dict[str, tuple[Callable[[TrainFile], TrainFile], str]] = {
    "lr": (lambda file: replace(file, optimizer=AdamWConfig(lr=0.5)), "optimizer.lr: 0.0003 on rank 0, 0.5 on rank 1"),
    "optimizer": (lambda file: replace(file, optimizer=AdamWConfig(beta1=0.5)), "optimizer.beta1: 0.9 on rank 0, 0.5"),
    "seed": (lambda file: replace(file, seed=7), "seed: 0 on rank 0, 7 on rank 1"),
    "seq_len": (
        lambda file: replace(file, workload=replace(file.workload, seq_len=16)),
        "workload.seq_len: 8 on rank 0, 16 on rank 1",
    ),
    "batch_size": (
        lambda file: replace(file, workload=replace(file.workload, batch_size=4)),
        "workload.batch_size: 2 on rank 0, 4 on rank 1",
    ),
    "num_steps": (lambda file: replace(file, num_steps=5), "num_steps: 4 on rank 0, 5 on rank 1"),
    "stack": (lambda file: replace(file, optimizations=()), "optimizations: [{"),
    "validation_rows": (
        lambda file: replace(file, data=DataConfig(path=Path("lines.jsonl"), validation_rows=3)),
        "data.validation_rows: 256 on rank 0, 3 on rank 1",
    ),
    "data": (lambda file: with_data(file, "others.jsonl"), "data.digest: "),
    "weights": (lambda file: with_weights(file, "others"), "weights of model.init_from: "),
}  # fmt: skip


def base_of(case: str) -> TrainFile:
    file = load_config(Path("train.toml"))
    if case == "validation_rows":
        return replace(file, data=DataConfig(path=Path("others.jsonl")))
    if case == "data":
        return with_data(file, "lines.jsonl")
    return with_weights(file, "source") if case == "weights" else file


def test_what_ranks_were_given_otherwise_is_told_on_all_of_them() -> None:
    source = transformers_model(SHAPE)
    save_model(source, Path("source"))
    with torch.no_grad():
        source.lm_head.weight.mul_(2)
    save_model(source, Path("others"))

    def told(group: TorchGroup) -> dict[str, str]:
        found = {}
        for case, (change, _) in CASES.items():
            file = change(base_of(case)) if group.rank else base_of(case)
            corpus = open_corpus(Path("text.txt"), vocab_size=256) if file.data is None else None
            with pytest.raises(ConfigError) as met:
                train(file, corpus, Path(case), resume=False, say=lambda _: None, progress=False, group=group)
            found[case] = str(met.value)
        for name, (options, versions) in {"--change": (["seed"], "9"), "version of torch": ([], "8")}.items():
            if group.rank:
                train_module.versions_of = lambda versions=versions: {"torch": versions}  # type: ignore[misc]
            with pytest.raises(ConfigError) as met:
                train(
                    base_of(""), open_corpus(Path("text.txt"), vocab_size=256), Path(name), resume=False,
                    say=lambda _: None, progress=False, group=group, allowed=options if group.rank else (),
                )  # fmt: skip
            found[name] = str(met.value)
        return found

    first, second = on_ranks(2, told)
    assert first == second
    for case, (_, words) in CASES.items():
        assert words in first[case], case
        assert first[case].startswith("2 ranks: ")
        assert not Path(case, "checkpoints").exists()
        assert not Path(case, "log.jsonl").exists()
    assert '--change: [] on rank 0, ["seed"] on rank 1' in first["--change"]
    assert 'on rank 0, "8" on rank 1; it must be the same on every rank' in first["version of torch"]


def launched(files: list[str], data: list[str] | None = None) -> list[int | None]:
    """Return the exit codes of ranks that are started as torchrun would."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def rank(number: int) -> None:
        names = {"RANK": number, "WORLD_SIZE": len(files), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()})
        torch.set_num_threads(1)
        source = [] if data is None else ["--data", data[number]]
        os._exit(main(["train", files[number], *source, "--rank-timeout-s", "20"]))

    processes = [multiprocessing.get_context("fork").Process(target=rank, args=(n,)) for n in range(len(files))]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def test_the_command_ends_with_2_on_every_rank(capfd: pytest.CaptureFixture[str]) -> None:
    Path("other.toml").write_text(Path("train.toml").read_text().replace("seq_len = 8", "seq_len = 16"))
    assert launched(["train.toml", "other.toml"], ["text.txt"] * 2) == [2, 2]
    assert capfd.readouterr().err.count("workload.seq_len: 8 on rank 0, 16 on rank 1") == 2
    assert launched(["train.toml"] * 2, ["text.txt", "other.txt"]) == [2, 2]
    assert capfd.readouterr().err.count("data.digest: ") == 2
    assert launched(["train.toml"] * 2, ["text.txt"] * 2) == [0, 0]


def test_a_rank_that_failed_alone_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    write_lines(Path("bad.jsonl"), {"neither": "text"})
    file = Path("train.toml").read_text()
    for name in ("lines", "bad"):
        Path(f"{name}.toml").write_text(file.replace("[model", f'[data]\npath = "{name}.jsonl"\n[model', 1))
    assert launched(["lines.toml", "bad.toml"]) == [1, 2]
    assert "rank 0 of 2: another rank ended or did not answer in time" in capfd.readouterr().err


@pytest.mark.parametrize("is_first", [False, True])
def test_ranks_that_do_not_meet_end_within_their_time(is_first: bool) -> None:
    """One at a port that takes connections and never answers, one that waits for ranks that do not come."""
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        if is_first:
            server.close()

        def join() -> None:
            try:
                TorchGroup.open(CPU, init_method=address, rank=0 if is_first else 1, world=2, timeout_s=0.5)
            except RankError as error:
                writer.send(str(error))
            os._exit(0)  # torch's own wait goes on in its thread

        process = fork.Process(target=join)
        process.start()
        is_told = reader.poll(60)  # torch alone waits for minutes
        process.kill()
        process.join()
    assert is_told
    assert "not all ranks joined within 0.5 s" in reader.recv()
