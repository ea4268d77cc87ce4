import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hybridtrain.data.byte_tokens import encode_bytes
from hybridtrain.data.tokenizer import ByteTokenizer, open_tokenizer
from hybridtrain.errors import DataError
from tiny_tokenizers import BEGIN, END, END_TURN, SENTENCES, save_llama_tokenizer, save_tokenizer


def test_bytes_and_the_characters_they_stand_for() -> None:
    encoded = ByteTokenizer().encode(["h\u00e9!"])[0]
    np.testing.assert_array_equal(encoded.ids, encode_bytes("h\u00e9!".encode()))
    assert encoded.spans.tolist() == [[0, 1], [1, 2], [1, 2], [2, 3]]
    assert ByteTokenizer().decode(encoded.ids.tolist()) == "h\u00e9!"


@pytest.mark.parametrize("name", ["tok", "tok/tokenizer.json"])
def test_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    save_tokenizer(tmp_path / "tok")
    ours = open_tokenizer(str(tmp_path / name), vocab_size=300)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tok")
    texts = [*SENTENCES, f"a{END}b", "  two  spaces \n", "\u00fc\U0001f600"]
    for text, found in zip(texts, ours.encode(texts), strict=True):
        assert found.ids.tolist() == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(found.ids.tolist()) == text
    assert ours.eos_ids == ours.stop_ids == (theirs.eos_token_id,)
    assert ours.bos_ids == ()
    assert ours.special_tokens == {"eos_token": END, "bos_token": BEGIN}


def test_what_a_tokenizer_puts_before_a_text_is_put_before_a_document(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(save_tokenizer(tmp_path, adds_bos=True)), vocab_size=300)
    assert tokenizer.decode(tokenizer.bos_ids) == BEGIN
    assert tokenizer.encode(["a"])[0].ids[0] not in tokenizer.bos_ids


def test_spans_hold_the_white_space_of_a_token(tmp_path: Path) -> None:
    text = "def f(x):\n    return x"
    encoded = open_tokenizer(str(save_tokenizer(tmp_path)), vocab_size=300).encode([text])[0]
    assert encoded.spans[0, 0] == 0
    np.testing.assert_array_equal(encoded.spans[1:, 0], encoded.spans[:-1, 1])
    assert encoded.spans[-1, 1] == len(text)


def test_another_end_of_text_token(tmp_path: Path) -> None:
    folder = str(save_tokenizer(tmp_path))
    tokenizer = open_tokenizer(folder, vocab_size=300, eos_token=END_TURN)
    assert tokenizer.decode(tokenizer.eos_ids) == END_TURN
    assert tokenizer.digest != open_tokenizer(folder, vocab_size=300).digest
    with pytest.raises(DataError, match=r"eos_token: 'nope' is not a token of .*; use one"):
        open_tokenizer(folder, vocab_size=300, eos_token="nope")  # noqa: S106


@pytest.mark.parametrize(
    ("name", "vocab_size", "words"),
    [
        ("bos", 3, "adds token 3 to each document, but the model's vocab_size is 3; use the model's"),
        ("bytes", 100, "adds token 188 to each document, but the model's vocab_size is 100"),
        ("tokk", 300, "does not exist; did you mean 'tok'"),
        ("damaged.json", 300, "damaged.json is not a tokenizer of the library 'tokenizers'"),
        ("badly", 300, "tokenizer_config.json is not JSON"),
        ("half", 300, "tokenizer_config.json is not JSON .*surrogates not allowed"),
        ("empty", 300, "contains no tokenizer.json, and transformers cannot open it"),
    ],
)
def test_tokenizers_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, vocab_size: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "tok")
    save_tokenizer(tmp_path / "bos", adds_bos=True)
    (save_tokenizer(tmp_path / "badly") / "tokenizer_config.json").write_text("{")
    (save_tokenizer(tmp_path / "half") / "tokenizer_config.json").write_text('{"eos_token": "\\ud800"}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.json").write_text("{}")
    with pytest.raises(DataError, match=words):
        open_tokenizer(name, vocab_size=vocab_size)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'hybridtrain\[text\]'"):
        open_tokenizer(str(tmp_path), vocab_size=300)


def test_templates_in_files_of_their_own(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template="old")
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    tokenizer = open_tokenizer(str(tmp_path), vocab_size=300)
    assert tokenizer.templates == {"default": "new", "rag": "rag"}


def test_a_folder_without_tokenizer_json_is_opened_by_transformers(tmp_path: Path) -> None:
    model = json.loads((save_tokenizer(tmp_path / "fast") / "tokenizer.json").read_text())["model"]
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("".join(" ".join(pair) + "\n" for pair in model["merges"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": END}))
    found = open_tokenizer(str(folder), vocab_size=300).encode(list(SENTENCES))
    expected = open_tokenizer(str(tmp_path / "fast"), vocab_size=300).encode(list(SENTENCES))
    assert [one.ids.tolist() for one in found] == [one.ids.tolist() for one in expected]


AROUND_SPECIAL = (
    "<s>[INST] Hi the [/INST] Hi</s>",
    "<s>Hi the",
    " Hi",
    "a</s> a<s>a",
    "</s>\nthe",
    "Hi the",
    "\u00e9</s>",
)
CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "CodeLlamaTokenizer", None)


@pytest.mark.parametrize("legacy", [None, True, False])
@pytest.mark.parametrize("name", CLASSES)
def test_ids_are_those_of_the_class_that_transformers_takes(
    tmp_path: Path, name: str | None, legacy: bool | None
) -> None:
    settings = {"tokenizer_class": name, "legacy": legacy}
    folder = save_llama_tokenizer(tmp_path, **{key: value for key, value in settings.items() if value is not None})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    theirs, ours = AutoTokenizer.from_pretrained(folder), open_tokenizer(str(folder), vocab_size=300)
    for text, found in zip(AROUND_SPECIAL, ours.encode(AROUND_SPECIAL), strict=True):
        assert found.ids.tolist() == theirs.encode(text, add_special_tokens=False), text
    assert [*ours.bos_ids] == theirs.encode("a")[: len(ours.bos_ids)]
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert bool(ours.remark) == (name in {"LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer"})


@pytest.mark.parametrize("name", CLASSES)
def test_without_transformers_a_class_that_may_make_other_ids_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    folder = save_llama_tokenizer(tmp_path, **({} if name is None else {"tokenizer_class": name}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    told = open_tokenizer(str(folder), vocab_size=300).remark
    expected = name is not None and name.endswith(("LlamaTokenizer", "LlamaTokenizerFast"))
    assert (f"transformers' {name} may differ: install transformers" in told) == expected


def test_a_folder_that_transformers_cannot_open_is_read_as_its_files_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no such class\nand more")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    tokenizer = open_tokenizer(str(save_llama_tokenizer(tmp_path)), vocab_size=300)
    assert tokenizer.remark.endswith("tokenizer.json, which transformers cannot open (no such class)")
    assert tokenizer.special_tokens["eos_token"] == "</s>"  # noqa: S105


def test_tokens_beyond_the_vocabulary_that_no_document_needs_are_allowed(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<pad>"}))
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = backend.get_vocab_size()
    backend.add_special_tokens(["<pad>"])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = open_tokenizer(str(folder), vocab_size=known)
    assert tokenizer.vocab_size == known + 1
    assert tokenizer.pad_id < known
    assert open_tokenizer(str(folder), vocab_size=known + 1).pad_id == known
