"""modded-nanogpt's compiled training of GPT-2, December 2024 to May 2025: model, optimizers and loop rewritten here.

T tokens of a card in one sequence, D width, H heads, V vocabulary. A run is described by what its record changed: the
number of value embeddings, layers without attention, merged projections, float8 in the head, distributed gradients;
and by its size, where it is not GPT-2 small's.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import flex_attention as attention
from torch.nn.parallel import DistributedDataParallel

from hybridtrain.virtual_gpu.account.op_rules import register_scratch
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu
from hybridvalidation.engines.rank_peaks import rank_peaks

_WORLD = 8
_STEPS = 2
_SMALL = {"layers": 12, "width": 768, "heads": 6}


def plan(common: Mapping[str, Any], config: Mapping[str, Any], card: str) -> dict[str, float]:
    """Return the largest allocated and reserved bytes of rank 0, over validation and two steps."""
    settings = {**_SMALL, **common, **config}
    allocator = AllocatorConfig(expandable_segments=settings["expandable_segments"])
    gpu = VirtualGpu(find_card(card), world=_WORLD, allocator=allocator)
    return rank_peaks(gpu, lambda: _train(settings))


def _train(settings: Mapping[str, Any]) -> None:
    model = _model(settings)
    compiled: Any = torch.compile(model, dynamic=False)
    called = _distributed(compiled) if settings["ddp"] else compiled
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.dim() >= 2]
    kept = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in kept]
    optimizers: list[Any] = [torch.optim.Adam(others, betas=(0.8, 0.95), fused=True), Muon(matrices)]
    window = torch.tensor(1, dtype=torch.int32).cuda()

    def step() -> None:
        called(*_batch(settings["tokens"]), window).backward()
        for parameter in () if settings["ddp"] else model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)

    if settings["warmup"]:
        state = deepcopy(compiled.state_dict()), [deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        step()
        step()
        compiled.load_state_dict(state[0])
        for optimizer, kept_state in zip(optimizers, state[1], strict=True):
            optimizer.load_state_dict(kept_state)
        del state
    model.eval()
    with torch.no_grad():
        loss: Any = 0.0
        for _ in range(2):
            loss += called(*_batch(settings["val_tokens"]), window)
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    model.train()
    for _ in range(_STEPS):
        step()


def _model(settings: Mapping[str, Any]) -> "GPT":
    model = GPT(settings).cuda()
    if settings["all_bf16"]:
        model.bfloat16()
    for module in model.modules():
        if settings["all_bf16"] and isinstance(module, CastedLinear):
            module.float()
        elif isinstance(module, nn.Embedding):
            module.bfloat16()
    return model


def _distributed(model: nn.Module) -> Any:
    return DistributedDataParallel(model, device_ids=[0], broadcast_buffers=False, gradient_as_bucket_view=True)


def _batch(tokens: int) -> tuple[Tensor, Tensor]:
    row = torch.zeros(tokens + 1, dtype=torch.int32)
    return row[:-1].to("cuda", torch.int32), row[1:].to("cuda", torch.int64)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized by five Newton-Schulz steps; ranks share the work and gather their updates."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        found = list(parameters)
        groups = []
        for size in {parameter.numel() for parameter in found}:
            buffer = torch.empty(_WORLD, size, dtype=torch.bfloat16, device="cuda")
            groups.append({"params": [one for one in found if one.numel() == size], "buffer": buffer})
        super().__init__(groups, {"lr": 0.05, "momentum": 0.95})
        self._orthogonal = torch.compile(orthogonal)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002  torch's signature
        """Update every parameter."""
        for group in self.param_groups:
            parameters, buffer = group["params"], group["buffer"]
            for first in range(0, len(parameters), _WORLD):
                own = parameters[first]  # rank 0's
                state = self.state[own]
                if not state:
                    state["momentum"] = torch.zeros_like(own.grad)
                average = state["momentum"].lerp_(own.grad, 1 - group["momentum"])
                update = self._orthogonal(own.grad.lerp_(average, group["momentum"]), 5).flatten()
                dist.all_gather_into_tensor(buffer, update)
                for parameter, row in zip(parameters[first : first + _WORLD], buffer, strict=False):
                    parameter.add_(row.view_as(parameter), alpha=-group["lr"])


def orthogonal(gradient: Tensor, steps: int) -> Tensor:
    """Return the nearest orthogonal matrix, about, in bfloat16."""
    x = gradient.bfloat16()
    is_tall = x.size(-2) > x.size(-1)
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square: Tensor = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    found: Tensor = x.mT if is_tall else x
    return found


def norm(x: Tensor) -> Tensor:
    """Return x over the root mean square of its rows."""
    return functional.rms_norm(x, (x.size(-1),))


class CastedLinear(nn.Linear):
    """A product with an fp32 weight, cast to the input's type."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        return functional.linear(x, self.weight.type_as(x))


class Rotary(nn.Module):
    """Rotary positions of a table of cosines and sines, which takes the model's type."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(tokens).float(), torch.arange(width // 2).float())
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, tokens, heads, width] turned."""
        cos, sin = (table[None, : x.size(1), None] for table in (self.cos, self.sin))
        left, right = (x if cos.dtype == x.dtype else x.float()).chunk(2, dim=-1)
        return torch.cat((left * cos + right * sin, left * -sin + right * cos), 3).type_as(x)


