"""Low-rank adapters beside frozen matrices: LoRA (2106.09685), rank-stabilised (2312.03732), DoRA (2402.09353).

R rank, D and F the matrix' input and output features. Arithmetic and its order are those of PEFT's LoraLayer.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.models.block_model import BlockModel, BlockScope
from hybridtrain.models.linear import Linear, dropout, outputless_linear
from hybridtrain.models.widening import widened
from hybridtrain.plan.memory_plan import PhasePlan

GROUPS = {
    "attention": ("query", "key", "value", "qkv", "attention_out"),
    "mlp": ("ffn_gate", "ffn_up", "ffn_gate_up", "ffn_out"),
}
"""Names that stand for several matrices; ``all-linear`` means all."""
_PART = ".adapter."


class Adapter(nn.Module):
    """The trained low-rank matrices beside a frozen ``Linear``."""

    def __init__(
        self, linear: Linear, *, rank: int, scale: float, probability: float, learns_magnitude: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        out_features, in_features = linear.weight.shape
        self.scale = scale
        self.probability = probability
        self.lora_a = nn.Parameter(torch.empty(rank, in_features, dtype=dtype))
        self.lora_b = nn.Parameter(torch.empty(out_features, rank, dtype=dtype))
        self.magnitude = nn.Parameter(torch.empty(out_features, dtype=dtype)) if learns_magnitude else None

    def forward(self, x: Tensor, linear: Linear, *, computes_output: bool = True) -> Tensor:
        """Return (..., F): the output of matrix plus adapter for x."""
        dropped = dropout(x, self.probability, training=self.training)
        low = functional.linear(dropped, self.lora_a)
        if self.magnitude is None:
            base = linear.multiply(x, computes_output=computes_output)
            added = outputless_linear(low, self.lora_b, None, computes_output=computes_output)
            return base + added * self.scale
        with widened(linear.weight) as weight_FD:
            base = functional.linear(x, weight_FD, linear.bias)
            share_F = self.magnitude / self.row_norms(weight_FD)
            plain = functional.linear(dropped, weight_FD)
        adapted: Tensor = base + (share_F - 1) * plain + share_F * functional.linear(low, self.lora_b) * self.scale
        return adapted

    def row_norms(self, weight_FD: Tensor) -> Tensor:
        """Return the row norms of the adapted matrix, (F,), without gradient (section 4.3 of 2402.09353)."""
        with torch.no_grad():
            adapted_FD = torch.addmm(weight_FD, self.lora_b, self.lora_a, alpha=self.scale)
            norms_F: Tensor = torch.linalg.vector_norm(adapted_FD, dim=1)
            return norms_F

    def merged(self, weight_FD: Tensor) -> Tensor:
        """Return matrix and adapter merged into one matrix, (F, D)."""
        sum_FD = torch.addmm(weight_FD, self.lora_b.to(weight_FD), self.lora_a.to(weight_FD), alpha=self.scale)
        if self.magnitude is None:
            return sum_FD
        share_F: Tensor = self.magnitude.to(weight_FD) / torch.linalg.vector_norm(sum_FD, dim=1)
        return share_F[:, None] * sum_FD


def attach_adapters(model: BlockModel, plan: PhasePlan, dtype: torch.dtype, block_scope: BlockScope) -> None:
    """Freeze a model and attach uninitialised adapters to the plan's target matrices, on the default device.

    A block's are made within ``block_scope``. Raises ``ConfigError``: a target is not a matrix of the model's blocks.
    """
    matrices = {name: child for name, child in model.blocks[0].named_children() if isinstance(child, Linear)}
    chosen = _chosen(plan.adapter_targets.split(","), list(matrices))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for number, block in enumerate(model.blocks):
        for name in chosen:
            linear = block.get_submodule(name)
            assert isinstance(linear, Linear), "blocks with different matrices"
            with block_scope(number):
                linear.adapter = Adapter(
                    linear, rank=plan.adapter_rank, scale=plan.adapter_scale, probability=plan.adapter_dropout,
                    learns_magnitude=plan.adapter_magnitude, dtype=dtype,
                )  # fmt: skip


def _chosen(targets: list[str], names: list[str]) -> list[str]:
    """Return the targeted matrices of a block; names that only other families have may be absent."""
    groups = {"all-linear": tuple(names), **GROUPS}
    known = dict.fromkeys([*groups, *names, *(name for group in GROUPS.values() for name in group)])
    faults = [f"targets: {unknown_name('matrix', target, known)}" for target in targets if target not in known]
    wanted = [name for target in targets for name in groups.get(target, (target,))]
    chosen = [name for name in names if name in wanted]
    if not faults and not chosen:
        faults = [f"targets: {', '.join(targets)} are not in this model; its matrices are {', '.join(names)}"]
    if faults:
        raise ConfigError("lora", faults)
    return chosen


def adapter_coverage(model: BlockModel) -> tuple[list[str], list[str]]:
    """Return the linear layers of a block with adapters, and those without, router and experts included."""
    block = model.blocks[0]
    linears = {name: child.adapter is not None for name, child in block.named_children() if isinstance(child, Linear)}
    others = [name for name, has_adapter in linears.items() if not has_adapter]
    experts = [name for name, parameter in block.named_parameters(recurse=False) if parameter.dim() > 1]
    return [name for name in linears if name not in others], [*others, *experts]


def without_adapters(block: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of a block's parameters without adapters."""
    return ((name, parameter) for name, parameter in block.named_parameters() if not is_adapter(name))


def is_adapter(name: str) -> bool:
    """Return whether a qualified parameter name is an adapter's."""
    return _PART in name


def fill_adapter(name: str, values: Tensor, generator: torch.Generator | None) -> None:
    """Fill lora_a and lora_b in place: uniform in +-1/sqrt(D), and 0, as PEFT does."""
    if name.endswith("lora_b"):
        values.zero_()
    else:
        bound = 1 / math.sqrt(values.shape[1])
        values.uniform_(-bound, bound, generator=generator)
