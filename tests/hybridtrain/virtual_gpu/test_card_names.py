import re

import pytest

from hybridtrain.errors import ConfigError
from hybridtrain.virtual_gpu.cards.card import card_catalogue, find_card


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        find_card(name)
    (fault,) = caught.value.faults
    return fault


def suggested(name: str) -> list[str]:
    return re.findall("'([^']+)'", refusal(name).partition("did you mean ")[2])


@pytest.mark.parametrize(
    ("asked", "hints"),
    [
        ("rtx-4060-ti", ["rtx-4060-ti-8gb", "rtx-4060-ti-16gb"]),
        ("rtx-4060-ti-16", []),
        ("RTX 4060 Ti 16 GB", ["rtx-4060-ti-16gb"]),
        ("rtx-3080", ["rtx-3080-10gb", "rtx-3080-12gb"]),
        ("rtx-3060", ["rtx-3060-12gb"]),
        ("NVIDIA GeForce RTX 4090", ["rtx-4090"]),
        ("4090", ["rtx-4090"]),
        ("rtx-3090ti", ["rtx-3090-ti"]),
        ("rtx-4090-24gb", ["rtx-4090"]),
        ("rtx-4090-48gb", []),
        ("rtx-2080-ti-22gb", []),
        ("rtx-3050", []),
        ("rtx-5090-mobile", ["rtx-5090-laptop-24gb"]),
        ("rtx-6000", []),
        ("a100", ["a100-40gb", "a100-80gb"]),
        ("h100", ["h100-pcie", "h100-sxm", "h100-nvl"]),
        ("h100-80gb", ["h100-pcie", "h100-sxm"]),
        ("Tesla V100-SXM2-32GB", ["v100-32gb"]),
        ("t4-16gb", ["t4"]),
        ("l4-24gb", ["l4"]),
        ("", []),
    ],
)
def test_a_hint_names_only_cards_of_that_model_and_memory(asked: str, hints: list[str]) -> None:
    assert suggested(asked) == hints
    told = refusal(asked)
    assert told.endswith("Your own card: a .toml file with its figures.")
    assert hints or f"`hybridtrain list cards` names the {len(card_catalogue())} known ones" in told


def test_the_hint_for_a_card_spelled_otherwise_is_its_name() -> None:
    for name, card in card_catalogue().items():
        assert suggested(f"NVIDIA {name.replace('-', '_')}") == [name]
        assert name in suggested(card.name.upper())


@pytest.mark.parametrize(
    ("names", "beginning", "reason"),
    [
        (
            ["rx-7900-xtx", "mi210", "mi300x", "AMD Instinct MI250", "Radeon RX 9070 XT", "w7900", "gfx942", "9070-xt"],
            "a card of AMD's ROCm cannot be planned",
            "allocator settings",
        ),
        (["arc-b580", "a770", "gaudi2", "max-1550"], "a card of Intel's XPU cannot be planned", "workspaces"),
        (["m3-max", "apple-m2", "M1"], "Apple's MPS cannot be planned", "counted twice"),
        (["gb10", "dgx-spark", "NVIDIA GB10"], "GB10 (DGX Spark) cannot be planned as it is", "--host-memory"),
    ],
)
def test_cards_that_cannot_be_planned_are_refused_with_the_reason(
    names: list[str], beginning: str, reason: str
) -> None:
    for name in names:
        assert refusal(name).startswith(f"card '{name}': {beginning}")
        assert reason in refusal(name)