class Attention(nn.Module):
    """Attention over one long sequence, with value embeddings mixed in."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.is_merged, self.heads = settings["merged_qkv"], settings["heads"]
        width = settings["width"]
        if self.is_merged:
            self.qkv = nn.Parameter(torch.empty(3, width, width))
        else:
            self.q, self.k, self.v = (CastedLinear(width, width) for _ in range(3))
        self.mix = nn.Parameter(torch.ones(2))
        self.rotary = Rotary(width // self.heads, max(settings["tokens"], settings["val_tokens"], 65536))
        self.out = CastedLinear(width, width)

    def forward(self, x: Tensor, extra: Tensor | None) -> Tensor:
        """Return the layer's addition; x is [1, T, D]."""
        rows = x.shape[:2]
        if self.is_merged:
            joint = functional.linear(x, self.qkv.flatten(end_dim=1).type_as(x))
            q, k, v = joint.view(*rows, 3 * self.heads, -1).chunk(3, dim=-2)
        else:
            q, k, v = (part(x).view(*rows, self.heads, -1) for part in (self.q, self.k, self.v))
        v = self.mix[0] * v if extra is None else self.mix[0] * v + self.mix[1] * extra.view_as(v)
        q, k = self.rotary(norm(q)), self.rotary(norm(k))
        y: Any = attention.flex_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        joined: Tensor = self.out(y.transpose(1, 2).contiguous().view(*rows, -1))
        return joined


class Block(nn.Module):
    """One layer, with a share of the first one's input."""

    def __init__(self, settings: Mapping[str, Any], *, attends: bool) -> None:
        super().__init__()
        self.attention = Attention(settings) if attends else None
        width = settings["width"]
        self.up, self.down = CastedLinear(width, 4 * width), CastedLinear(4 * width, width)
        self.mix = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, extra: Tensor | None, first: Tensor) -> Tensor:
        """Return the layer's output."""
        x = self.mix[0] * x + self.mix[1] * first
        if self.attention is not None:
            x = x + self.attention(norm(x), extra)
        hidden: Tensor = functional.relu(self.up(norm(x))).square()
        added: Tensor = x + self.down(hidden)
        return added


class GPT(nn.Module):
    """The model: a U-net of layers, embeddings of values, a loss of capped logits."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings = dict(settings)
        count, tokens, width = settings["value_embeds"], settings["vocab_size"], settings["width"]
        self.embed = nn.Embedding(tokens, width)
        self.values = nn.ModuleList([nn.Embedding(tokens, width) for _ in range(count)])
        skipped = settings["layer_without_attention"]
        self.blocks = nn.ModuleList([Block(settings, attends=n != skipped) for n in range(settings["layers"])])
        self.head = CastedLinear(width, 50304)
        self.skips = nn.Parameter(torch.ones(settings["layers"] // 2))

    def forward(self, tokens: Tensor, targets: Tensor, _window: Tensor) -> Tensor:
        """Return the loss."""
        count, half = len(self.blocks), len(self.blocks) // 2
        extras: list[Tensor | None] = [embed(tokens) for embed in self.values]
        mirrored = extras[::-1] if len(extras) == half else extras
        extras = [*extras, *[None] * (count - 2 * len(extras)), *mirrored]
        x = first = norm(self.embed(tokens)[None])
        skipped: list[Tensor] = []
        for number, (block, extra) in enumerate(zip(self.blocks, extras, strict=True)):
            if number >= half:
                x = x + self.skips[number - half] * skipped.pop()
            x = block(x, extra, first)
            if number < half:
                skipped.append(x)
        return functional.cross_entropy(self._logits(norm(x)).view(targets.numel(), -1), targets)

    def _logits(self, x: Tensor) -> Tensor:
        if not self.settings["float8"]:
            capped: Tensor = self.settings["cap"] * torch.tanh(self.head(x) / self.settings["cap"])
            return capped.float()
        product: Tensor = float8_product(x.flatten(0, -2), self.head.weight)[0] if self.training else self.head(x)
        return 30 * torch.sigmoid(product.float() / 7.5)


@torch.library.custom_op("hybridvalidation::float8_product", mutates_args=())
def float8_product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [T, D] times weight [V, D], and both in float8."""
    return x @ weight.T.to(x.dtype), x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)


@torch.library.custom_op("hybridvalidation::float8_product_backward", mutates_args=())
def float8_product_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """Return the gradients of x, bfloat16, and weight, fp32."""
    return x.to(torch.bfloat16), weight.to(torch.float32)


def _save(ctx: Any, inputs: Sequence[Tensor], output: Sequence[Tensor]) -> None:  # noqa: ARG001  torch's signature
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = float8_product_backward(grad, *ctx.saved_tensors)
    return found


float8_product.register_fake(float8_product._init_fn)
float8_product_backward.register_fake(float8_product_backward._init_fn)
float8_product.register_autograd(_backward, setup_context=_save)
register_scratch(
    torch.ops.hybridvalidation.float8_product_backward.default,
    lambda args: 2 * args[0].numel() + args[1].numel() + args[2].numel(),
)
"""Their kernels hold in float8 the gradient and its transpose, and transposes of both operands."""
