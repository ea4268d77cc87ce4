"""Facts of the compiled kernel: nothing is spilled, and weights arrive ahead of their use."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no triton: its kernels cannot be built")


def test_nothing_is_spilled_and_two_tiles_of_weights_are_on_their_way() -> None:
    from hybridkernels.ahead_of_time import compile_ahead  # noqa: PLC0415  needs triton
    from hybridkernels.rssm_gru.triton_kernel import compile_cases  # noqa: PLC0415

    cases = compile_cases(80)
    assert {case.constants["ROWS"] for case in cases} == {1, 4}
    for case in cases:
        resources = compile_ahead(case, 80)
        assert resources.spill_bytes == 0, case.name
        assert resources.shared_bytes >= 2 * 4 * case.constants["TILE"], case.name
