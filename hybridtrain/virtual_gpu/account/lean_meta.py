"""Faster dispatch of meta tensors, without work that only real tensors need.

Meta rules import torch._dynamo (1.4 s) and evaluate their checks in sympy (0.4 s), which concrete sizes do not need.
Custom ops pass through autograd's Python functions, which do nothing without gradients.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._library.custom_ops import CustomOpDef

_MARK = "__dynamo_disable"
"""Attribute under which torch's decorator stores the wrapped function, once dynamo exists."""
_RULES = ("torch._refs", "torch._decomp", "torch._prims", "torch._meta_registrations")
_DECORATED = _disable_dynamo(lambda: None).__code__


@contextmanager
def bypass_meta_wrappers() -> Iterator[None]:
    """Bypass torch's wrappers around meta rules and ops inside the block.

    Without effect in a torch version without these wrappers.
    """
    marked = [] if "torch._dynamo" in sys.modules else _unmarked_rules()
    for rule in marked:
        setattr(rule, _MARK, rule)
    call = CustomOpDef.__call__

    def lean_call(op: CustomOpDef, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return call(op, *args, **kwargs)  # type: ignore[no-untyped-call]
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op._opoverload(*args, **kwargs)

    check_with = torch._check_with

    def lean_check_with(error_type: type[Exception], cond: Any, message: Any) -> None:
        if cond is not True:
            check_with(error_type, cond, message)

    CustomOpDef.__call__ = lean_call  # type: ignore[method-assign, assignment]
    torch._check_with = lean_check_with
    try:
        yield
    finally:
        torch._check_with = check_with
        CustomOpDef.__call__ = call  # type: ignore[method-assign]
        for rule in marked:
            delattr(rule, _MARK)


def _unmarked_rules() -> list[Callable[..., Any]]:
    names = tuple(name for name in sys.modules if name.startswith(_RULES))
    return [rule for rule in _decorated_rules(names) if not hasattr(rule, _MARK)]


@cache
def _decorated_rules(names: tuple[str, ...]) -> tuple[Callable[..., Any], ...]:
    """Return the decorated functions: below a rule lies another, in its closure."""
    found: list[Callable[..., Any]] = []
    waiting = [rule for name in names for rule in vars(sys.modules[name]).values()]
    seen: set[int] = set()
    while waiting:
        rule = waiting.pop()
        if not isinstance(rule, FunctionType) or id(rule) in seen:
            continue
        seen.add(id(rule))
        cells = dict(zip(rule.__code__.co_freevars, rule.__closure__ or (), strict=True))
        inner = [cell.cell_contents for cell in cells.values()]
        if rule.__code__ is _DECORATED:
            found.append(cells["fn"].cell_contents)
        waiting += inner
    return tuple(found)
