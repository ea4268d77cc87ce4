# mypy: disable-error-code="no-untyped-call"
"""The replacement of ``torch.cuda`` for a virtual card, with its streams and events."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from types import SimpleNamespace
from typing import Any, NoReturn, Self

import torch

from hybridtrain.virtual_gpu.cards.card import Card
from hybridtrain.virtual_gpu.facade.placeholders import where_called
from hybridtrain.virtual_gpu.facade.virtual_ledger import VirtualLedger

CARD = torch.device("cuda", 0)
_COUNTERS = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
_CONSTANTS = {
    "is_available": True, "is_initialized": True, "_is_in_bad_fork": False, "is_current_stream_capturing": False,
    "utilization": 100, "memory_usage": 0, "temperature": 0, "power_draw": 0, "clock_rate": 0, "initial_seed": 0,
    "current_blas_handle": 0, "current_solver_handle": 0, "has_magma": True, "get_allocator_backend": "native",
    "get_sync_debug_mode": 0, "get_per_process_memory_fraction": 1.0, "can_device_access_peer": True,
}  # fmt: skip
_NOTHING = (
    "_lazy_init", "_sleep", "init", "reset_accumulated_memory_stats", "ipc_collect", "synchronize", "set_stream",
    "reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats", "empty_host_cache", "set_sync_debug_mode",
    "manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all",
)  # fmt: skip
_REFUSED = {
    **dict.fromkeys(("CUDAGraph", "Graph", "graph", "make_graphed_callables", "graph_pool_handle"), "CUDA graphs"),
    **dict.fromkeys(
        ("CUDAPluggableAllocator", "change_current_allocator", "caching_allocator_alloc", "caching_allocator_delete"),
        "allocators beside torch's own",
    ),
    **dict.fromkeys(("caching_allocator_enable", "caching_allocator_disabled"), "blocks that are not cached"),
    **dict.fromkeys(("host_memory_stats", "host_memory_stats_as_nested_dict"), "figures of pinned host memory"),
    "GreenContext": "parts of a card",
}
"""Replaced by classes, as annotations name some of them."""
_PEAKS = ("peak_memory_stats", "max_memory_allocated", "max_memory_reserved", "max_memory_cached")
_BUILDS = (
    ((7, 5), "13.0", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")),
    ((5, 0), "12.6", ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")),
)
"""Wheels of torch: least compute capability, CUDA version, and compiled architectures (.ci/manywheel/build_cuda.sh)."""
_RATES = {
    "is_integrated": 0, "is_multi_gpu_board": 0, "warp_size": 32,
    "regs_per_multiprocessor": 65536, "shared_memory_per_block_optin": 101376,
    "shared_memory_per_multiprocessor": 102400, "shared_memory_per_block": 49152, "L2_cache_size": 0, "gcnArchName": "",
    "uuid": "00000000-0000-0000-0000-000000000000",
}  # fmt: skip
"""Fields of ``get_device_properties`` that are equal for all cards."""


def nothing() -> Callable[..., None]:
    """Return a function of its own that does nothing: TorchDynamo has a rule for each function of torch."""

    def do_nothing(*_args: Any, **_kwargs: Any) -> None:
        """Do nothing, whatever the arguments."""

    return do_nothing


def cuda_build(card: Card) -> tuple[str, tuple[str, ...]]:
    """Return CUDA version and compiled architectures of the torch wheel for a card."""
    capability = tuple(int(part) for part in card.compute_capability.split("."))
    return next(((version, archs) for least, version, archs in _BUILDS if capability >= least), _BUILDS[-1][1:])


def answering(answer: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that ignores its arguments and returns ``answer()``."""
    return lambda *_args, **_kwargs: answer()


class VirtualStream:
    """A stream or event of a card on which all work is complete at once."""

    cuda_stream = cuda_event = stream_id = device_index = 0
    device = CARD

    def __init__(self, _device: Any = None, priority: int = 0, **_kwargs: Any) -> None:
        self.priority = priority

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_args: object) -> None:
        pass

    def query(self) -> bool:
        """Return True: all work is complete."""
        return True

    def is_capturing(self) -> bool:
        """Return False: no graph is being captured."""
        return False

    def elapsed_time(self, _other: object) -> float:
        """Return placeholder milliseconds; the report has the estimated step time."""
        return 1.0

    def record_event(self, event: "VirtualStream | None" = None) -> "VirtualStream":
        """Return a completed event."""
        return event or VirtualStream()

    def synchronize(self, *_args: object) -> None:
        """Wait for nothing."""

    wait_event = wait_stream = record = wait = synchronize


