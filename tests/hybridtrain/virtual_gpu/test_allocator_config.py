"""The allocator's settings: their limits are torch's own, asked from torch's parser."""

import json
import subprocess
import sys
from typing import TypedDict

import pytest

from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig

MIB = 2**20


class Settings(TypedDict, total=False):
    expandable_segments: bool
    large_segment_size: int
    max_split_size: int
    max_non_split_rounding: int
    roundup_power2_divisions: int
    garbage_collection_threshold: float


ALLOWED: dict[str, Settings] = {
    "large_segment_size_mb:11": {"large_segment_size": 11 * MIB},
    "large_segment_size_mb:32": {"large_segment_size": 32 * MIB},  # max_non_split_rounding stays 20 MiB
    "max_split_size_mb:20": {"max_split_size": 20 * MIB},
    "large_segment_size_mb:32,max_split_size_mb:32": {"large_segment_size": 32 * MIB, "max_split_size": 32 * MIB},
    "max_non_split_rounding_mb:21": {"max_non_split_rounding": 21 * MIB},
    "roundup_power2_divisions:1": {"roundup_power2_divisions": 1},
    "roundup_power2_divisions:16": {"roundup_power2_divisions": 16},
    "garbage_collection_threshold:0.001": {"garbage_collection_threshold": 0.001},
    "garbage_collection_threshold:0.999": {"garbage_collection_threshold": 0.999},
    "expandable_segments:True,large_segment_size_mb:64": {"expandable_segments": True, "large_segment_size": 64 * MIB},
}
REFUSED: dict[str, Settings] = {
    "large_segment_size_mb:10": {"large_segment_size": 10 * MIB},
    "max_split_size_mb:19": {"max_split_size": 19 * MIB},
    "large_segment_size_mb:32,max_split_size_mb:31": {"large_segment_size": 32 * MIB, "max_split_size": 31 * MIB},
    "max_non_split_rounding_mb:19": {"max_non_split_rounding": 19 * MIB},
    "large_segment_size_mb:32,max_non_split_rounding_mb:31": {
        "large_segment_size": 32 * MIB,
        "max_non_split_rounding": 31 * MIB,
    },
    "roundup_power2_divisions:3": {"roundup_power2_divisions": 3},
    "garbage_collection_threshold:1.0": {"garbage_collection_threshold": 1.0},
    "garbage_collection_threshold:-0.1": {"garbage_collection_threshold": -0.1},
}
# Torch's text form cannot say these, or a card refuses them only when memory is mapped.
REFUSED_HERE: list[Settings] = [
    {"large_segment_size": 20 * MIB + 1},
    {"max_split_size": 20 * MIB + 512},
    {"max_non_split_rounding": 20 * MIB + 512},
    {"max_split_size": -MIB},
    {"roundup_power2_divisions": -2},
    {"large_segment_size": 21 * MIB, "expandable_segments": True},
]

# Torch keeps settings for the whole process and cannot take all of them back, so another one tries them.
ASK_TORCH = """
import json, sys
import torch
verdicts = {}
for text in json.load(sys.stdin):
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    try:
        torch._C._accelerator_setAllocatorSettings(text)
        verdicts[text] = True
    except ValueError:
        verdicts[text] = False
json.dump(verdicts, sys.stdout)
"""


@pytest.fixture(scope="module")
def torch_allows() -> dict[str, bool]:
    finished = subprocess.run(
        [sys.executable, "-c", ASK_TORCH],
        input=json.dumps([*ALLOWED, *REFUSED]),
        capture_output=True,
        text=True,
        check=True,
    )
    verdicts: dict[str, bool] = json.loads(finished.stdout)
    return verdicts


@pytest.mark.parametrize("text", ALLOWED)
def test_torch_allows_what_is_allowed(text: str, torch_allows: dict[str, bool]) -> None:
    assert AllocatorConfig(**ALLOWED[text]).to_environment() == text
    assert torch_allows[text]


@pytest.mark.parametrize("text", REFUSED)
def test_torch_refuses_what_is_refused(text: str, torch_allows: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match=[*REFUSED[text]][-1]):
        AllocatorConfig(**REFUSED[text])
    assert not torch_allows[text]


@pytest.mark.parametrize("values", REFUSED_HERE, ids=str)
def test_what_no_card_could_do_is_refused(values: Settings) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        AllocatorConfig(**values)


def test_environment_names_only_what_differs_from_the_defaults() -> None:
    assert not AllocatorConfig().to_environment()
    config = AllocatorConfig(
        expandable_segments=True,
        large_segment_size=32 * MIB,
        max_split_size=64 * MIB,
        max_non_split_rounding=40 * MIB,
        roundup_power2_divisions=8,
        garbage_collection_threshold=0.75,
    )
    assert config.to_environment() == (
        "expandable_segments:True,large_segment_size_mb:32,max_split_size_mb:64,max_non_split_rounding_mb:40,"
        "roundup_power2_divisions:8,garbage_collection_threshold:0.75"
    )
