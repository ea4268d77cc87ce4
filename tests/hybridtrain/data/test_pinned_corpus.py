from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.data import pinned_corpus as module
from hybridtrain.data.pinned_corpus import PINNED, pinned_corpus
from hybridtrain.errors import DataError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _forgets() -> None:
    pinned_corpus.cache_clear()


@pytest.mark.parametrize(("name", "least"), [("sympy", 23_000_000), ("networkx", 5_900_000)])
def test_a_pinned_text_is_what_was_pinned(name: str, least: int) -> None:
    corpus = pinned_corpus(name)
    assert corpus.digest == PINNED[name][1]
    assert corpus.train.size > least
    assert corpus.train.size // 20 < corpus.validation.size < corpus.train.size // 5


def test_the_constraints_pin_the_same_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert {f"{name}=={version}" for name, (version, _) in PINNED.items()} <= set(lines)


class Package:
    version, files = "1.0", ()


@pytest.mark.parametrize(
    ("found", "message"),
    [(None, "networkx is not installed"), (Package, "networkx has version 1.0; unmodified version")],
)
def test_another_package_is_refused(found: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> Any:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "distribution", distribution)
    with pytest.raises(DataError, match=message):
        pinned_corpus("networkx")


def test_an_edited_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make = module.corpus_of_documents

    def edited(documents: dict[str, bytes], **about: Any) -> Any:
        path = next(iter(documents))
        return make(documents | {path: documents[path] + b"#"}, **about)

    monkeypatch.setattr(module, "corpus_of_documents", edited)
    with pytest.raises(DataError, match="networkx has files with the digest"):
        pinned_corpus("networkx")
