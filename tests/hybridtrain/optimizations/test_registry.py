"""The registry of optimizations: every name leads to the class of that name."""

import dataclasses

import pytest

from hybridtrain.optimizations import OPTIMIZATIONS


@pytest.mark.parametrize("kind", OPTIMIZATIONS)
def test_a_kind_leads_to_a_frozen_dataclass_that_works_without_settings(kind: str) -> None:
    optimization = OPTIMIZATIONS[kind]
    assert optimization.kind == kind
    assert dataclasses.is_dataclass(optimization)
    assert optimization.__dataclass_params__.frozen
    assert list(optimization().claims())
