from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import pytest

from hybridtrain.config.decode import load_toml, missing_path
from hybridtrain.errors import ConfigError


class Layer(Protocol):
    kind: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    kind: ClassVar[str] = "dense"
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    seq_len: int
    layers: tuple[Layer, ...] = ()


def test_a_file_with_arrays_of_tables_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    layer = '[[layers]]\nkind = "dense"\nwidth = '
    path.write_text(f"seq_len = 2\n{layer}3\n{layer}4\n")
    model = load_toml(Model, path, unions={Layer: {"dense": Dense}})
    assert model == Model(seq_len=2, layers=(Dense(width=3), Dense(width=4)))


def test_faults_in_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("seq_len = true\n")
    with pytest.raises(ConfigError) as caught:
        load_toml(Model, path)
    assert str(caught.value) == f"{path}: 1 fault\n  $.seq_len: found True (a boolean); an integer is required"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a = 1\nb 2\n", "is not TOML: Expected '=' after a key in a key/value pair (at line 2, column 3)"),
        (b"a = 1\nb = '''x\n", "is not TOML: Expected \"'''\" (at line 2, the end of the file)"),
        (b"a = 1\na = 2\n", "is not TOML: Cannot overwrite a value (at line 2, column 6)"),
        (b"a = '\xff'\n", "byte 5 is not UTF-8; save the file as UTF-8"),
    ],
)
def test_a_broken_file_says_where(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_toml(Model, path)
    assert caught.value.faults == (words,)


DEEP = 2000
QUOTES = '"' * 1000
BOMBS = {
    "nests arrays or tables too deeply; use less nesting": f"a = {'[' * DEEP}{']' * DEEP}",
    "contains a number that cannot be read (Exceeds the limit (4300 digits)": f"seq_len = {'9' * 5000}",
    "$.a: is an unknown key (found a value too large to show)": f"seq_len = 1\na = 0x{'f' * 5000}",
    "$.b: is an unknown key (found a value too large to show)": f"seq_len = 1\na = 1\nb = [0x{'f' * 5000}]",
    "line 2: a key of more than 64 parts; use less nesting": f"\n{'.'.join(['a'] * 100_000)} = 1",
}


@pytest.mark.parametrize("words", [*BOMBS, "line 1: a key of more than 64 parts"])
def test_a_file_that_no_parser_endures_is_a_fault(words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(BOMBS.get(words, "[" + " . ".join(['"a b"'] * 100_000) + "]"))
    with pytest.raises(ConfigError) as caught:
        load_toml(Model, path)
    assert any(fault.startswith(words) for fault in caught.value.faults), caught.value.faults


def test_long_words_and_texts_are_searched_in_no_time(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f"seq_len = 2\n# {'a' * 500_000} {'a.' * 60} {QUOTES} {'-' * 500_000}\n")
    assert load_toml(Model, path) == Model(seq_len=2)


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "llama_7b.toml").touch()
    (tmp_path / "other.txt").touch()
    with pytest.raises(ConfigError) as caught:
        load_toml(Model, tmp_path / "lama_7b.toml")
    assert caught.value.faults == ("does not exist; did you mean 'llama_7b.toml'?",)


def test_a_missing_file_beside_nothing_alike_has_no_suggestion(tmp_path: Path) -> None:
    assert missing_path(tmp_path / "a.toml") == "does not exist"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "scenarios"
    with pytest.raises(ConfigError) as caught:
        load_toml(Model, folder / "a.toml")
    assert caught.value.faults == (f"does not exist: there is no folder {folder}",)


def test_a_folder_is_no_toml_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; a TOML file is required"):
        load_toml(Model, tmp_path)


def test_an_unreadable_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "a.toml"
    path.touch()
    monkeypatch.setattr("hybridtrain.config.decode.read_plain", refuse)  # a chmod would not stop the superuser
    with pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\); check its permissions"):
        load_toml(Model, path)
