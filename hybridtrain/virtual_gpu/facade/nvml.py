"""``pynvml`` for a virtual card: what scripts that print a card's memory ask of the driver."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from hybridtrain.virtual_gpu.facade.cuda_module import answering
from hybridtrain.virtual_gpu.facade.nvidia_smi import DRIVER
from hybridtrain.virtual_gpu.facade.virtual_ledger import VirtualLedger


@contextmanager
def nvml(ledger: VirtualLedger, cuda: dict[str, Any]) -> Iterator[None]:
    """Put the module in place; of other functions than these it knows nothing."""
    module = ModuleType("pynvml", __doc__)
    module.__spec__ = ModuleSpec("pynvml", None)

    def memory(*_args: Any) -> Any:
        free, total = cuda["mem_get_info"]()
        return SimpleNamespace(total=total, free=free, used=total - free)

    def unknown(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ledger.unplanned(f"pynvml.{name} is not planned")

    answers: dict[str, Any] = {
        "Init": None, "InitWithFlags": None, "Shutdown": None, "DeviceGetCount": ledger.num_cards,
        "DeviceGetHandleByIndex": 0, "DeviceGetHandleByUUID": 0, "DeviceGetHandleByPciBusId": 0, "DeviceGetIndex": 0,
        "DeviceGetName": ledger.card.name, "SystemGetDriverVersion": DRIVER, "DeviceGetTemperature": 0,
        "DeviceGetPowerUsage": 0, "DeviceGetUtilizationRates": SimpleNamespace(gpu=100, memory=0),
        "DeviceGetComputeRunningProcesses": [],
    }  # fmt: skip
    vars(module).update({f"nvml{name}": answering(lambda value=value: value) for name, value in answers.items()})  # type: ignore[misc]
    vars(module).update(
        nvmlDeviceGetMemoryInfo=memory, NVMLError=type("NVMLError", (Exception,), {}), NVML_TEMPERATURE_GPU=0,
        __getattr__=unknown,
    )  # fmt: skip
    before, sys.modules["pynvml"] = sys.modules.get("pynvml"), module
    try:
        yield
    finally:
        del sys.modules["pynvml"]
        if before is not None:
            sys.modules["pynvml"] = before
