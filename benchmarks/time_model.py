"""The time model against training steps that others recorded, each source predicted by what was fitted without it.

``python benchmarks/time_model.py`` fits kernels (kernel_curves.py) and what their sum leaves out of a step on the rows
of recorded_steps.toml with the role ``fit``; it predicts every source from the others, and rows with the role
``predict``, and those that were kept back, from all that are fitted. It writes results/time-model.md, every prediction
into results/time-model.csv and, for the program, hybridtrain/virtual_gpu/cards/{kernel_curves,time_error}.toml.
"""

import argparse
import csv
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from math import exp, hypot, log
from pathlib import Path
from statistics import fmean
from typing import Any

import kernel_curves
import numpy as np
from kernel_curves import ATTENTION, SPREAD
from peer_runs import SHORT, PeerRun, load_runs, rules_of
from recorded_steps import Register, Source, Step, load_register
from scipy.optimize import least_squares
from step_plans import ADAPTED, Key, Recipe, kernels_of, load_kernels, model_of, recipe_of

from hybridtrain.errors import ConfigError
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.units import GB
from hybridtrain.virtual_gpu.account.op_record import OpRecord, Stage
from hybridtrain.virtual_gpu.cards.card import Card, card_catalogue, find_card
from hybridtrain.virtual_gpu.cards.kernels import Curves, Kernel, KernelTimes, class_of
from hybridtrain.virtual_gpu.cards.roofline import WIDTH_OF_80, Bottleneck

HERE = Path(__file__).resolve().parent
CARDS = {
    "a100-40gb-pcie": "a100-40gb", "a100-80gb-pcie": "a100-80gb", "h100-96gb-hbm2e": "h100-sxm", "gb200": "b200",
    "gb300": "b300",
}  # fmt: skip
"""Cards outside the catalogue and those that stand for them."""
NOT_PLANNED = (
    "offload",
    "CPU",
    "parallel",
    "tensor",
    "pipeline",
    "expert",
    "context 2",
    "context 4",
    "context 8",
    "not packed",
)
"""Words in a recipe: work of the host, or a model cut among cards in ways that are not planned here."""
SELECTIVE = 0.45
"""Share of forward that selective checkpointing does twice (assumed)."""
NVLINK = ("a100", "h100", "h200", "b200", "gb", "v100-32gb")
UPDATE = {"fused": 28.0, "eager": 60.0, "compiled": 28.0, "cuda-graph": 14.0}
"""Bytes a parameter of the update with fp32 states: one kernel, or torch's foreach."""
PER_OP = {"fused": 2.0, "eager": 3.0, "compiled": 1.0, "cuda-graph": 0.0}
"""Kernels issued for each op of ours: eager layers have several for a norm, a rotation, an activation."""


MOST = 0.9
"""Share of a peak that no published product exceeds but on GeForce cards: a step that would is of another card."""


def seconds_of(step: Step) -> float | None:
    """Return the recorded seconds of an optimizer step; None of a quantity that needs assumptions on FLOPs."""
    samples = step.micro_batch * step.accumulation
    tokens, value = samples * step.length, step.value
    found = {
        "tokens_s": tokens * step.cards / value, "tokens_s_card": tokens / value,
        "samples_s": samples * step.cards / value, "step_s": value, "step_ms": value / 1e3,
        "micro_batch_ms": step.accumulation * value / 1e3, "steps_s": 1 / value, "run_s": value / (step.steps or 1),
        "run_min": 60 * value / (step.steps or 1),
    }  # fmt: skip
    return found.get(step.quantity)


@dataclass(frozen=True, slots=True)
class Planned:
    """A recorded step and the kernels of one of its micro-batches."""

    source: Source
    step: Step
    card: Card
    model: ModelConfig
    kernels: Counter[Key]
    recorded_s: float

    @property
    def name(self) -> str:
        """The repository: what is left out together."""
        return self.source.repository

    @property
    def flops(self) -> float:
        """Of the whole step, on one card, at the rate of 16 bits."""
        return self.step.accumulation * sum(key[2] * count for key, count in self.kernels.items())


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a step by class of kernel, and what stands beside them."""

    kernels: dict[str, float]
    update: float
    casts: float
    host_ops: float
    """Kernels to issue."""
    link: float


ADAPTER_KERNELS = 20
"""Beside each adapted product, in both passes: dropout, casts, scale, sum, and what autograd adds (assumed)."""


def linears_of(source: Source, model: ModelConfig, step: Step) -> list[tuple[int, int]]:
    """Return inputs and outputs of a block's matrices with an adapter."""
    width, ffn, kv = model.width, model.ffn_width, model.num_kv_heads * model.head_dim
    if "qwen1" in step.model:
        return [(width, 3 * width), (width, width), (width, ffn), (width, ffn), (ffn, width)]
    attention, mlp = (
        [(width, width), (width, kv), (width, kv), (width, width)],
        [(width, ffn), (width, ffn), (ffn, width)],
    )
    chosen = ADAPTED.get(source.repository, ("all-linear",))
    return {("attention",): attention, ("query", "value"): attention[:2]}.get(chosen, attention + mlp)


