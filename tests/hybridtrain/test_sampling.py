from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridtrain.data.byte_tokens import encode_bytes
from hybridtrain.errors import HybridTrainError
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.plan.compose import compose
from hybridtrain.sampling import sample_text
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from numerics import assert_bitwise
from tiny_models import GPT2_TIED_DROPOUT

MODEL = replace(GPT2_TIED_DROPOUT, vocab_size=300, max_seq_len=8, dropout=0.5)
CERTAIN = 1e4
"""A logit that leaves nothing to chance: exp(-1e4 / 0.8) is 0 in float32."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads gain nothing on tiny tensors and wait for each other on a shared machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_trainer(vocab_size: int = MODEL.vocab_size) -> Trainer:
    config = replace(MODEL, vocab_size=vocab_size)
    return Trainer(config, compose([]), TrainerConfig(), DirectTransfer(torch.device("cpu")))


def test_a_seed_gives_one_text_and_another_seed_another() -> None:
    texts = [sample_text(new_trainer(), "a", num_tokens=40, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_prompt_comes_first_and_every_byte_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer()
    always(monkeypatch, trainer, b"z")
    assert sample_text(trainer, "h\u00e9llo ", num_tokens=5, seed=0) == "h\u00e9llo zzzzz"


@pytest.mark.parametrize(("prompt", "text"), [("", "\n"), ("\n", "\n"), ("no more", "no more")])
def test_no_tokens_give_the_prompt(prompt: str, text: str) -> None:
    assert sample_text(new_trainer(), prompt, num_tokens=0, seed=0) == text


def test_only_the_last_positions_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer()
    windows = always(monkeypatch, trainer, b"z")
    sample_text(trainer, "0123456789", num_tokens=2, seed=0)
    assert windows == [[*encode_bytes(b"23456789")], [*encode_bytes(b"3456789z")]]


def test_tokens_that_are_no_bytes_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer()

    def forward(token_ids_BT: Tensor) -> Tensor:
        logits_BTV = torch.zeros(*token_ids_BT.shape, 300)
        logits_BTV[..., 256:] = CERTAIN
        logits_BTV[..., int(encode_bytes(b"b")[0])] = CERTAIN / 2
        return logits_BTV

    monkeypatch.setattr(trainer.executor, "forward", forward)
    assert sample_text(trainer, "a", num_tokens=3, seed=0) == "abbb"


def test_bytes_that_are_no_text_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer()
    always(monkeypatch, trainer, b"\xff")
    assert sample_text(trainer, "a", num_tokens=1, seed=0) == "a\ufffd"


def test_the_training_is_not_disturbed() -> None:
    trainer = new_trainer()
    before = {name: value.detach().clone() for name, value in trainer.model.named_unit_parameters()}
    random_state = torch.get_rng_state()
    sample_text(trainer, "a", num_tokens=4, seed=0)
    assert trainer.model.training
    assert_bitwise(torch.get_rng_state(), random_state)
    for name, value in trainer.model.named_unit_parameters():
        assert value.grad is None
        assert_bitwise(value.detach(), before[name], name)


def test_text_is_drawn_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer()
    drawn = []
    forward = trainer.executor.forward
    monkeypatch.setattr(trainer.executor, "forward", lambda ids: drawn.append(forward(ids)) or drawn[-1])
    for _ in range(2):
        sample_text(trainer, "abc", num_tokens=1, seed=0)
    assert_bitwise(drawn[0], drawn[1])


def test_a_vocabulary_without_all_bytes_draws_what_it_has() -> None:
    # As after training on a token file; "z" is byte token 89.
    assert sample_text(new_trainer(vocab_size=100), "z", num_tokens=3, seed=0).startswith("z")


def test_a_prompt_beyond_the_vocabulary_is_refused() -> None:
    # A newline, which is the default prompt, is byte token 198: no character-level vocabulary has it.
    with pytest.raises(HybridTrainError, match="vocab"):
        sample_text(new_trainer(vocab_size=65), "\n", num_tokens=3, seed=0)


def always(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, byte: bytes) -> list[list[int]]:
    """Make the model sure of one byte; return the list of windows it will be shown."""
    windows: list[list[int]] = []

    def forward(token_ids_BT: Tensor) -> Tensor:
        windows.append(token_ids_BT[0].tolist())
        logits_BTV = torch.zeros(*token_ids_BT.shape, MODEL.vocab_size)
        logits_BTV[..., int(encode_bytes(byte)[0])] = CERTAIN
        return logits_BTV

    monkeypatch.setattr(trainer.executor, "forward", forward)
    return windows
