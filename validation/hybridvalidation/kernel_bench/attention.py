"""Cases of causal attention: ours, torch's three fused kernels, and plain products that keep the scores.

B batch, T sequence, N query heads, K key/value heads, H head dim, G = N / K query heads of a group.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hybridkernels.flash_attention import causal_attention, unfused_attention
from hybridkernels.flash_attention.reference import causal_attention_reference
from hybridvalidation.kernel_bench.case import (
    Inputs,
    KernelCase,
    Maker,
    Mode,
    ModelBatch,
    Provider,
    Setup,
    model_batches,
    needs_card,
    own_providers,
    trained,
    widened,
)

OP = "causal_attention"
_DTYPE = torch.bfloat16
_SDPA = {
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention_cases(device: torch.device, modes: Sequence[Mode], *, quick: bool) -> Iterator[KernelCase]:
    """Yield the cases of causal attention."""
    for workload in model_batches(device, quick=quick):
        for mode in modes:
            yield _case(workload, mode, device)


def _case(workload: ModelBatch, mode: Mode, device: torch.device) -> KernelCase:
    config = workload.config
    tokens, head_dim = workload.num_tokens, config.head_dim
    q_bytes, kv_bytes = (
        tokens * heads * head_dim * _DTYPE.itemsize for heads in (config.num_heads, config.num_kv_heads)
    )
    # forward: q, k, v in, out out; backward: those, out and its gradient in, three gradients out
    forward_bytes, backward_bytes = 2 * q_bytes + 2 * kv_bytes, 4 * q_bytes + 4 * kv_bytes
    forward_flops = 2 * tokens * workload.seq_len * config.num_heads * head_dim  # two products, lower triangle
    share = {Mode.FORWARD: (1, 0), Mode.BACKWARD: (0, 1), Mode.BOTH: (1, 1)}[mode]
    key = f"{OP}/head{head_dim}"

    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(where, _DTYPE)
        q, k, v = (
            maker.normal(workload.batch, workload.seq_len, heads, head_dim)
            for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        )
        return Inputs((q, k, v), maker.normal(*q.shape, grad=False))

    # In fp32 the definition is exact enough for 16 bits, and takes seconds on cards that are slow in fp64.
    wide = torch.float64 if device.type == "cpu" else torch.float32
    return KernelCase(
        op=OP, key=key, shape=workload.name, dtype="bfloat16", mode=mode,
        num_bytes=share[0] * forward_bytes + share[1] * backward_bytes,
        flops=forward_flops * (2 * share[0] + 5 * share[1]) // 2, uses_tensor_cores=True, make_inputs=make_inputs,
        exact=widened(trained(_in_pieces, mode), wide), same_dtype=trained(_in_pieces, mode),
        providers=_providers(key, mode, device),
    )  # fmt: skip


def _providers(key: str, mode: Mode, device: torch.device) -> tuple[Provider, ...]:
    ours = own_providers(key, "flash_attention", trained(causal_attention, mode), device, others=("sdpa_flash",))
    torchs = tuple(
        Provider(name=name, setup=_with_backend(backend, mode), missing=needs_card(device))
        for name, backend in _SDPA.items()
    )
    return (*ours, *torchs, Provider(name="unfused", setup=trained(unfused_attention, mode)))


def _with_backend(backend: SDPBackend, mode: Mode) -> Setup:
    def attend(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q_BTNH, k_BTKH, v_BTKH))
        group = q.shape[1] // k.shape[1]
        if backend is SDPBackend.EFFICIENT_ATTENTION and group > 1:  # it knows no groups
            k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)
        return out.transpose(1, 2)

    return trained(attend, mode)


def _in_pieces(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    """Return the definition, one sequence and one key/value head at a time: only one piece's scores exist."""
    batch, _, num_heads, _ = q_BTNH.shape
    num_kv_heads = k_BTKH.shape[2]
    group = num_heads // num_kv_heads
    rows = []
    for row in range(batch):
        pieces = []
        for head in range(num_kv_heads):
            q = q_BTNH[row : row + 1, :, head * group : (head + 1) * group]
            k, v = (tensor[row : row + 1, :, head : head + 1] for tensor in (k_BTKH, v_BTKH))
            pieces.append(checkpoint(causal_attention_reference, q, k, v, use_reentrant=False))
        rows.append(torch.cat(pieces, 2))
    return torch.cat(rows, 0)
