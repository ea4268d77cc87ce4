"""CPU training throughput of gpt2-small against transformers and torch's checkpointing: interleaved, medians."""

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from hybridtrain.data.batches import TokenBatch
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import model_preset
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import GradientCheckpointing, MixedPrecision
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig

_BATCH, _SEQ_LEN = 4, 256
_OPTIMIZER = AdamWConfig(max_grad_norm=0.0)

Step = Callable[[], None]


def main() -> None:
    """Time each pair in turn and print the ratio of its medians; above 1 the first one is faster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    rng = np.random.default_rng(0)
    token_ids_BT, target_ids_BT = (rng.integers(0, 50257, (_BATCH, _SEQ_LEN)) for _ in range(2))
    batch = TokenBatch(token_ids_BT=token_ids_BT, target_ids_BT=target_ids_BT)
    mixed, recompute = MixedPrecision(), GradientCheckpointing(recompute_every=1)
    print(f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, ours, theirs in (
        ("fp32 / transformers fp32", lambda: _ours([], batch), lambda: _transformers(batch, None)),
        ("bf16 / transformers autocast", lambda: _ours([mixed], batch), lambda: _transformers(batch, "autocast")),
        ("bf16 / transformers pure bf16", lambda: _ours([mixed], batch), lambda: _transformers(batch, "pure")),
        ("fp32 recompute / torch checkpoint", lambda: _ours([recompute], batch), lambda: _torch_checkpoint(batch)),
        (
            "bf16 recompute / torch checkpoint",
            lambda: _ours([mixed, recompute], batch),
            lambda: _torch_checkpoint(batch, torch.bfloat16),
        ),
    ):
        (first, first_cpu), (second, second_cpu) = _interleave(ours(), theirs(), rounds)
        tokens = _BATCH * _SEQ_LEN
        print(
            f"{name:36} {tokens / first:6.0f} / {tokens / second:6.0f} tokens/s   ratio {second / first:.3f}   "
            f"by processor time {second_cpu / first_cpu:.3f}",
            flush=True,
        )


def _interleave(first: Step, second: Step, rounds: int) -> list[tuple[float, float]]:
    """Return the median wall and processor seconds of a step, for both."""
    walls: tuple[list[float], list[float]] = ([], [])
    processors: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        order = ((0, first), (1, second)) if number % 2 else ((1, second), (0, first))
        for index, step in order:
            begin, begin_cpu = time.perf_counter(), time.process_time()
            step()
            if number:  # the first round warms up
                walls[index].append(time.perf_counter() - begin)
                processors[index].append(time.process_time() - begin_cpu)
    return [(median(wall), median(processor)) for wall, processor in zip(walls, processors, strict=True)]


def _ours(stack: list[Optimization], batch: TokenBatch) -> Step:
    config = TrainerConfig(optimizer=_OPTIMIZER)
    trainer = Trainer(model_preset("gpt2-small"), compose(stack), config, DirectTransfer(torch.device("cpu")))
    return lambda: _discard(trainer.step([batch]))


def _discard(_result: object) -> None:
    """Make a step return nothing."""


def _transformers(batch: TokenBatch, precision: str | None) -> Step:
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config.use_cache = False
    model = GPT2LMHeadModel(config)
    if precision == "pure":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_OPTIMIZER.lr, weight_decay=0.1, fused=True)
    token_ids_BT = torch.from_numpy(batch.token_ids_BT)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            loss = model(input_ids=token_ids_BT, labels=token_ids_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def _torch_checkpoint(batch: TokenBatch, dtype: torch.dtype = torch.float32) -> Step:
    """Return a step of the same model under torch.utils.checkpoint and torch's fused AdamW."""
    stack: list[Optimization] = [MixedPrecision()] if dtype == torch.bfloat16 else []
    trainer = Trainer(model_preset("gpt2-small"), compose(stack), TrainerConfig(), DirectTransfer(torch.device("cpu")))
    model = trainer.model
    parameters = [parameter for _, parameter in model.named_unit_parameters()]
    masters = [parameter.detach().float() for parameter in parameters] if stack else parameters
    optimizer = torch.optim.AdamW(masters, lr=_OPTIMIZER.lr, weight_decay=0.1, fused=True)
    token_ids_BT, target_ids_BT = torch.from_numpy(batch.token_ids_BT), torch.from_numpy(batch.target_ids_BT)

    def step() -> None:
        hidden_BTD = model.embedding(token_ids_BT)
        for block in model.blocks:
            hidden_BTD = checkpoint(block, hidden_BTD, use_reentrant=False)
        loss = model.head(hidden_BTD, target_ids_BT)
        loss.backward()
        if stack:
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = parameter.grad.float()
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        if stack:
            with torch.no_grad():
                for master, parameter in zip(masters, parameters, strict=True):
                    parameter.copy_(master)
        loss.item()

    return step


if __name__ == "__main__":
    main()
