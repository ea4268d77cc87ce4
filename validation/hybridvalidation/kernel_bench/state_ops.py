"""Cases of the ops on a run's state: 8-bit codes, AdamW with such moments, and the small ops between steps.

The small ones are features of a training state, sums over moments and an imagined path; they are timed by the wall
clock, launches included, and beside the reference on the processor, which is what they replace. All ops have a forward
pass only. Those that work in place give each provider a copy of what it overwrites.
P values, G = ceil(P / 256) groups; N states, E members, B rows, S ticks, H hidden units, Z = K * C classes, A actions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE, adamw_int8_, adamw_int8_rounded_
from hybridkernels.adamw_int8.op import Moments as OfMoments
from hybridkernels.adamw_int8.op import Settings
from hybridkernels.adamw_int8.reference import adamw_int8_reference
from hybridkernels.int8_quantize import int8_dequantize, int8_quantize, num_groups
from hybridkernels.int8_quantize.reference import int8_dequantize_reference, int8_quantize_reference
from hybridkernels.rssm_gru import rssm_rollout, unimix
from hybridkernels.rssm_gru.op import LAYERS, WEIGHTS
from hybridkernels.state_encoding import (
    GRAD_NORM_STEPS,
    LOSS_STEPS,
    NUM_FEATURES,
    NUM_MOMENT_STATISTICS,
    NUM_PHASES,
    NUM_SCALARS,
    Moments,
    encode_state,
    moment_statistics,
)
from hybridtrain.hybrid.forecast import rssm_cell
from hybridtrain.hybrid.forecast.rssm import NUM_MEMBERS
from hybridtrain.hybrid.forecast.ticks import NUM_ACTIONS
from hybridtrain.models.model_config import block_params
from hybridvalidation.kernel_bench.case import (
    Clock,
    Inputs,
    KernelCase,
    Maker,
    Mode,
    ModelBatch,
    Provider,
    Run,
    Setup,
    Tensors,
    forced,
    model_batches,
    needs_package,
    own_providers,
    widened,
    writing,
)

_LR, _BETAS, _EPS, _DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
_CHECKED_STEPS = 3
"""The first step does not read what the 8-bit moments hold."""
_SLICE_GROUPS = 2**16
"""That the reference takes at a time: it makes a dozen float32 tensors of them."""
_NUM_STATES = (1, 512)
"""One state, as between two steps; a replay of them."""
_ROWS, _TICKS = 8, 16
"""A forecast's samples and the ticks of its horizon of 400 steps."""


def state_cases(device: torch.device, modes: Sequence[Mode], *, quick: bool) -> Iterator[KernelCase]:
    """Yield the cases of these ops; all modes but ``backward`` mean the forward pass."""
    if not {Mode.FORWARD, Mode.BOTH} & set(modes):
        return
    for workload in model_batches(device, quick=quick):
        if device.type == "cuda" and workload.model == "gpt2-small":
            continue  # its blocks are too small to say more than the others
        block = _block(workload, device)
        yield _adamw_case(*block, device)
        yield _rounded_case(*block, device)
        yield _quantize_case(*block, device)
        yield _dequantize_case(*block, device)
    yield _rollout_case(device)
    for num_states in _NUM_STATES[: 1 if quick else None]:
        yield _encode_case(num_states, device)
    yield _moments_case(*_block(model_batches(device)[0], device), device)


def _block(workload: ModelBatch, device: torch.device) -> tuple[str, int]:
    """Return name and count of the parameters of a block; of a matrix of it where there is no card."""
    if device.type == "cuda":
        return f"{workload.model} block", block_params(workload.config)
    return f"{workload.model} width x width", workload.config.width**2


def _codes_case(op: str, shape: str, numel: int, **others: Any) -> KernelCase:
    """Return a case of 2-byte values and 1-byte codes, one of them read and one written."""
    return KernelCase(
        op=op, key=op, shape=shape, dtype="bfloat16", mode=Mode.FORWARD, num_bytes=3 * numel + 4 * num_groups(numel),
        **others,
    )  # fmt: skip


