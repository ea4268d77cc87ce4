"""Parts of the evidence by priority, and whether there is time for one."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.optimizations.activation_offload import ActivationOffload
from hybridtrain.optimizations.chunked_loss import ChunkedLoss
from hybridtrain.optimizations.fused_update import FusedUpdate
from hybridtrain.optimizations.grad_accumulation import GradAccumulation
from hybridtrain.optimizations.gradient_checkpointing import GradientCheckpointing
from hybridtrain.optimizations.int8_weights import Int8Weights
from hybridtrain.optimizations.mixed_precision import MixedPrecision
from hybridtrain.optimizations.weight_streaming import WeightStreaming
from hybridtrain.stacks import Stack
from hybridtrain.units import GIB, MIB, format_bytes, format_seconds

CEILINGS = "ceilings"
"""The first part, which always runs: it shows whether the card works."""
CURVES = "curves"
"""Times of single kernels."""
SCRIPTS = "scripts"
"""Name that stands for all scripts, each a part ``script/NAME``."""
KERNELS = "kernels"
"""This project's kernels beside others."""
PAIRS = "pairs"
"""Name that stands for all small pairs of model and stack."""
SCRIPT_FILES = Path(__file__).parent / "scripts"
_SCRIPT_ORDER = ("gpt2_pretrain", "llama_1b_full", "resnet50", "llama_1b_qlora", "trainer_qwen")
"""The most telling scripts; the others follow by name."""
_SETUP_SECONDS = 20.0
"""Assumed seconds for starting Python, torch and CUDA, and drawing initial values."""
_SECONDS_PER_PINNED_BYTE = 1 / (1.5 * GIB)
"""Assumed rate of pinning host memory, at the slow end of measurements."""
_LEAST_STEPS = 2
"""Fewest steps: the first allocates and warms up, the second shows the speed."""
_STEP_MARGIN = 1.6
"""Factor by which a step may exceed its estimate before the part is stopped."""
_SHORTAGE = 0.9
"""Share of a part's cap that must be free: a 24 GB card has a little less than 24 GiB, and maybe a desktop."""
_PAIR_MODELS = ("gpt2-large", "gpt2-xl", "gpt2-1b")
PAIR_STACKS = ("vanilla", "mixed", "phase2-lite", "balanced", "streaming", "conservative", "tight")
"""Stacks of the scenario folder for small models."""
_PAIR_CAPS_GIB = {24: _PAIR_MODELS, 16: ("gpt2-large", "gpt2-1b")}
"""Models by cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPart:
    """Something to measure on the card."""

    name: str
    description: str
    limit_s: float
    """Most seconds on the card."""
    least_s: float = 0.0
    """It is not begun with less time left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptPart(CardPart):
    """A plain script, on the card and planned."""

    path: Path

    def packages(self) -> tuple[str, ...]:
        """Return the packages that it imports."""
        names = [
            name
            for node in script_imports(self.path).body
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])  # type: ignore[attr-defined]
        ]
        return tuple(dict.fromkeys(str(name).split(".")[0] for name in names))

    def missing(self) -> str:
        """Return the first package that it imports and that is not installed; empty: all are."""
        return next((name for name in self.packages() if find_spec(name) is None), "")

    def models(self) -> list[str]:
        """Return the presets whose folder it loads."""
        return re.findall(r"models/([\w.-]+)", self.path.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(CardPart):
    """One model trained under one cap."""

    model: str
    cap_gib: int
    seq_len: int
    num_sequences: int
    """Sequences per optimizer step."""
    stack: Stack | None = None
    """Stack; None: the one that ``recommend`` finds."""
    num_steps: int = 3
    profiles: bool = False
    """Whether an additional step is profiled."""
    host_gib: float | None = None
    """Host memory for the run; None: available memory."""

    @property
    def cap_bytes(self) -> int:
        """Bytes of the card that the run may use, CUDA context included."""
        return self.cap_gib * GIB


@cache
def script_imports(path: Path) -> ast.Module:
    """Return a script's imports, and nothing else of it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], type_ignores=[])


def all_parts(stacks: Sequence[Stack]) -> Iterator[CardPart]:
    """Yield the parts by priority; ``stacks``: the scenario folder's, for the pairs."""
    yield CardPart(name=CURVES, description="times of single kernels by class and size", limit_s=90, least_s=30)
    yield from script_parts(SCRIPT_FILES)
    yield CardPart(name=KERNELS, description="hybridtrain bench kernels --quick", limit_s=130, least_s=40)
    yield _recommended("7b-24", "llama-7b", 24, limit_s=300, profiles=True)
    yield _recommended("1b-16", "llama-1b", 16, limit_s=150)
    yield _recommended("7b-16", "llama-7b", 16, limit_s=300)
    yield from _pairs(stacks)
    yield _recommended("13b-24", "llama-13b-57l", 24, limit_s=360)
    yield _largest("50b-24", micro_batch_size=2, num_micro_batches=2, num_steps=2, limit_s=300)
    yield _largest("50b-24-more", micro_batch_size=4, num_micro_batches=4, num_steps=2, limit_s=400)


def script_parts(folder: Path) -> list[ScriptPart]:
    """Return the scripts of a folder, the most telling first."""
    ranks = {name: rank for rank, name in enumerate(_SCRIPT_ORDER)}
    paths = sorted(folder.glob("*.py"), key=lambda path: (ranks.get(path.stem, len(ranks)), path.stem))
    return [
        ScriptPart(
            name=f"script/{path.stem}", description=_first_line(path), limit_s=60, least_s=15, path=path
        )
        for path in paths
    ]  # fmt: skip


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.stem
    return text.splitlines()[0].rstrip(".")


def choose_parts(parts: Sequence[CardPart], only: Sequence[str]) -> list[CardPart]:
    """Return the requested parts in order; all by default.

    Raises:
        ConfigError: an unknown part.
    """
    names = [part.name for part in parts]
    groups = {
        SCRIPTS: {part.name for part in parts if isinstance(part, ScriptPart)},
        PAIRS: {part.name for part in parts if isinstance(part, Part) and "/" in part.name},
    }
    known = [CEILINGS, *groups, *names]
    faults = [unknown_name("part", name, known) for name in only if name not in known]
    if faults:
        raise ConfigError("--only", faults)
    wanted = set(only or names).union(*(group for name, group in groups.items() if name in only))
    return [part for part in parts if part.name in wanted]


def effective_cap(part: Part, total_bytes: int, others_bytes: int) -> int:
    """Return the part's memory in bytes: its cap, or a little less; 0 if too little is free."""
    there = (total_bytes - others_bytes) // MIB * MIB
    cap = min(part.cap_bytes, there)
    return cap if cap >= _SHORTAGE * part.cap_bytes else 0


def shortage(part: Part, total_bytes: int, others_bytes: int) -> str:
    """Return the reason why the card cannot hold the part's cap."""
    if total_bytes < _SHORTAGE * part.cap_bytes:
        return f"the card is too small: it has {format_bytes(total_bytes)}, the part needs {part.cap_gib} GiB"
    return (
        f"the card is in use: other programs use {format_bytes(others_bytes)} of {format_bytes(total_bytes)}, the part "
        f"wants {part.cap_gib} GiB"
    )


def plain_limit(part: CardPart, remaining_s: float) -> tuple[float, str]:
    """Return the time limit in seconds of a part without an estimate, or 0 and why there is no time for it."""
    if remaining_s >= part.least_s:
        return min(remaining_s, part.limit_s), ""
    return 0.0, f"it needs {format_seconds(part.least_s)}, {format_seconds(max(0.0, remaining_s))} are left"


def time_limit(part: Part, *, step_s: float, host_bytes: int, remaining_s: float) -> tuple[float, str]:
    """Return the part's time limit in seconds and an empty text, or 0 and why there is no time for it.

    ``step_s``: estimated step time; ``host_bytes``: to be pinned; ``remaining_s``: time left.
    """
    setup_s = _SETUP_SECONDS + host_bytes * _SECONDS_PER_PINNED_BYTE
    least_s = setup_s + _LEAST_STEPS * _STEP_MARGIN * step_s
    if least_s > remaining_s:
        left = format_seconds(max(0.0, remaining_s))
        return 0.0, f"two steps would take {format_seconds(least_s)}, {left} are left"
    return min(remaining_s, max(part.limit_s, least_s)), ""


def _recommended(name: str, model: str, cap_gib: int, *, limit_s: float, profiles: bool = False) -> Part:
    return Part(
        name=name, description=f"{model} under {cap_gib} GiB, the stack that recommend finds, 131,072 tokens per step",
        model=model, cap_gib=cap_gib, seq_len=2048, num_sequences=64, limit_s=limit_s, profiles=profiles,
    )  # fmt: skip


def _largest(name: str, *, micro_batch_size: int, num_micro_batches: int, num_steps: int, limit_s: float) -> Part:
    stack = Stack(
        name="int8-factored-fused",
        description="8-bit weights on the host, factored state, each block updated within its backward visit",
        optimizer="adafactor",
        optimizations=(
            MixedPrecision(master="absent"),
            Int8Weights(),
            GradientCheckpointing(recompute_every=1),
            ChunkedLoss(loss_chunk_tokens=2048),
            GradAccumulation(grad_accum_steps=num_micro_batches, schedule="vertical", accumulator="bfloat16"),
            WeightStreaming(),
            FusedUpdate(),
            ActivationOffload(),
        ),
    )
    sequences = micro_batch_size * num_micro_batches
    return Part(
        name=name, description=f"llama-50b under 24 GiB, 110 GiB of host memory, {2048 * sequences:,} tokens per step",
        model="llama-50b", cap_gib=24, seq_len=2048, num_sequences=sequences, stack=stack, num_steps=num_steps,
        host_gib=110, limit_s=limit_s,
    )  # fmt: skip


def _pairs(stacks: Sequence[Stack]) -> Iterator[Part]:
    """Yield small models under stacks of the scenario folder, for the error of the dry run's bytes."""
    by_name = {stack.name: stack for stack in stacks}
    for cap_gib, models in _PAIR_CAPS_GIB.items():
        for model in models:
            for name in PAIR_STACKS:
                if name in by_name:
                    yield Part(
                        name=f"{model}/{name}/{cap_gib}", description=f"{model} under {cap_gib} GiB with {name}",
                        model=model,
                        cap_gib=cap_gib, seq_len=512, num_sequences=4, stack=by_name[name], num_steps=4, limit_s=60,
                    )  # fmt: skip
