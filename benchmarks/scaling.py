"""From one card to 512: what a card holds, what a machine, and what a token costs, with all of it cut among the ranks.

``python benchmarks/scaling.py`` plans a step of two arrangements of the same numbers on growing numbers of cards, as
many tokens on each, and writes the faster that fits to results/scaling.md. The first rank stands for all; nothing was
measured.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybridtrain.models.model_config import Workload, model_preset
from hybridtrain.optimizations import (
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    MixedPrecision,
    OptimizerOffload,
    WeightStreaming,
    Zero,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import DryRun, dry_run
from hybridtrain.units import format_count, to_gib
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.cards.links import World

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("llama-7b", "llama-13b-57l", "llama-50b", "llama-2-70b")
WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_MICRO_BATCHES, _SEQ_LEN = 2, 2048
_HOUR = 3600.0
_NUMBERS: tuple[Optimization, ...] = (
    MixedPrecision(master="absent"), Int8Optimizer(), GradientCheckpointing(recompute_every=1),
)  # fmt: skip
ARRANGEMENTS: dict[str, tuple[Optimization, ...]] = {
    "card": (Zero(stage=2),),
    "host": (WeightStreaming(), OptimizerOffload(offload_grads=True), Zero(stage=3, prefetch=1)),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Cards, and what joins those of a machine; machines are joined by ethernet."""

    card: str
    link: str
    micro_batch_size: int

    @property
    def title(self) -> str:
        """Heading of its tables."""
        return (
            f"{find_card(self.card).name}, {self.link} within a machine of eight, {_MICRO_BATCHES} micro-batches of "
            f"{self.micro_batch_size} x {_SEQ_LEN} tokens on each"
        )


SETTINGS = (Setting("h100-sxm", "nvlink", 4), Setting("rtx-4090", "pcie", 2))
_HEADER = """\
# One card to 512

Made by `python benchmarks/scaling.py`: a step of bfloat16 weights with stochastic rounding, 8-bit state and
recomputed blocks, planned as its first rank. *card*: everything on the card, gradients and state cut among all cards.
*host*: weights cut too, and what is cut waits on the host. The faster that fits is shown, else the smaller. Bytes are
**planned**, times **estimated**; no such run was measured. Every card has as many tokens a step, so a step of more
cards is a larger batch: whether it trains as well is not told here. Nothing recorded has more than eight cards. One
recorded run whose copies from the host share a bus with the link between cards took 1.8 times as long as planned
(time-model.md): *host* rows without NVLink may be as wrong. Above 100 % of one alone: the state that one card fetches
is cut among more, or all of it now fits on the cards. Host memory is that of a machine of eight cards (fewer where
fewer train), tensors alone. *Card hours*: of one billion tokens; times the price of a card for an hour they are
the cost.
"""
_HEAD = (
    "| cards | where, bottleneck | device GiB | tokens/s | a card's, of one alone | host GiB a machine | card hours |\n"
    "|--:|---|--:|--:|--:|--:|--:|"
)


def main() -> None:
    """Plan all, write the page."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    text = [_HEADER, *_tables()]
    (ROOT / "results" / "scaling.md").write_text("\n".join(text) + "\n", encoding="utf-8")


def _tables() -> Iterator[str]:
    for setting in SETTINGS:
        yield f"## {setting.title}\n"
        for name in MODELS:
            yield f"### {name}, {format_count(model_preset(name).num_params)} parameters\n\n{_HEAD}"
            begin, alone = time.process_time(), 0.0
            for world in WORLDS:
                where, run = chosen(name, setting, world)
                alone = alone or run.tokens_per_s
                yield row(where, run, alone)
            yield ""
            print(f"{setting.card} {name} {time.process_time() - begin:.0f} s", flush=True)


def chosen(name: str, setting: Setting, world: int) -> tuple[str, DryRun]:
    """Return the faster arrangement that fits, else the one that needs less of the card."""
    runs = {where: _run(name, setting, world, where) for where in ARRANGEMENTS}
    fitting = {where: run for where, run in runs.items() if run.fits_card}
    if fitting:
        return max(fitting.items(), key=lambda item: item[1].tokens_per_s)
    return min(runs.items(), key=lambda item: item[1].device_used_bytes)


def _run(name: str, setting: Setting, world: int, where: str) -> DryRun:
    workload = Workload(micro_batch_size=setting.micro_batch_size, seq_len=_SEQ_LEN)
    accumulation = GradAccumulation(grad_accum_steps=_MICRO_BATCHES * world, accumulator="bfloat16")
    return dry_run(
        model_preset(name), compose((*_NUMBERS, accumulation, *ARRANGEMENTS[where])), find_card(setting.card), workload,
        world=World(size=world, link=setting.link),
    )  # fmt: skip


def row(where: str, run: DryRun, alone: float) -> str:
    """Return a line of the table; ``alone``: tokens/s of one card."""
    world = run.world.size
    fits = "" if run.fits_card else " (does not fit)"
    return (
        f"| {world} | {where}, {run.bound} | {to_gib(run.device_used_bytes):.2f}{fits} | {run.tokens_per_s:,.0f} "
        f"| {run.tokens_per_s / world / alone:.0%} | {to_gib(run.machine_host_bytes):,.1f} "
        f"| {1e9 / run.tokens_per_s * world / _HOUR:,.0f} |"
    )


if __name__ == "__main__":
    main()
