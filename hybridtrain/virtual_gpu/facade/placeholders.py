"""Placeholders for values that were not computed: fixed rules, and a list of all uses.

    a number that is read         True, 1 or 1.0 (``loss.item()``, a norm, "are all positions attended to?")
    are they finite               yes: ``isnan`` and ``isinf`` say no, ``isfinite`` says yes
    is a drawn number rejected    no: ``torch.nn.init.trunc_normal_`` draws once
    is a variance negative        no: ``gaussian_nll_loss`` goes on
    which are the largest         position r of the k-th choice is (r * k + j) mod n: experts are loaded evenly
    is it one of these            no: no generated token is an end token, and texts get as long as they may
    does L-BFGS make progress     yes: a step takes all its iterations, with one evaluation each
    how many there are            not answered: ``DataDependentError`` names the op and the line

A rule holds only for values that depend on arithmetic; what follows from the script's own data is known.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache, wraps
from math import inf
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor
from torch.optim import lbfgs

from hybridtrain.errors import HybridTrainError
from hybridtrain.virtual_gpu.account.op_rules import Args, Kwargs, Op
from hybridtrain.virtual_gpu.facade.assumption import Assumption
from hybridtrain.virtual_gpu.facade.op_sets import FINITE_ANSWERS

_ATEN = torch.ops.aten
_QUESTIONS_OF_LBFGS = 5
"""Comparisons in an iteration, of gradients, steps and losses."""
_NOT_THE_SCRIPT = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
"""Folders of torch and of the virtual card, whose frames are not the script's."""


class DataDependentError(HybridTrainError):
    """A tensor's size depends on computed values, which a virtual GPU does not have."""


class UnplannedOpError(HybridTrainError, NotImplementedError):
    """CUDA has this op, a virtual GPU has no rule for it."""


@dataclass(frozen=True, slots=True)
class PlaceholderUse:
    """One place in the code where a placeholder value was used."""

    where: str
    """``file:line``."""
    op: str
    rule: str
    times: int


class Placeholders:
    """Provides placeholder values, and records their uses."""

    def __init__(self, note_refusal: Callable[[str], object]) -> None:
        self._note_refusal = note_refusal
        self._uses: Counter[tuple[str, str, str]] = Counter()
        self._truth = True
        self.assumed = Assumption()
        """What the user states."""

    def uses(self) -> tuple[PlaceholderUse, ...]:
        """Return all uses, the most frequent first."""
        return tuple(PlaceholderUse(*key, times) for key, times in self._uses.most_common())

    def note(self, func: Op, rule: str, times: int = 1) -> None:
        """Record uses of a placeholder value at the calling code."""
        self._uses[where_called(), str(func), rule] += times

    def number(self, func: Op, dtype: torch.dtype) -> float | bool:
        """Return the placeholder value for one number."""
        value: float | bool = self._truth if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        if self.assumed.lengths is not None and not (dtype is torch.bool or dtype.is_floating_point):
            value = self.assumed.lengths
            self.note(func, f"assumed: lengths={value}")
        else:
            self.note(func, f"a number that is read: {value}")
        return value

    def kept(self, func: Op, count: int) -> int:
        """Return how many of ``count`` elements of unknown value are kept, as the user states.

        Raises:
            DataDependentError: Nothing is stated.
        """
        found = self.assumed.kept(count)
        if found is None:
            self.refuse(func)
        self.note(func, f"assumed: keep={self.assumed.keep:g}")
        return found

    @contextmanager
    def answering(self, *, truth: bool) -> Iterator[None]:
        """Read unknown booleans as ``truth`` inside the block, for loops that run until False."""
        outer, self._truth = self._truth, truth
        try:
            yield
        finally:
            self._truth = outer

    def rule(self, func: Op, args: Args, kwargs: Kwargs) -> Any:
        """Return placeholder values for an op's results, on the CPU; None without a rule."""
        packet = func._overloadpacket
        if packet in FINITE_ANSWERS:
            return torch.full(args[0].shape, FINITE_ANSWERS[packet], device="cpu")
        if packet is _ATEN.isin and isinstance(args[0], Tensor):
            self.note(func, "is it one of these: no")
            return torch.full(args[0].shape, bool(kwargs.get("invert")), device="cpu")
        if packet is _ATEN.topk:
            return (None, self._even_choice(func, args[0], args[1], args[2] if len(args) > 2 else -1))
        return None

    def refuse(self, func: Op) -> NoReturn:
        """Raise ``DataDependentError``: a shape depends on unknown values."""
        text = (
            f"{where_called()}: {func} makes a tensor whose size depends on computed values, which a virtual GPU does "
            f"not have; sizes may depend on the script's own data (token ids, masks, lengths); state a "
            f"rule for masks (--assume keep=0.5), use another code path "
            f"(for experts: grouped or batched matmuls), or skip this line."
        )
        self._note_refusal(text)
        raise DataDependentError(text)

    def _even_choice(self, func: Op, scores: Tensor, k: int, dim: int) -> Tensor:
        dim %= scores.dim()
        shape = list(scores.shape)
        num, shape[dim] = shape[dim], k
        rows = scores.numel() // max(num, 1)
        choice = (torch.arange(rows * k, device="cpu") % max(num, 1)).view(rows, k)
        self.note(func, "which are the largest: all equally often")
        others = [size for position, size in enumerate(shape) if position != dim]
        return choice.view(*others, k).movedim(-1, dim).contiguous()


