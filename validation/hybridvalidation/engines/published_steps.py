# mypy: disable-error-code="no-untyped-call"
"""Short training scripts whose authors printed their peak of memory: models and loops rewritten here, a function each.

B batch, T sequence, D width, H heads. A run is described by its script (``step``) and what its row changes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu
from hybridvalidation.engines.torchvision_ops import declare_torchvision_ops

_Settings = Mapping[str, Any]


def plan(common: _Settings, config: _Settings, card: str) -> dict[str, float]:
    """Return the largest allocated and reserved bytes since the script reset them, and whether the card was full."""
    settings = {**common, **config}
    step = _STEPS[settings["step"]]
    gpu, peaks = VirtualGpu(find_card(card), world=2 if step is _zero_recipe else 1), dict[str, float]()
    with suppress(torch.OutOfMemoryError), gpu:
        step(settings)
        peaks = {
            "allocated_max": torch.cuda.max_memory_allocated(), "reserved_max": torch.cuda.max_memory_reserved(),
        }  # fmt: skip
    return peaks | {"oom": float(gpu.oom is not None)}


# --- transformers, eager and fused attention --------------------------------------------------------------------------

_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "opt-350m": ("OPTConfig", "OPTForCausalLM", {
        "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "word_embed_proj_dim": 512, "do_layer_norm_before": False,
    }),
    "pythia-410m": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {
        "vocab_size": 50304, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16,
    }),
    "gpt2-large": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "bert-base": ("BertConfig", "BertLMHeadModel", {}),
    "albert-base": ("AlbertConfig", "AlbertForMaskedLM", {
        "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }),
    "distilbert-base": ("DistilBertConfig", "DistilBertForMaskedLM", {}),
    "biogpt": ("BioGptConfig", "BioGptForCausalLM", {}),
}  # fmt: skip
_WITHOUT_MASK = {"albert-base", "distilbert-base", "biogpt"}


def _attention_table(settings: _Settings) -> None:
    library, name = import_module("transformers"), settings["model"]
    config, model, changed = _MODELS[name]
    made = getattr(library, model)._from_config(
        getattr(library, config)(**changed), attn_implementation=settings["attention"]
    )
    made.to("cuda", torch.float16).train()  # the argument's name differs by version
    size = (settings["batch"], settings["length"])
    inputs = {"input_ids": torch.randint(made.config.vocab_size - 1, size, device="cuda")}
    if name not in _WITHOUT_MASK:
        inputs["attention_mask"] = torch.ones(size, dtype=torch.int64, device="cuda")
    for step in range(4):
        if step == 2:
            _reset()
        made.zero_grad()
        outputs = made(**inputs)
        loss = outputs.logits.sum()
        loss.backward()


def _reset() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


# --- notebooks on checkpointing ---------------------------------------------------------------------------------------


class _CheckpointedResnet(nn.Module):
    """torchvision's ResNet-50 of which single blocks, or whole stages, are computed twice."""

    def __init__(self, classes: int, kind: str) -> None:
        super().__init__()
        declare_torchvision_ops()
        made = import_module("torchvision").models.resnet50(weights=None)
        self.stem = nn.Sequential(made.conv1, made.bn1, made.relu, made.maxpool)
        self.stages = nn.ModuleList([made.layer1, made.layer2, made.layer3, made.layer4])
        self.pool, self.fc, self.kind = made.avgpool, nn.Linear(2048, classes), kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, stage in enumerate(self.stages):
            is_by_block = self.kind == "per_block" or (self.kind == "aggressive" and number >= 2)
            parts: Sequence[nn.Module] = list(stage) if is_by_block else [stage]  # type: ignore[call-overload]
            for part in parts:
                x = checkpoint(part, x, use_reentrant=False) if is_by_block or self.kind == "per_stage" else part(x)
        return self.fc(self.pool(x).flatten(1))  # type: ignore[no-any-return]


def _resnet50(settings: _Settings) -> None:
    classes, batch, with_amp = settings.get("classes", 1000), settings["batch"], settings.get("amp", False)
    model = _CheckpointedResnet(classes, settings["checkpoint"]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if with_amp else None
    scaler = torch.amp.GradScaler("cuda", enabled=with_amp)
    images, labels = torch.randn(batch, 3, 224, 224, device="cuda"), torch.zeros(batch, dtype=torch.int64).cuda()
    for step in range(1 if settings.get("fresh") else 4):
        if step == 2:
            _reset()
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16, enabled=with_amp):
            out = model(images)
            loss = functional.cross_entropy(out, labels)
        scaler.scale(loss).backward()
        if optimizer is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            model.zero_grad(set_to_none=True)


