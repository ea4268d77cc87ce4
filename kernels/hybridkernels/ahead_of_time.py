"""Kernels compiled without a card, and what they would take of one: registers, spills, shared memory, code bytes.

Needs triton, which carries NVIDIA's assembler; no card, driver or toolkit.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hybridkernels.compile_case import SHARED_MEMORY_BYTES, CompileCase

KERNELS = (
    "adamw_int8",
    "flash_attention",
    "geglu",
    "int8_quantize",
    "linear_cross_entropy",
    "nf4",
    "rssm_gru",
    "state_encoding",
    "swiglu",
)
"""Folders with a ``compile_cases`` module."""

_FIRST_BLACKWELL = 100
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResources:
    """What one compiled kernel takes."""

    registers: int
    """Per thread."""
    spill_bytes: int
    """Per thread, stored to and loaded from local memory for want of registers; the two are added."""
    shared_bytes: int
    """Shared memory of one block."""
    code_bytes: int
    """Size of the cubin, line information left out."""


def compile_cases(capability: int, kernels: tuple[str, ...] = KERNELS) -> Iterator[CompileCase]:
    """Yield the cases of every kernel for a compute capability, as 90."""
    for kernel in kernels:
        yield from import_module(f"hybridkernels.{kernel}.compile_cases").compile_cases(capability)


def compile_ahead(case: CompileCase, capability: int) -> KernelResources:
    """Compile one case for a compute capability, as 90.

    Raises:
        RuntimeError: it takes more shared memory than a block of such a card may.
        triton.CompilationError: the kernel is at fault.
    """
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: PLC0415  optional
    from triton import knobs  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    names = case.kernel.arg_names
    signature = {name: case.arguments.get(name, "constexpr") for name in names}
    aligned = [
        position
        for position, name in enumerate(names)
        if name not in case.unaligned and signature[name].startswith(("*", "i"))
    ]
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs=dict(case.constants),
        attrs={(position,): [["tt.divisibility", 16]] for position in aligned},
    )
    with _no_line_information(knobs):
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _resources(case.name, built, capability, Path(triton.__file__).parent)


@contextmanager
def _no_line_information(knobs: Any) -> Iterator[None]:
    """Leave paths of source files out of the code, whose size would depend on them."""
    before = knobs.compilation.disable_line_info
    knobs.compilation.disable_line_info = True
    try:
        yield
    finally:
        knobs.compilation.disable_line_info = before


def _resources(name: str, built: Any, capability: int, triton_folder: Path) -> KernelResources:
    shared: int = built.metadata.shared
    if shared > SHARED_MEMORY_BYTES[capability]:
        raise RuntimeError(
            f"{name}: takes {shared:,} B of shared memory, a block on sm_{capability} may take "
            f"{SHARED_MEMORY_BYTES[capability]:,}; use smaller blocks or fewer stages there"
        )
    log = _assemble(built.asm["ptx"], capability, triton_folder)
    spills, registers = _SPILLS.search(log), _REGISTERS.search(log)
    if spills is None or registers is None:
        raise RuntimeError(f"{name}: the assembler's report is not understood: {log}")
    return KernelResources(
        registers=int(registers[1]),
        spill_bytes=int(spills[2]) + int(spills[3]),
        shared_bytes=shared,
        code_bytes=len(built.asm["cubin"]),
    )


def _assemble(ptx: str, capability: int, triton_folder: Path) -> str:
    """Return the report of the assembler that Triton itself used."""
    tool = "ptxas-blackwell" if capability >= _FIRST_BLACKWELL else "ptxas"
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [str(triton_folder / "backends/nvidia/bin" / tool), "-v", f"--gpu-name={target[1]}", str(source)]
        done = subprocess.run(  # noqa: S603  a program of the triton package
            [*command, "-o", str(Path(folder) / "kernel.cubin")], capture_output=True, text=True, check=True
        )
    report: str = done.stdout + done.stderr
    return report