def _quantize_case(shape: str, numel: int, device: torch.device) -> KernelCase:
    def setup(inputs: Inputs) -> Run:
        (values_P,) = inputs.args
        codes_P = torch.empty(numel, dtype=torch.int8, device=values_P.device)
        scales_G = torch.empty(num_groups(numel), device=values_P.device)
        return writing(lambda: int8_quantize(values_P, codes_P, scales_G, stochastic=False), codes_P, scales_G)

    def reference(inputs: Inputs) -> Run:
        return lambda: int8_quantize_reference(inputs.args[0])

    own = own_providers("int8_quantize", setup, device)
    return _codes_case(
        "int8_quantize", shape, numel, flops=5 * numel,
        make_inputs=lambda where: Inputs((Maker(where, torch.bfloat16).normal(numel, grad=False),)),
        exact=reference, same_dtype=reference,  # every step is correctly rounded: the codes are equal
        providers=(*own, Provider(name="reference", setup=reference)),
    )  # fmt: skip


def _dequantize_case(shape: str, numel: int, device: torch.device) -> KernelCase:
    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(where, torch.float32)
        codes_P = (maker.integers(numel, below=255) - 127).to(torch.int8)
        return Inputs((codes_P, maker.uniform(num_groups(numel), low=0.001, high=0.1)))

    def setup(inputs: Inputs) -> Run:
        out_P = torch.empty(numel, dtype=torch.bfloat16, device=inputs.args[0].device)
        return writing(lambda: int8_dequantize(inputs.args[0], inputs.args[1], out_P), out_P)

    def rounded(inputs: Inputs) -> Run:
        return lambda: (int8_dequantize_reference(*inputs.args).bfloat16(),)

    own = own_providers("int8_dequantize", setup, device)
    return _codes_case(
        "int8_dequantize", shape, numel, flops=numel, make_inputs=make_inputs,
        exact=lambda inputs: lambda: (int8_dequantize_reference(*inputs.args),), same_dtype=rounded,
        providers=(*own, Provider(name="reference", setup=rounded)),
    )  # fmt: skip


def _update_case(
    op: str, shape: str, numel: int, device: torch.device, *, setup: Setup, same_dtype: Setup, dtype: torch.dtype,
    flops: int, providers: tuple[Provider, ...], choices: Sequence[str] = ("torch",),
) -> KernelCase:  # fmt: skip
    """Return a case: weight read and written, gradient read, two codes and two scales of a group read and written."""

    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(where, torch.bfloat16)
        grad_P = maker.normal(numel, scale=1e-3, grad=False)
        return Inputs((maker.normal(numel, scale=0.02, grad=False, dtype=dtype), grad_P))

    return KernelCase(
        op=op, key=op, shape=shape, dtype=str(dtype)[6:], mode=Mode.FORWARD,
        num_bytes=(2 * dtype.itemsize + 2 + 4) * numel + 4 * 4 * num_groups(numel), flops=flops * numel,
        make_inputs=make_inputs, exact=_adamw_exact, same_dtype=same_dtype, checked_calls=_CHECKED_STEPS,
        providers=(*own_providers(op, setup, device, others=choices), *providers),
    )  # fmt: skip


def _adamw_case(shape: str, numel: int, device: torch.device) -> KernelCase:
    reference = () if device.type == "cuda" else (Provider(name="reference", setup=_adamw_reference),)
    torchao = Provider(name="torchao", setup=_adamw_torchao, missing=needs_package("torchao", device))
    setup = _in_place(lambda param_P, grad_P, moments, step: adamw_int8_(param_P, grad_P, moments, **_settings(step)))
    return _update_case(
        "adamw_int8", shape, numel, device, setup=setup, same_dtype=_adamw_reference, dtype=torch.float32, flops=40,
        providers=(*reference, torchao), choices=("bitsandbytes", "torch"),
    )  # fmt: skip


def _rounded_case(shape: str, numel: int, device: torch.device) -> KernelCase:
    """Return the case of the update of bfloat16 weights that have no float32 copy."""
    op = "adamw_int8_rounded"

    def update(weight_P: Tensor, grad_P: Tensor, moments: OfMoments, step: int) -> None:
        adamw_int8_rounded_((weight_P,), grad_P, moments, seed=_seed(weight_P.device), **_settings(step))

    setup = _in_place(update)
    same_dtype = forced(op, "torch", setup) if device.type == "cuda" else setup
    return _update_case(
        op, shape, numel, device, setup=setup, same_dtype=same_dtype, dtype=torch.bfloat16, flops=60, providers=()
    )


def _settings(step: int) -> Settings:
    return Settings(lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY, step=step)


@cache
def _seed(device: torch.device) -> Tensor:
    """Return the seed by which all providers round alike."""
    return torch.full((1,), 20, dtype=torch.int64, device=device)