def adapted_bytes(source: Source, model: ModelConfig, step: Step) -> int:
    """Return bytes a token that adapters of separate ops move in both passes: 16 for each input, 14 for each output."""
    return model.num_blocks * sum(16 * inner + 14 * outer for inner, outer in linears_of(source, model, step))


def parts_of(planned: Planned, curves: Curves) -> Parts:
    """Return the parts of a step at a card's curves."""
    step, model, card = planned.step, planned.model, planned.card
    if step.attention in {"flash-3", "flash-4", "cudnn"} and card.capability[0] >= 9:
        curves = kernel_curves.newer(curves)
    if step.attention in OLD:
        curves = replace(curves, attention=curves.attention_old)
    times, seconds, issued = KernelTimes(card, curves), dict.fromkeys(Kernel, 0.0), 0.0
    for (name, stage, flops, moved, dtype, shape), count in planned.kernels.items():
        is_low = step.precision in EIGHT_BITS and flops and "attention" not in name
        is_head = is_low and shape is not None and model.vocab_size in shape
        op = OpRecord(
            name=name, event=0, stage=Stage(stage), unit="", is_matmul=False, flops=flops, bytes_moved=moved,
            dtype="float8_e4m3fn" if is_low and not is_head and card.has_float8_tensor_cores else dtype, shape=shape,
        )  # fmt: skip
        seconds[class_of(op)] += max(times.seconds(op)[:2]) * count * step.accumulation
        if is_low and not is_head and shape is not None:  # operands are made of 8 bits
            rows, _, inner = shape
            seconds[Kernel.QUANTIZE] += count * step.accumulation * 3 * rows * inner / times.memory_rate(10**9)
        issued += count
    is_whole = step.method == "full"
    if not is_whole and step.engine == "eager":  # dropout, casts, scales and sums beside each adapted product
        rows = step.micro_batch * step.length * step.accumulation * (1.5 if step.checkpointing == "full" else 1.0)
        issued += ADAPTER_KERNELS * model.num_blocks * len(linears_of(planned.source, model, step)) / PER_OP["eager"]
        seconds[Kernel.ELEMENTWISE] += rows * adapted_bytes(planned.source, model, step) / times.memory_rate(10**9)
    trained = model.num_params if is_whole else 0.01 * model.num_params
    shard = step.cards if step.sharding.startswith("zero") else 1
    per_param = 14.0 if step.precision in {"bf16", "fp8"} and step.engine == "cuda-graph" else UPDATE[step.engine]
    if step.precision == "bf16":
        per_param /= 2
    update = per_param * trained / shard / (times.memory_rate(10**9) * curves.optimizer)
    is_cast = step.precision.endswith("mixed") and is_whole and step.sharding in {"none", "ddp", "zero1", "zero2"}
    casts = 6 * model.num_params * step.accumulation * (2 if step.checkpointing == "full" else 1)
    moved = 0.0
    if step.cards > 1:
        weights = 2.0 * model.num_params * (0.27 if step.method == "qlora" else 1.0)
        gathers = step.accumulation * (3 if is_whole else 2 if step.sharding == "zero3" else 0)
        moved = weights * gathers if step.sharding in {"zero3", "hybrid"} else 4.0 * trained
        moved *= (step.cards - 1) / step.cards
    has_nvlink = step.card.startswith(NVLINK)
    rate = (
        {"8.0": 300.0, "9.0": 450.0}.get(card.compute_capability, 900.0 if has_nvlink else 0.0) if has_nvlink else 0.0
    )
    rate = (rate * GB if rate else card.bus_bytes_per_second / 2) * 0.8
    if step.cards > 8 and step.sharding != "hybrid" and not step.card.startswith("gb"):
        rate = min(rate, 40.0 * GB)
    return Parts(
        {kind.value: value for kind, value in seconds.items()}, update,
        casts / times.memory_rate(10**9) if is_cast else 0.0,
        issued * step.accumulation * PER_OP[step.engine], moved / rate,
    )  # fmt: skip


SPREADS = {
    "gemm": 0.1,
    "attention": 0.05,
    "memory": 0.4,
    "loss": 0.5,
    "float8": 0.3,
    "update": 0.3,
    "host": 0.5,
    "link": 0.35,
}
"""How far a factor is expected from 1, as logarithms: the prior of the fit."""
ROUNDING = 1e-9
HOST_SECONDS = 7.1e-6
"""To issue a kernel, before the fit: of an addition on an A100 (kernel_times, flaggems-4558)."""
EXPOSED = 0.5
"""Share of what passes between cards that no computation hides, before the fit."""
ENGINE_FACTORS = ("memory", "loss")


EIGHT_BITS = frozenset({"fp8", "mxfp8", "int8"})
OLD = frozenset({"unknown", "flash-1", "plain"})
"""Attention of before FlashAttention 2, or written so."""


def names_of(planned: Planned) -> dict[str, str]:
    """Return the factor of each part of a step."""
    step = planned.step
    kind = "flash-1" if step.attention in OLD else "flash"
    place = "between" if step.cards > 8 else "nvlink" if step.card.startswith(NVLINK) else "pcie"
    engine = "fused" if step.engine == "cuda-graph" else step.engine
    device = planned.card
    low = "float8 GeForce" if "GeForce" in device.name else "float8" if step.precision in EIGHT_BITS else "none"
    return {
        "gemm": f"gemm {device.generation.replace('10.3', '10.0')}", "attention": f"attention {kind}",
        "memory": f"memory {engine}", "loss": f"loss {engine}", "low": low, "update": "update", "host": "host",
        "link": f"link {place} {step.sharding[:4]}",
    }  # fmt: skip