@contextmanager
def progress_of_lbfgs(placeholders: Placeholders) -> Iterator[None]:
    """Let ``torch.optim.LBFGS`` use its iterations and fill its history, whatever its loss is."""
    true_step: Callable[..., Any] = lbfgs.LBFGS.step

    @wraps(true_step)
    def step(optimizer: lbfgs.LBFGS, closure: Callable[[], Any]) -> Any:
        group = optimizer.param_groups[0]
        kept = {name: group[name] for name in ("tolerance_grad", "tolerance_change")}
        group.update(dict.fromkeys(kept, -inf))

        def evaluated() -> Any:
            rule = f"does L-BFGS make progress: yes, all {group['max_iter']} iterations"
            placeholders.note(_ATEN.le.Scalar, rule, _QUESTIONS_OF_LBFGS)
            return closure()

        try:
            return true_step(optimizer, evaluated)
        finally:
            group.update(kept)

    def first_trial(evaluate: Callable[..., Any], x: Any, t: Any, d: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        loss, grad = evaluate(x, t, d)
        return loss, grad.clone(memory_format=torch.contiguous_format), t, 1

    with mock.patch.object(lbfgs.LBFGS, "step", step), mock.patch.object(lbfgs, "_strong_wolfe", first_trial):
        yield


def where_called(*, in_script: bool = False) -> str:
    """Return file and line of the innermost frame that is neither torch's nor ours, and ``in_script`` of no package."""
    frame = sys._getframe(1)
    found = frame
    while frame is not None:
        kind = _kind_of(frame.f_code.co_filename)
        if kind is _Code.SCRIPT or (kind is _Code.PACKAGE and not in_script):
            return _shorten(frame.f_code.co_filename, frame.f_lineno)
        if kind is _Code.PACKAGE and _kind_of(found.f_code.co_filename) is not _Code.PACKAGE:
            found = frame
        frame = frame.f_back  # type: ignore[assignment]
    return _shorten(found.f_code.co_filename, found.f_lineno)


def is_of_script(function: Callable[..., Any]) -> bool:
    """Return whether a function is written in the script, or in code that is not installed as a package."""
    code = getattr(function, "__code__", None)
    return code is not None and _kind_of(code.co_filename) is _Code.SCRIPT


class _Code(Enum):
    """Whose code a file is."""

    OURS = "ours, torch's or generated"
    PACKAGE = "an installed package's"
    SCRIPT = "the script's"


@cache
def _kind_of(path: str) -> _Code:
    if path.startswith(("<", *_NOT_THE_SCRIPT)):
        return _Code.OURS
    return _Code.PACKAGE if "-packages/" in path else _Code.SCRIPT


@cache
def _shorten(path: str, line: int) -> str:
    """Return a place in an installed package without the folder where packages lie."""
    for folder in ("site-packages/", f"{Path.cwd()}/"):
        if folder in path:
            return f"{path.split(folder, 1)[1]}:{line}"
    return f"{path}:{line}"
