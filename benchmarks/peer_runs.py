"""Recorded runs of others in our terms: the recipe as a stack, and what their kernels and schedule do otherwise.

The rules are fixed in peer_runs.toml beside this file. D width, F feed-forward, T sequence.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridtrain.dry_runs import dry_run
from hybridtrain.models.model_config import ModelConfig, Workload
from hybridtrain.optimizations import (
    ActivationOffload,
    Bf16Optimizer,
    ChunkedLoss,
    GradAccumulation,
    GradientCheckpointing,
    MixedPrecision,
    OptimizerOffload,
    WeightStreaming,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.virtual_gpu.card import find_card
from hybridtrain.virtual_gpu.ledger import OpRecord
from hybridtrain.virtual_gpu.observer import Lane, Stage
from hybridtrain.virtual_gpu.roofline import Efficiency, StepTime, estimate_step

SHORT = 2
"""Micro-batches of the shorter recorded step; the longer one has one more."""
VIEWS = frozenset({"aten._unsafe_view.default"})
"""Ops that move nothing, although the op costs count them."""
Tables = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Steps:
    """Ops of one step, by the number of its micro-batches, as they were recorded."""

    ops: dict[int, Sequence[OpRecord]]
    first: dict[int, int]
    """Number of the step's first op."""
    device_bytes: int
    host_bytes: int

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

    @property
    def is_test(self) -> bool:
        """Whether it is predicted, not fitted."""
        return bool(self.facts["role"] == "test")

    @property
    def family(self) -> str:
        """Cards that share one efficiency."""
        return find_card(self.facts["card"]).family

    @property
    def kept_blocks(self) -> int:
        """Blocks that are not recomputed, so that the recompute share comes closest to the recorded one."""
        shares = [recompute_share(self.model, kept) for kept in range(self.model.num_blocks + 1)]
        return min(range(len(shares)), key=lambda kept: abs(shares[kept] - self.facts["recompute_share"]))

    @property
    def embed_head_share(self) -> float:
        """Share of the parameters outside the blocks."""
        return self.model.vocab_size * self.model.width * (2 - self.model.tied) / self.model.num_params

    def stack(self, micro_batches: int) -> list[Optimization]:
        """Return the recipe in our terms."""
        facts = self.facts
        stack: list[Optimization] = [
            GradAccumulation(grad_accum_steps=micro_batches, accumulator="bfloat16"),
            MixedPrecision(master="absent"),
            Bf16Optimizer(),
            ChunkedLoss(loss_chunk_tokens=facts["head_chunk_tokens"]),
        ]
        if self.kept_blocks < self.model.num_blocks:
            stack.append(GradientCheckpointing(recompute_every=1, kept_blocks=self.kept_blocks))
            if facts["system"] == "ml_dataflow" or "--offload-residual" in facts["flags"]:
                stack.append(ActivationOffload())
        if facts["weights_home"] == "host":
            stack.append(WeightStreaming())
        if facts["optimizer_home"] == "host":
            stack.append(OptimizerOffload(offload_grads=facts["grads_home"] == "host"))
        return stack

    def record(self, *counts: int) -> Steps:
        """Run steps of the given numbers of micro-batches dry, on the virtual card."""
        steps = Steps({}, {}, 0, 0)
        workload = Workload(micro_batch_size=self.facts["micro_batch_size"], seq_len=self.facts["seq_len"])
        for count in counts:
            found = dry_run(self.model, compose(self.stack(count)), find_card(self.facts["card"]), workload)
            steps.ops[count] = found.trace.step_ops(1)
            steps.first[count] = found.trace.steps[1].op
            steps = replace(steps, device_bytes=found.device_used_bytes, host_bytes=found.host_peak_bytes)
        return steps

    def tokens_per_s(self, steps: Steps, efficiency: Efficiency) -> float:
        """Return the estimate for the whole step, extrapolated from two short ones."""
        short, longer = (self.step_time(steps, count, efficiency).seconds for count in (SHORT, SHORT + 1))
        whole = short + (self.facts["micro_batches_per_step"] - SHORT) * (longer - short)
        return float(self.facts["tokens_per_step"] / whole)

    def step_time(self, steps: Steps, count: int, efficiency: Efficiency) -> StepTime:
        """Return the estimate for a recorded step of so many micro-batches."""
        tokens = count * self.facts["micro_batch_size"] * self.facts["seq_len"]
        card, first = find_card(self.facts["card"]), steps.first[count]
        return estimate_step(steps.ops[count], card, upload_bytes=16 * tokens, first=first, efficiency=efficiency)


def recompute_share(model: ModelConfig, kept_blocks: int) -> float:
    """Return the share of all FLOPs that are done twice: blocks but their last projection, and flash's scores."""
    width, ffn = model.width, model.width * model.ffn_width
    block = 2 * width**2 + 2 * width * model.num_kv_heads * model.head_dim + 3 * ffn
    scores = model.max_seq_len * width  # one causal matmul of attention: T / 2 keys a query, 2 FLOPs each
    again = (model.num_blocks - kept_blocks) * (2 * (block - ffn) + 2 * scores)
    once = 6 * (model.num_blocks * block + model.vocab_size * width) + 7 * model.num_blocks * scores
    return (again + model.num_blocks * scores) / (again + once)


def peers_schedule(ops: Sequence[OpRecord], first: int, *, embed_head_share: float) -> list[OpRecord]:
    """Fetch a gradient from the beginning of its block's backward visit on; keep embedding and head on the card.

    Args:
        ops: Of one step.
        first: Number of the first one.
        embed_head_share: Share of the parameters that the update need not stream; 0: embedding and head are streamed.
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
            new = replace(op, bytes_moved=round(op.bytes_moved * (1 - embed_head_share)))
        elif op.lane is Lane.COPY_IN and any(_is_stored_gradient(ops, wait - first) for wait in op.waits):
            stores = [wait for wait in op.waits if _is_stored_gradient(ops, wait - first)]
            new = replace(op, waits=(start, *stores))
        changed.append(new)
    return changed


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


def free(ops: Sequence[OpRecord], names: frozenset[str]) -> list[OpRecord]:
    """Let the named ops move nothing."""
    return [replace(op, bytes_moved=0) if op.name in names else op for op in ops]


def rules_of(run: PeerRun, protocol: Tables) -> dict[str, Rules]:
    """Return the rules of each column."""
    share = run.embed_head_share if run.facts["embed_head_home"] == "card" else 0.0
    if run.facts["optimizer_home"] == "card":
        share = 0.0  # nothing is streamed, nothing is left out
    update = protocol["update_bytes"] * run.model.num_params

    def peers(ops: Sequence[OpRecord], first: int) -> list[OpRecord]:
        return fuse(peers_schedule(ops, first, embed_head_share=share), protocol["fused_share"], update)

    def eager(ops: Sequence[OpRecord], first: int) -> list[OpRecord]:
        return free(peers_schedule(ops, first, embed_head_share=share), VIEWS)

    return {"peers": peers, "eager": eager, "ours": lambda ops, _first: free(ops, VIEWS)}


def load_runs(path: Path) -> tuple[Tables, list[PeerRun]]:
    """Return the protocol and the runs in the order of the file."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    runs = [
        PeerRun(facts, ModelConfig(**tables["models"][facts["model"]], max_seq_len=facts["seq_len"]))
        for facts in tables["run"]
    ]
    return tables["protocol"], runs
