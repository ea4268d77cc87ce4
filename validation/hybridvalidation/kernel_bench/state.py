"""Cases of the small ops between steps: features of a training state, sums over moments, an imagined path.

They are timed by the wall clock, launches included, and beside the reference on the processor, which is what they
replace. N states, E members, B rows, S ticks, H hidden units, Z = K * C classes, A actions, D widths.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from hybridkernels.rssm_gru import rssm_rollout, unimix
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
    Provider,
    Run,
    Setup,
    Tensors,
    model_batches,
    own_providers,
    widened,
)

_NUM_STATES = (1, 512)
"""One state, as between two steps; a replay of them."""
_ROWS, _TICKS = 8, 16
"""A forecast's samples and the ticks of its horizon of 400 steps."""
MakeInputs: TypeAlias = Callable[[torch.device], Inputs]
_LAYERS = ("mix", "action", "seen", "gru_input", "gru_hidden", "prior", "head_hidden", "head")
_WIDTHS = (LOSS_STEPS, GRAD_NORM_STEPS, NUM_MOMENT_STATISTICS, NUM_SCALARS, NUM_PHASES)


def state_cases(device: torch.device, modes: Sequence[Mode], *, quick: bool) -> Iterator[KernelCase]:
    """Yield the cases; the ops have a forward pass only, all modes but ``backward`` mean it."""
    if not {Mode.FORWARD, Mode.BOTH} & set(modes):
        return
    yield _rollout_case(device)
    for num_states in _NUM_STATES[: 1 if quick else None]:
        yield _encode_case(num_states, device)
    yield _moments_case(device)


def _encode_case(num_states: int, device: torch.device) -> KernelCase:
    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(torch.device("cpu"), torch.float32)
        histories = [maker.uniform(num_states, steps, low=0.5, high=5.0) for steps in (LOSS_STEPS, GRAD_NORM_STEPS)]
        moments = maker.uniform(num_states, NUM_MOMENT_STATISTICS, low=1e-6, high=1e-3)
        scalars = maker.uniform(num_states, NUM_SCALARS, low=0.1, high=0.9)
        phases = torch.eye(NUM_PHASES)[maker.integers(num_states, below=NUM_PHASES)]
        return Inputs(tuple(tensor.to(where) for tensor in (*histories, moments, scalars, phases)))

    def setup(inputs: Inputs) -> Run:
        return lambda: (encode_state(*inputs.args),)

    products = 2 * (LOSS_STEPS + GRAD_NORM_STEPS) * NUM_FEATURES
    shape = "1 state" if num_states == 1 else f"{num_states} states"
    return _case(
        "state_encoding", "encode_state", shape, setup, device, make_inputs=make_inputs,
        num_bytes=4 * num_states * (sum(_WIDTHS) + NUM_FEATURES), flops=num_states * products,
    )  # fmt: skip


def _moments_case(device: torch.device) -> KernelCase:
    workload = model_batches(device)[0]
    on_card = device.type == "cuda"
    numel = block_params(workload.config) if on_card else workload.config.width**2

    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(where, torch.float32)
        m, v, slow = (maker.uniform(numel, low=0.5 * size, high=1.5 * size) for size in (1e-3, 1e-6, 1e-4))
        return Inputs((m, v, slow))  # of one sign: sums that cancel would have no digits to compare

    def setup(inputs: Inputs) -> Run:
        moments = [Moments(*inputs.args)]
        return lambda: (moment_statistics(moments),)

    shape = f"{workload.model} block" if on_card else f"{workload.model} width x width"
    found = _case(
        "moment_statistics", "moment_statistics", shape, setup, device, make_inputs=make_inputs,
        num_bytes=3 * 4 * numel, flops=10 * numel,
    )  # fmt: skip
    # Blocks of some thousand values are summed in fp32: a dozen roundings of 2^-24.
    return replace(found, exact=_exact_sums, floor=1e-6, seen=lambda outputs: outputs[0].unbind())


def _exact_sums(inputs: Inputs) -> Run:
    """Return the definition of the sums in float64."""

    def run() -> Tensors:
        m, v, slow = (arg.double() for arg in inputs.args)
        sums = (m.sum(), m.dot(m), v.sum(), v.dot(v), slow.dot(slow), m.dot(slow))
        ends = [torch.full_like(sums[0], value) for value in (m.numel(), 1)]
        return (torch.stack([ends[0], *sums, ends[1]]),)

    return run


def _rollout_case(device: torch.device) -> KernelCase:
    num_weights = sum(prod(rssm_cell.LAYERS[name]) for name in _LAYERS if name != "seen")
    rows = (NUM_MEMBERS, _ROWS)
    names = [f"{layer}.{part}" for layer in _LAYERS for part in ("weight", "bias")]

    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(torch.device("cpu"), torch.float32)
        weights: list[Tensor] = []
        for fan_in, fan_out in (rssm_cell.LAYERS[name] for name in _LAYERS):
            weights.append(maker.normal(NUM_MEMBERS, fan_in, fan_out, scale=fan_in**-0.5, grad=False))
            weights.append(maker.normal(NUM_MEMBERS, 1, fan_out, scale=0.1, grad=False))
        state = (
            maker.normal(*rows, rssm_cell.HIDDEN, grad=False),
            maker.integers(*rows, rssm_cell.NUM_CATEGORICALS, below=rssm_cell.NUM_CLASSES),
            maker.normal(_TICKS, *rows, NUM_ACTIONS, grad=False),
            maker.uniform(_TICKS, *rows, rssm_cell.NUM_CATEGORICALS, low=0.0, high=1.0),
        )
        state = (*state[:3], _centred(dict(zip(names, weights, strict=True)), *state))
        return Inputs(tuple(tensor.to(where) for tensor in (*weights, *state)))

    def setup(inputs: Inputs) -> Run:
        weights = dict(zip(names, inputs.args[: len(names)], strict=True))
        state = inputs.args[len(names) :]

        def run() -> Tensors:
            found = rssm_rollout(weights, *state)
            return found.means_SEB, found.log_variances_SEB, found.hidden_EBH

        return run

    return _case(
        "rssm_gru", "rssm_rollout", f"forecast of {_TICKS} ticks, {NUM_MEMBERS} x {_ROWS} rows", setup, device,
        make_inputs=make_inputs, num_bytes=4 * NUM_MEMBERS * num_weights,
        flops=2 * _TICKS * NUM_MEMBERS * _ROWS * num_weights, kernel="rssm_gru",
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


def _case(
    op: str, key: str, shape: str, setup: Setup, device: torch.device, *, make_inputs: MakeInputs, num_bytes: int,
    flops: int, kernel: str = "state_encoding",
) -> KernelCase:  # fmt: skip
    """Return a case whose definition is the op itself on the processor, in float64."""
    exact = on_processor(widened(setup, torch.float64))
    same_dtype = on_processor(setup)
    processor = Provider(name="cpu", setup=same_dtype)
    own = own_providers(key, kernel, setup, device)
    return KernelCase(
        op=op, key=key, shape=shape, dtype="float32", mode=Mode.FORWARD, num_bytes=num_bytes, flops=flops,
        clock=Clock.WALL, make_inputs=make_inputs, exact=exact, same_dtype=same_dtype,
        providers=(*own, processor) if device.type == "cuda" else own,
    )  # fmt: skip


def on_processor(setup: Setup) -> Setup:
    """Return a setup that copies its inputs to the processor first and works there."""
    return lambda inputs: setup(Inputs(tuple(arg.cpu() for arg in inputs.args)))
