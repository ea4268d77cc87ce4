"""The examples run as they stand, and every public name has one."""

import runpy
from pathlib import Path

import pytest

import hybridtrain
from hybridtrain import recommendation

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "dry_run": "fits: True",
    "train": "step 3: loss",
    "virtual_gpu": "NVIDIA GeForce RTX 4090: fits",
    "estimate_memory": "largest batch: ",
    "load_config": "did you mean 'gpt2-small'?",
    "recommend": "tokens/s",
}


def test_every_script_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_an_example_says_what_it_promises(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recommendation, "LEVELS", recommendation.LEVELS[:1])  # the search itself is tested elsewhere
    monkeypatch.setattr(recommendation, "ARRANGEMENTS", recommendation.ARRANGEMENTS[:1])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out


def test_every_public_name_is_there_and_documented() -> None:
    for name in dir(hybridtrain):
        assert getattr(hybridtrain, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'train_all'"):
        _ = hybridtrain.train_all
