"""Recorded runs of others in our terms: the recipe as a stack, and what their kernels and schedule do otherwise.

The rules are fixed in peer_runs.toml beside this file. D width, F feed-forward, T sequence.
"""

import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from hybridtrain.data.batches import TokenBatch
from hybridtrain.memory import formats
from hybridtrain.memory.group import VirtualGroup
from hybridtrain.memory.state_store import StateSlot, StateStore
from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.models.model_config import ModelConfig, block_params
from hybridtrain.optimizations import (
    ActivationOffload,
    Bf16Optimizer,
    ChunkedLoss,
    GradAccumulation,
    GradientCheckpointing,
    MixedPrecision,
    OptimizerOffload,
    WeightStreaming,
    Zero,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import on_links, record_steps
from hybridtrain.units import GIB
from hybridtrain.virtual_gpu.account.op_record import Lane, OpRecord, Stage
from hybridtrain.virtual_gpu.cards.card import Card, Host, find_card
from hybridtrain.virtual_gpu.cards.kernels import Curves
from hybridtrain.virtual_gpu.cards.links import World
from hybridtrain.virtual_gpu.cards.roofline import StepTime, estimate_step

SHORT = 2
"""Micro-batches of the shorter recorded step; the longer one has one more."""
Tables = Mapping[str, Any]
_AS_RECORDED: Mapping[Lane, float] = {}
_WHOLE_UPDATE = {Lane.COPY_IN: 2.0, Lane.COPY_OUT: 1.5}
"""Weights and gradients too come from the host, and weights go back, where ours streams two moments in and out."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Ops of one step, by the number of its micro-batches, as they were recorded."""

    ops: dict[int, Sequence[OpRecord]]
    first: dict[int, int]
    """Number of the step's first op."""

    def under(self, rules: "Rules") -> "Steps":
        """Return the ops that are timed."""
        return replace(self, ops={count: rules(ops, self.first[count]) for count, ops in self.ops.items()})


Rules = Callable[[Sequence[OpRecord], int], Sequence[OpRecord]]
"""Turns the recorded ops of a step, and the number of its first one, into those that are timed."""


@dataclass(frozen=True, slots=True)
class PeerRun:
    """A recorded run and its model."""

    facts: Tables
    model: ModelConfig
    card: Card
    host: Host

    @property
    def world(self) -> World:
        """The cards, of which the first is timed."""
        return World(size=self.facts.get("world", 1), link=self.facts.get("link", "pcie"))

    @property
    def kept_blocks(self) -> int:
        """Blocks that are not recomputed, so that the recompute share comes closest to the recorded one."""
        shares = [recompute_share(self.model, kept) for kept in range(self.model.num_blocks + 1)]
        return min(range(len(shares)), key=lambda kept: abs(shares[kept] - self.facts["recompute_share"]))

    @property
    def embed_head_share(self) -> float:
        """Share of the parameters outside the blocks."""
        return self.model.vocab_size * self.model.width * (2 - self.model.tied) / self.model.num_params

    @property
    def is_streamed(self) -> bool:
        """Whether weights and gradients of blocks travel; ml_dataflow's do if the used memory has no room for all."""
        facts, model = self.facts, self.model
        if facts["system"] != "ml_dataflow":
            return bool(facts["weights_home"] == "host")
        outside = self.embed_head_share * model.num_params
        kept = facts["resident_layers"] * self.bytes_of_level["full"] * facts["micro_batch_size"] * facts["seq_len"]
        return bool(facts["vram_used_gib"] * GIB < kept + 8 * outside + 4 * (model.num_params - outside))

    @property
    def bytes_of_level(self) -> dict[str, int]:
        """Bytes a token that a block keeps by ml_dataflow's three levels; its column of used memory agrees to 0.1 %."""
        model = self.model
        width, kv_width = model.width, model.num_kv_heads * model.head_dim
        attention = 2 * (2 * width + 2 * kv_width) + 4 * model.num_heads + 8
        return {
            "full": attention + 2 * (2 * width + 2 * model.ffn_width),
            "inp_attn": attention,
            "inp_only": 2 * (width + 2 * kv_width) + 4,
        }

    @property
    def activation_bytes(self) -> int:
        """Bytes that a block sends to the host in a micro-batch, on average and beside recorded block inputs."""
        facts, model = self.facts, self.model
        total = sum(facts[f"host_layers_{level}"] * num_bytes for level, num_bytes in self.bytes_of_level.items())
        total -= 2 * model.width * (model.num_blocks - self.kept_blocks)
        blocks = model.num_blocks - facts["resident_layers"]
        return int(max(total, 0) * facts["micro_batch_size"] * facts["seq_len"] / max(blocks, 1))

    @property
    def summed_bytes(self) -> dict[str, int]:
        """Bytes that a unit's gradients take in bfloat16; embedding and head are gathered anew as well."""
        model = self.model
        blocks = {f"block.{number}": 2 * block_params(model) for number in range(model.num_blocks)}
        return blocks | dict.fromkeys(("embedding", "head"), 4 * model.vocab_size * model.width)

    def stack(self, micro_batches: int) -> list[Optimization]:
        """Return the recipe in our terms, with so many micro-batches on each card."""
        facts = self.facts
        stack: list[Optimization] = [
            GradAccumulation(grad_accum_steps=micro_batches * self.world.size, accumulator="bfloat16"),
            MixedPrecision(master="absent"),
            Bf16Optimizer(),
            ChunkedLoss(loss_chunk_tokens=facts["head_chunk_tokens"]),
        ]
        if self.kept_blocks < self.model.num_blocks:
            stack.append(GradientCheckpointing(recompute_every=1, kept_blocks=self.kept_blocks))
            if facts["system"] == "ml_dataflow" or "--offload-residual" in facts["flags"]:
                stack.append(ActivationOffload())
        if self.is_streamed:
            stack.append(WeightStreaming())
        if self.world.size > 1:
            stack.append(Zero(stage=3, prefetch=1) if self.is_streamed else Zero(stage=1))
        if facts["optimizer_home"] == "host":
            stack.append(OptimizerOffload(offload_grads=facts["grads_home"] == "host" and self.is_streamed))
        return stack

    def record(self, *counts: int) -> Steps:
        """Run steps of the given numbers of micro-batches dry, on the virtual card."""
        steps = Steps({}, {})
        empty = np.zeros((self.facts["micro_batch_size"], self.facts["seq_len"]), dtype=np.int64)
        batch = TokenBatch(token_ids_BT=empty, target_ids_BT=empty)
        # One step is recorded, whose state has values as in any later one. Rounding by chance is left out: eight ops a
        # slice, four fifths of all, where the peers' update is one kernel (update_bytes).
        with (
            mock.patch.object(formats, "round_stochastically", _round_to_nearest),
            mock.patch.object(StateStore, "_allocate", _allocate_with_values),
        ):
            for count in counts:
                plan = compose(self.stack(count))
                group = VirtualGroup(0, self.world.size) if self.world.size > 1 else None
                trace = record_steps(self.model, plan, [[batch] * count], VirtualTransfer(), group=group)
                steps.ops[count], steps.first[count] = trace.step_ops(0), trace.steps[0].op
        return steps

    def tokens_per_s(self, steps: Steps, curves: Curves | None = None) -> float:
        """Return the estimate for the whole step, extrapolated from two short ones."""
        short, longer = (self.step_time(steps, count, curves).seconds for count in (SHORT, SHORT + 1))
        whole = short + (self.facts["micro_batches_per_step"] - SHORT) * (longer - short)
        return float(self.facts["tokens_per_step"] / whole)

    def step_time(self, steps: Steps, count: int, curves: Curves | None = None) -> StepTime:
        """Return the estimate for a recorded step of so many micro-batches."""
        tokens = count * self.facts["micro_batch_size"] * self.facts["seq_len"]
        first = steps.first[count]
        ops = on_links(steps.ops[count], self.card, self.world, is_pipeline=False)
        host = self.host.shared(self.world.size)
        return estimate_step(ops, self.card, upload_bytes=16 * tokens, first=first, host=host, curves=curves)


_ALLOCATE = StateStore._allocate


def _allocate_with_values(self: StateStore, unit: str, slots: Sequence[StateSlot]) -> None:
    _ALLOCATE(self, unit, slots)
    for slot in slots:
        slot.is_fresh = False


def _round_to_nearest(value_P: Tensor, target_P: Tensor) -> None:
    target_P.copy_(value_P)


def recompute_share(model: ModelConfig, kept_blocks: int) -> float:
    """Return the share of all FLOPs that are done twice: blocks but their last projection, and flash's scores."""
    width, ffn = model.width, model.width * model.ffn_width
    block = 2 * width**2 + 2 * width * model.num_kv_heads * model.head_dim + 3 * ffn
    scores = model.max_seq_len * width  # one causal matmul of attention: T / 2 keys a query, 2 FLOPs each
    again = (model.num_blocks - kept_blocks) * (2 * (block - ffn) + 2 * scores)
    once = 6 * (model.num_blocks * block + model.vocab_size * width) + 7 * model.num_blocks * scores
    return (again + model.num_blocks * scores) / (again + once)


def peers_schedule(
    ops: Sequence[OpRecord], first: int, *, embed_head_share: float, update_streams: Mapping[Lane, float] = _AS_RECORDED
) -> list[OpRecord]:
    """Fetch a gradient from the beginning of its block's backward visit on; keep embedding and head on the card.

    Args:
        ops: Of one step.
        first: Number of the first one.
        embed_head_share: Share of the parameters that the update need not stream; 0: embedding and head are streamed.
        update_streams: What the update's copies move, over what ours do.
    """
    changed: list[OpRecord] = []
    visit, start = (Stage.BUILD, ""), -1
    for number, op in enumerate(ops, first):
        new = op
        if op.lane is Lane.COMPUTE:
            if (op.stage, op.unit) != visit:
                visit, start = (op.stage, op.unit), number
        elif embed_head_share and op.unit in {"embedding", "head"}:
            new = replace(op, lane=Lane.COMPUTE, bytes_moved=0, waits=())
        elif op.stage is Stage.BUILD:  # the update's streams: nobody says what they belong to
            share = (1 - embed_head_share) * update_streams.get(op.lane, 1.0)
            new = replace(op, bytes_moved=round(op.bytes_moved * share))
        elif op.lane is Lane.COPY_IN and any(_is_stored_gradient(ops, wait - first) for wait in op.waits):
            stores = [wait for wait in op.waits if _is_stored_gradient(ops, wait - first)]
            new = replace(op, waits=(start, *stores))
        changed.append(new)
    return changed


def send_activations(ops: Sequence[OpRecord], first: int, *, blocks: int, slots: int, num_bytes: int) -> list[OpRecord]:
    """Send what a block keeps to the host after its forward visit, and fetch it for its backward one.

    Args:
        ops: Of one step.
        first: Number of the first one.
        blocks: Number of first blocks whose activations travel; the others stay.
        slots: Places on the card: a forward visit waits for the one that it takes, a fetch until one is free.
        num_bytes: Of one block.
    """
    changed: list[OpRecord] = []
    numbers: list[int] = []
    stored: dict[int, int] = {}
    fetched: dict[int, int] = {}
    visit, last = (Stage.BUILD, ""), -1

    def copy(lane: Lane, block: int) -> int:
        changed.append(
            OpRecord(
                name=lane.value, event=0, stage=visit[0], unit=f"block.{block}", is_matmul=False, flops=0,
                bytes_moved=num_bytes, dtype="", lane=lane, waits=(last,),
            )
        )  # fmt: skip
        return first + len(changed) - 1

    for op in ops:
        waits = tuple(wait if wait < first else numbers[wait - first] for wait in op.waits)
        if op.lane is Lane.COMPUTE:
            if (op.stage, op.unit) != visit:
                done = _block(visit[1])
                if visit[0] is Stage.FORWARD and 0 <= done < blocks:
                    stored[done] = copy(Lane.COPY_OUT, done)
                elif visit[0] is Stage.BACKWARD and 0 <= done - slots < blocks:
                    fetched[done - slots] = copy(Lane.COPY_IN, done - slots)
                visit = (op.stage, op.unit)
                begun, before = _block(op.unit), stored if op.stage is Stage.FORWARD else fetched
                needed = before.pop(begun - slots if op.stage is Stage.FORWARD else begun, None)
                waits += () if needed is None else (needed,)
            last = first + len(changed)
        numbers.append(first + len(changed))
        changed.append(replace(op, waits=waits))
    return changed


def sum_each_micro_batch(
    ops: Sequence[OpRecord], first: int, *, num_bytes: Mapping[str, int], ranks: int
) -> list[OpRecord]:
    """Cut gradients among the ranks after every backward visit but the last one of a unit, which is recorded so.

    Args:
        ops: Of one step.
        first: Number of the first one.
        num_bytes: Passed between ranks at the end of a unit's visit, by unit; the card computes meanwhile.
        ranks: Each has its part of the gradients that travel to and from the host.
    """
    ends, visit = dict[int, str](), -1
    for index, op in enumerate(ops):
        if op.lane is Lane.COMPUTE:
            last = ops[visit]
            if visit >= 0 and last.stage is Stage.BACKWARD and (op.stage, op.unit) != (last.stage, last.unit):
                ends[visit] = last.unit
            visit = index
    ends = {index: unit for index, unit in ends.items() if unit in num_bytes}
    left = Counter(ends.values())
    changed: list[OpRecord] = []
    numbers: list[int] = []
    for index, op in enumerate(ops):
        waits = tuple(wait if wait < first else numbers[wait - first] for wait in op.waits)
        is_gradient = (op.lane is Lane.COPY_OUT and op.stage is Stage.BACKWARD) or (
            op.lane is Lane.COPY_IN and any(_is_stored_gradient(ops, wait - first) for wait in op.waits)
        )
        numbers.append(first + len(changed))
        changed.append(replace(op, waits=waits, bytes_moved=op.bytes_moved // (ranks if is_gradient else 1)))
        if index in ends:
            left[ends[index]] -= 1
            if left[ends[index]]:
                changed.append(
                    OpRecord(
                        name=Lane.LINK.value, event=0, stage=Stage.BACKWARD, unit=op.unit, is_matmul=False, flops=0,
                        bytes_moved=num_bytes[op.unit], dtype="", lane=Lane.LINK, waits=(numbers[-1],),
                    )
                )  # fmt: skip
    return changed


def _block(unit: str) -> int:
    return int(unit[6:]) if unit.startswith("block.") else -1


def _is_stored_gradient(ops: Sequence[OpRecord], index: int) -> bool:
    return index >= 0 and ops[index].lane is Lane.COPY_OUT and ops[index].stage is Stage.BACKWARD


def fuse(ops: Sequence[OpRecord], shares: Mapping[str, float], update_bytes: float) -> list[OpRecord]:
    """Leave of each op's bytes what the peers' kernels move; the update on the card moves ``update_bytes`` in all."""
    in_update = sum(op.bytes_moved for op in ops if op.lane is Lane.COMPUTE and op.stage is Stage.UPDATE)
    update_share = update_bytes / in_update
    return [
        op
        if op.lane is not Lane.COMPUTE
        else replace(
            op,
            bytes_moved=round(
                op.bytes_moved * (update_share if op.stage is Stage.UPDATE else shares.get(op.name, 1.0))
            ),
        )
        for op in ops
    ]


def rules_of(run: PeerRun, protocol: Tables) -> Rules:
    """Return what the peers' kernels and schedule do otherwise."""
    share = run.embed_head_share if run.facts["embed_head_home"] == "card" else 0.0
    if run.facts["optimizer_home"] == "card":
        share = 0.0  # nothing is streamed, nothing is left out
    update = protocol["update_bytes"] * run.model.num_params / run.world.size
    slots = run.facts.get("resident_layers", run.model.num_blocks)
    streams = _WHOLE_UPDATE if run.facts["system"] == "ml_dataflow" and not run.is_streamed else _AS_RECORDED

    def peers(ops: Sequence[OpRecord], first: int) -> list[OpRecord]:
        scheduled = peers_schedule(ops, first, embed_head_share=share, update_streams=streams)
        changed = fuse(scheduled, protocol["fused_share"], update)
        if "--shard-gradients" in run.facts.get("flags", "") and run.world.size > 1:
            changed = sum_each_micro_batch(changed, first, num_bytes=run.summed_bytes, ranks=run.world.size)
        if slots == run.model.num_blocks:
            return changed
        blocks = run.model.num_blocks - slots
        return send_activations(changed, first, blocks=blocks, slots=slots, num_bytes=run.activation_bytes)

    return peers


def machine_of(facts: Tables) -> str:
    """Return the name of the machine that a run was made on."""
    cards = f"{facts['world']}x-" if "world" in facts else ""
    return f"{'mdf' if facts['system'] == 'ml_dataflow' else facts['system']}-{cards}{facts['card']}"


def load_left_out(path: Path) -> list[dict[str, str]]:
    """Return what is known of runs that are not predicted: id, source, cards, recorded and why, in words."""
    runs: list[dict[str, str]] = tomllib.loads(path.read_text(encoding="utf-8"))["left_out"]
    return runs


def load_runs(path: Path) -> tuple[Tables, list[PeerRun]]:
    """Return the protocol and the runs in the order of the file."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    runs = [
        PeerRun(
            facts,
            ModelConfig(**tables["models"][facts["model"]], max_seq_len=facts["seq_len"]),
            find_card(facts["card"]),
            Host(
                memory_gbps=tables["protocol"]["host_share"] * tables["machines"][machine_of(facts)]["host_dram_gbps"]
            ),
        )
        for facts in tables["run"]
    ]
    return tables["protocol"], runs