def _moments(like_P: Tensor) -> OfMoments:
    """Return codes and scales of two moments that are zero."""
    groups, device = num_groups(like_P.numel()), like_P.device
    m_codes, v_codes = (
        torch.full((groups * QUANT_GROUP_SIZE,), zero, dtype=torch.uint8, device=device) for zero in (127, 0)
    )
    return m_codes, torch.zeros(groups, device=device), v_codes, torch.zeros(groups, device=device)


def _in_place(update: Callable[[Tensor, Tensor, OfMoments, int], None]) -> Setup:
    """Return a setup that updates a copy of the weight, one step a call."""

    def setup(inputs: Inputs) -> Run:
        weight_P, grad_P, steps = inputs.args[0].clone(), inputs.args[1], count(1)
        moments = _moments(weight_P)
        return writing(lambda: update(weight_P, grad_P, moments, next(steps)), weight_P)

    return setup


def _adamw_reference(inputs: Inputs) -> Run:
    numel, groups, steps = inputs.args[0].numel(), num_groups(inputs.args[0].numel()), count(1)
    padding = (0, groups * QUANT_GROUP_SIZE - numel)
    param_GS, grad_GS = (torch.nn.functional.pad(tensor, padding).view(groups, -1) for tensor in inputs.args)
    m_codes, m_scale, v_codes, v_scale = _moments(inputs.args[0])

    def run() -> Tensors:
        step = next(steps)
        hyper = torch.tensor(
            [_LR, *_BETAS, _EPS, _DECAY, 1 - _BETAS[0] ** step, sqrt(1 - _BETAS[1] ** step), 0.0], device=m_scale.device
        )
        parts = (param_GS, grad_GS, m_codes.view(groups, -1), m_scale, v_codes.view(groups, -1), v_scale)
        for param, grad, *moments in zip(*(torch.split(part, _SLICE_GROUPS) for part in parts), strict=True):
            adamw_int8_reference(param, grad, moments, hyper)
        return (param_GS.view(-1)[:numel],)

    return run


def _adamw_exact(inputs: Inputs) -> Run:
    """Set up AdamW whose moments are not rounded at all: 8 bits may cost as much as the reference's, twice."""
    return _torch_optimizer(inputs, torch.optim.AdamW, torch.float64)


def _adamw_torchao(inputs: Inputs) -> Run:
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: PLC0415  optional

    return _torch_optimizer(inputs, AdamW8bit, torch.float32)


