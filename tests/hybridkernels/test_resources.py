"""What speed hangs on, of the figures that ``hybridtrain gate kernels`` holds every compiled kernel to."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("triton") is None:
    pytest.skip("no triton: its kernels cannot be read", allow_module_level=True)

from hybridkernels.ahead_of_time import CAPABILITIES, CompileCase, KernelResources, compile_cases
from hybridkernels.flash_attention.tiles import launch_config

CASES = {capability: {case.name: case for case in compile_cases(capability)} for capability in CAPABILITIES}
BASELINE = json.loads(Path("results/baselines/kernels.json").read_text(encoding="utf-8"))["resources"]
CARDS = pytest.mark.parametrize("capability", CAPABILITIES)
REGISTERS = 65_536
"""Of a multiprocessor."""


def kernels(capability: int, beginning: str) -> list[tuple[CompileCase, KernelResources]]:
    """Return cases whose name begins so, with their resources."""
    found = BASELINE[f"sm_{capability}"]
    return [
        (case, KernelResources(**found[name])) for name, case in CASES[capability].items() if name.startswith(beginning)
    ]


@CARDS
def test_the_baseline_has_every_kernel_once(capability: int) -> None:
    assert CASES[capability].keys() == BASELINE[f"sm_{capability}"].keys()
    assert len(CASES[capability]) == len(list(compile_cases(capability))) == (112 if capability >= 89 else 110)


@CARDS
def test_nothing_spills_but_wide_attention(capability: int) -> None:
    spilling = {case.name for case, resources in kernels(capability, "") if resources.spill_bytes}
    assert all(name.startswith("flash_attention/") for name in spilling)
    if capability == 90:
        assert not any("head64" in name for name in spilling)
        # Per thread and kernel, of 128 accumulators; about one in 60 instructions of its main loop.
        ((_, largest), _) = kernels(90, "flash_attention/dkdv/bf16/head128")[:2]
        assert largest.spill_bytes <= 128


@CARDS
@pytest.mark.parametrize(
    "name",
    ["swiglu/", "adamw_int8/fp32/grad_bf16", "adamw_int8/int8/grad_bf16", "int8_quantize/bf16/stochastic/dynamic"],
)
def test_half_of_a_multiprocessors_threads_or_more_can_be_there_at_a_time(capability: int, name: str) -> None:
    for _, resources in kernels(capability, name):
        assert resources.registers <= 64
        # Of 8-bit groups only their largest magnitudes or scales change threads, 4 bytes of each warp or group; random
        # words arise where they are needed.
        assert resources.shared_bytes == (0 if name == "swiglu/" else 32)


@CARDS
def test_two_tiles_of_an_imagined_paths_weights_are_on_their_way(capability: int) -> None:
    found = kernels(capability, "rssm_gru/")
    assert {case.constants["ROWS"] for case, _ in found} == {1, 4}
    assert all(resources.shared_bytes >= 2 * 4 * case.constants["TILE"] for case, resources in found)


@CARDS
@pytest.mark.parametrize(
    ("name", "programs"), [("encode_state", 4), ("moment_statistics/fp32", 4), ("training_state/fp32_and_codes", 3)]
)
def test_a_multiprocessor_holds_several_programs_that_sum_moments(capability: int, name: str, programs: int) -> None:
    for case, resources in kernels(capability, f"state_encoding/{name}"):
        assert REGISTERS // (resources.registers * 32 * case.num_warps) >= programs


@pytest.mark.parametrize("capability", [*CAPABILITIES, 75, 100])
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
@pytest.mark.parametrize("head_dim", [1, 64, 80, 96, 100, 128])
def test_blocks_are_such_as_the_attention_kernels_can_work_with(capability: int, kernel: str, head_dim: int) -> None:
    config = launch_config(capability, kernel, head_dim)
    if kernel != "dkdv":  # a key block must not reach over the first query of its query block
        assert config.block_m % config.block_n == 0
    assert config.num_warps in {4, 8}
