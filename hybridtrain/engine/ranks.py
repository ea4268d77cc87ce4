"""Checks before anything is built: plans that ranks cannot run, and settings that differ between ranks."""

import json
from collections.abc import Iterator, Mapping

import torch

from hybridtrain.config.encode import JsonMapping, JsonValue
from hybridtrain.errors import ConfigError
from hybridtrain.memory.group import Group, gather_texts
from hybridtrain.optim.optimizer import Optimizer, Role
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan, weight_storage

_ROLES = (Role((256, 256), in_block=True), Role((256, 256), in_block=False), Role((256,), in_block=True))


def require_ranks(group: Group, plan: MemoryPlan, optimizer: Optimizer, num_blocks: int) -> None:
    """Raise ``ConfigError`` unless a plan can run on the ranks of a group, with a sentence for each fault."""
    faults = list(_faults(group, plan, optimizer, num_blocks))
    if faults:
        raise ConfigError(f"{group.shares} ranks", faults)


def require_agreement(group: Group, device: torch.device, given: Mapping[str, JsonValue]) -> None:
    """Raise an error if settings differ between ranks; every rank must call this. Each is named as the user sets it.

    Raises:
        ConfigError: a fault for each name, with the values of the ranks.
        RankError: another rank ended or did not answer in time.
    """
    if device.type == "meta":
        return
    told: list[JsonMapping] = [json.loads(text) for text in gather_texts(group, device, json.dumps(dict(given)))]
    names = dict.fromkeys(name for values in told for name in values)
    faults = [
        f"{name}: {_by_rank([json.dumps(values[name]) if name in values else 'absent' for values in told])}; it must "
        "be the same on every rank: start all of them with the same file, arguments, data and packages"
        for name in names
        if any(values.get(name) != told[0].get(name) or (name in values) != (name in told[0]) for values in told)
    ]
    if faults:
        raise ConfigError(f"{group.world} ranks", faults)


def _by_rank(values: list[str]) -> str:
    """Return each value with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' * (len(held) > 1)} {', '.join(map(str, held))}" for value, held in ranks.items()
    )


def _faults(group: Group, plan: MemoryPlan, optimizer: Optimizer, num_blocks: int) -> Iterator[str]:
    full, shares = plan.for_phase(Phase.FULL), group.shares
    is_pipeline = group.world > 1 and full.pipeline_stages > 1
    if is_pipeline and full.pipeline_stages != group.world:
        yield (
            f"pipeline_stages: needs {full.pipeline_stages} ranks, one per stage; set "
            f"pipeline's stages to {group.world}, or start {full.pipeline_stages} ranks"
        )
    if is_pipeline and group.world > num_blocks:
        yield (
            f"pipeline_stages: {group.world} stages need at least one block each, the model has {num_blocks}; start "
            f"at most "
            f"{num_blocks} ranks, with as many stages"
        )
    if not is_pipeline and full.grad_accum_steps % shares:
        yield (
            f"grad_accum_steps: {full.grad_accum_steps} micro-batches of a step must be a multiple of the number of "
            f"ranks; set grad_accumulation's grad_accum_steps to a multiple of {shares}, or "
            f"start another number of ranks"
        )
    is_whole = any(optimizer.needs_whole(role) for role in _ROLES)
    if full.zero_stage and (is_whole or any(spec.shape for role in _ROLES for spec in optimizer.state(role))):
        yield (
            f"optimizer.kind: '{optimizer.kind}' works on whole matrices, whose state zero shards; allowed: "
            f"element-wise optimizers (adamw, lion), or drop zero"
        )
    if full.history_tensors:
        yield (f"history_tensors: {full.history_tensors}; predictor_state works on one rank only; drop it")
    for phase in Phase:
        other = plan.for_phase(phase)
        if weight_storage(other) != weight_storage(full) or other.optim_state != full.optim_state:
            yield (
                f"active_phases: weights or optimizer state are stored differently in {phase} than in full; with "
                f"several ranks storage must be the same in every phase: drop active_phases"
            )
            return