class _Stats(dict[str, int]):
    """``memory_stats`` by name; of other names nothing is known."""

    def __init__(self, ledger: VirtualLedger) -> None:
        allocator = ledger.allocator
        for name in _COUNTERS:
            self[f"{name}.all.current"] = getattr(allocator, name)
            self[f"{name}.all.peak"] = getattr(allocator, f"peak_{name}")
        self |= {"num_alloc_retries": allocator.num_alloc_retries, "num_ooms": allocator.num_ooms}
        self._ledger = ledger

    def __missing__(self, name: str) -> NoReturn:
        raise self._ledger.unplanned(f"memory_stats()[{name!r}] is not counted; counted are {', '.join(self)}")

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ARG002  dict's signature
        """Return a figure; 0 in place of one that is not counted would be wrong."""
        return self[name]

    def nested(self) -> dict[str, Any]:
        """Return dictionaries in dictionaries, by the parts of the names."""
        found: dict[str, Any] = {}
        for name, value in self.items():
            *path, last = name.split(".")
            reduce(lambda inner, part: inner.setdefault(part, {}), path, found)[last] = value
        return found


class VirtualDevice(nullcontext[None]):
    """``torch.cuda.device``: selects the only card."""

    def __init__(self, *_args: Any) -> None:
        super().__init__()
        self.idx = CARD.index


def cuda_names(ledger: VirtualLedger) -> dict[str, Any]:
    """Return the replacements in ``torch.cuda``, also used for equal names elsewhere in torch."""
    allocator, card = ledger.allocator, ledger.card
    major, minor = (int(part) for part in card.compute_capability.split("."))
    properties = SimpleNamespace(
        name=card.name, total_memory=card.memory_bytes, major=major, minor=minor, multi_processor_count=card.sms,
        max_threads_per_multi_processor=card.threads_per_multiprocessor, **_RATES,
    )  # fmt: skip

    def state() -> torch.Tensor:
        return torch.tensor([0] * 16, dtype=torch.uint8, device="cpu")

    def refusing(what: str) -> Callable[..., NoReturn]:
        def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
            raise ledger.unplanned(what)

        return refuse

    def set_fraction(fraction: float, *_args: Any) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        if allocator.capacity_bytes is not None:
            allocator.capacity_bytes = min(int(fraction * card.memory_bytes), card.allocator_capacity_bytes)

    def free_and_total() -> tuple[int, int]:
        return max(0, card.allocator_capacity_bytes - allocator.reserved_bytes), card.memory_bytes

    class MemPool:
        """A pool that has no blocks of its own."""

        id, allocator = (0, 1), None

        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            told = "memory pools: their blocks are counted in the common pool"
            ledger.seen.approximated.setdefault(told, where_called())

        def use_count(self) -> int:
            return 1

    answers: dict[str, Callable[[], Any]] = {
        "device_count": lambda: ledger.num_cards,
        "current_device": lambda: ledger.card_index,
        "get_device_name": lambda: card.name,
        "get_device_capability": lambda: (major, minor),
        "get_device_properties": lambda: properties,
        "get_arch_list": lambda: [*cuda_build(card)[1]],
        "is_tf32_supported": lambda: major >= 8,
        "memory_allocated": lambda: allocator.allocated_bytes,
        "max_memory_allocated": lambda: allocator.peak_allocated_bytes,
        "memory_stats": lambda: _Stats(ledger),
        "memory_stats_as_nested_dict": lambda: _Stats(ledger).nested(),
        "memory_summary": lambda: "\n".join(f"{name}: {value}" for name, value in _Stats(ledger).items()),
        "cudart": lambda: SimpleNamespace(
            cudaProfilerStart=answering(lambda: 0),
            cudaProfilerStop=answering(lambda: 0),
            cudaMemGetInfo=answering(free_and_total),
        ),
        **dict.fromkeys(("mem_get_info", "get_memory_info"), free_and_total),
        "device_memory_used": lambda: card.memory_bytes - free_and_total()[0],
        "list_gpu_processes": lambda: "GPU:0\nno processes are running",
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state()],
        **dict.fromkeys(("memory_reserved", "memory_cached"), lambda: allocator.reserved_bytes),
        **dict.fromkeys(("max_memory_reserved", "max_memory_cached"), lambda: allocator.peak_reserved_bytes),
        **{f"reset_{name}": allocator.reset_peaks for name in _PEAKS},
        **dict.fromkeys(("stream", "StreamContext", "use_mem_pool"), nullcontext),
    }
    return {
        **{name: answering(lambda value=value: value) for name, value in _CONSTANTS.items()},  # type: ignore[misc]
        **{name: nothing() for name in _NOTHING},
        **{name: answering(answer) for name, answer in answers.items()},
        **dict.fromkeys(("device", "device_of", "_DeviceGuard", "device_index"), VirtualDevice),
        "MemPool": MemPool,
        **dict.fromkeys(
            ("current_stream", "default_stream", "Stream", "Event", "ExternalStream", "get_stream_from_external"),
            VirtualStream,
        ),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card.has_bfloat16_tensor_cores,
        "set_device": ledger.require_card,
        "set_per_process_memory_fraction": set_fraction,
        "empty_cache": ledger.release_cache,
        "default_generators": (torch.Generator("cpu"),) * ledger.num_cards,
        **dict.fromkeys(
            ("memory_snapshot", "_snapshot"),
            refusing("a snapshot as data is not planned; hybridtrain virtual --snapshot FILE writes one"),
        ),
        **{name: type(name, (), {"__init__": refusing(f"{what} are not planned")}) for name, what in _REFUSED.items()},
    }