Factors = Mapping[str, float]
"""Logarithms; one that is missing is 0."""


def step_s(parts: Parts, names: Mapping[str, str], factors: Factors, low: bool) -> float:
    """Return the seconds of a step."""
    factor = {part: exp(factors.get(name, 0.0)) for part, name in names.items()}
    kernels = parts.kernels
    gemm = kernels["gemm"] * factor["gemm"] * (factor["low"] if low else 1.0)
    other = sum(seconds for kind, seconds in kernels.items() if kind not in {"gemm", "attention", "loss"})
    device = gemm + kernels["attention"] * factor["attention"] + (other + parts.casts) * factor["memory"]
    device += kernels["loss"] * factor["loss"] + parts.update * factor["update"]
    host = parts.host_ops * HOST_SECONDS * factor["host"]
    return float((device**4 + host**4) ** 0.25 + parts.link * EXPOSED * factor["link"])


@dataclass(frozen=True, slots=True)
class Row:
    """A planned step with its parts."""

    planned: Planned
    parts: Parts
    names: Mapping[str, str]

    def error(self, factors: Factors) -> float:
        """Return the logarithm of estimated over recorded seconds."""
        low = self.names["low"] != "none"
        return log(step_s(self.parts, self.names, factors, low) / self.planned.recorded_s)


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Return factors by least squares; sources and cards weigh the same, far rows little (soft L1)."""
    names = sorted({name for row in rows for name in row.names.values() if name != "none"})
    weight = Counter((row.planned.name, row.planned.card.name) for row in rows)
    scale = [weight[row.planned.name, row.planned.card.name] ** -0.5 / 0.1 for row in rows]
    spread = [SPREADS[name.split()[0]] for name in names]

    def residuals(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> list[float]:
        factors = dict(zip(names, map(float, values), strict=True))
        errors = [row.error(factors) * one for row, one in zip(rows, scale, strict=True)]
        return [*errors, *(value / sd for value, sd in zip(values, spread, strict=True))]

    found = least_squares(residuals, np.zeros(len(names)), loss="soft_l1", diff_step=1e-3, xtol=1e-4, ftol=1e-5).x
    return dict(zip(names, map(float, found), strict=True))


def peer_rows(kept: dict[Any, Any], fitted: kernel_curves.Fit) -> list[Row]:
    """Return the runs of one card of peer_runs.toml that hardly wait; they are fitted on with their repositories."""
    rows = []
    for run in load_runs(HERE / "peer_runs.toml")[1]:
        facts = run.facts
        if facts["role"] != "cross" or facts["confidence"] == "low":
            continue
        repository = {"ml_dataflow": "als244/ml_dataflow", "llmq": "IST-DASLab/llmq"}[facts["system"]]
        step = Step(
            kind="cuda", model=facts["model"], card=facts["card"], cards=1, sharding="none",
            micro_batch=facts["micro_batch_size"], accumulation=facts["micro_batches_per_step"],
            length=facts["seq_len"], checkpointing="none", method="full", precision="bf16", engine="cuda-graph",
            attention="flash-3" if run.card.capability == (9, 0) else "flash-2", quantity="tokens_s",
            value=facts["recorded_tokens_per_s"], at=facts["id"], confidence="high",
        )  # fmt: skip
        source = Source(
            id=facts["system"], repository=repository, commit="", path="", date="", role="fit", software="", notes="",
            rows=(step,),
        )  # fmt: skip
        recipe = Recipe(facts["model"], step.micro_batch, step.length, False, "full", 0, ())
        if recipe not in kept:
            kept[recipe] = kernels_of(run.model, recipe)
        again = (run.model.num_blocks - run.kept_blocks) / run.model.num_blocks
        total = kernels_in(kept[recipe], run.model.num_blocks, again)
        seconds = facts["tokens_per_step"] / facts["recorded_tokens_per_s"]
        planned = Planned(source, step, run.card, run.model, total, seconds)
        parts = parts_of(planned, fitted.curves(run.card))
        if facts["optimizer_home"] == "host":  # two moments of 16 bits come and go, one direction at a time
            copied = 4.0 * run.model.num_params / (0.8 * run.card.bus_bytes_per_second)
            parts = replace(parts, update=max(parts.update, copied))
        home = f"update {facts['optimizer_home']}"
        rows.append(Row(planned, parts, {**names_of(planned), "update": home}))
    return rows


def kernels_in(kept: tuple[Counter[Key], Counter[Key]], blocks: int, again: float) -> Counter[Key]:
    """Return the kernels of a micro-batch of so many blocks, of which a share goes forward a second time."""
    one, more = kept
    total = Counter[Key](one)
    for key, count in more.items():
        total[key] += count * (blocks - 1)
        if again and key[1] == Stage.FORWARD.value:
            total[key] += count * blocks * again
    return total


def load_rows(register: Register, kept: dict[Any, Any], fitted: kernel_curves.Fit, *, held: bool = False) -> list[Row]:
    """Return the steps that are planned, with their parts."""
    rows = []
    for source, step in register.steps():
        recipe = recipe_of(source, step)
        seconds = seconds_of(step)
        is_odd = any(word in step.recipe for word in NOT_PLANNED)
        if (source.role == "held") != held or recipe is None or seconds is None or is_odd or step.confidence == "low":
            continue
        model = model_of(register, step.model, step.length)
        if model is None or kept.get(recipe) is None:
            continue
        again = SELECTIVE if step.checkpointing == "selective" else 0.0
        total = kernels_in(kept[recipe], model.num_blocks, again)
        card = find_card(CARDS.get(step.card, step.card))
        planned = Planned(source, step, card, model, total, seconds)
        peak = max(rate for name, rate in card.flops_per_second.items() if "8" not in name or "8" in step.precision)
        if planned.flops / peak > MOST * seconds and "GeForce" not in card.name:
            continue
        rows.append(Row(planned, parts_of(planned, fitted.curves(card)), names_of(planned)))
    return rows


Predicted = list[tuple[Row, float, float]]
"""Rows with the logarithm of estimated over recorded seconds, and of the null model's."""