class _NormBlock(nn.Module):
    """A pre-norm block; ``kind``: what of it is computed twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(512), nn.LayerNorm(512)
        self.attention = nn.MultiheadAttention(512, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            normed = self.norm1(x)
            return self.attention(normed, normed, normed)[0]  # type: ignore[no-any-return]

        def feed(x: Tensor) -> Tensor:
            return self.mlp(self.norm2(x))  # type: ignore[no-any-return]

        x = x + (checkpoint(attend, x, use_reentrant=False) if self.kind in {"both", "attention"} else attend(x))
        return x + (checkpoint(feed, x, use_reentrant=False) if self.kind in {"both", "mlp"} else feed(x))


def _checkpointed_transformer(settings: _Settings) -> None:
    kinds = ("none", "both", "mlp", "attention")
    models = [
        nn.Sequential(*(_NormBlock(kind if number else "none") for number in range(12))).to("cuda", torch.bfloat16)
        for kind in kinds
    ]
    x = torch.randn(1, 4096, 512, device="cuda", dtype=torch.bfloat16)
    for model in models[: settings["order"] + 1]:
        _reset()
        _train_on_mean(model, x)


def _train_on_mean(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()


# --- attention by single ops ------------------------------------------------------------------------------------------


def _attention_by_ops(settings: _Settings) -> None:
    length, width = settings["length"], settings["width"]
    q, k, v = (torch.randn(8, length, width, device="cuda", requires_grad=True) for _ in range(3))

    def attend() -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) / width**0.5
        return torch.matmul(functional.softmax(scores, dim=-1), v)

    for _ in range(2):
        attend().sum().backward()
        q.grad = k.grad = v.grad = None
    torch.cuda.reset_peak_memory_stats()
    out = attend()
    out = attend()  # the first graph lives until this one is there
    out = attend()
    loss = out.sum()
    for _ in range(3):
        loss.backward(retain_graph=True)


# --- GPT-2 step by step -----------------------------------------------------------------------------------------------


class _OwnNorm(nn.Module):
    """Layer normalization by single ops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        normed = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
        return self.scale * normed + self.shift


class _OwnGelu(nn.Module):
    """GELU by single ops."""

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


class _GptBlock(nn.Module):
    """Attention and MLP of width 768, with 12 heads."""

    def __init__(self, mask: str, *, by_library: bool) -> None:
        super().__init__()
        norm, gelu = (nn.LayerNorm, nn.GELU(approximate="tanh")) if by_library else (_OwnNorm, _OwnGelu())
        self.mask_kind = mask
        if mask == "none":
            self.qkv = nn.Linear(768, 3 * 768, bias=False)
        else:
            self.query, self.key, self.value = (nn.Linear(768, 768, bias=False) for _ in range(3))
        self.out = nn.Linear(768, 768)
        if mask == "kept":
            self.register_buffer("mask", torch.triu(torch.ones(1024, 1024), diagonal=1))
        self.layers = nn.Sequential(nn.Linear(768, 4 * 768), gelu, nn.Linear(4 * 768, 768))
        self.norm1, self.norm2 = norm(768), norm(768)
        self.dropout, self.shortcut = nn.Dropout(0.1), nn.Dropout(0.1)

    def _attend(self, x_BTD: Tensor) -> Tensor:
        batch, length, width = x_BTD.shape
        if self.mask_kind == "none":
            q, k, v = self.qkv(x_BTD).view(batch, length, 3, 12, 64).permute(2, 0, 3, 1, 4)
            found = functional.scaled_dot_product_attention(
                q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True
            )
            return self.out(found.transpose(1, 2).contiguous().view(batch, length, width))  # type: ignore[no-any-return]
        k, q, v = (
            each(x_BTD).view(batch, length, 12, 64).transpose(1, 2) for each in (self.key, self.query, self.value)
        )
        scores = q @ k.transpose(2, 3)
        if self.mask_kind == "kept":
            mask = self.mask.bool()[:length, :length]  # type: ignore[operator]
        else:
            mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x_BTD.device), diagonal=1)
        scores.masked_fill_(mask, -torch.inf)
        weights = self.dropout(torch.softmax(scores / 64**0.5, dim=-1))
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = self.shortcut(self._attend(self.norm1(x))) + x
        return self.shortcut(self.layers(self.norm2(x))) + x  # type: ignore[no-any-return]


