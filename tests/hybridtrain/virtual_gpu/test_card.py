import tomllib
from pathlib import Path

import pytest

from hybridtrain.errors import ConfigError
from hybridtrain.virtual_gpu.card import Card, card_catalogue, find_card

MIB = 2**20
HOME_MADE = """\
name = "Home-made"
memory_mib = 1000
compute_capability = "8.9"
tflops_bf16 = 100.0
tflops_fp32 = 50
memory_gbps = 500.0
pcie_gbps = 30.0
"""


def card(**changes: object) -> Card:
    return Card(**(tomllib.loads(HOME_MADE) | changes))


def faults_of(caught: pytest.ExceptionInfo[ValueError]) -> list[str]:
    return str(caught.value).splitlines()


def test_a_16_gb_card_in_bytes_and_rates() -> None:
    found = find_card("rtx-4070-ti-super")
    assert found.memory_bytes == 16376 * MIB
    assert found.context_bytes == 426 * MIB
    assert found.allocator_capacity_bytes == (16376 - 426) * MIB
    assert found.flops_per_second == {"bfloat16": 88.2e12, "float16": 88.2e12, "float32": 44.1e12}
    assert found.memory_bytes_per_second == 672.3e9
    assert found.bus_bytes_per_second == 31.5e9


def test_every_card_of_the_catalogue_is_another_one() -> None:
    cards = card_catalogue().values()
    assert len(cards) >= 14
    assert len({item.name for item in cards}) == len(cards)


def test_tensor_cores_are_never_slower_than_cuda_cores() -> None:
    for name, item in card_catalogue().items():
        assert item.flops_per_second["bfloat16"] > item.flops_per_second["float32"], name


# 4096 KiB x 2 + 16 KiB x 8 before Hopper, 4096 KiB x 8 from Hopper on (CublasHandlePool.cpp).
@pytest.mark.parametrize(
    ("capability", "num_bytes"),
    [
        ("7.5", 8_519_680),
        ("8.0", 8_519_680),
        ("8.6", 8_519_680),
        ("8.9", 8_519_680),
        ("9.0", 33_554_432),
        ("10.0", 33_554_432),
        ("12.0", 33_554_432),
    ],
)
def test_the_cublas_workspace_depends_on_the_generation(capability: str, num_bytes: int) -> None:
    assert card(compute_capability=capability).cublas_workspace_bytes == num_bytes


@pytest.mark.parametrize("name", ["memory_mib", "tflops_bf16", "tflops_fp32", "memory_gbps", "pcie_gbps"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_figure_that_is_not_positive_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        card(**{name: value})
    assert f"{name}: {value} must be above 0" in faults_of(caught)


@pytest.mark.parametrize("context_mib", [-1, 1000, 2000])
def test_a_context_that_leaves_nothing_is_refused(context_mib: int) -> None:
    with pytest.raises(ValueError, match="context_mib") as caught:
        card(context_mib=context_mib)
    assert faults_of(caught) == [f"context_mib: {context_mib} must be at least 0 and below memory_mib"]


@pytest.mark.parametrize("capability", ["", "ada", "8.9.1", "-8.9", "8,9", ".9", "8.", "\u00b2.0"])
def test_a_compute_capability_that_is_no_version_is_refused(capability: str) -> None:
    with pytest.raises(ValueError, match=r"must read like '8\.9'"):
        card(compute_capability=capability)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="pcie_gbps") as caught:
        card(memory_gbps=0, pcie_gbps=-2.0, compute_capability="?")
    assert [fault.split(":")[0] for fault in faults_of(caught)] == [
        "memory_gbps",
        "pcie_gbps",
        "compute_capability",
    ]


def test_a_card_of_ones_own_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(HOME_MADE)
    assert find_card(str(path)) == card()


def test_a_faulty_card_file_names_file_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(HOME_MADE.replace("memory_mib = 1000", 'memory_mib = "16 GB"\nram = 3'))
    with pytest.raises(ConfigError) as caught:
        find_card(str(path))
    assert caught.value.source == str(path)
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["$.ram", "$.memory_mib"]


def test_an_unknown_card_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(ConfigError, match="did you mean 'rtx-4070-ti-super'") as caught:
        find_card("rtx-4070-super")
    assert all(name in str(caught.value) for name in card_catalogue())
    assert ".toml" in str(caught.value)
