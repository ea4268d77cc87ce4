"""The kernel compiled without a card: what its speed rests on."""

from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("triton") is None:
    pytest.skip("no triton: nothing can be compiled", allow_module_level=True)

from hybridkernels.ahead_of_time import compile_ahead, compile_cases

CASES = [case for case in compile_cases(90, ("linear_cross_entropy",)) if case.name.endswith("vocab50257")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whole_blocks_move_16_bytes_an_access_whatever_the_vocabulary(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr("hybridkernels.ahead_of_time._assemble", lambda ptx, *_: seen.append(ptx) or REPORT)
    compile_ahead(case, 90)
    (ptx,) = seen
    reads, writes = (sum(line.startswith(start) for line in map(str.strip, ptx.splitlines())) for start in STARTS)
    per_block = 4 if "fp32" in case.name else 2  # 4096 elements by 256 threads
    assert reads >= 2 * per_block  # of the first and of the second reading
    assert writes >= per_block


STARTS = ("ld.global.v4.b32", "st.global.v4.b32")
REPORT = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 1 registers"
