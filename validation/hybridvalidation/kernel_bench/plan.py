"""Which cases are run, in which order: the ones that most hangs on first."""

from collections.abc import Callable, Iterable, Sequence

import torch

from hybridtrain.errors import ConfigError, unknown_name
from hybridvalidation.kernel_bench.attention import attention_cases
from hybridvalidation.kernel_bench.case import Case, Mode
from hybridvalidation.kernel_bench.elementwise import elementwise_cases
from hybridvalidation.kernel_bench.int8 import int8_cases
from hybridvalidation.kernel_bench.loss import loss_cases
from hybridvalidation.kernel_bench.state import state_cases

OPS = (
    "causal_attention", "linear_cross_entropy", "adamw_int8", "adamw_int8_rounded", "swiglu", "rssm_gru",
    "state_encoding", "moment_statistics", "int8_quantize", "int8_dequantize", "rms_norm", "layer_norm", "rotary",
)  # fmt: skip
"""By the share of a step that hangs on their speed, and by how little is known of it."""

_MAKERS: tuple[Callable[..., Iterable[Case]], ...] = (
    attention_cases, loss_cases, int8_cases, elementwise_cases, state_cases
)  # fmt: skip
_MODE_ORDER = (Mode.BOTH, Mode.FORWARD, Mode.BACKWARD)
"""Both decides the choice of a provider."""


def plan_cases(device: torch.device, *, only: Sequence[str], modes: Sequence[str], quick: bool) -> list[Case]:
    """Return the cases of a device: first one of each op, then the rest, op by op in the order of ``OPS``.

    Args:
        device: Where they will run.
        only: Ops; empty: all.
        modes: Empty: all.
        quick: One shape of each op.

    Raises:
        ConfigError: as ``require_names``.
    """
    require_names(only, modes)
    wanted = [mode for mode in _MODE_ORDER if not modes or mode in modes]
    cases = [case for make in _MAKERS for case in make(device, wanted, quick=quick) if case.op in (only or OPS)]
    by_op = [[case for case in cases if case.op == op] for op in OPS]
    return [case for found in by_op for case in found[:1]] + [case for found in by_op for case in found[1:]]


def require_names(only: Sequence[str], modes: Sequence[str]) -> None:
    """Refuse unknown ops and modes.

    Raises:
        ConfigError: an op or a mode that nobody knows; all of them are named.
    """
    faults = [unknown_name("op", name, OPS) for name in only if name not in OPS]
    faults += [unknown_name("mode", name, list(Mode)) for name in modes if name not in list(Mode)]
    if faults:
        raise ConfigError("--only, --modes", faults)
