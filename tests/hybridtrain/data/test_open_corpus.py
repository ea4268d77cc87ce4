from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from hybridtrain.data.byte_tokens import decode_tokens
from hybridtrain.data.corpus import embedded_corpus, open_corpus, text_corpus
from hybridtrain.data.token_file import TokenFormat, open_token_file, write_token_file
from hybridtrain.errors import DataError

TEXT = "a few words, often enough; " * 10
WORDS = "Ein paar W\u00f6rter, oft genug. " * 10


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
    with pytest.raises(DataError, match=f"has no {missing}"):
        open_corpus(tmp_path, vocab_size=30)


def test_text_needs_a_vocabulary_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    for corpus in (None, path):
        with pytest.raises(DataError, match="needs 256 byte tokens, but the model's vocab_size is 255"):
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


def test_a_file_keeps_its_last_tenth_for_validation(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(WORDS, encoding="utf-8")
    corpus = text_corpus(path)
    assert decode_tokens(corpus.train) + decode_tokens(corpus.validation) == WORDS.encode() + b"\0"
    assert corpus.validation.size == (len(WORDS.encode()) + 1) // 10
    assert (corpus.name, corpus.num_documents, corpus.source) == ("book.txt", 1, f"text file {path}")


def test_a_folder_gives_one_document_per_text_file(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "sub/deep/c.py", "sub/no_suffix"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name} {WORDS}", encoding="utf-8")
    (tmp_path / "sub/picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin1.txt").write_bytes("W\u00f6rter".encode("latin-1"))
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_text(WORDS)
    (tmp_path / "sub/empty.txt").touch()
    (tmp_path / ".hidden").write_text(WORDS)
    corpus = text_corpus(tmp_path)
    found = (decode_tokens(corpus.train) + decode_tokens(corpus.validation)).split(b"\0")[:-1]
    assert sorted(text.split()[0] for text in found) == [
        b"a.txt",
        b"b.md",
        b"sub/deep/c.py",
        b"sub/no_suffix",
    ]
    assert (corpus.name, corpus.num_documents) == (tmp_path.name, 4)
    assert corpus.source == f"4 text files below {tmp_path}, 2 other files ignored"


def test_a_folder_is_the_same_corpus_wherever_it_lies(tmp_path: Path) -> None:
    digests = set()
    for folder in ("here", "there"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        for index in range(5):
            (tmp_path / folder / "sub" / f"{index}.txt").write_text(f"{index} {WORDS}", encoding="utf-8")
        digests.add(text_corpus(tmp_path / folder).digest)
    assert len(digests) == 1


def test_the_current_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(WORDS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert text_corpus(Path()).name == tmp_path.name


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "a.txt contains no UTF-8 text and no records"), ("too short", "10 tokens to train .*are too few")],
)
def test_an_empty_or_tiny_file_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        text_corpus(path)


def test_a_folder_without_text_says_what_it_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\0")
    with pytest.raises(
        DataError, match=r"contains no UTF-8 text and no records \(a\.png: no UTF-8 text\); give a text file"
    ):
        text_corpus(tmp_path)


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.txt").touch()
    monkeypatch.setattr("hybridtrain.data.documents.open_plain", refuse)  # a chmod would not stop the superuser
    for corpus in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(DataError, match=r"a.txt cannot be read \(Permission denied\); check its permissions"):
            text_corpus(corpus)
