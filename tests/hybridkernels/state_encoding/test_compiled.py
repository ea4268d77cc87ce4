"""Facts of the compiled kernels: nothing is spilled, several programs fit a multiprocessor."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no triton: its kernels cannot be built")

REGISTERS = 65_536
"""Of a multiprocessor."""


@pytest.mark.parametrize(
    ("name", "programs"), [("encode_state", 4), ("moment_statistics/fp32", 4), ("training_state/fp32_and_codes", 3)]
)
def test_nothing_is_spilled_and_a_multiprocessor_holds_several_programs(name: str, programs: int) -> None:
    from hybridkernels.ahead_of_time import compile_ahead  # noqa: PLC0415  needs triton
    from hybridkernels.state_encoding.triton_kernel import compile_cases  # noqa: PLC0415

    (case,) = (case for case in compile_cases(80) if case.name == f"state_encoding/{name}")
    resources = compile_ahead(case, 80)
    assert resources.spill_bytes == 0
    assert REGISTERS // (resources.registers * 32 * case.num_warps) >= programs