class _Gpt(nn.Module):
    def __init__(self, vocabulary: int, mask: str, *, by_library: bool) -> None:
        super().__init__()
        self.tokens, self.places, self.drop = nn.Embedding(vocabulary, 768), nn.Embedding(1024, 768), nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(_GptBlock(mask, by_library=by_library) for _ in range(12)))
        self.norm = nn.LayerNorm(768) if by_library else _OwnNorm(768)
        self.head = nn.Linear(768, vocabulary, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        places = self.places(torch.arange(ids_BT.shape[1], device=ids_BT.device))
        return self.head(self.norm(self.blocks(self.drop(self.tokens(ids_BT) + places))))  # type: ignore[no-any-return]


def _gpt2_speed(settings: _Settings) -> None:
    vocabulary, batch = settings.get("vocabulary", 50257), settings.get("batch", 8)
    model: Any = _Gpt(vocabulary, settings.get("mask", "kept"), by_library=settings.get("layers") == "torch")
    if settings.get("compile"):
        model = torch.compile(model)
    model.to("cuda").to(getattr(torch, settings.get("dtype", "float32")))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=5e-4, weight_decay=0.1, fused=True if settings.get("fused") else None
    )

    def loss_of() -> Tensor:
        ids, targets = (torch.zeros(batch, 1024, dtype=torch.int64).to("cuda") for _ in range(2))
        return functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())

    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        if step == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(2):
                    loss_of().item()
            model.train()
    model.eval()
    ids = torch.zeros(1, 4, dtype=torch.int64).to("cuda")
    for _ in range(50):
        with torch.no_grad():
            logits = model(ids)
        ids = torch.cat((ids, torch.argmax(logits[:, -1, :], dim=-1, keepdim=True)), dim=1)


# --- a vision transformer step by step --------------------------------------------------------------------------------


def _vit_savings(settings: _Settings) -> None:
    declare_torchvision_ops()
    precision, batch = settings.get("precision", "float32"), settings.get("batch", 64)
    accumulate, is_mixed = settings.get("accumulate", 1), precision == "float16"
    model = import_module("torchvision").models.vit_l_16(weights=None)
    model.heads.head = nn.Linear(1024, 10)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model.to("cuda").to(dtype)
    kind = torch.optim.SGD if settings.get("optimizer") == "sgd" else torch.optim.Adam
    optimizer, scaler = kind(model.parameters(), lr=5e-5), torch.amp.GradScaler("cuda", enabled=is_mixed)

    def loss_of() -> Tensor:
        images = torch.randn(batch, 3, 224, 224, dtype=dtype, device="cpu").to("cuda")
        labels = torch.zeros(batch, dtype=torch.int64).to("cuda")
        with torch.autocast("cuda", dtype=torch.float16) if is_mixed else nullcontext():
            return functional.cross_entropy(model(images), labels)

    for number in range(3 * accumulate):
        model.train()
        loss = loss_of() / accumulate
        if accumulate == 1:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        if (number + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            if accumulate > 1:
                optimizer.zero_grad()
        if number == accumulate - 1:
            with torch.no_grad():
                model.eval()
                loss_of()


# --- ZeroRedundancyOptimizer ------------------------------------------------------------------------------------------


def _zero_recipe(settings: _Settings) -> None:
    dist.init_process_group("nccl")
    _zero_step(settings["until"], is_sharded=settings.get("zero", False))
    dist.destroy_process_group()


def _zero_step(until: str, *, is_sharded: bool) -> None:
    model = nn.Sequential(*(nn.Linear(2000, 2000).cuda() for _ in range(20)))
    if until == "model":
        return
    called = DistributedDataParallel(model, device_ids=[0])
    if until == "ddp":
        return
    optimizer: Any = torch.optim.Adam(called.parameters(), lr=0.01, foreach=False)
    if is_sharded:
        optimizer = ZeroRedundancyOptimizer(called.parameters(), torch.optim.Adam, lr=0.01, foreach=False)
    outputs = called(torch.randn(20, 2000).cuda())
    functional.mse_loss(outputs, torch.randn(20, 2000).cuda()).backward()
    if until == "step":
        optimizer.step()


# --- timm's benchmark -------------------------------------------------------------------------------------------------


def _timm_batch(settings: _Settings) -> None:
    declare_torchvision_ops()
    torch.backends.cudnn.benchmark = True
    model, batch = import_module("timm").create_model(settings["model"], pretrained=False).cuda(), settings["batch"]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, foreach=False)
    images, labels = torch.randn(batch, 3, 224, 224, device="cuda"), torch.zeros(batch, dtype=torch.int64).cuda()
    model.train()
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", dtype=torch.float16):
            functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


_STEPS: dict[str, Callable[[_Settings], None]] = {
    "attention_table": _attention_table, "resnet50": _resnet50, "checkpointed_transformer": _checkpointed_transformer,
    "attention_by_ops": _attention_by_ops, "gpt2_speed": _gpt2_speed, "vit_savings": _vit_savings,
    "zero_recipe": _zero_recipe, "timm_batch": _timm_batch,
}  # fmt: skip
