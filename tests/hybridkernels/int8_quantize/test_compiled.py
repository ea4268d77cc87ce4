"""Facts of the compiled kernels that speed hangs on."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no triton: its kernels cannot be built")


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_rounding_at_random_stays_in_registers(capability: int) -> None:
    from hybridkernels.ahead_of_time import compile_ahead  # noqa: PLC0415  optional
    from hybridkernels.int8_quantize.triton_kernel import compile_cases  # noqa: PLC0415

    (case,) = [case for case in compile_cases(capability) if case.name == "int8_quantize/bf16/stochastic/dynamic"]
    found = compile_ahead(case, capability)
    assert found.spill_bytes == 0
    # So half of a multiprocessor's threads or more can be there at a time.
    assert found.registers <= 64
    # The random words arise where they are needed: only the scales, 4 bytes each of 8 groups, change threads.
    assert found.shared_bytes == 32
