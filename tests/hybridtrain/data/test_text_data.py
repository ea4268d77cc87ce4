import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from hybridtrain.data.byte_tokens import decode_tokens
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
    assert "answers are located by prefixes of the chat template" in said


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
    assert "renders earlier answers of 1 conversations differently," in said[-1]


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
    write_lines(Path("a.jsonl"), *[{"text": f"{number} {SENTENCES[0]}"} for number in range(40)], CHATS[0])

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
    lines = [{"text": f"{number} of many"} for number in range(200)]
    write_lines(Path("a.jsonl"), *lines[:100])
    few = opened(DataConfig(path=Path("a.jsonl")))
    write_lines(Path("a.jsonl"), *lines)
    many = opened(DataConfig(path=Path("a.jsonl")))
    assert set(contents(few.validation)) <= set(contents(many.validation))
    assert set(contents(few.train)) <= set(contents(many.train))
    assert len(set(contents(many.validation))) + len(set(contents(many.train))) == 200
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
    ("options", "words"),
    [
        ({"packing": "stream"}, "packing = 'stream' draws windows at random,"),
        ({"chat_template": "chatlm"}, "template 'chatlm' is unknown; did you mean 'chatml'"),
        ({"chat_template": "none.jinja"}, "none.jinja does not exist"),
        ({}, "messages need a chat template, and the tokenizer has no default; set chat_template to .*chatml"),
    ],
)
def test_what_messages_need(options: dict[str, str], words: str) -> None:
    save_tokenizer(Path("tok"), template=None)
    write_lines(Path("a.jsonl"), *CHATS)
    with pytest.raises(DataError, match=words):
        opened(DataConfig(path=Path("a.jsonl"), tokenizer="tok", **options))  # type: ignore[arg-type]


def test_a_template_in_a_file() -> None:
    save_tokenizer(Path("tok"), template="{{ never }}")
    Path("mine.jinja").write_text(PREFIX_TEMPLATE)
    write_lines(Path("a.jsonl"), CHATS[1])
    text = opened(DataConfig(path=Path("a.jsonl"), tokenizer="tok", chat_template="mine.jinja"))
    assert text.tokenizer.decode(text.train.tokens.tolist()).startswith("<|im_start|>user\nName")


def contents(documents: EncodedDocuments | None) -> list[bytes]:
    return [] if documents is None else [part.tobytes() for part in np.split(documents.tokens, documents.ends[:-1])]


def spelled(number: int, spelling: int) -> str:
    """Return a line with the same text, in one of several ways to write it."""
    text = f"{number} caf\u00e9"
    return (
        json.dumps({"text": text}), json.dumps({"id": spelling, "text": text}, ensure_ascii=False),
        f' {{"text":\t{json.dumps(text)}}} ', json.dumps({"prompt": text[:3], "completion": text[3:]}),
    )[spelling]  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=40), st.integers(1, 90),
    st.booleans(),
)  # fmt: skip
def test_equal_documents_are_on_one_side(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[int, int]], percent: int, with_file: bool
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("split")
    (folder / "a.jsonl").write_text("\n".join(spelled(*line) for line in lines))
    if with_file:
        (folder / "b.txt").write_text("0 caf\u00e9")
    said: list[str] = []
    config = DataConfig(path=folder, validation_percent=percent, loss_on="all")
    text = open_text(config, vocab_size=256, folder=folder / ".tokens", say=said.append)
    train, validation = contents(text.train), contents(text.validation)
    assert train
    assert not set(train) & set(validation)
    assert len(train) + len(validation) == len(lines) + with_file
    assert bool(validation) == (len(set(train) | set(validation)) > 1)
    if not validation and len(train) > 1:
        assert any("nothing is held out" in line for line in said)
    if abs(100 * len(validation) / (len(train) + len(validation)) - percent) > percent / 2 and validation:
        assert any(f"validation_percent is {percent}, and " in line for line in said)


def test_equal_text_files_are_on_one_side() -> None:
    Path("text").mkdir()
    for number in range(40):
        Path(f"text/{number}.txt").write_text(f"{number % 8} {SENTENCES[0]}")
    text = opened(DataConfig(path=Path("text")))
    assert set(contents(text.validation))
    assert not set(contents(text.train)) & set(contents(text.validation))


def test_equal_chats_are_on_one_side_whatever_their_weights() -> None:
    save_tokenizer(Path("tok"))
    turns: list[dict[str, object]] = [{"role": "user", "content": "a"}, {"content": "b", "role": "assistant"}]
    weighed = [turns[0], turns[1] | {"weight": 0}]
    lines = [{"messages": turns}, {"messages": weighed, "id": 3}] * 20
    write_lines(Path("a.jsonl"), *lines, *CHATS)
    for percent in range(1, 91, 6):
        text = opened(DataConfig(path=Path("a.jsonl"), tokenizer="tok", validation_percent=percent))
        assert not set(contents(text.train)) & set(contents(text.validation))


