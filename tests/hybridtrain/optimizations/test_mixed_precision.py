"""Mixed precision: its claims for each kind of master, and for each phase."""

from typing import Any, Literal

import pytest

from hybridtrain.optimizations import MixedPrecision
from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim
from hybridtrain.plan.compose import compose
from hybridtrain.plan.placement import Codec, Placement


@pytest.mark.parametrize("master", ["float32", "split16", "absent"])
def test_it_claims_arithmetic_and_master(master: Literal["float32", "split16", "absent"]) -> None:
    assert list(MixedPrecision(master=master).claims()) == [
        Claim("compute_dtype", Codec.BFLOAT16),
        Claim("master.codec", Codec(master)),
    ]


EACH: dict[str, tuple[dict[str, Any], list[str]]] = {
    "fp32 but bf16 in predict": ({"active_phases": (Phase.PREDICT,)}, ["float32", "float32", "bfloat16", "float32"]),
    "the same by overrides": (
        {"warmup_dtype": "float32", "full_dtype": "float32", "correct_dtype": "float32"},
        ["float32", "float32", "bfloat16", "float32"],
    ),
    "two 16-bit types": ({"predict_dtype": "float16"}, ["bfloat16", "bfloat16", "float16", "bfloat16"]),
    "one of every kind": (
        {"warmup_dtype": "float32", "predict_dtype": "float16", "correct_dtype": "bfloat16"},
        ["float32", "bfloat16", "float16", "bfloat16"],
    ),
    "an override of an inactive phase": (
        {"active_phases": (Phase.FULL,), "correct_dtype": "float16"},
        ["float32", "bfloat16", "float32", "float16"],
    ),
}


@pytest.mark.parametrize("name", EACH)
def test_each_phase_has_its_own_element_type(name: str) -> None:
    settings, expected = EACH[name]
    plan = compose([MixedPrecision(**settings)])
    tables = [plan.for_phase(phase) for phase in Phase]
    assert [table.compute_dtype for table in tables] == [table.weight.codec for table in tables] == expected
    masters = [Codec.ABSENT if dtype == "float32" else Codec.FLOAT32 for dtype in expected]
    assert [table.master.codec for table in tables] == masters
    is_guest = expected[1] == "float32" != expected[2]
    assert plan.for_phase(Phase.PREDICT).master.placement is (Placement.HOST if is_guest else Placement.DEVICE)


def test_overrides_that_say_the_same_are_the_same_plan() -> None:
    said = MixedPrecision(**{f"{phase}_dtype": "float16" for phase in Phase})  # type: ignore[arg-type]
    assert list(said.claims()) == list(MixedPrecision(compute_dtype="float16").claims())


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (
            {f"{phase}_dtype": "float32" for phase in Phase},
            "^compute_dtype: float32 in every phase needs no mixed_precision",
        ),
        ({"predict_dtype": "float16", "master": "split16"}, "^master: 'split16' works with bfloat16 only"),
        ({"active_phases": ()}, "^active_phases: empty"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        MixedPrecision(**settings)