def null_share(rows: Iterable[Row], card: Card) -> float:
    """Return the logarithm of the share of the peak that others reach: on the card, else its generation, else any."""
    reached = [
        (row, log(row.planned.flops / row.planned.card.flops_per_second["bfloat16"] / row.planned.recorded_s))
        for row in rows
    ]
    for alike in (
        lambda other: other.name == card.name,
        lambda other: other.generation == card.generation,
        lambda _: True,
    ):
        of_source: defaultdict[str, list[float]] = defaultdict(list)
        for row, share in reached:
            if alike(row.planned.card):
                of_source[row.planned.name].append(share)
        if of_source:
            return fmean(map(fmean, of_source.values()))
    return 0.0


def predict(rows: Sequence[Row], others: Sequence[Row]) -> Predicted:
    """Return rows predicted by what is fitted on others; the null model from the same."""
    factors = fit(others)
    found = []
    for row in rows:
        planned = row.planned
        least = planned.flops / planned.card.flops_per_second["bfloat16"] / planned.recorded_s
        found.append((row, row.error(factors), log(least) - null_share(others, planned.card)))
    return found


def left_out(rows: Sequence[Row]) -> Predicted:
    """Return every row predicted without its repository; what is not to be fitted, by all that is."""
    fitted = [row for row in rows if row.planned.source.role == "fit"]
    found = predict([row for row in rows if row.planned.source.role != "fit"], fitted)
    for name in sorted({row.planned.name for row in fitted}):
        found += predict(
            [row for row in fitted if row.planned.name == name], [row for row in fitted if row.planned.name != name]
        )
    return found


@dataclass(frozen=True, slots=True)
class Intervals:
    """How wide the interval of a step is."""

    spread: Callable[[Card], Mapping[str, float]]
    """Of a card's classes of kernels."""
    residual: float
    """Of a step, beside them."""

    def width(self, row: Row) -> float:
        """Return half the interval of 80 %, of the logarithm of seconds."""
        known, kernels = self.spread(row.planned.card), row.parts.kernels
        total = sum(kernels.values())
        parts = (seconds / total * known[kind] for kind, seconds in kernels.items())
        return WIDTH_OF_80 * hypot(self.residual, *parts)

    def holds(self, row: Row, error: float) -> bool:
        """Return whether the recorded seconds are within the estimate's interval of 80 %."""
        return abs(error) <= self.width(row)

    def coverage(self, found: Predicted) -> float:
        """Return the share of steps within their interval."""
        return fmean(self.holds(row, error) for row, error, _ in found)


def fitted_intervals(found: Predicted, spread: Callable[[Card], Mapping[str, float]]) -> Intervals:
    """Return intervals that hold four of five steps, repositories weighing the same."""
    weight = Counter(row.planned.name for row, _, _ in found)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        trial = Intervals(spread, middle)
        inside = sum(trial.holds(row, error) / weight[row.planned.name] for row, error, _ in found) / len(weight)
        low, high = (low, middle) if inside > 0.8 - ROUNDING else (middle, high)
    return Intervals(spread, high)


def line(title: str, found: Predicted, intervals: Intervals) -> str:
    """Return a line of a table: steps, mean, mean absolute and largest error in percent, those of the null model."""
    cells = [str(len(found))]
    for place in (1, 2):
        errors = [exp(entry[place]) - 1 for entry in found]
        cells += [f"{fmean(errors):+.1%}", f"{fmean(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}"]
    return f"| {title} | {' | '.join(cells)} | {intervals.coverage(found):.0%} |"


