"""Facts of the compiled kernel that speed hangs on."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no triton: its kernels cannot be built")


@pytest.mark.parametrize("capability", [80, 120])
@pytest.mark.parametrize("weight", ["fp32", "int8"])
def test_all_of_an_update_stays_in_registers(weight: str, capability: int) -> None:
    import triton  # noqa: PLC0415  optional

    from hybridkernels.adamw_int8.triton_kernel import compile_cases  # noqa: PLC0415
    from hybridkernels.ahead_of_time import compile_ahead  # noqa: PLC0415

    (case,) = [case for case in compile_cases(capability) if case.name == f"adamw_int8/{weight}/grad_bf16"]
    found = compile_ahead(case, capability)
    assert found.spill_bytes == 0
    # So half of a multiprocessor's threads or more can be there at a time.
    assert found.registers <= 64
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7):
        # Two warps share a group: 8 warps exchange their largest magnitude, 4 bytes each, and no element. Triton 3.6
        # has the elements change threads around the look-ups in the 8-bit map.
        assert found.shared_bytes == 32
