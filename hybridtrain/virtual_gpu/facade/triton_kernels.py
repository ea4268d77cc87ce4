"""Triton on a virtual card: kernels of a script, its tuner, and the driver that it asks for the card's properties."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from hybridtrain.virtual_gpu.facade.cuda_module import CARD, answering, nothing
from hybridtrain.virtual_gpu.facade.placeholders import where_called
from hybridtrain.virtual_gpu.facade.sequence_ops import Replaced
from hybridtrain.virtual_gpu.facade.virtual_ledger import VirtualLedger

_FLUSHED_WORDS = 2**26
"""int32 values of the buffer by which the tuner flushes the L2 cache (triton/backends/nvidia/driver.py)."""


def triton_kernels(ledger: VirtualLedger) -> Replaced:
    """Yield the replacements in Triton, where it is installed."""
    if find_spec("triton") is None:
        return
    run = _launched(ledger)
    for module, name in (("jit", "JITFunction"), ("autotuner", "Autotuner"), ("autotuner", "Heuristics")):
        yield getattr(import_module(f"triton.runtime.{module}"), name), "run", run
    # Asked for through a property of its holder, which would look for libcuda.
    holder = type(import_module("triton.runtime.driver").driver)
    yield holder, "active", _driver(ledger)


def _launched(ledger: VirtualLedger) -> Callable[..., None]:
    """Return the launch of a kernel: it allocates nothing, as it writes into tensors that its caller made."""
    tuned = set[tuple[Any, ...]]()

    def tune(tuner: Any, args: Any, kwargs: Any) -> None:
        given = dict(zip(tuner.arg_names, args, strict=False)) | kwargs
        key = (id(tuner), *(str(given[name]) for name in tuner.keys if name in given))
        if len(tuner.configs) > 1 and key not in tuned:
            tuned.add(key)
            torch.empty(_FLUSHED_WORDS, dtype=torch.int32, device=CARD)

    def run(kernel: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> None:
        if warmup:  # compiles alone
            return
        while not hasattr(kernel, "__name__"):  # tuners and heuristics wrap it
            if hasattr(kernel, "configs"):
                tune(kernel, args, kwargs)
            kernel = kernel.fn
        told = "Triton kernels are not run: their time is that of reading or writing every tensor argument once"
        ledger.seen.approximated.setdefault(told, where_called(in_script=True))
        ledger.launch(f"triton.{kernel.__name__}", (*args, *kwargs.values()))

    return run


def _driver(ledger: VirtualLedger) -> Any:
    """Return what answers for the driver: the card's target, and properties under Triton's names."""
    card = ledger.card
    target = import_module("triton.backends.compiler").GPUTarget(
        "cuda", int(card.compute_capability.replace(".", "")), 32
    )

    def properties(_index: int) -> dict[str, int]:
        rates: Any = torch.cuda.get_device_properties(0)
        return {
            "max_shared_mem": rates.shared_memory_per_block_optin, "max_num_regs": rates.regs_per_multiprocessor,
            "multiprocessor_count": card.sms, "warpSize": rates.warp_size,
        }  # fmt: skip

    return SimpleNamespace(
        get_current_target=answering(lambda: target), get_active_torch_device=answering(lambda: CARD),
        get_device_interface=answering(lambda: torch.cuda), get_current_device=answering(lambda: 0),
        get_current_stream=answering(lambda: 0), set_current_device=nothing(), clear_cache=nothing(),
        get_empty_cache_for_benchmark=lambda: torch.empty(_FLUSHED_WORDS, dtype=torch.int32, device=CARD),
        utils=SimpleNamespace(get_device_properties=properties),
    )  # fmt: skip
