"""Generation by transformers: its loop runs for every token, the model for some of them.

Between two of those the model's results and its cache grow as they did from one token to the next: by nothing, or by
one position. So memory between tokens is exact. Inside the model it is largest for the prompt or at the last token,
and both are run. Skipped tokens take the time of the token that was run before them.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from importlib.machinery import ModuleSpec
from itertools import count, takewhile
from operator import add, sub
from typing import Any
from unittest import mock
from weakref import ref

import torch
from torch import Tensor

from hybridtrain.virtual_gpu.facade.virtual_ledger import VirtualLedger

_MODULE = "transformers.generation.utils"
_LOOPS = ("_sample", "_beam_search", "_greedy_search")
"""Methods of ``GenerationMixin`` that call the model once per token, to a known length."""
_RUN_FIRST = 3
"""Calls that are always run: the prompt, and two tokens that show what grows."""
_RUN_LAST = 2
_RUN_BETWEEN = 16
"""Further tokens that are run, as time and small temporaries depend on the length."""
_INPUTS = ("decoder_input_ids", "input_ids")


@contextmanager
def generation(ledger: VirtualLedger) -> Iterator[None]:
    """Plan the loops of ``GenerationMixin`` by their length inside the block, wherever it is imported."""
    found: list[Any] = []

    def replace(module: Any) -> None:
        mixin = module.GenerationMixin
        for name in (name for name in _LOOPS if name in vars(mixin)):
            found.append(mock.patch.object(mixin, name, _planned(ledger, getattr(mixin, name))))
            found[-1].start()

    waiting = _AfterImport(replace)
    if _MODULE in sys.modules:
        replace(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, waiting)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.meta_path.remove(waiting)
        for patch in found:
            patch.stop()


class _AfterImport:
    """A finder that changes one module after its import."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self._change = change

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        """Return the module's own spec with a longer execution; None for other modules."""
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            true_exec = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                true_exec(module)
                self._change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _planned(ledger: VirtualLedger, loop: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(loop)
    def call(model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        criteria = kwargs.get("stopping_criteria") or ()
        length = next((one.max_length for one in criteria if hasattr(one, "max_length")), None)
        if length is None or ledger.place_of(input_ids) is None:
            return loop(model, input_ids, *args, **kwargs)
        num_tokens = length - input_ids.shape[-1]
        left = iter(range(num_tokens))

        def has_more(*_args: Any, **_kwargs: Any) -> bool:
            return next(left, None) is not None

        with ExitStack() as stack:
            # Whether all rows have ended depends on values: none ends before the longest.
            ends = mock.patch.object(model, "_has_unfinished_sequences", has_more)
            stack.enter_context(ends)
            if getattr(kwargs.get("generation_config"), "cache_implementation", None) is None:  # else compiled
                calls = _Calls(ledger, model.forward, num_tokens)
                stack.enter_context(mock.patch.object(model, "forward", calls.forward()))
            return loop(model, input_ids, *args, **kwargs)

    return call


class _Calls:
    """The calls of a model in one loop, of which some are run."""

    def __init__(self, ledger: VirtualLedger, forward: Callable[..., Any], num_calls: int) -> None:
        self._ledger, self._true, self._num_calls = ledger, forward, num_calls
        self._number = -1
        self._every = max(2, (num_calls - _RUN_FIRST - _RUN_LAST) // _RUN_BETWEEN)
        self._shape: torch.Size | None = None
        self._last: _Results | None = None
        self._growth: _Growth | None = None
        self._ops = range(0)

    def forward(self) -> Callable[..., Any]:
        """Return what stands for the model's ``forward``."""

        @wraps(self._true)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._number += 1
            ids = next((kwargs[name] for name in _INPUTS if kwargs.get(name) is not None), None)
            is_token = ids is not None and not args and ids.shape == self._shape
            self._shape = None if ids is None else ids.shape
            if self._last is not None and self._growth is not None and is_token and self._skips(self._number):
                if self._ops:
                    times = sum(1 for _ in takewhile(self._skips, count(self._number)))
                    self._ledger.repeat_ops(self._ops, times)
                    self._ops = range(0)
                return self._last.grown(self._growth)
            start = self._ledger.num_ops
            out = self._true(*args, **kwargs)
            self._ops = range(start, self._ledger.num_ops)
            before, self._last = self._last, _Results(out)
            self._growth = self._last.growth_since(before) if is_token and before is not None else None
            return out

        return forward

    def _skips(self, number: int) -> bool:
        is_between = _RUN_FIRST <= number < self._num_calls - _RUN_LAST
        return is_between and (number - _RUN_FIRST) % self._every != self._every - 1


_Path = tuple[Any, ...]
_Growth = dict[_Path, tuple[int, ...]]


class _Results:
    """A model's results: sizes of tensors, and counters; what grows in its cache. No tensor is kept alive."""

    def __init__(self, results: Any) -> None:
        self._is_simple = isinstance(results, dict)
        self._kind: Callable[..., Any] = type(results)
        self._fields: dict[str, Any] = {}
        """Results by name: how to make a tensor, with a weak reference to it, or the object itself."""
        self._holders: dict[_Path, Any] = {}
        self._sizes: dict[_Path, tuple[int, ...]] = {}
        for name, value in results.items() if self._is_simple else ():
            if isinstance(value, Tensor):
                self._sizes[name,] = tuple(value.shape)
                self._fields[name] = (ref(value), {"dtype": value.dtype, "device": value.device})
            else:
                self._fields[name] = value
                self._visit((name,), value)

    def growth_since(self, before: "_Results") -> _Growth | None:
        """Return by how much each size grew; None unless each grew by nothing or, in one dimension, by one."""
        if not (self._is_simple and before._is_simple) or self._sizes.keys() != before._sizes.keys():
            return None
        found = {}
        for path, size in self._sizes.items():
            grown = tuple(map(sub, size, before._sizes[path]))
            if len(size) != len(before._sizes[path]) or not {*grown} <= {0, 1} or sum(grown) > 1:
                return None
            found[path] = grown
        return found

    def grown(self, growth: _Growth) -> Any:
        """Return the results of the next call: new tensors, and the same cache, grown."""
        for path, grown in growth.items():
            size = self._sizes[path] = tuple(map(add, self._sizes[path], grown))
            if len(path) == 1 or not any(grown):
                continue
            holder, name = self._holders[path], path[-1]
            value = _item(holder, name)
            window = getattr(holder, "sliding_window", None)
            if window is not None and isinstance(value, Tensor):  # which keeps so many positions, with the next one
                size = tuple(min(one, window - 1) if more else one for one, more in zip(size, grown, strict=True))
            _set_item(holder, name, value.new_empty(size) if isinstance(value, Tensor) else size[0])
        return self._kind(**{name: self._field(name, value) for name, value in self._fields.items()})

    def _field(self, name: str, value: Any) -> Any:
        """Return a result of the next call; the same one where another holds it, as an encoder's output."""
        if (name,) not in self._sizes:
            return value
        reference, made = value
        held = reference()
        return torch.empty(self._sizes[name,], **made) if held is None else held

    def _visit(self, path: _Path, value: Any) -> None:
        module = type(value).__module__
        if isinstance(value, dict | list):
            items = list(value.items() if isinstance(value, dict) else enumerate(value))
        elif module == "transformers.cache_utils":
            items = list(vars(value).items())
        else:  # a tuple can't grow in place, and other caches grow in ways of their own
            self._is_simple = self._is_simple and not (isinstance(value, tuple) or module.startswith("transformers."))
            return
        for name, item in items:
            inner = (*path, name)
            if isinstance(item, Tensor) or type(item) is int:
                self._holders[inner] = value
                self._sizes[inner] = tuple(item.shape) if isinstance(item, Tensor) else (item,)
            else:
                self._visit(inner, item)


def _item(holder: Any, name: Any) -> Any:
    return holder[name] if isinstance(holder, dict | list) else getattr(holder, name)


def _set_item(holder: Any, name: Any, value: Any) -> None:
    if isinstance(holder, dict | list):
        holder[name] = value
    else:
        setattr(holder, name, value)
