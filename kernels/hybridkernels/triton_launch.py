"""Test of Triton on this machine's card, once, by a trial launch."""

import warnings
from functools import cache
from importlib.util import find_spec

import torch


@cache
def cuda_backend() -> str:
    """Return ``triton`` where its kernels can be built and launched, else ``torch``.

    Triton builds its launcher with the machine's C compiler and Python headers, so the answer takes a trial launch.
    """
    if find_spec("triton") is None or not torch.cuda.is_available():
        return "torch"
    try:
        from hybridkernels.swiglu.triton_kernel import launch, swiglu_kernel  # noqa: PLC0415  Triton is optional

        launch(swiglu_kernel, *torch.zeros(3, 16, dtype=torch.bfloat16, device="cuda"))
    except Exception as error:  # noqa: BLE001  compilers, headers and drivers fail in many ways; training goes on
        warnings.warn(
            f"Triton cannot run kernels here ({error}); training goes on with torch's own ops, more slowly; "
            "install gcc and the Python headers, or uninstall triton to silence this",
            stacklevel=2,
        )
        return "torch"
    return "triton"


@cache
def compute_capability(device: torch.device) -> int:
    """Return 90 for a card of compute capability 9.0, and so on."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of the card; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
