from pathlib import Path

import pytest

from hybridtrain.data.byte_tokens import decode_tokens
from hybridtrain.data.corpus import text_corpus
from hybridtrain.errors import DataError

TEXT = "Ein paar W\u00f6rter, oft genug. " * 10


def test_a_file_keeps_its_last_tenth_for_validation(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(TEXT, encoding="utf-8")
    corpus = text_corpus(path)
    assert decode_tokens(corpus.train) + decode_tokens(corpus.validation) == TEXT.encode() + b"\0"
    assert corpus.validation.size == (len(TEXT.encode()) + 1) // 10
    assert (corpus.name, corpus.num_documents, corpus.source) == ("book.txt", 1, f"text file {path}")


def test_a_folder_gives_one_document_per_text_file(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "sub/deep/c.py", "sub/no_suffix"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name} {TEXT}", encoding="utf-8")
    (tmp_path / "sub/picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin1.txt").write_bytes("W\u00f6rter".encode("latin-1"))
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_text(TEXT)
    (tmp_path / "sub/empty.txt").touch()
    (tmp_path / ".hidden").write_text(TEXT)
    corpus = text_corpus(tmp_path)
    found = (decode_tokens(corpus.train) + decode_tokens(corpus.validation)).split(b"\0")[:-1]
    assert sorted(text.split()[0] for text in found) == [
        b"a.txt",
        b"b.md",
        b"sub/deep/c.py",
        b"sub/no_suffix",
    ]
    assert (corpus.name, corpus.num_documents) == (tmp_path.name, 4)
    assert corpus.source == f"4 text files below {tmp_path}, 2 other files skipped"


def test_a_folder_is_the_same_corpus_wherever_it_lies(tmp_path: Path) -> None:
    digests = set()
    for folder in ("here", "there"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        for index in range(5):
            (tmp_path / folder / "sub" / f"{index}.txt").write_text(f"{index} {TEXT}", encoding="utf-8")
        digests.add(text_corpus(tmp_path / folder).digest)
    assert len(digests) == 1


def test_the_current_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert text_corpus(Path()).name == tmp_path.name


def test_a_missing_path_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").touch()
    with pytest.raises(DataError, match=r"does not exist; did you mean 'shakespeare.txt'\?"):
        text_corpus(tmp_path / "shakespear.txt")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"fine until here: \xe9t\xe9", "byte 17 is 0xe9"),
        (b"cut in a letter \xc3", "byte 16 is 0xc3"),
        (b"ab\0cd", "byte 2 is NUL"),
    ],
)
def test_a_file_that_is_no_text_names_the_byte(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"a.txt is no UTF-8 text: {words}; save it as UTF-8"):
        text_corpus(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "a.txt holds no UTF-8 text and no records"), ("too short", "10 tokens to train .*are too few")],
)
def test_an_empty_or_tiny_file_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        text_corpus(path)


def test_a_folder_without_text_says_what_it_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\0")
    with pytest.raises(
        DataError, match=r"holds no UTF-8 text and no records \(a\.png: no UTF-8 text\); name a text file"
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
