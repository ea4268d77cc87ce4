import platform
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain.data.byte_tokens import decode_tokens, encode_bytes
from hybridtrain.data.corpus import Corpus, corpus_of_documents, embedded_corpus, split_tail
from hybridtrain.errors import DataError

DOCUMENTS = {f"folder/{index}.txt": f"document {index};".encode() * 3 for index in range(200)}


def corpus_of(documents: dict[str, bytes]) -> Corpus:
    return corpus_of_documents(documents, name="n", source="s")


def texts(tokens: np.ndarray) -> list[bytes]:
    return decode_tokens(tokens).split(b"\0")[:-1]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the standard library."""
    for index in range(100):
        path = tmp_path / f"package{index % 3}" / f"module{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"x = {index:04}\n")  # 9 bytes
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    return tmp_path


def test_the_embedded_corpus_is_large_and_split() -> None:
    corpus = embedded_corpus()
    total = corpus.train.size + corpus.validation.size
    assert 7_000_000 < total < 8_600_000
    assert 0.03 < corpus.validation.size / total < 0.25, "a tenth of the files, whose sizes differ"
    assert corpus.name == "embedded"
    assert corpus.source.startswith(f"{corpus.num_documents} files of the Python {platform.python_version()}")
    assert corpus.train.dtype == np.uint16
    assert b"def __init__(self" in decode_tokens(corpus.train)


def test_the_embedded_corpus_is_the_same_every_time() -> None:
    first, second = embedded_corpus(2**18), embedded_corpus(2**18)
    assert first.digest == second.digest
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.validation, second.validation)


@pytest.mark.usefixtures("library")
def test_max_bytes_bounds_the_text_and_takes_a_mixture() -> None:
    corpus = embedded_corpus(9 * 50 + 8)
    assert corpus.num_documents == 50
    assert corpus.train.size + corpus.validation.size == 50 * 10, "9 bytes and a separator each"
    packages = [int(text[4:]) % 3 for text in texts(corpus.train) + texts(corpus.validation)]
    assert np.bincount(packages, minlength=3).min() > 10, "17 of each expected; in folder order one would be missing"


def test_tests_packages_and_build_details_are_passed_over(library: Path) -> None:
    before = embedded_corpus()
    for name in (
        "test/a.py",
        "json/tests/a.py",
        "idlelib/idle_test/a.py",
        "site-packages/a.py",
        "dist-packages/a.py",
        "__pycache__/a.py",
        "config-3.11-x86_64/python-config.py",
        "_sysconfigdata__linux.py",
        "sitecustomize.py",
        "notes.txt",
        "json/empty.py",
    ):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("" if "empty" in name else "never read this\n")
    assert embedded_corpus().digest == before.digest
    (library / "testing.py").write_text("read this\n")
    assert embedded_corpus().num_documents == before.num_documents + 1


def test_a_python_without_sources_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    with pytest.raises(DataError, match=r"found no Python file .* name a text file"):
        embedded_corpus()


def test_each_document_is_whole_in_one_part() -> None:
    corpus = corpus_of(DOCUMENTS)
    train, validation = texts(corpus.train), texts(corpus.validation)
    assert sorted(train + validation) == sorted(DOCUMENTS.values())
    assert 8 <= len(validation) <= 35, "200 draws of one tenth: 20 +- 3.5 standard deviations of 4.2"
    assert corpus.num_documents == 200


def test_the_part_of_a_document_follows_its_path_alone() -> None:
    held_out = set(texts(corpus_of(DOCUMENTS).validation))
    more = DOCUMENTS | {f"more/{index}": f"another {index}".encode() for index in range(50)}
    assert held_out < set(texts(corpus_of(more).validation))


def test_the_order_of_the_mapping_does_not_matter() -> None:
    corpus, reverse = corpus_of(DOCUMENTS), corpus_of(dict(reversed(DOCUMENTS.items())))
    assert corpus.digest == reverse.digest
    np.testing.assert_array_equal(corpus.train, reverse.train)


def test_the_digest_follows_paths_contents_and_their_border() -> None:
    base = {"a": b"x" * 40, "b": b"y" * 40}
    digests = {
        corpus_of(documents).digest
        for documents in (
            base,
            base | {"b": b"y" * 39 + b"z"},
            {"a": b"x" * 40, "c": b"y" * 40},
            {"a": b"x" * 40, "by": b"y" * 39},
        )
    }
    assert len(digests) == 4


@pytest.mark.parametrize("count", range(2, 12))
def test_a_few_documents_still_give_two_parts(count: int) -> None:
    documents = {f"{index}.md": b"some words of text %d " % index * 3 for index in range(count)}
    corpus = corpus_of(documents)
    assert len(texts(corpus.train)) + len(texts(corpus.validation)) == count
    assert texts(corpus.train)
    assert texts(corpus.validation)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=40))
def test_equal_documents_are_on_one_side(numbers: list[int]) -> None:
    documents = {f"{index}.md": b"some words of text %d " % number for index, number in enumerate(numbers)}
    if len(set(numbers)) == 1:
        with pytest.raises(DataError, match="have the same content, so none can be held out"):
            corpus_of(documents)
        return
    corpus = corpus_of(documents)
    assert not set(texts(corpus.train)) & set(texts(corpus.validation))
    assert len(texts(corpus.train)) + len(texts(corpus.validation)) == len(numbers)


def test_two_documents_both_drawn_for_validation_still_give_two_parts() -> None:
    drawn = [path for path, text in DOCUMENTS.items() if text in texts(corpus_of(DOCUMENTS).validation)][:2]
    corpus = corpus_of({path: DOCUMENTS[path] for path in drawn})
    assert (len(texts(corpus.train)), len(texts(corpus.validation))) == (1, 1)


def test_one_document_keeps_its_last_tenth() -> None:
    content = bytes(range(1, 100))  # and its separator: 100 tokens
    corpus = corpus_of({"a": content})
    assert decode_tokens(corpus.train) == content[:90]
    assert decode_tokens(corpus.validation) == content[90:] + b"\0"
    assert corpus.num_documents == 1


@pytest.mark.parametrize("documents", [{"a": b"x" * 18}, {"a": b"x" * 4, "b": b"y" * 4}, {"a": b"", "b": b"y" * 90}])
def test_too_little_text_is_refused(documents: dict[str, bytes]) -> None:
    with pytest.raises(DataError, match=r"s: \d+ tokens to train and .*to validate on are too few; at least 20"):
        corpus_of(documents)


def test_the_tail_is_a_view() -> None:
    tokens = encode_bytes(b"x" * 20)
    train, validation = split_tail(tokens, "s")
    assert (train.size, validation.size) == (18, 2)
    assert np.shares_memory(train, tokens)
    assert np.shares_memory(validation, tokens)
    with pytest.raises(DataError, match="s: 19 tokens to train and to validate on are too few"):
        split_tail(tokens[1:], "s")
