from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from hybridtrain.data.corpus import embedded_corpus, open_corpus, text_corpus
from hybridtrain.data.token_file import TokenFormat, open_token_file, write_token_file
from hybridtrain.errors import DataError

TEXT = "a few words, often enough; " * 10


def write_tokens(path: Path, count: int) -> None:
    write_token_file(path, np.arange(count), TokenFormat.LLMC_GPT2)


def test_no_path_is_the_embedded_corpus() -> None:
    assert open_corpus(None, vocab_size=50257).digest == embedded_corpus().digest


def test_a_text_file_and_a_folder_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    for corpus in (path, tmp_path):
        assert open_corpus(corpus, vocab_size=256).source == text_corpus(corpus).source


def test_a_token_file_keeps_its_last_tenth(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    write_tokens(path, 30)
    corpus = open_corpus(path, vocab_size=30)
    assert corpus.train.tolist() == list(range(27))
    assert corpus.validation.tolist() == [27, 28, 29]
    assert corpus.digest == open_token_file(path, vocab_size=30).digest
    assert (corpus.name, corpus.num_documents) == ("t.bin", 0)
    assert corpus.source == f"token file {path} (llmc_gpt2)"


def test_a_folder_with_train_and_val_uses_both(tmp_path: Path) -> None:
    write_tokens(tmp_path / "train.bin", 30)
    write_tokens(tmp_path / "val.bin", 5)
    corpus = open_corpus(tmp_path, vocab_size=30)
    assert corpus.train.tolist() == list(range(30))
    assert corpus.validation.tolist() == list(range(5))
    digests = [open_token_file(tmp_path / name, vocab_size=30).digest.encode() for name in ("train.bin", "val.bin")]
    assert corpus.digest == sha256(b"".join(digests)).hexdigest()
    assert corpus.name == tmp_path.name


@pytest.mark.parametrize(("present", "missing"), [("train.bin", "val.bin"), ("val.bin", "train.bin")])
def test_half_a_token_folder_says_which_file_is_missing(tmp_path: Path, present: str, missing: str) -> None:
    write_tokens(tmp_path / present, 30)
    with pytest.raises(DataError, match=f"lacks {missing}"):
        open_corpus(tmp_path, vocab_size=30)


def test_text_needs_a_vocabulary_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    for corpus in (None, path):
        with pytest.raises(DataError, match="read as 256 byte tokens, but the vocabulary has 255"):
            open_corpus(corpus, vocab_size=255)


def test_a_token_file_must_fit_the_vocabulary(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t.bin", 30)
    with pytest.raises(DataError, match="a vocabulary of 29 allows 0 to 28"):
        open_corpus(tmp_path / "t.bin", vocab_size=29)


def test_a_tiny_token_file_cannot_be_split(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t.bin", 19)
    with pytest.raises(DataError, match="19 tokens to train and to validate on are too few"):
        open_corpus(tmp_path / "t.bin", vocab_size=30)


@pytest.mark.parametrize("name", ["trian.bin", "trian.txt"])
def test_a_missing_path_names_the_nearest_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.bin").touch()
    with pytest.raises(DataError, match=r"does not exist; did you mean 'train\.bin'"):
        open_corpus(tmp_path / name, vocab_size=256)
