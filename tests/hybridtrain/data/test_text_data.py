import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from hybridtrain.data.corpus import open_corpus
from hybridtrain.data.data_config import DataConfig
from hybridtrain.data.packing import EncodedDocuments
from hybridtrain.data.text_data import TextData, open_text
from hybridtrain.data.token_file import TokenFormat, write_token_file
from hybridtrain.errors import DataError
from tiny_tokenizers import (
    END,
    END_TURN,
    MARKED_TEMPLATE,
    PREFIX_TEMPLATE,
    SENTENCES,
    chat,
    save_tokenizer,
    write_lines,
)

CHATS = [
    chat("What is the colour of the sky?", "The sky is blue.", "def", "def f(x):\n    return  x "),
    chat("Name an animal", "\u00e9 fox"),
    chat("Nobody answers"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def opened(config: DataConfig, said: list[str] | None = None) -> TextData:
    return open_text(
        config, vocab_size=300, folder=Path("run/tokens"), say=(lambda _: None) if said is None else said.append
    )


def of_document(documents: EncodedDocuments, number: int) -> tuple[list[int], list[int]]:
    first = int(documents.ends[number - 1]) if number else 0
    part = slice(first, int(documents.ends[number]))
    assert documents.counted is not None
    return documents.tokens[part].tolist(), documents.counted[part].tolist()


def test_masks_are_those_of_transformers() -> None:
    save_tokenizer(Path("tok"), template=MARKED_TEMPLATE)
    write_lines(Path("a.jsonl"), *CHATS)
    train = opened(DataConfig(path=Path("a.jsonl"), tokenizer="tok", validation_percent=0)).train
    theirs = PreTrainedTokenizerFast.from_pretrained("tok")
    for number, line in enumerate(CHATS):
        found = theirs.apply_chat_template(
            line["messages"], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        tokens, counted = of_document(train, number)
        assert tokens == found["input_ids"]
        assert counted == found["assistant_masks"]
    assert train.num_documents == len(CHATS)


def test_masks_by_prefixes() -> None:
    save_tokenizer(Path("tok"))
    write_lines(Path("a.jsonl"), *CHATS)
    said: list[str] = []
    train = opened(DataConfig(path=Path("a.jsonl"), tokenizer="tok", validation_percent=0), said).train
    theirs = PreTrainedTokenizerFast.from_pretrained("tok")
    tokens, counted = of_document(train, 0)
    answers = [token for token, counts in zip(tokens, counted, strict=True) if counts]
    assert theirs.decode(answers) == "The sky is blue.<|im_end|>\ndef f(x):\n    return  x <|im_end|>\n"
    assert not any(of_document(train, 2)[1])
    assert "answers are found by prefixes of the chat template" in said


def test_answers_that_are_written_otherwise_later_end_documents_of_their_own() -> None:
    template = PREFIX_TEMPLATE + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
    save_tokenizer(Path("tok"), template=template)
    write_lines(Path("a.jsonl"), *CHATS[:2])
    said: list[str] = []
    train = opened(DataConfig(path=Path("a.jsonl"), tokenizer="tok", validation_percent=0), said).train
    theirs = PreTrainedTokenizerFast.from_pretrained("tok")
    answers = [
        theirs.decode(np.array(tokens)[np.array(counted) == 1])
        for tokens, counted in (of_document(train, number) for number in range(train.num_documents))
    ]
    assert answers == [
        f"{answer}<|im_end|>\n{END}" for answer in ("The sky is blue.", "def f(x):\n    return  x ", "\u00e9 fox")
    ]
    assert "writes earlier answers of 1 conversations otherwise" in said[-1]


def test_loss_on_all() -> None:
    save_tokenizer(Path("tok"))
    write_lines(Path("a.jsonl"), *CHATS)
    text = opened(DataConfig(path=Path("a.jsonl"), tokenizer="tok", validation_percent=0, loss_on="all"))
    assert text.train.counted is None
    assert text.packing == "documents"


def test_prompts_and_completions() -> None:
    save_tokenizer(Path("tok"), adds_bos=True)
    write_lines(Path("a.jsonl"), {"prompt": "Name an animal", "completion": " fox"}, {"text": "blue"})
    train = opened(DataConfig(path=Path("a.jsonl"), tokenizer="tok", validation_percent=0)).train
    theirs = PreTrainedTokenizerFast.from_pretrained("tok")
    tokens, counted = of_document(train, 0)
    assert theirs.decode(tokens) == f"<s>Name an animal fox{END}"
    assert theirs.decode(np.array(tokens)[np.array(counted) == 1]) == f" fox{END}"
    assert of_document(train, 1)[1] == [0] + [1] * (len(of_document(train, 1)[0]) - 1)


@pytest.mark.parametrize("is_folder", [False, True])
def test_bytes_in_a_stream_are_the_tokens_of_a_corpus(is_folder: bool) -> None:
    Path("text").mkdir()
    for number in range(30):
        Path(f"text/{number}.txt").write_text(f"{number} {SENTENCES[number % 6]} \u00e9\n" * 9)
    path = Path("text") if is_folder else Path("text/3.txt")
    text, corpus = opened(DataConfig(path=path)), open_corpus(path, vocab_size=256)
    assert text.packing == "stream"
    assert text.validation is not None
    np.testing.assert_array_equal(text.train.tokens, corpus.train)
    np.testing.assert_array_equal(text.validation.tokens, corpus.validation)


def test_text_is_encoded_once_until_something_changes() -> None:
    save_tokenizer(Path("tok"))
    write_lines(Path("a.jsonl"), *[{"text": f"{number} {SENTENCES[0]}"} for number in range(40)])

    def encodes(config: DataConfig) -> bool:
        said: list[str] = []
        opened(config, said)
        return bool(said)

    config = DataConfig(path=Path("a.jsonl"), tokenizer="tok")
    assert encodes(config)
    assert not encodes(config)
    assert encodes(DataConfig(path=Path("a.jsonl"), tokenizer="tok", validation_percent=20))
    assert encodes(DataConfig(path=Path("a.jsonl"), tokenizer="tok", eos_token=END_TURN))
    assert encodes(DataConfig(path=Path("a.jsonl"), tokenizer="tok", chat_template="chatml"))
    assert not encodes(config)
    tokens = max(Path("run/tokens").glob("*/train.tokens"), key=lambda path: path.stat().st_mtime_ns)
    content = bytearray(tokens.read_bytes())
    content[0] ^= 1
    tokens.write_bytes(content)
    assert encodes(DataConfig(path=Path("a.jsonl"), tokenizer="tok", chat_template="chatml"))
    Path("a.jsonl").write_text(Path("a.jsonl").read_text().replace("39", "93"))
    assert encodes(config)


def test_an_interrupted_encoding_is_begun_anew() -> None:
    write_lines(Path("a.jsonl"), {"text": "one"}, {"text": "two"}, {"nothing": 1})
    config = DataConfig(path=Path("a.jsonl"), validation_percent=0)
    for _ in range(2):
        with pytest.raises(DataError, match="line 3"):
            opened(config)


def test_documents_are_held_out_whole_and_stay_so_when_others_come() -> None:
    def contents(documents: EncodedDocuments | None) -> set[bytes]:
        assert documents is not None
        return {part.tobytes() for part in np.split(documents.tokens, documents.ends[:-1])}

    lines = [{"text": f"{number} of many"} for number in range(200)]
    write_lines(Path("a.jsonl"), *lines[:100])
    few = opened(DataConfig(path=Path("a.jsonl")))
    write_lines(Path("a.jsonl"), *lines)
    many = opened(DataConfig(path=Path("a.jsonl")))
    assert contents(few.validation) <= contents(many.validation)
    assert contents(few.train) <= contents(many.train)
    assert len(contents(many.validation)) + len(contents(many.train)) == 200
    assert 5 < len(contents(many.validation)) < 40


def test_validation_text_of_its_own() -> None:
    write_lines(Path("a.jsonl"), {"text": "a b"}, {"text": "c d"})
    Path("v.txt").write_text("held out")
    text = opened(DataConfig(path=Path("a.jsonl"), validation=Path("v.txt")))
    assert text.train.num_documents == 2
    assert text.validation is not None
    assert text.tokenizer.decode(text.validation.tokens.tolist()) == "held out\0"


def test_token_files_are_taken_as_they_are() -> None:
    write_token_file(Path("a.bin"), np.arange(1000) % 256, TokenFormat.RAW_UINT16)
    text = opened(DataConfig(path=Path("a.bin"), validation_percent=20))
    assert text.validation is not None
    assert (text.train.tokens.size, text.validation.tokens.size) == (800, 200)
    with pytest.raises(DataError, match="do not say where documents end; packing = 'documents'"):
        opened(DataConfig(path=Path("a.bin"), packing="documents"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"packing": "stream"}, "packing = 'stream' takes windows wherever they fall"),
        ({"chat_template": "chatlm"}, "template 'chatlm' is unknown; did you mean 'chatml'"),
        ({"chat_template": "none.jinja"}, "none.jinja does not exist"),
        ({}, "messages need a chat template and the tokenizer has no default one; set chat_template to .*chatml"),
    ],
)
def test_what_messages_need(settings: dict[str, str], words: str) -> None:
    save_tokenizer(Path("tok"), template=None)
    write_lines(Path("a.jsonl"), *CHATS)
    with pytest.raises(DataError, match=words):
        opened(DataConfig(path=Path("a.jsonl"), tokenizer="tok", **settings))  # type: ignore[arg-type]


def test_a_template_in_a_file() -> None:
    save_tokenizer(Path("tok"), template="{{ never }}")
    Path("mine.jinja").write_text(PREFIX_TEMPLATE)
    write_lines(Path("a.jsonl"), CHATS[1])
    text = opened(DataConfig(path=Path("a.jsonl"), tokenizer="tok", chat_template="mine.jinja"))
    assert text.tokenizer.decode(text.train.tokens.tolist()).startswith("<|im_start|>user\nName")


def test_without_jinja2_messages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(Path("a.jsonl"), *CHATS)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(DataError, match=r"pip install 'hybridtrain\[text\]'"):
        opened(DataConfig(path=Path("a.jsonl"), chat_template="chatml"))
