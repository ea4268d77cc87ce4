import re
import tomllib
from dataclasses import replace
from importlib import resources
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtrain.config.decode import decode
from hybridtrain.config.encode import encode
from hybridtrain.errors import ConfigError
from hybridtrain.virtual_gpu.cards import card as card_module
from hybridtrain.virtual_gpu.cards.card import (
    MARGIN_SHARE,
    NOT_FOUND,
    Card,
    FitVerdict,
    card_catalogue,
    find_card,
    safe_context_mib,
    safe_memory_mib,
)

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


TABLES: dict[str, Any] = tomllib.loads(
    resources.files("hybridtrain.virtual_gpu.cards").joinpath("hardware.toml").read_text(encoding="utf-8")
)


def published_gib(source: str) -> tuple[float, float]:
    """Return the range that a source begins with; it goes on with where that was published."""
    found = re.match(r"(\d+\.\d+)(?: to (\d+\.\d+))? GiB\b.*(https://|public)", source, re.IGNORECASE)
    assert found, source
    return float(found[1]), float(found[2] or found[1])


def card(**changes: object) -> Card:
    return Card(**(tomllib.loads(HOME_MADE) | changes))


def faults_of(caught: pytest.ExceptionInfo[ValueError]) -> list[str]:
    return str(caught.value).splitlines()


def test_a_16_gb_card_in_bytes_and_rates() -> None:
    found = find_card("rtx-4070-ti-super")
    assert found.memory_bytes == 15929 * MIB
    assert found.context_bytes == 584 * MIB
    assert found.allocator_capacity_bytes == (15929 - 584) * MIB
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


@pytest.mark.parametrize("name", TABLES)
def test_memory_is_the_least_of_its_source_and_below_what_nvidia_smi_tells(name: str) -> None:
    table, item = TABLES[name], card_catalogue()[name]
    low, high = published_gib(table["memory_source"])
    assert item.memory_mib < item.nvidia_smi_mib == table["nvidia_smi_mib"]
    assert f"{item.memory_mib / 1024:.2f}" == f"{low:.2f}"
    assert item.memory_mib >= safe_memory_mib(item.nvidia_smi_mib)
    assert high - low <= MARGIN_SHARE * low


@pytest.mark.parametrize("name", TABLES)
def test_a_context_is_the_highest_of_its_source_or_that_of_its_generation(name: str) -> None:
    table, item = TABLES[name], card_catalogue()[name]
    if table["context_source"] != NOT_FOUND:
        low, high = published_gib(table["context_source"])
        assert item.context_mib == ceil(high * 1024)
        assert (high - low) * 1024 <= MARGIN_SHARE * item.memory_mib
    else:
        assert "context_mib" not in table
        assert item.context_mib == safe_context_mib(item.compute_capability)
        assert any(
            other.context_mib == item.context_mib
            for other in card_catalogue().values()
            if other.compute_capability == item.compute_capability and other.context_source != NOT_FOUND
        )
    assert item.context_mib <= safe_context_mib(item.compute_capability)


def test_a_card_without_sources_is_on_the_safe_side_and_says_so() -> None:
    assert safe_memory_mib(8188) == 8188 - 82 - 384
    unknown = card(memory_mib=7722, nvidia_smi_mib=8188, memory_source=NOT_FOUND)
    assert unknown.context_mib == 584  # of the RTX 4090
    assert unknown.source_note == (
        "Home-made: no published figure for capacity (7.54 GiB): a safe one is taken; "
        "its file states no source for CUDA context (584.00 MiB)"
    )
    assert card(compute_capability="7.5").context_mib == max(
        item.context_mib for item in card_catalogue().values() if item.family != "data_center"
    )
    known = card(memory_source="0.98 GiB", context_source="0.57 GiB")
    assert known.source_note == ""
    both = replace(known, memory_source="", context_source="").source_note
    assert both == "Home-made: its file states no source for capacity (1000.00 MiB) and CUDA context (584.00 MiB)"


def test_a_table_whose_memory_was_not_found_has_a_safe_one(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {name: value for name, value in TABLES["rtx-4060-ti-16gb"].items() if name != "memory_mib"}
    monkeypatch.setattr(card_module, "tables", lambda _file: TABLES | {"new": table | {"memory_source": NOT_FOUND}})
    found = card_catalogue.__wrapped__()["new"]
    assert found.memory_mib == safe_memory_mib(16380) < TABLES["rtx-4060-ti-16gb"]["memory_mib"]
    assert "no published figure for capacity (15.46 GiB) and CUDA context" in found.source_note


def test_sources_are_no_part_of_a_cards_identity() -> None:
    plain, sourced = card(), card(nvidia_smi_mib=1024, memory_source="0.98 GiB: a log", context_source="0.57 GiB")
    assert plain == sourced
    assert encode(plain) == encode(sourced)
    assert decode(Card, encode(sourced), source="test") == sourced
    assert card(memory_mib=999) != plain


@given(memory_mib=st.integers(600, 200_000), used=st.integers(0, 2**38))
def test_a_verdict_keeps_the_margin(memory_mib: int, used: int) -> None:
    item = card(memory_mib=memory_mib)
    verdict = item.verdict(used)
    assert (verdict is FitVerdict.FITS) == (used + round(MARGIN_SHARE * memory_mib * MIB) <= memory_mib * MIB)
    assert item.verdict(used, fits=False) is FitVerdict.NO
    assert (item.told(verdict) == "fits") == (verdict is FitVerdict.FITS)


def test_a_plan_within_the_margin_fits_barely_and_says_how_large_that_is() -> None:
    item = card()
    assert item.verdict(950 * MIB) is FitVerdict.FITS
    assert item.verdict(950 * MIB + 1) is FitVerdict.BARELY
    assert item.told(FitVerdict.BARELY) == (
        "fits barely, within the margin of 5 % for other drivers, libraries and a display (50.00 MiB)"
    )


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
    assert [fault.split(":")[0] for fault in faults_of(caught)] == ["memory_gbps", "pcie_gbps", "compute_capability"]


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
