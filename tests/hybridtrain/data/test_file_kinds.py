"""Records are never prose: whatever their file is called, they are read as documents or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain.data.chat import BUILTIN_TEMPLATES, ChatTemplate
from hybridtrain.data.corpus import text_corpus
from hybridtrain.data.documents import TextSource, holds_records, open_source, read_documents
from hybridtrain.data.file_kinds import is_json_text
from hybridtrain.errors import DataError
from tiny_tokenizers import chat

RECORDS: list[dict[str, object]] = [chat("Hi", "Ho"), {"text": "plain"}, {"prompt": "2+2=", "completion": "4"}]
TEXTS = ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n", "plain", "2+2=4"]
LINES = "\n".join(map(json.dumps, RECORDS)) + "\n"
LIST = json.dumps(RECORDS)
PRETTY = json.dumps(RECORDS, indent=2)
PROSE = "A line of prose that says nothing of records.\n" * 3


def texts(source: TextSource) -> list[str]:
    template = ChatTemplate(BUILTIN_TEMPLATES["chatml"], {})
    documents = read_documents(source, lambda: template, counts_all=False)
    return ["".join(passage.text for passage in document) for document in documents]


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES), ("a.JSONL", LINES), ("a.ndjson", LINES), ("a.JsonLines", LINES), ("a.json", LINES),
        ("a.json", LIST), ("a.JSON", PRETTY), ("a.json", "\ufeff" + LIST), ("a.jsonl", "\ufeff\n" + LINES + " \n"),
    ],
)  # fmt: skip
def test_records_are_read_by_any_of_their_names(tmp_path: Path, name: str, content: str, *, is_folder: bool) -> None:
    (tmp_path / name).write_text(content)
    path = tmp_path if is_folder else tmp_path / name
    assert texts(open_source(path)) == TEXTS
    assert holds_records(path)
    with pytest.raises(DataError, match=r"contains .*, not plain text; give it in the \[data\] table"):
        text_corpus(path)


@pytest.mark.sample(one_in=5)
@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("content", [LINES, LIST, PRETTY, json.dumps(RECORDS[0], indent=1), "\ufeff \n" + LINES,
                                     json.dumps([RECORDS[0]]) + "\n" + json.dumps([RECORDS[1]])])  # fmt: skip
@pytest.mark.parametrize("name", ["a.jsonl.txt", "a.txt", "a", "a.json5", "a.jsonl.bak", "a.md"])
def test_json_under_another_name_is_refused(tmp_path: Path, name: str, content: str, *, is_folder: bool) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "prose.txt").write_text(PROSE)
    with pytest.raises(DataError, match=f"{name} contains JSON, which is not"):
        open_source(tmp_path if is_folder else tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.zst", "a.JSONL.BZ2", "a.parquet.zip"])
def test_compressed_records_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x1f\x8b\0")
    (tmp_path / "prose.txt").write_text(PROSE)
    assert holds_records(tmp_path)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(DataError, match="is compressed, which is not supported; unpack it"):
            open_source(path)


@pytest.mark.parametrize(
    "text",
    [
        PROSE, "[1] A footnote.\n[2] Another.\n", "{ int x; }\n{ int y; }\n", "[section]\nkey = 1\n", "",
        "{}\nand on\n", '{"a": 1} is an object.\n', "[1]\n[2]\n", "{{ name }}", "[" * 100_000, '"a string"',
        "42\n", " \n\n",
    ],
)  # fmt: skip
def test_prose_is_not_taken_for_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert not is_json_text(tmp_path / "a.txt")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(), VALUES, min_size=1, max_size=3), min_size=1, max_size=3),
    st.sampled_from(["\n", "\n\n", "\r\n", " ", ",\n"]), st.sampled_from([None, 0, 2, "\t"]), st.booleans(),
    st.sampled_from(["", "\ufeff", "\n", "  \n\t"]),
)  # fmt: skip
def test_any_json_is_seen(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], between: str, indent: int | str | None, is_ascii: bool,
    before: str,
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("json") / "a.txt"
    written = [json.dumps(value, indent=indent, ensure_ascii=is_ascii) for value in values]
    for content in (between.join(written), json.dumps(values, indent=indent, ensure_ascii=is_ascii)):
        path.write_bytes((before + content).encode(errors="surrogatepass"))
        assert is_json_text(path)


def test_files_about_records_are_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "notes.txt").write_text(PROSE)
    about = ("README.md", "LICENSE", "dataset_infos.json", "dataset_info.json", "state.json", "config.json")
    for name in about:
        (tmp_path / name).write_text('{"features": 1}' if name.endswith("json") else PROSE)
    source = open_source(tmp_path)
    assert sorted(texts(source)) == sorted([*TEXTS, PROSE])
    assert {name for name, _ in source.left_out} == set(about)
    assert all(name in source.as_text() for name in about)


def test_a_readme_and_metadata_among_prose(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(PROSE)
    (tmp_path / "package.json").write_text('{"name": "a"}')
    (tmp_path / "tsconfig.json").write_text('{ // a comment\n"a": 1}')
    (tmp_path / "a.py").write_text("a = 1\n" * 9)
    source = open_source(tmp_path)
    assert [file.name for file in source.files if file.name != "README.md"] == ["a.py"]
    assert [name for name, _ in source.left_out] == ["package.json", "tsconfig.json"]
    assert not holds_records(tmp_path)


def test_damaged_json_beside_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "b.json").write_text(LIST[:-1])
    with pytest.raises(DataError, match=r"b\.json is no JSON .*; fix it, or remove it from the folder"):
        open_source(tmp_path)
    with pytest.raises(DataError, match=r"b\.json is no JSON .*; fix it"):
        open_source(tmp_path / "b.json")


@pytest.mark.parametrize("content", ["{}", "[]", "[1, 2]", '{"a": [1]}', '"a"'])
def test_a_json_file_without_documents_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match="contains no document; allowed: "):
        open_source(tmp_path / "a.json")


def test_faults_of_elements_are_told_by_number(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"instruction": "b"}, 3]')
    with pytest.raises(DataError, match=r"element 2: found keys \['instruction'\].*\n.*element 3: found int 3"):
        texts(open_source(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("names", "trained", "validated"),
    [
        (["train.jsonl", "test.jsonl"], ["train.jsonl"], ["test.jsonl"]),
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl"],
         ["data/train-00000-of-00001.jsonl"], ["data/validation-00000-of-00001.jsonl"]),
        (["train/a.jsonl", "dev/a.jsonl", "b.jsonl"], ["b.jsonl", "train/a.jsonl"], ["dev/a.jsonl"]),
        (["test.jsonl", "valid.jsonl"], ["test.jsonl", "valid.jsonl"], ["test.jsonl", "valid.jsonl"]),
        (["trains.jsonl", "latest.jsonl"], ["latest.jsonl", "trains.jsonl"], ["latest.jsonl", "trains.jsonl"]),
    ],
)  # fmt: skip
def test_of_splits_each_part_takes_its_own(
    tmp_path: Path, names: list[str], trained: list[str], validated: list[str]
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LINES)
    for part, expected in (("train", trained), ("validation", validated)):
        source = open_source(tmp_path, part="train" if part == "train" else "validation")
        assert sorted(file.name for file in source.files) == expected
        assert sorted(name for name, _ in source.left_out) == sorted(set(names) - set(expected))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "stream.arrow"])
def test_tables_are_read(tmp_path: Path, name: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    blank = dict.fromkeys(key for record in RECORDS for key in record)
    table = arrow.Table.from_pylist([blank | record | {"id": number} for number, record in enumerate(RECORDS * 300)])
    if name == "a.parquet":
        parquet.write_table(table, tmp_path / name, row_group_size=100)
    else:
        opened = arrow.ipc.new_file if name == "a.arrow" else arrow.ipc.new_stream
        with opened(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "cache-0123456789abcdef.arrow").write_bytes((tmp_path / name).read_bytes())
    source = open_source(tmp_path)
    assert texts(source) == TEXTS * 300
    assert [found for found, _ in source.left_out] == ["cache-0123456789abcdef.arrow", "state.json"]
    assert texts(open_source(tmp_path / name)) == TEXTS * 300
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=rf"{name} is not a complete (Parquet|Arrow) file .*; copy it again"):
        texts(open_source(tmp_path / name))


def test_tables_without_pyarrow_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"needs the package pyarrow, .* pip install 'hybridtrain\[arrow\]'"):
        texts(open_source(tmp_path / "a.parquet"))
