"""The Triton kernels without a card: run by Triton's interpreter, and compiled ahead of time for real cards."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridkernels.swiglu import cuda_backend, swiglu
from hybridkernels.swiglu.reference import swiglu_backward_reference, swiglu_reference
from numerics import assert_error_bound

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no triton: its kernels cannot be built")

NAMES = ("out", "grad_gate", "grad_up")
LENGTHS = (0, 1, 15, 1023, 1024, 1025, 2500)
FLOORS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative to the largest element: one rounding, in fp32 a few, for cases where torch happens to be exact."""
CAPABILITIES = (80, 89, 90, 120)
POINTERS = {"swiglu_kernel": 3, "swiglu_backward_kernel": 5}

# Runs in a process of its own: whether a kernel is interpreted is settled when it is defined.
INTERPRET = """
import sys
import torch
from hybridkernels.swiglu.triton_kernel import BLOCK, _launch, swiglu_backward_kernel, swiglu_kernel
from hybridkernels.swiglu.triton_kernel import swiglu_backward_triton, swiglu_triton

results = [(swiglu_triton(*case[:2]), *swiglu_backward_triton(*case)) for case in torch.load(sys.argv[1])]
torch.save(results, sys.argv[2])

GUARD = 7.0
inputs = torch.ones(3, BLOCK + 5).unbind(0)
buffers = torch.full((3, 3 * BLOCK), GUARD).unbind(0)
outputs = [buffer[BLOCK : 2 * BLOCK + 5] for buffer in buffers]
_launch(swiglu_kernel, *inputs[:2], outputs[0])
_launch(swiglu_backward_kernel, *inputs, *outputs[1:])
for buffer, output in zip(buffers, outputs):
    assert (output != GUARD).all(), "elements not written"
    assert (buffer == GUARD).sum() == buffer.numel() - output.numel(), "written outside of the tensor"
"""


def random_case(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, grad = ((torch.randn(numel) * 2).to(dtype) for _ in range(3))
    return gate, up, grad


def strided_case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, grad = torch.randn(30, 3 * 50).to(dtype).chunk(3, dim=-1)
    return gate, up, grad


def extreme_case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    largest = torch.finfo(dtype).max
    gate = torch.tensor([-largest, -1e4, -200.0, -88.5, -0.0, 0.0, 88.5, 200.0, 1e4, largest]).to(dtype)
    return gate, torch.full_like(gate, 0.5), torch.full_like(gate, -0.5)


def torchs_results(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in (gate, up)]
    out = functional.silu(leaves[0]) * leaves[1]
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def interpret(cases: list[tuple[Tensor, ...]], folder: Path) -> list[tuple[Tensor, ...]]:
    torch.save(cases, folder / "cases.pt")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRET, str(folder / "cases.pt"), str(folder / "results.pt")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: list[tuple[Tensor, ...]] = torch.load(folder / "results.pt")
    return results


@needs_triton
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_interpreted_kernels_are_as_exact_as_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    cases = [*(random_case(numel, dtype) for numel in LENGTHS), strided_case(dtype)]
    for case, results in zip(cases, interpret(cases, tmp_path), strict=True):
        same_dtype, exact = torchs_results(*case), torchs_results(*(tensor.double() for tensor in case))
        for name, actual, torchs, target in zip(NAMES, results, same_dtype, exact, strict=True):
            assert actual.shape == case[0].shape
            assert actual.is_contiguous()
            if actual.numel():
                floor = FLOORS[dtype] * target.abs().max().item()
                assert_error_bound(actual, torchs, target, floor=floor, name=f"{name} of {actual.numel()}")


@needs_triton
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_interpreted_kernels_give_no_nan_for_extreme_gates(dtype: torch.dtype, tmp_path: Path) -> None:
    case = extreme_case(dtype)
    exact = torchs_results(*(tensor.double() for tensor in case))
    for name, actual, target in zip(NAMES, interpret([case], tmp_path)[0], exact, strict=True):
        assert actual.isfinite().all(), name
        # Relative to each element: one rounding of the type, and fp32's few in front of it.
        rtol = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(actual.double(), target, rtol=rtol, atol=1e-30 + torch.finfo(dtype).tiny, msg=name)


def compile_kernel(kernel_name: str, dtype: str, numel: str, capability: int) -> Any:
    """Compile for 16-byte aligned tensors whose length is a multiple of 16, as Triton does at such a launch."""
    import triton  # noqa: PLC0415  optional
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    from hybridkernels.swiglu import triton_kernel  # noqa: PLC0415

    kernel, pointers = getattr(triton_kernel, kernel_name), POINTERS[kernel_name]
    types = dict.fromkeys(kernel.arg_names[:pointers], f"*{dtype}")
    source = ASTSource(
        fn=kernel,
        signature={**types, "numel": numel, "BLOCK": "constexpr"},
        constexprs={"BLOCK": triton_kernel.BLOCK},
        attrs={(position,): [["tt.divisibility", 16]] for position in range(pointers + 1)},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})


@needs_triton
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kernel_name", POINTERS)
def test_the_kernels_compile_for_every_card(
    kernel_name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for dtype in ("fp32", "bf16", "fp16"):
        built = compile_kernel(kernel_name, dtype, "i32", capability)
        assert built.asm["cubin"].startswith(b"\x7fELF")
        # 1024 elements by 128 threads: every tensor is read or written 16 bytes at a time, without shared memory.
        accesses_per_tensor = 2 if dtype == "fp32" else 1
        assert built.asm["ptx"].count(".v4.b32") == POINTERS[kernel_name] * accesses_per_tensor
        assert built.metadata.shared == 0


@needs_triton
@pytest.mark.parametrize("kernel_name", POINTERS)
@pytest.mark.parametrize("numel", ["i32", "i64"])
def test_offsets_have_64_bits(kernel_name: str, numel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    lines = compile_kernel(kernel_name, "bf16", numel, 90).asm["ttir"].splitlines()
    steps = [line for line in lines if "tt.addptr" in line]
    assert len(steps) == POINTERS[kernel_name]
    assert all("tensor<1024xi64>" in line for line in steps)
    (start,) = (line for line in lines if "arith.muli" in line)
    assert ": i64" in start  # the product of program and block does not wrap at 2^31 either


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_the_backend_is_torch() -> None:
    cuda_backend.cache_clear()
    assert cuda_backend() == "torch"


def test_the_op_works_where_triton_cannot_be_imported() -> None:
    code = "import sys; sys.modules['triton'] = None; import torch; from hybridkernels.swiglu import swiglu; "
    code += "swiglu(*torch.ones(2, 3, requires_grad=True)).sum().backward(); "
    code += "assert 'hybridkernels.swiglu.triton_kernel' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("numel", LENGTHS[1:])
def test_a_card_is_as_exact_as_torch_on_it(dtype: torch.dtype, numel: int) -> None:
    case = tuple(tensor.cuda() for tensor in random_case(numel, dtype))
    leaves = [tensor.clone().requires_grad_() for tensor in case[:2]]
    out = swiglu(*leaves)
    results = (out.detach(), *torch.autograd.grad(out, leaves, case[2]))
    exact = torchs_results(*(tensor.double() for tensor in case))
    reference = (swiglu_reference(*case[:2]), *swiglu_backward_reference(*case))
    for name, actual, torchs, target in zip(NAMES, results, reference, exact, strict=True):
        floor = FLOORS[dtype] * target.abs().max().item()
        assert_error_bound(actual, torchs, target, floor=floor, name=name)
