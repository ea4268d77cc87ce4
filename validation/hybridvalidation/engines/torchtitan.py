# mypy: disable-error-code="no-untyped-call"
"""torchtitan's pre-training of Llama 3 under FSDP2, as of December 2024: model and loop rewritten here.

As in the commit that its benchmark names, every second matrix product and all attention are kept (selective
checkpointing by op). Norms are written out in fp32, rotary positions are complex, the loss is of fp32 logits.
Parameters are fp32 shards, gathered in bfloat16 and reduced in fp32; the last block stays gathered.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.cards.card import Card, find_card
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu

_ATEN = torch.ops.aten
_SAVED = frozenset(
    {
        _ATEN.mm.default, _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_flash_attention.default, _ATEN.abs.default, _ATEN.max.default,
    }
)  # fmt: skip


def plan(common: Mapping[str, Any], config: Mapping[str, Any], card: str) -> dict[str, float]:
    """Return the largest reserved bytes of a rank, which the trainer logs as its memory."""
    settings = {**common, **config}
    allocator = AllocatorConfig(expandable_segments=settings["expandable_segments"])
    gpu = VirtualGpu(_card(find_card(card), settings), world=settings["world"], allocator=allocator)
    with suppress(torch.OutOfMemoryError), gpu:
        dist.init_process_group("nccl")
        _train(settings)
        largest = torch.cuda.max_memory_reserved()
        dist.destroy_process_group()
    found = {"reserved_max": float(largest if gpu.oom is None else gpu.ledger.allocator.peak_reserved_bytes)}
    return found | {"oom": float(gpu.oom is not None)}


def _card(card: Card, settings: Mapping[str, Any]) -> Card:
    """Return the card with the memory that the source says it has."""
    return Card(**{**{name: getattr(card, name) for name in Card.__dataclass_fields__}, **settings["card"]})


def _train(settings: Mapping[str, Any]) -> None:
    mesh = init_device_mesh("cuda", (settings["world"],), mesh_dim_names=("dp_shard_cp",))
    with torch.device("meta"):
        model = Transformer(**settings["model"])
    model = _sharded(model, mesh, compiles=settings.get("compile", False))
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    shape = settings["batch_size"], settings["model"]["max_seq_len"]
    torch.cuda.reset_peak_memory_stats()
    losses: list[Tensor] = []
    loss_of: Any = torch.compile(_loss) if settings.get("compile_loss") else _loss
    for _ in range(settings["steps"]):
        ids, labels = (torch.zeros(shape, dtype=torch.int64).to("cuda") for _ in range(2))
        optimizer.zero_grad()
        pred = model(ids)
        loss = loss_of(pred, labels)
        del pred
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        norm.full_tensor()
        optimizer.step()
        losses.append(loss)


def _loss(pred: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1))


def _sharded(model: "Transformer", mesh: Any, *, compiles: bool) -> "Transformer":
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    last = len(model.layers) - 1
    for name, block in model.layers.named_children():
        wrapped: Any = checkpoint_wrapper(block, context_fn=_selective, preserve_rng_state=False)
        compiled: Any = torch.compile(wrapped, fullgraph=True) if compiles else wrapped
        model.layers.register_module(name, compiled)
    for name, block in model.layers.items():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=int(name) < last)
    # It asked for resharding here too, which torch of that time never did for the root module (_fsdp_state.py).
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def _selective() -> Any:
    """Return contexts that keep every other matrix product, and attention."""
    products: Counter[bool] = Counter()

    def choose(context: Any, func: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_product = func == _ATEN.mm.default
        products[context.is_recompute] += is_product
        is_saved = func in _SAVED and not (is_product and products[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


class RMSNorm(nn.Module):
    """A norm of single ops, in fp32."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x over its root mean square."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class Attention(nn.Module):
    """Attention with grouped heads, which are repeated."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.repeats = heads // kv_heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Attend; x is [batch, tokens, width]."""
        rows = x.shape[:2]
        q, k, v = (part(x) for part in (self.wq, self.wk, self.wv))
        q, k, v = (part.view(*rows, -1, self.head_width) for part in (q, k, v))
        q, k = _rotated(q, k, angles)
        keys, values = (_repeated(part, self.repeats) for part in (k, v))
        q = q.transpose(1, 2)
        k = keys.transpose(1, 2)
        v = values.transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).contiguous()
        return self.wo(out.view(*rows, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """The gated product of three matrices."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's addition to x."""
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, kv_heads)
        self.feed_forward = FeedForward(width, hidden)
        self.attention_norm = RMSNorm(width)
        self.ffn_norm = RMSNorm(width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Return the layer's output."""
        h = x + self.attention(self.attention_norm(x), angles)
        out: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class Transformer(nn.Module):
    """Llama 3."""

    def __init__(
        self, *, width: int, layers: int, heads: int, kv_heads: int, hidden: int, vocab_size: int, max_seq_len: int
    ) -> None:
        super().__init__()
        self.shape = max_seq_len, width // heads
        self.tok_embeddings = nn.Embedding(vocab_size, width)
        self.angles: Tensor
        self.register_buffer("angles", self._angles())
        self.layers = nn.ModuleDict({str(n): Block(width, heads, kv_heads, hidden) for n in range(layers)})
        self.norm = RMSNorm(width)
        self.output = nn.Linear(width, vocab_size, bias=False)

    def init_weights(self) -> None:
        """Draw weights on the card; angles are recomputed there."""
        with torch.device(self.angles.device):
            self.angles = self._angles()
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        h = self.tok_embeddings(tokens)
        for block in self.layers.values():
            h = block(h, self.angles)
        h = self.norm(h)
        return self.output(h)  # type: ignore[no-any-return]

    def _angles(self) -> Tensor:
        tokens, head_width = self.shape
        steps = 1.0 / (500000.0 ** (torch.arange(0, head_width, 2)[: head_width // 2].float() / head_width))
        positions = torch.arange(tokens, device=steps.device)
        table = torch.outer(positions, steps).float()
        return torch.polar(torch.ones_like(table), table)


def _rotated(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    wide_q, wide_k = (torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) for x in (q, k))
    factors = angles[: wide_q.shape[1]].view(1, wide_q.shape[1], 1, -1)
    q_out = torch.view_as_real(wide_q * factors).flatten(3)
    k_out = torch.view_as_real(wide_k * factors).flatten(3)
    return q_out.type_as(q), k_out.type_as(k)


def _repeated(x: Tensor, times: int) -> Tensor:
    batch, tokens, heads, width = x.shape
    wide = x[:, :, :, None].expand(batch, tokens, heads, times, width)
    return x if times == 1 else wide.reshape(batch, tokens, heads * times, width)
