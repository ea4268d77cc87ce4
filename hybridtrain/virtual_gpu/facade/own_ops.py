"""Ops that a script defines itself, in Python: on the card their bodies run, so that what they allocate is counted."""

from collections.abc import Callable
from typing import Any

import torch

from hybridtrain.virtual_gpu.account.op_rules import Op
from hybridtrain.virtual_gpu.facade.placeholders import is_of_script
from hybridtrain.virtual_gpu.facade.sequence_ops import Replaced

_KEYS = ("CUDA", "CompositeExplicitAutograd")
"""Dispatch keys of a kernel that a card would run."""


class OwnOps:
    """Finds the Python function behind an op: of the script, or of a package that tells no shapes of its results."""

    def __init__(self) -> None:
        self._registered: dict[str, Callable[..., Any]] = {}

    def names(self) -> Replaced:
        """Yield the replacement that sees kernels as they are registered."""
        true_impl: Callable[..., None] = torch.library.Library.impl

        def impl(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
            if (dispatch_key or library.dispatch_key) in _KEYS and callable(fn):
                name = op_name._name if hasattr(op_name, "_name") else f"{library.ns}::{op_name.rpartition('::')[2]}"
                self._registered[name] = fn
            true_impl(library, op_name, fn, dispatch_key, **options)

        yield torch.library.Library, "impl", impl

    def body_of(self, func: Op) -> Callable[..., Any] | None:
        """Return the function that runs on a card; None: its results are known by shapes alone."""
        definition = torch._library.custom_ops.OPDEFS.get(func._schema.name)
        if definition is None:
            body = written = self._registered.get(func._name.removesuffix(".default"))
            has_shapes = torch._C._dispatch_has_kernel_for_dispatch_key(func._name, "Meta")
        else:
            written = definition._init_fn
            body = definition._backend_fns.get("cuda") or definition._backend_fns.get(None)
            has_shapes = definition._abstract_fn is not None
        return body if written is not None and (is_of_script(written) or not has_shapes) else None
