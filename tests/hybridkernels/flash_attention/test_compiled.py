"""What the assembler makes of the Triton kernels, without a card."""

from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("no triton: its kernels cannot be built", allow_module_level=True)

from hybridkernels.ahead_of_time import CAPABILITIES, CompileCase, compile_ahead
from hybridkernels.flash_attention.tiles import launch_config
from hybridkernels.flash_attention.triton_kernel import compile_cases


def case(name: str, capability: int) -> CompileCase:
    (found,) = (case for case in compile_cases(capability) if case.name == f"flash_attention/{name}")
    return found


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_nothing_spills_at_head_dim_64_on_hopper(kernel: str) -> None:
    assert compile_ahead(case(f"{kernel}/bf16/head64", 90), 90).spill_bytes == 0


def test_the_largest_kernel_spills_next_to_nothing() -> None:
    # Per thread and kernel, of 128 accumulators; about one in 60 instructions of its main loop.
    assert compile_ahead(case("dkdv/bf16/head128", 90), 90).spill_bytes <= 128


@pytest.mark.parametrize("capability", [*CAPABILITIES, 75, 100])
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
@pytest.mark.parametrize("head_dim", [1, 64, 80, 96, 100, 128])
def test_blocks_are_such_as_the_kernels_can_work_with(capability: int, kernel: str, head_dim: int) -> None:
    config = launch_config(capability, kernel, head_dim)
    if kernel != "dkdv":  # a key block must not reach over the first query of its query block
        assert config.block_m % config.block_n == 0
    assert config.num_warps in {4, 8}


def test_every_kernel_is_compiled_for_every_head_dim_dtype_and_variant() -> None:
    names = [case.name for case in compile_cases(90)]
    assert len(set(names)) == len(names) == 3 * (4 * 2 + 5 + 2)
