from pathlib import Path

import pytest

from hybridtrain.data.chat import ChatTemplate
from hybridtrain.data.documents import _PIECE_CHARACTERS, Passage, open_source, read_documents
from hybridtrain.data.tokenizer import open_tokenizer
from hybridtrain.errors import DataError
from tiny_tokenizers import PREFIX_TEMPLATE, SENTENCES, chat, save_tokenizer, write_lines


def passages(path: Path, *, counts_all: bool = False) -> list[list[Passage]]:
    documents = read_documents(open_source(path), lambda: ChatTemplate(PREFIX_TEMPLATE, {}), counts_all=counts_all)
    return [list(document) for document in documents]


def test_lines_of_each_kind(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", {"text": "plain", "id": 7}, {"prompt": "2+2=", "completion": "4"}, chat("Hi", "Ho")
    )
    path.write_text("\ufeff" + path.read_text() + "\n\n")
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    assert passages(path) == [
        [Passage("plain")],
        [Passage("2+2=4", ((4, 5),))],
        [Passage(rendered, ((52, 65),), opens=False, closes=False)],
    ]
    assert rendered[52:65] == "Ho<|im_end|>\n"
    assert [one.counted for document in passages(path, counts_all=True) for one in document] == [None] * 3


def test_every_fault_has_file_line_and_what_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        "{", "[1]", '{"txt": "a"}', '{"text": "a", "messages": []}', '{"text": 3}', '{"prompt": "a"}',
        '{"messages": []}', '{"messages": [{"role": "asistant", "content": "a"}]}',
        '{"messages": [{"role": "user"}]}', '{"text": "\\ud800"}', '{"text": "never told: the eleventh"}', "{",
    ]  # fmt: skip
    path.write_text("\n".join(["", *lines]))
    with pytest.raises(DataError) as raised:
        passages(path)
    told = str(raised.value).splitlines()
    words = [
        "is not JSON", "found list", "keys ['txt']", 'both "text" and "messages"', "text: found 3; a string",
        "completion is missing; a string is required", "messages: found []; allowed: a list of at least one message",
        'messages[0].role: found "asistant"; allowed: system, developer, user, assistant, tool',
        "messages[0].content is missing", "an unpaired surrogate",
    ]  # fmt: skip
    assert len(told) == len(words) + 1
    for number, (line, part) in enumerate(zip(told, words, strict=False), 2):
        assert line.startswith(f"{path}, line {number}: ")
        assert part in line
    assert "fix these first" in told[-1]


def test_a_long_text_is_cut_where_its_tokens_do_not_notice(tmp_path: Path) -> None:
    paragraph = "\n".join(SENTENCES) + "\n\n  " + SENTENCES[0] + "\n\n"
    text = paragraph * (3 * _PIECE_CHARACTERS // len(paragraph))
    (tmp_path / "a.txt").write_text(text)
    (document,) = passages(tmp_path / "a.txt")
    assert len(document) > 2
    assert "".join(one.text for one in document) == text
    assert [one.opens for one in document] == [True] + [False] * (len(document) - 1)
    assert [one.ends for one in document] == [one.closes for one in document] == [False] * (len(document) - 1) + [True]
    tokenizer = open_tokenizer(str(save_tokenizer(tmp_path / "tok")), vocab_size=300)
    pieces = [token for one in tokenizer.encode([one.text for one in document]) for token in one.ids.tolist()]
    assert pieces == tokenizer.encode([text])[0].ids.tolist()


@pytest.mark.parametrize("text", ["\u5929" * 300_000, "a " * 150_000, "\n" * 300_000], ids=["none", "spaces", "lines"])
def test_text_without_lines_is_cut_all_the_same(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    (document,) = passages(tmp_path / "a.txt")
    assert "".join(one.text for one in document) == text
    assert max(len(one.text) for one in document) <= _PIECE_CHARACTERS + 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"ab\0", "byte 2 is NUL"),
        ("a.jsonl", b"ab\xff", "byte 2 is 0xff"),
        ("a.txt", b"a" * (2**20 - 1) + b"\xc3", "byte 1048575 is 0xc3"),
        ("a.txt", b"a" * (2**20 - 1) + b"\xc3\xc3", "byte 1048575 is 0xc3"),
        ("a.txt", b"", "contains no UTF-8 text"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        open_source(tmp_path / name)


def test_a_character_may_lie_across_two_reads(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * (2**20 - 1) + "\u00e9".encode())
    assert not open_source(tmp_path / "a.txt").left_out


def test_a_folder_holds_text_and_lines(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\0")
    write_lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    source = open_source(tmp_path)
    assert source.left_out == (("c.png", "no UTF-8 text"),)
    assert "reads a.jsonl (JSON lines), b.txt (text); ignores c.png (no UTF-8 text)" in source.as_text()
    assert sorted(one[0].text for one in passages(tmp_path)) == ["one", "text", "two"]
    assert len(list(source.ranks())) == 3
    before = source.digest
    (tmp_path / "b.txt").write_text("other")
    assert open_source(tmp_path).digest != before
