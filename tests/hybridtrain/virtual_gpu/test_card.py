import re
import tomllib
from dataclasses import replace
from importlib import resources
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

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
    CardLimit,
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
    assert found.flops_per_second == {
        "bfloat16": 88.2e12,
        "float16": 88.2e12,
        "float32": 44.1e12,
        "float8_e4m3fn": 176.4e12,
        "float8_e5m2": 176.4e12,
        "int8": 352.8e12,
    }
    assert found.memory_bytes_per_second == 672.3e9
    assert found.bus_bytes_per_second == 31.5e9


def test_every_card_of_the_catalogue_is_another_one() -> None:
    cards = card_catalogue().values()
    assert len(cards) >= 50
    assert len({(item.name, item.nvidia_smi_mib) for item in cards}) == len(cards)


def test_tensor_cores_are_never_slower_than_cuda_cores() -> None:
    for name, item in card_catalogue().items():
        rates = item.flops_per_second
        assert rates["float16"] > rates["float32"], name
        assert rates["bfloat16"] == (rates["float32"] if item.capability < (8, 0) else rates["float16"]), name


class Generation(NamedTuple):
    """Of a compute capability, from NVIDIA's whitepapers."""

    cores: int
    """CUDA cores of a multiprocessor."""
    most_sms: int
    ghz: tuple[float, float]
    tensor: tuple[float, float]
    """16-bit rate of tensor cores with fp32 accumulation over that of fp32: of GeForce cards, of others."""
    gbps_per_sm: tuple[float, float]
    buses: set[float]
    years: tuple[int, int]


GENERATIONS = {
    "7.0": Generation(64, 80, (1.5, 1.6), (8, 8), (11, 12), {15.8}, (2017, 2018)),
    "7.5": Generation(64, 72, (1.5, 1.8), (4, 8), (8, 10), {15.8}, (2018, 2020)),
    "8.0": Generation(64, 108, (1.4, 1.5), (16, 16), (14, 19), {31.5}, (2020, 2021)),
    "8.6": Generation(128, 84, (1.5, 1.9), (2, 4), (7.5, 13.1), {15.8, 31.5}, (2020, 2022)),
    "8.9": Generation(128, 142, (2.0, 2.7), (2, 4), (5, 12), {15.8, 31.5}, (2022, 2024)),
    "9.0": Generation(128, 132, (1.7, 2.3), (14.8, 14.8), (17, 52), {63.0, 450.0}, (2022, 2024)),
    "10.0": Generation(128, 148, (1.9, 2.1), (30, 30), (50, 54), {63.0}, (2024, 2026)),
    "10.3": Generation(128, 148, (1.9, 2.1), (30, 30), (50, 54), {63.0}, (2025, 2026)),
    "12.0": Generation(128, 188, (2.1, 2.7), (2, 4), (8, 15), {31.5, 63.0}, (2025, 2026)),
}
OTHER_TENSOR = {"a10g": 2, "l40": 2, "l20": 2, "h20": 148 / 44, "h100-nvl": 835 / 60}
"""Cards whose tensor cores the vendor slows down, by their data sheets."""


def implausible(name: str, table: dict[str, Any]) -> list[str]:
    """Return the keys of an entry that do not suit its generation."""
    item = decode(Card, table if "memory_mib" in table else table | {"memory_mib": 1000}, source=name)
    known = GENERATIONS[item.compute_capability]
    is_geforce = "GeForce" in item.name
    tensor = table.get("tflops_bf16") or table["tflops_fp16"]
    ratio = OTHER_TENSOR.get(name, known.tensor[0 if is_geforce else 1])
    clock_ghz = item.tflops_fp32 * 1e3 / (2 * known.cores * item.sms)
    told = re.search(r"-(\d+)gb$", name)
    low, high = known.gbps_per_sm
    holds = {
        "sms": item.sms <= known.most_sms,
        "tflops_fp32": known.ghz[0] <= clock_ghz <= known.ghz[1],
        "tflops of tensor cores": abs(tensor / item.tflops_fp32 / ratio - 1) < 0.02,  # rounded in data sheets
        "tops_int8": not item.tops_int8 or abs(item.tops_int8 / tensor / (4 if is_geforce else 2) - 1) < 0.02,
        "memory_gbps": low <= item.memory_gbps / item.sms <= high,
        "pcie_gbps": item.pcie_gbps in known.buses,
        "year": known.years[0] <= item.year <= known.years[1],
        "l2_mib": 2 <= item.l2_mib <= 128,
        "nvidia_smi_mib": told is None or 0.88 < item.nvidia_smi_mib / 1024 / int(told[1]) <= 1.03,
    }
    return [key for key, is_so in holds.items() if not is_so]


