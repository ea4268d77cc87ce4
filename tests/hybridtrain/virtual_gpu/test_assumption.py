"""Stated rules decide sizes that depend on computed values, and each use is listed."""

import pytest
import torch

from hybridtrain.virtual_gpu import VirtualGpu
from hybridtrain.virtual_gpu.facade.assumption import Assumption
from hybridtrain.virtual_gpu.facade.placeholders import DataDependentError


def test_stated_rules_decide_sizes() -> None:
    with VirtualGpu("rtx-4090", assume="keep=0.25,lengths=7") as gpu:
        scores = torch.randn(200, 40, device="cuda").matmul(torch.randn(40, 40, device="cuda"))
        mask = scores > 0
        assert scores[mask].shape == (2000,)
        assert mask.nonzero().shape == (2000, 2)
        assert torch.masked_select(scores, mask).shape == (2000,)
        assert mask.sum().item() == 7
        assert scores.sum().item() == 1.0
    rules = [use.rule for use in gpu.placeholders()]
    assert rules.count("assumed: keep=0.25") == 3
    assert rules.count("assumed: lengths=7") == 1
    assert all("test_assumption.py" in use.where for use in gpu.placeholders())


def test_without_a_rule_such_a_size_is_an_error() -> None:
    with VirtualGpu("rtx-4090", assume="lengths=7"):
        scores = torch.randn(200, 40, device="cuda").matmul(torch.randn(40, 40, device="cuda"))
        for select in (lambda: scores[scores > 0], scores.nonzero):
            with pytest.raises(DataDependentError, match="--assume keep"):
                select()


@pytest.mark.parametrize(
    "text", ["kep=1", "keep=0", "keep=1.5", "keep=x", "lengths=0", "lengths=2.5", "keep=1,keep=1", ""]
)
def test_bad_rules_are_one_clear_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"--assume .*; give keep=SHARE"):
        Assumption.parse(text)
