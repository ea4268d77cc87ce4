"""Optimizers are found by being there, and one that is asked for by kind is imported alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from hybridtrain import optim
from hybridtrain.optim import OPTIMIZERS
from hybridtrain.optim.lion import Lion

_DRY_RUN = """\
import sys
from hybridtrain import Workload, compose, dry_run, find_card
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import OPTIMIZERS
from hybridtrain.trainer_config import TrainerConfig
model = ModelConfig(
    family="gpt2", vocab_size=64, max_seq_len=16, num_blocks=2, width=32, num_heads=2, num_kv_heads=2, ffn_width=64,
    tied=True,
)
config = TrainerConfig(optimizer=OPTIMIZERS[sys.argv[1]]())
dry_run(model, compose([]), find_card("rtx-4090"), Workload(micro_batch_size=1, seq_len=8), config=config)
print(*sorted(name for name in sys.modules if name.startswith(("hybridtrain.optim.", "hybridtrain.hybrid"))))
"""


def test_a_plan_imports_its_optimizer_alone_and_no_hybrid_training() -> None:
    done = subprocess.run([sys.executable, "-c", _DRY_RUN, "lion"], capture_output=True, text=True, check=True)
    # AdamW is what a training file without an optimizer means, so that it is always there.
    assert done.stdout.split() == [f"hybridtrain.optim.{name}" for name in ("adamw", "lion", "optimizer")]


def test_a_file_of_another_name_than_its_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(optim.__file__).with_name("lion.py").read_text(encoding="utf-8")
    (tmp_path / "tiger.py").write_text(source.replace('"lion"', '"puma"'))
    monkeypatch.setattr(optim, "__path__", [str(tmp_path)])
    optim._files.cache_clear()
    try:
        with pytest.raises(TypeError, match=r"optim\.tiger: kind 'puma' must be the file's name"):
            list(OPTIMIZERS)
    finally:
        optim._files.cache_clear()
        sys.modules.pop("hybridtrain.optim.tiger", None)


def test_classes_are_found_by_kind_and_by_name() -> None:
    assert OPTIMIZERS["lion"] is optim.Lion is Lion
    assert "muon" in OPTIMIZERS
    assert "optimizer" not in OPTIMIZERS, "its file has what all of them share"
    assert len(OPTIMIZERS) == len(list(OPTIMIZERS)) >= 5
    with pytest.raises(AttributeError, match="Tiger"):
        _ = optim.Tiger
    with pytest.raises(KeyError):
        _ = OPTIMIZERS["tiger"]