HEAD = (
    "| | steps | mean | mean absolute | largest | null: mean | mean absolute | largest | in interval |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def groups(found: Predicted, key: Callable[[Row], str]) -> dict[str, Predicted]:
    """Return rows by a key, in the order of its values."""
    by: defaultdict[str, Predicted] = defaultdict(list)
    for entry in found:
        by[key(entry[0])].append(entry)
    return dict(sorted(by.items()))


def band(value: float, bounds: Sequence[float], unit: str) -> str:
    """Return the group of a number, named so that names sort as numbers do."""
    place = sum(value > bound for bound in bounds)
    return f"{'abcdefgh'[place]}: " + (
        f"to {bounds[place]:g}{unit}" if place < len(bounds) else f"above {bounds[-1]:g}{unit}"
    )


TRENDS: Mapping[str, Callable[[Row], str]] = {
    "By length of a sequence": lambda row: band(row.planned.step.length, (512, 1024, 2048, 4096, 8192, 16384), ""),
    "By size of the model": lambda row: band(row.planned.model.num_params / 1e9, (0.5, 1.5, 4, 9, 20), "B"),
    "By tokens of a micro-batch": lambda row: band(
        row.planned.step.micro_batch * row.planned.step.length, (2048, 8192, 16384, 65536), ""
    ),
    "By card": lambda row: row.planned.card.name,
    "By software": lambda row: f"{row.planned.step.engine}, {row.planned.step.kind}",
    "By cards": lambda row: (
        "one" if row.planned.step.cards == 1 else "up to 8" if row.planned.step.cards <= 8 else "more"
    ),
}


def by_source(found: Predicted) -> list[float]:
    """Return the mean absolute error of each repository."""
    return [
        fmean(abs(exp(error) - 1) for _, error, _ in of) for of in groups(found, lambda row: row.planned.name).values()
    ]


CURVES_HEAD = """\
# Written by benchmarks/time_model.py; kernels.py tells what the figures mean. Shares are fitted on published times of
# single kernels (benchmarks/kernel_times, {rows} of {sources} sources, {cards} cards) and, for what training does to
# products, attention and the time to issue a kernel, on recorded steps (benchmarks/recorded_steps.toml, {steps} of
# {repositories} repositories). Nothing was measured by this project. cached, bus and kernel_seconds are assumed.
# A card has its own table, that of its generation, and "all", the most particular figure first.
"""


def shipped_scopes(
    fitted: kernel_curves.Fit, factors: Factors, spread: Mapping[str, Mapping[str, float]]
) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """Return figures and spreads of all cards, of generations and of cards, as the program reads them."""
    of_gemm = {name.split(" ", 1)[1]: value for name, value in factors.items() if name.startswith("gemm ")}
    attention = factors.get("attention flash", 0.0)
    generations = {card.generation for card in card_catalogue().values()}
    names = {card.name: card.generation for card in card_catalogue().values()}
    scopes: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
    for scope in ("all", *sorted(generations), *sorted(names)):
        generation = names.get(scope, scope)
        training = of_gemm.get(generation.replace("10.3", "10.0"), fmean(of_gemm.values()))
        figures: dict[str, float] = {}
        found: dict[str, float] = {}
        level = "all" if scope == "all" else "generation" if scope in generations else "card"
        for kind, pooled in fitted.pooled.items():
            is_product = kind.startswith("gemm")
            if scope in pooled or (is_product and scope in of_gemm and scope != "all"):
                value = pooled.get(scope, pooled["all"])
                figures[kind] = exp(value - (training if is_product else attention if kind in ATTENTION else 0.0))
                if kind in spread[level]:
                    found |= spread_of(kind, spread[level][kind], spread["all"])
        if scope == "all":
            figures |= fitted.shared
            base = asdict(kernel_curves.BASE)
            figures |= {name: base[name] for name in ("cached", "bus", "kernel_seconds")}
            figures["launch_seconds"] = HOST_SECONDS * exp(factors.get("host", 0.0))
            figures["optimizer"] /= exp(factors.get("update", 0.0))
        if "gemm" in figures:
            figures["gemm_float8"] = fitted.float8 * figures["gemm"]
        if figures:
            scopes[scope] = figures, found
    return scopes


_OF_MEMORY = {
    Kernel.ELEMENTWISE: "", Kernel.NORMALIZATION: "normalization", Kernel.LOSS: "loss", Kernel.REDUCTION: "reduction",
    Kernel.GATHER: "gather", Kernel.QUANTIZE: "quantize", Kernel.OPTIMIZER: "optimizer",
}  # fmt: skip


def spread_of(kind: str, value: float, shared: Mapping[str, float]) -> dict[str, float]:
    """Return the spreads of classes that follow from a curve's."""
    if kind in {"gemm", "attention"}:
        return {kind: value}
    if kind != "memory":
        return {}
    return {kernel.value: hypot(value, shared.get(name, 0.0)) for kernel, name in _OF_MEMORY.items()}


def write_program_data(scopes: Mapping[str, tuple[dict[str, float], dict[str, float]]], head: str) -> None:
    """Write kernel_curves.toml."""
    lines = [head]
    for scope, (figures, spread) in scopes.items():
        quoted = scope if scope.isalnum() else f'"{scope}"'
        lines.append(f"[{quoted}]")
        lines += [f"{name} = {value:.4g}" for name, value in figures.items()]
        if spread:
            told = ", ".join(f"{name} = {value:.3f}" for name, value in spread.items())
            lines.append(f"spread = {{ {told} }}")
        lines.append("")
    (PACKAGE / "kernel_curves.toml").write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    """Fit, predict what was left out, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, help="file for recorded kernels, so that a second call is fast")
    asked = parser.parse_args()
    register = load_register(HERE / "recorded_steps.toml")
    kept = load_kernels(asked.keep) if asked.keep else {}
    record(register, kept)
    timed = kernel_curves.load()
    kernels = [one for one in timed if one.role == "fit"]
    fitted = kernel_curves.fit(kernels)
    spread = kernel_curves.spreads(kernels, fitted)
    rows = [*load_rows(register, kept, fitted), *peer_rows(kept, fitted)]
    if asked.keep:
        asked.keep.write_bytes(pickle.dumps(kept))
    fitting = [row for row in rows if row.planned.source.role == "fit"]
    factors = fit(fitting)
    long = [one for one in kernels if kernel_curves.is_long(one)]
    head = CURVES_HEAD.format(
        rows=len(long), sources=len({one.time.source for one in long}), cards=len({one.card.name for one in long}),
        steps=len(fitting), repositories=len({row.planned.name for row in fitting}),
    )  # fmt: skip
    scopes = shipped_scopes(fitted, factors, spread)
    write_program_data(scopes, head)

    def of_card(card: Card) -> dict[str, float]:
        joined: dict[str, float] = {}
        for scope in ("all", card.generation, card.name):
            joined |= scopes.get(scope, ({}, {}))[1]
        return joined

    found = left_out(rows)
    intervals = fitted_intervals(found, of_card)
    held = predict(load_rows(register, kept, fitted, held=True), fitting)
    waiting = waiting_runs(kept)
    if asked.keep:
        asked.keep.write_bytes(pickle.dumps(kept))
    write_errors(found, held, intervals, waiting)
    write_predictions(found, held, intervals)
    text = "\n".join(
        [
            *steps_told(found, intervals), *held_told(held, intervals), *waiting_told(waiting),
            "## Kernels left out\n", KERNELS, *kernel_table(timed, fitted), "", *fit_told(factors, rows, register),
        ]
    )  # fmt: skip
    (HERE.parent / "results" / "time-model.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def record(register: Register, kept: dict[Any, Any]) -> None:
    """Record what is missing."""
    for source, step in register.steps():
        recipe = recipe_of(source, step)
        if recipe is None or recipe in kept:
            continue
        config = model_of(register, step.model, step.length)
        try:
            kept[recipe] = None if config is None else kernels_of(config, recipe)
        except ConfigError as error:
            print(f"{source.id}, {step.model}: {error}")
            kept[recipe] = None


def waiting_runs(keep: dict[Any, Any]) -> list[tuple[PeerRun, float, float]]:
    """Return the runs of peer_runs.toml that wait for copies, the error of their seconds, and the share of waiting."""
    protocol, runs = load_runs(HERE / "peer_runs.toml")
    found = []
    for run in runs:
        if run.facts["role"] != "transfer" or run.facts["confidence"] == "low":
            continue
        key = ("peer", run.facts["id"])
        if key not in keep:
            keep[key] = run.record(SHORT, SHORT + 1)
        steps = keep[key].under(rules_of(run, protocol))
        longer, short = (run.step_time(steps, count) for count in (SHORT + 1, SHORT))
        waits = sum(
            time.seconds_by_bound.get(Bottleneck.TRANSFER, 0.0) * sign for time, sign in ((longer, 1), (short, -1))
        )
        error = float(run.facts["recorded_tokens_per_s"]) / run.tokens_per_s(steps) - 1
        found.append((run, error, waits / (longer.seconds - short.seconds)))
    return found


def write_predictions(found: Predicted, held: Predicted, intervals: Intervals) -> None:
    """Write every predicted step with its recorded seconds into results/time-model.csv."""
    with (HERE.parent / "results" / "time-model.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([
            "role", "repository", "source", "model", "card", "cards", "method", "checkpointing", "sequences", "length",
            "software", "recorded_s", "estimated_s", "low_80_s", "high_80_s", "null_model_s",
        ])  # fmt: skip
        for role, rows in (("left out", found), ("kept back", held)):
            for row, error, null in rows:
                planned, step = row.planned, row.planned.step
                estimated, width = planned.recorded_s * exp(error), intervals.width(row)
                seconds = (
                    planned.recorded_s, estimated, estimated * exp(-width), estimated * exp(width),
                    planned.recorded_s * exp(null),
                )  # fmt: skip
                table.writerow([
                    role, planned.name, planned.source.id, step.model, planned.card.name, step.cards, step.method,
                    step.checkpointing, step.micro_batch, step.length, f"{step.engine}, {step.kind}",
                    *(f"{value:.5g}" for value in seconds),
                ])  # fmt: skip


def write_errors(
    found: Predicted, held: Predicted, intervals: Intervals, waiting: Sequence[tuple[PeerRun, float, float]]
) -> None:
    """Write the errors of steps left out by source, kept back, and of those that wait, into time_error.toml."""
    means, wait = by_source(found), [error for _, error, _ in waiting]
    kept_back = [exp(error) - 1 for _, error, _ in held]
    spread = max(SPREAD * fmean(map(abs, wait)), intervals.residual)
    tables = {
        "source_out": (
            [exp(error) - 1 for _, error, _ in found], len(means), fmean(means), max(means), intervals.residual,
            intervals.coverage(found),
        ),
        "kept_back": (
            kept_back, len(by_source(held)), fmean(map(abs, kept_back)), max(map(abs, kept_back)), intervals.residual,
            intervals.coverage(held),
        ),
        "waiting": (
            wait, 1, fmean(map(abs, wait)), max(map(abs, wait)), spread,
            fmean(abs(log(1 + error)) <= WIDTH_OF_80 * hypot(intervals.residual, spread) for error in wait),
        ),
    }  # fmt: skip
    ratios = ratio_errors(found)
    of_ratios = [fmean(map(abs, errors)) for errors in ratios.values()]
    every = [error for errors in ratios.values() for error in errors]
    of_speeds = tables["source_out"]
    mean_ratio = fmean(of_ratios)
    tables["ratio"] = every, len(of_ratios), mean_ratio, max(of_ratios), SPREAD * mean_ratio, of_speeds[-1]
    lines = ["# Written by benchmarks/time_model.py: estimated over recorded seconds, less 1 (results/time-model.md)."]
    for name, (errors, sources, mean_absolute, largest, wide, covered) in tables.items():
        figures = {
            "mean": fmean(errors), "mean_absolute": mean_absolute, "largest": largest, "spread": wide,
            "covered": covered,
        }  # fmt: skip
        lines += ["", f"[{name}]", f"runs = {len(errors)}", f"sources = {sources}"]
        lines += [f"{key} = {value:.4f}" for key, value in figures.items()]
    (PACKAGE / "time_error.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def ratio_errors(found: Predicted) -> dict[str, list[float]]:
    """Return by repository the errors of ratios of seconds: of two steps of one model, length, card and card count."""
    alike: defaultdict[tuple[object, ...], list[float]] = defaultdict(list)
    for row, error, _ in found:
        step = row.planned.step
        alike[row.planned.name, step.card, step.cards, step.model, step.length].append(error)
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for place, errors in alike.items():
        ratios[str(place[0])] += [exp(one - other) - 1 for one, other in combinations(errors, 2)]
    return {name: errors for name, errors in ratios.items() if errors}


def steps_told(found: Predicted, intervals: Intervals) -> list[str]:
    """Return the tables of steps left out by source."""
    means, cards = by_source(found), {row.planned.card.name for row, _, _ in found}
    lines = [
        HEADER, "## Steps, each source left out\n",
        (
            f"{len(found)} steps of {len(means)} repositories on {len(cards)} cards; mean absolute error of "
            f"repositories, each the same: **{fmean(means):.1%}**; "
            f"{sum(value <= MOST_OF_A_SOURCE for value in means)} of {len(means)} within {MOST_OF_A_SOURCE:.0%}.\n"
        ),
    ]  # fmt: skip
    sources = groups(found, lambda row: row.planned.name)
    lines += [
        HEAD,
        *(line(name, part, intervals) for name, part in sources.items()),
        line("**all**", found, intervals),
        "",
    ]
    for title, key in TRENDS.items():
        lines += [f"### {title}\n", HEAD]
        lines += [*(line(name, part, intervals) for name, part in groups(found, key).items()), ""]
    ratios = {name: fmean(map(abs, errors)) for name, errors in ratio_errors(found).items()}
    lines += [
        "### Ratios\n",
        (
            f"Of two steps of one trainer, model, length and card, errors are alike in part: of {len(ratios)} "
            f"repositories, each the same, a ratio's mean absolute error is **{fmean(ratios.values()):.1%}**.\n"
        ),
    ]
    return [*lines, READING]


def held_told(held: Predicted, intervals: Intervals) -> list[str]:
    """Return the table of rows that were kept back: by source, and those that are missed."""
    lines = ["## Rows that were kept back\n", HELD, HEAD]
    lines += [line(name, part, intervals) for name, part in groups(held, lambda row: row.planned.source.id).items()]
    missed = [entry for entry in held if abs(exp(entry[1]) - 1) > FAR]
    lines += ["", f"Missed by more than {FAR:.0%}:\n", HEAD]
    for entry in missed:
        step = entry[0].planned.step
        title = (
            f"{step.model}, {step.micro_batch} x {step.length}, {step.method}, {step.checkpointing}, {step.cards} cards"
        )
        lines.append(line(title, [entry], intervals))
    return [*lines, ""]


def waiting_told(waiting: Sequence[tuple[PeerRun, float, float]]) -> list[str]:
    """Return the table of runs that wait for copies."""
    lines = [
        "## Runs that wait for copies\n",
        WAITING,
        "| run | recorded tokens/s | error | waits |",
        "|---|--:|--:|--:|",
    ]
    return [
        *lines,
        *(
            f"| {run.facts['id']} | {run.facts['recorded_tokens_per_s']:,.0f} | {error:+.1%} | {share:.0%} |"
            for run, error, share in waiting
        ),
        "",
    ]


def kernel_table(timed: Sequence[kernel_curves.Timed], fitted: kernel_curves.Fit) -> list[str]:
    """Return a table of kernels by curve and role: mean and mean absolute error."""
    lines = ["| curve | source | role | times | mean | mean absolute |", "|---|---|---|--:|--:|--:|"]
    by: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in timed:
        if kernel_curves.is_long(one):
            error = exp(one.error(fitted.curves(one.card))) - 1
            by[one.kind, one.time.source, one.role].append(error)
            if one.role != "fit":
                by[one.kind, "**all**", "left out"].append(error)
                by["**all**", "", "left out"].append(error)
    for (kind, source, role), errors in sorted(by.items()):
        lines.append(
            f"| {kind} | {source} | {role} | {len(errors)} | {fmean(errors):+.0%} | {fmean(map(abs, errors)):.0%} |"
        )
    return lines


def fit_told(factors: Factors, rows: Sequence[Row], register: Register) -> list[str]:
    """Return what was fitted on steps, and what was not planned."""
    planned = Counter(row.planned.source.id for row in rows)
    missing = [
        f"| {source.id} | {source.role} | {len(source.rows)} | {planned[source.id]} |"
        for source in register.source if source.role != "held" and planned[source.id] < len(source.rows)
    ]  # fmt: skip
    told = [f"| {name} | {exp(value):.2f} |" for name, value in factors.items()]
    return [
        "## What training does to kernels\n", FACTORS, "| part | factor |", "|---|--:|", *told,
        "\n## Steps that are not planned\n", NOT_TOLD, "| source | role | steps | planned |", "|---|---|--:|--:|",
        *missing,
    ]  # fmt: skip


FAR, MOST_OF_A_SOURCE = 0.2, 0.15
HEADER = """\
# The time model against recorded steps of others

Made by `python benchmarks/time_model.py` from benchmarks/recorded_steps.toml, peer_runs.toml and kernel_times, which
name every source. Predicted figures are **estimated**; recorded ones are others' own. Nothing was measured by this
project. Every prediction is in [time-model.csv](time-model.csv), seconds a step.

No step *left out* is predicted by what was fitted on its repository; rows *kept back* are predicted by all that is
fitted, their repository's other sources too. Rows with the role `predict` were never fitted. Errors are estimated over
recorded seconds, less 1. *Null* is the null model: FLOPs at the share of the peak that the same other
repositories reached, on the card if they have it. *In interval*: recorded seconds within the estimate's 80 %.
"""
READING = """\
How to read it. The aim, 9 % by repository and none beyond 15 %, is **missed**. The null model is beaten in sum and in
every repository but PyTorch's torchtune. The form of the model was chosen while these errors were seen, so they are
flattered; rows that were kept back were not seen.

Causes of misses, by name:

- torchao and Megatron-Bridge: B200 and GB200 with float8. No published kernels of FlashAttention 2 on them are known,
  and two trainers differ by a factor of two on one model.
- PEFT: 4 x 210 tokens, padded lengths assumed; a step waits for its loss on the host, and adapters differ by row.
- LLMQ: GeForce cards, whose products other sources tell of at 1,024 to 8,192 alone; its own kernels are faster.
- LLMQ in float8: means of cards are 25 to 36 % too slow. The other float8 trainers, which stand for it, cast more.
- fsdp_qlora: two and more GeForce cards without NVLink. What passes between them, and what hides it, is assumed.
- torchtune: on an RTX 4090 a paged 8-bit optimizer; compiled code moves less than its ops say.
- fms-fsdp: 96 and 128 cards; the network between machines is assumed at 40 GB/s a card.
- steps of few tokens are estimated too fast: the program issues more kernels than our ops tell.
"""
HELD = """\
Predicted after all fitting; nothing was fitted on them or chosen by them. Afterwards the program of
the fit was tidied, and the update's rate counted once instead of twice; both moved the means of sources by less than
0.3 %.

Causes: llm-foundry on H100 is attention of before FlashAttention 2, of which no published time on an H100 was at hand;
it gets an A100's share of the peak, and the error grows with length. PowerLM has heads of 64, 36 of them with keys of
their own, and eager code between them: its eager and LoRA rows are missed most.
"""
WAITING = """\
Never fitted, planned by the schedule that peer_runs.toml states. *Waits*: share of a micro-batch in which the card
waits for copies. Before a rule on weights was added with them known, four of them were off by -20, -20, +2 and +46 %:
intervals of plans that wait take that 22 % where it is more. The last run contradicts itself: ml_dataflow falls from
3,213 tokens/s at 4,096 tokens to 2,022 at 8,192 under 18 GiB, and not under 20 GiB (3,054).
"""
KERNELS = """\
The aim, 12 %, is met by products of 16 bits and normalization forward, and **missed** by the others. Short kernels
(below 20 us, or within twice the second-level cache) are left out: they tell of launches. Norms' backward passes of
torch and Liger are slower than cuDNN's by half, and one curve holds all; kernelbench's fp32 products include the
program's time.
"""
FACTORS = """\
Of the kernels' seconds, by least squares on all steps with the role `fit`; near 1 means that kernels alone tell the
time. `memory eager` above 1: eager layers have kernels for what is one op of ours. The program takes those of products,
attention, update and host.
"""
NOT_TOLD = (
    "Foreign models, adapters but LoRA, offload, models cut among cards, low confidence, faster than the card's peak.\n"
)
PACKAGE = HERE.parent / "hybridtrain" / "virtual_gpu" / "cards"

if __name__ == "__main__":
    main()