def _torch_optimizer(inputs: Inputs, make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> Run:
    param_P = torch.nn.Parameter(inputs.args[0].to(dtype, copy=True))
    param_P.grad = inputs.args[1].to(dtype)
    optimizer = make([param_P], lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY)
    return writing(optimizer.step, param_P.detach())


def _small_case(op: str, key: str, shape: str, setup: Setup, device: torch.device, **others: Any) -> KernelCase:
    """Return a case whose definition is the op itself on the processor, in float64, unless another is given."""
    on_processor = {"exact": _on_processor(widened(setup, torch.float64)), "same_dtype": _on_processor(setup)}
    own = own_providers(key, setup, device)
    processor = (Provider(name="cpu", setup=_on_processor(setup)),) if device.type == "cuda" else ()
    return KernelCase(
        op=op, key=key, shape=shape, dtype="float32", mode=Mode.FORWARD, clock=Clock.WALL,
        providers=(*own, *processor), **{**on_processor, **others},
    )  # fmt: skip


def _on_processor(setup: Setup) -> Setup:
    """Return a setup that copies its inputs to the processor first and works there."""
    return lambda inputs: setup(Inputs(tuple(arg.cpu() for arg in inputs.args)))


def _encode_case(num_states: int, device: torch.device) -> KernelCase:
    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(torch.device("cpu"), torch.float32)
        histories = [maker.uniform(num_states, steps, low=0.5, high=5.0) for steps in (LOSS_STEPS, GRAD_NORM_STEPS)]
        moments = maker.uniform(num_states, NUM_MOMENT_STATISTICS, low=1e-6, high=1e-3)
        scalars = maker.uniform(num_states, NUM_SCALARS, low=0.1, high=0.9)
        phases = torch.eye(NUM_PHASES)[maker.integers(num_states, below=NUM_PHASES)]
        return Inputs(tuple(tensor.to(where) for tensor in (*histories, moments, scalars, phases)))

    history = LOSS_STEPS + GRAD_NORM_STEPS
    width = history + NUM_MOMENT_STATISTICS + NUM_SCALARS + NUM_PHASES + NUM_FEATURES
    return _small_case(
        "state_encoding", "encode_state", "1 state" if num_states == 1 else f"{num_states} states",
        lambda inputs: lambda: (encode_state(*inputs.args),), device, make_inputs=make_inputs,
        num_bytes=4 * num_states * width, flops=num_states * 2 * history * NUM_FEATURES,
    )  # fmt: skip


def _moments_case(shape: str, numel: int, device: torch.device) -> KernelCase:
    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(where, torch.float32)
        m, v, slow = (maker.uniform(numel, low=0.5 * size, high=1.5 * size) for size in (1e-3, 1e-6, 1e-4))
        return Inputs((m, v, slow))  # of one sign: sums that cancel would have no digits to compare

    def setup(inputs: Inputs) -> Run:
        moments = [Moments(*inputs.args)]
        return lambda: (moment_statistics(moments),)

    def exact(inputs: Inputs) -> Run:
        """Set up the definition of the sums in float64."""
        m, v, slow = (arg.double() for arg in inputs.args)
        sums = (m.sum(), m.dot(m), v.sum(), v.dot(v), slow.dot(slow), m.dot(slow))
        ends = [torch.full_like(sums[0], value) for value in (m.numel(), 1)]
        return lambda: (torch.stack([ends[0], *sums, ends[1]]),)

    # Blocks of some thousand values are summed in fp32: a dozen roundings of 2^-24.
    return _small_case(
        "moment_statistics", "moment_statistics", shape, setup, device, make_inputs=make_inputs,
        num_bytes=3 * 4 * numel, flops=10 * numel, exact=exact, floor=1e-6, seen=lambda outputs: outputs[0].unbind(),
    )  # fmt: skip


def _rollout_case(device: torch.device) -> KernelCase:
    num_weights = sum(prod(rssm_cell.LAYERS[name]) for name in LAYERS if name != "seen")
    rows = (NUM_MEMBERS, _ROWS)

    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(torch.device("cpu"), torch.float32)
        weights: list[Tensor] = []
        for fan_in, fan_out in (rssm_cell.LAYERS[name] for name in LAYERS):
            weights.append(maker.normal(NUM_MEMBERS, fan_in, fan_out, scale=fan_in**-0.5, grad=False))
            weights.append(maker.normal(NUM_MEMBERS, 1, fan_out, scale=0.1, grad=False))
        state = (
            maker.normal(*rows, rssm_cell.HIDDEN, grad=False),
            maker.integers(*rows, rssm_cell.NUM_CATEGORICALS, below=rssm_cell.NUM_CLASSES),
            maker.normal(_TICKS, *rows, NUM_ACTIONS, grad=False),
            maker.uniform(_TICKS, *rows, rssm_cell.NUM_CATEGORICALS, low=0.0, high=1.0),
        )
        uniforms = _centred(dict(zip(WEIGHTS, weights, strict=True)), *state)
        return Inputs(tuple(tensor.to(where) for tensor in (*weights, *state[:3], uniforms)))

    def setup(inputs: Inputs) -> Run:
        weights = dict(zip(WEIGHTS, inputs.args, strict=False))
        state = inputs.args[len(WEIGHTS) :]
        return lambda: rssm_rollout(weights, *state)[:3]

    return _small_case(
        "rssm_gru", "rssm_rollout", f"forecast of {_TICKS} ticks, {NUM_MEMBERS} x {_ROWS} rows", setup, device,
        make_inputs=make_inputs, num_bytes=4 * NUM_MEMBERS * num_weights,
        flops=2 * _TICKS * NUM_MEMBERS * _ROWS * num_weights,
    )  # fmt: skip


def _centred(
    weights: Mapping[str, Tensor], hidden: Tensor, classes: Tensor, actions: Tensor, uniforms: Tensor
) -> Tensor:
    """Return random numbers that draw the same classes from the middle of each one's interval.

    A number within rounding of a border would draw another class under another order of sums, and the path after it
    would be another one: no provider would be wrong.
    """
    wide = {name: weight.double() for name, weight in weights.items()}
    hidden, centres = hidden.double(), []
    for action, uniform in zip(actions.double(), uniforms.double(), strict=True):
        found = rssm_rollout(wide, hidden, classes, action[None], uniform[None])
        hidden, classes = found.hidden_EBH, found.classes_EBK
        shares = unimix(found.logits_EBZ.view(*classes.shape, -1))
        upper = shares.cumsum(-1).gather(-1, classes[..., None])
        centres.append((upper - shares.gather(-1, classes[..., None]) / 2)[..., 0])
    return torch.stack(centres).float()
