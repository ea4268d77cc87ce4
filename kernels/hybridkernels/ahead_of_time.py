"""Kernels compiled without a card, and their resources on one: registers, spills, shared memory, code bytes.

Needs triton, which carries NVIDIA's assembler; no card, driver or toolkit.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

KERNELS = (
    "adamw_int8", "flash_attention", "geglu", "int8_quantize", "linear_cross_entropy", "nf4", "rssm_gru",
    "scaled_matmul", "state_encoding", "swiglu",
)  # fmt: skip
"""Folders whose ``triton_kernel`` has ``compile_cases(capability)``."""
CAPABILITIES = (80, 86, 89, 90, 120)
"""Compute capabilities of the cards: A100, RTX 30xx, RTX 40xx, H100 and H200, RTX 50xx."""
SHARED_MEMORY_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 120: 101_376}
"""Largest shared memory per block (CUDA C++ Programming Guide, table of compute capabilities: 163, 99, 99, 227 and 99
KiB)."""

_FIRST_BLACKWELL = 100
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCase:
    """One specialization of one Triton kernel: the arguments and the configuration that its launcher gives it."""

    name: str
    """Unique name, for example ``flash_attention/forward/bf16/head64``."""
    kernel: Any
    """The ``triton.jit`` function."""
    arguments: Mapping[str, str]
    """Triton types of run-time arguments by name, for example ``*bf16``, ``i32``, ``fp32``."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Values of the ``tl.constexpr`` arguments by name."""
    unaligned: frozenset[str] = frozenset()
    """Arguments that Triton must not assume to be multiples of 16; floating-point scalars never are."""
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    def of(
        cls, name: str, kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], **options: Any
    ) -> "CompileCase":
        """Return a case; arguments are those without a constant, of type ``*fp32`` by default."""
        arguments = {key: types.get(key, "*fp32") for key in kernel.arg_names if key not in constants}
        return cls(name=name, kernel=kernel, arguments=arguments, constants=constants, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResources:
    """Resources of one compiled kernel."""

    registers: int
    """Per thread."""
    spill_bytes: int
    """Bytes per thread spilled to and loaded from local memory, added."""
    shared_bytes: int
    """Shared memory of one block."""
    code_bytes: int
    """Size of the cubin, line information left out."""


def compile_cases(capability: int, kernels: tuple[str, ...] = KERNELS) -> Iterator[CompileCase]:
    """Yield the cases of every kernel for a compute capability, for example 90."""
    for kernel in kernels:
        yield from import_module(f"hybridkernels.{kernel}.triton_kernel").compile_cases(capability)


def compile_ahead(case: CompileCase, capability: int) -> KernelResources:
    """Compile one case for a compute capability, as 90.

    Raises:
        RuntimeError: it exceeds the card's shared memory per block. triton.CompilationError: the kernel is invalid.
    """
    import triton  # noqa: PLC0415  optional
    from triton import knobs  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    signature = {name: case.arguments.get(name, "constexpr") for name in case.kernel.arg_names}
    aligned = [
        (position,)
        for position, (name, kind) in enumerate(signature.items())
        if name not in case.unaligned and kind.startswith(("*", "i"))
    ]
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs=dict(case.constants),
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True  # paths of source files, on which the size of the code would depend
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    shared: int = built.metadata.shared
    if shared > SHARED_MEMORY_BYTES[capability]:
        raise RuntimeError(
            f"{case.name}: takes {shared:,} B of shared memory, but a block on sm_{capability} has "
            f"{SHARED_MEMORY_BYTES[capability]:,}; use smaller blocks or fewer stages"
        )
    log = _assemble(built.asm["ptx"], capability, Path(triton.__file__).parent)
    spills, registers = _SPILLS.search(log), _REGISTERS.search(log)
    if spills is None or registers is None:
        raise RuntimeError(f"{case.name}: the assembler's report is not understood: {log}")
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
    assert target is not None, "PTX without a target"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [str(triton_folder / "backends/nvidia/bin" / tool), "-v", f"--gpu-name={target[1]}", str(source)]
        done = subprocess.run(  # noqa: S603  a program of the triton package
            [*command, "-o", str(source.with_suffix(".cubin"))], capture_output=True, text=True, check=True
        )
    return f"{done.stdout}{done.stderr}"
