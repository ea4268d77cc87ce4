"""Facts of the compiled kernels that speed and long tensors hang on."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no triton: its kernels cannot be built")

POINTERS = {"swiglu_kernel": 3, "swiglu_backward_kernel": 5}
KERNELS = pytest.mark.parametrize("kernel_name", POINTERS)


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return


def compile_kernel(kernel_name: str, dtype: str, numel: str, capability: int) -> Any:
    """Compile for 16-byte aligned tensors whose length is a multiple of 16, as Triton does at such a launch."""
    import triton  # noqa: PLC0415  optional
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    from hybridkernels.swiglu.triton_kernel import compile_cases  # noqa: PLC0415

    (case,) = [case for case in compile_cases(capability) if case.name == f"swiglu/{kernel_name}/{dtype}"]
    source = ASTSource(
        fn=case.kernel,
        signature={**case.arguments, "numel": numel, "BLOCK": "constexpr"},
        constexprs=dict(case.constants),
        attrs={(position,): [["tt.divisibility", 16]] for position in range(POINTERS[kernel_name] + 1)},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": case.num_warps})


@KERNELS
@pytest.mark.parametrize("capability", [80, 120])
@pytest.mark.parametrize(("dtype", "accesses_per_tensor"), [("fp32", 2), ("bf16", 1)])
def test_every_tensor_is_read_and_written_16_bytes_at_a_time(
    kernel_name: str, capability: int, dtype: str, accesses_per_tensor: int
) -> None:
    built = compile_kernel(kernel_name, dtype, "i32", capability)
    # 1024 elements by 128 threads, and nothing changes threads.
    assert built.asm["ptx"].count(".v4.b32") == POINTERS[kernel_name] * accesses_per_tensor
    assert built.metadata.shared == 0


@KERNELS
@pytest.mark.parametrize("numel", ["i32", "i64"])
def test_offsets_have_64_bits(kernel_name: str, numel: str) -> None:
    lines = compile_kernel(kernel_name, "bf16", numel, 90).asm["ttir"].splitlines()
    steps = [line for line in lines if "tt.addptr" in line]
    assert len(steps) == POINTERS[kernel_name]
    assert all("tensor<1024xi64>" in line for line in steps)
    (start,) = (line for line in lines if "arith.muli" in line)
    assert ": i64" in start  # the product of program and block does not wrap at 2^31 either