@pytest.mark.parametrize("name", TABLES)
def test_an_entry_suits_its_generation(name: str) -> None:
    assert implausible(name, TABLES[name]) == []


@pytest.mark.parametrize(
    ("key", "factor"),
    [("sms", 2), ("tflops_fp32", 1.1), ("tops_int8", 1.1), ("memory_gbps", 10), ("pcie_gbps", 2.1), ("l2_mib", 1000)],
)
def test_a_typing_error_in_an_entry_is_found(key: str, factor: float) -> None:
    for name, table in TABLES.items():
        if key in table:
            wrong = table | {key: type(table[key])(factor * table[key])}
            assert implausible(name, wrong), name


def test_a_card_without_bfloat16_tensor_cores_is_priced_at_the_rate_of_fp32_and_says_so() -> None:
    item = find_card("t4")
    assert item.flops_per_second == {"bfloat16": 8.1e12, "float16": 65e12, "float32": 8.1e12, "int8": 130e12}
    assert item.note == (
        "Tesla T4: no tensor cores for bfloat16: it is priced at the rate of fp32, 8.1 TFLOPS (float16: 65)"
    )
    assert CardLimit.WHEELS not in item.limits
    assert "cu126" in find_card("v100-32gb").note
    assert decode(Card, encode(item), source="test") == item
    with pytest.raises(
        ValueError, match=r"tflops_bf16: 65\.0 must be left out.*give the rate of float16 as tflops_fp16"
    ):
        card(compute_capability="7.5", tflops_bf16=65.0)
    with pytest.raises(ValueError, match="tflops_bf16: missing"):
        card(tflops_bf16=None)
    old = card(compute_capability="6.1", tflops_bf16=None)  # no tensor cores at all
    assert set(old.flops_per_second.values()) == {50e12}


def test_a_rate_of_float16_changes_no_text_of_other_cards() -> None:
    assert "tflops_fp16" not in encode(card())
    assert "year" not in encode(find_card("rtx-4090"))


@pytest.mark.parametrize("name", TABLES)
def test_memory_is_the_least_of_its_source_and_below_what_nvidia_smi_tells(name: str) -> None:
    table, item = TABLES[name], card_catalogue()[name]
    assert item.memory_mib < item.nvidia_smi_mib == table["nvidia_smi_mib"]
    if table["memory_source"] == NOT_FOUND:
        assert "memory_mib" not in table
        assert item.memory_mib == safe_memory_mib(item.nvidia_smi_mib)
        return
    low, high = published_gib(table["memory_source"])
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
        known = [other for other in card_catalogue().values() if other.context_source != NOT_FOUND]
        alike = [other for other in known if other.compute_capability == item.compute_capability]
        assert item.context_mib == max(other.context_mib for other in alike or known)
    assert item.context_mib <= safe_context_mib(item.compute_capability)


def test_a_card_without_sources_is_on_the_safe_side_and_says_so() -> None:
    assert safe_memory_mib(8188) == 8188 - 82 - 384
    unknown = card(memory_mib=7722, nvidia_smi_mib=8188, memory_source=NOT_FOUND)
    assert unknown.context_mib == 584  # of the RTX 4090
    assert unknown.note == (
        "Home-made: no published figure for capacity (7.54 GiB): a safe one is taken; "
        "its file states no source for CUDA context (584.00 MiB)"
    )
    assert card(compute_capability="11.0").context_mib == 973  # the largest of all
    known = card(memory_source="0.98 GiB", context_source="0.57 GiB")
    assert known.note == ""
    both = replace(known, memory_source="", context_source="").note
    assert both == "Home-made: its file states no source for capacity (1000.00 MiB) and CUDA context (584.00 MiB)"


def test_a_table_whose_memory_was_not_found_has_a_safe_one(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {name: value for name, value in TABLES["rtx-4060-ti-16gb"].items() if name != "memory_mib"}
    monkeypatch.setattr(card_module, "tables", lambda _file: TABLES | {"new": table | {"memory_source": NOT_FOUND}})
    found = card_catalogue.__wrapped__()["new"]
    assert found.memory_mib == safe_memory_mib(16380) < TABLES["rtx-4060-ti-16gb"]["memory_mib"]
    assert "no published figure for capacity (15.46 GiB) and CUDA context" in found.note


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
    assert card(compute_capability=capability, tflops_bf16=50.0).cublas_workspace_bytes == num_bytes


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