def test_validation_text_that_is_trained_on_is_told() -> None:
    write_lines(Path("a.jsonl"), {"text": "a b"}, {"text": "c d"}, {"text": "e"})
    write_lines(Path("v.jsonl"), {"text": "c d", "id": 1}, {"text": "held out"})
    said: list[str] = []
    opened(DataConfig(path=Path("a.jsonl"), validation=Path("v.jsonl")), said)
    assert any("1 of 2 documents of v.jsonl are also in a.jsonl," in line for line in said)


def test_tokens_that_the_model_lacks_are_refused_where_they_occur() -> None:
    save_tokenizer(Path("tok"))
    backend = Tokenizer.from_file("tok/tokenizer.json")
    known = backend.get_vocab_size()
    backend.add_tokens(["<image>"])
    backend.save("tok/tokenizer.json")
    write_lines(Path("a.jsonl"), *[{"text": sentence} for sentence in SENTENCES])
    config = DataConfig(path=Path("a.jsonl"), tokenizer="tok")
    for _ in range(2):  # encoded now, and found again
        open_text(config, vocab_size=known, folder=Path("run/tokens"), say=lambda _: None)
    write_lines(Path("b.jsonl"), {"text": "blue"}, {"text": "an <image> here"})
    open_text(DataConfig(path=Path("b.jsonl"), tokenizer="tok"), vocab_size=known + 1, folder=Path("run/tokens"),
              say=lambda _: None)  # fmt: skip
    for folder in ("run/tokens", "other"):
        with pytest.raises(
            DataError, match=rf"token {known}, '<image>', occurs in the text, .* vocab_size is {known}; use the"
        ):
            open_text(
                DataConfig(path=Path("b.jsonl"), tokenizer="tok"), vocab_size=known, folder=Path(folder),
                say=lambda _: None,
            )  # fmt: skip


@pytest.mark.parametrize("content", ["\n", " \n\t\n", "\ufeff\n\n", "\r\n"])
@pytest.mark.parametrize("options", [{}, {"packing": "none"}, {"packing": "stream", "loss_on": "all"}])
def test_files_of_blank_lines_are_refused(content: str, options: dict[str, str]) -> None:
    Path("blank").mkdir()
    for name in ("a.jsonl", "blank/a.jsonl", "blank/b.ndjson"):
        Path(name).write_text(content)
    for path in (Path("a.jsonl"), Path("blank")):
        with pytest.raises(DataError, match=f"{path} contains no text; give files with text"):
            opened(DataConfig(path=path, **options))  # type: ignore[arg-type]
    write_lines(Path("b.jsonl"), {"text": "a b"})
    with pytest.raises(DataError, match=r"a\.jsonl contains no text; give files with text"):
        opened(DataConfig(path=Path("b.jsonl"), validation=Path("a.jsonl"), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.bin", "folder"])
def test_a_chat_template_that_nothing_uses_is_refused(name: str) -> None:
    Path("folder").mkdir()
    Path("folder/b.txt").write_text(SENTENCES[0] * 9)
    Path("a.txt").write_text(SENTENCES[0] * 9)
    write_lines(Path("a.jsonl"), *[{"text": sentence} for sentence in SENTENCES])
    write_token_file(Path("a.bin"), np.arange(1000) % 256, TokenFormat.RAW_UINT16)
    for _ in range(2):
        with pytest.raises(DataError, match=f"chat_template: 'chatml' has no effect: {name} contains no messages"):
            opened(DataConfig(path=Path(name), chat_template="chatml"))


@pytest.mark.parametrize("percent", [0, 10])
def test_a_share_beside_a_file_that_is_held_out_is_refused(percent: int) -> None:
    Path("tokens").mkdir()
    for name in ("train.bin", "val.bin"):
        write_token_file(Path("tokens", name), np.arange(1000) % 256, TokenFormat.RAW_UINT16)
    assert opened(DataConfig(path=Path("tokens"))).validation is not None
    with pytest.raises(DataError, match=f"validation_percent: {percent} has no effect: tokens/val.bin is held"):
        opened(DataConfig(path=Path("tokens"), validation_percent=percent))


def test_an_end_token_that_bytes_do_not_have_is_refused() -> None:
    Path("a.txt").write_text(SENTENCES[0] * 9)
    with pytest.raises(DataError, match="eos_token: '</s>' has no effect"):
        opened(DataConfig(path=Path("a.txt"), eos_token="</s>"))  # noqa: S106


def test_noncharacters_reach_the_tokens_as_they_are() -> None:
    write_lines(Path("a.jsonl"), chat("q \ufdd0not an answer\ufdd1", "an\ufdd0swer"))
    train = opened(DataConfig(path=Path("a.jsonl"), chat_template="chatml", validation_percent=0)).train
    tokens, counted = of_document(train, 0)
    text = decode_tokens(np.array(tokens)).decode()
    assert "<|im_start|>user\nq \ufdd0not an answer\ufdd1<|im_end|>" in text
    assert decode_tokens(np.array(tokens)[np.array(counted) == 1]).decode() == "an\ufdd0swer<|im_end|>"
