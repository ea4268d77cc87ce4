"""Damage to the content of a file: bits, ranges, and tokens of TOML and JSON, of which a few are bombs."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

_NUMBER: Final = re.compile(rb"-?\d[\d.]*(?:e[-+]?\d+)?")
_TEXT: Final = re.compile(rb'"[^"\n]*"')
_WORD: Final = re.compile(rb"[A-Za-z_][\w.-]*")
_NUMBERS: Final = (
    b"0", b"-1", b"1", b"2147483648", b"-9223372036854775809", b"18446744073709551616", b"1" + 21 * b"0", b"1e308",
    b"1e999", b"-0.0", b"NaN", b"Infinity", b"nan", b"inf", 5000 * b"9", b"0x7f", b"1_0", b"true", b'"1"', b"[]", b"{}",
    b"null", b"1e-320", b"0.5",
)  # fmt: skip
_TEXTS: Final = (
    b'""', b'"\\ud800"', b'"\\u0000"', b'"../../etc/passwd"', b'"/dev/zero"', b'"' + 5000 * b"a" + b'"', b"1", b"null",
    b'"\xc3\xa9"', b'"\xff"', b"'''", b"[[]]", b'"a\\nb"', b'"%s{}"', b'"float32"', b'"."', b'"-"', b"{}", b"true",
)  # fmt: skip
_PIECES: Final = (
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"]", b"}", b'"', b",", b"=", b".", b"# ", b"[[a]]\n", b"\nkind = 1\n",
    b"\r", b"\x1b", b"{{", b"{%", b"c__builtin__\neval\n", b"\x80\x04", b"a.b.c = 1\n",
)  # fmt: skip
_OPENERS: Final = (b"[", b'{"a":', b"a.", b"(", b"{", b"\nx = [", b"l", b"]")


@dataclass(frozen=True, slots=True)
class Place:
    """Place and kind of a damage, drawn at random."""

    where: float
    """Share of the content, or of its tokens, in [0, 1)."""
    number: int
    """At least 0."""


def _index(place: Place, count: int) -> int:
    return min(count - 1, int(place.where * count))


def _flip(content: bytes, place: Place) -> bytes:
    if not content:
        return b"\0"
    at = _index(place, len(content))
    return content[:at] + bytes([content[at] ^ 1 << place.number % 8]) + content[at + 1 :]


def _set(content: bytes, place: Place) -> bytes:
    at = _index(place, len(content) + 1)
    return content[:at] + bytes([place.number % 256]) + content[at + 1 :]


def _drop(content: bytes, place: Place) -> bytes:
    at = _index(place, len(content) + 1)
    return content[:at] + content[at + 1 + place.number % 64 :]


def _cut(content: bytes, place: Place) -> bytes:
    return content[: _index(place, len(content) + 1)]


def _repeat(content: bytes, place: Place) -> bytes:
    at = _index(place, len(content) + 1)
    return content[:at] + content[at : at + 1 + place.number % 64] * 2 + content[at + 1 + place.number % 64 :]


def _insert(content: bytes, place: Place) -> bytes:
    at = _index(place, len(content) + 1)
    return content[:at] + _PIECES[place.number % len(_PIECES)] + content[at:]


def _swap_lines(content: bytes, place: Place) -> bytes:
    lines = content.split(b"\n")
    one, other = _index(place, len(lines)), place.number % len(lines)
    lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def _deep(content: bytes, place: Place) -> bytes:
    at = _index(place, len(content) + 1)
    depth = (100, 2_000, 100_000)[place.number % 3]
    return content[:at] + _OPENERS[place.number // 3 % len(_OPENERS)] * depth + content[at:]


def _of_tokens(pattern: re.Pattern[bytes], values: tuple[bytes, ...]) -> Callable[[bytes, Place], bytes]:
    """Return a function that replaces a token by a value, or by another token of the same content."""

    def replace(content: bytes, place: Place) -> bytes:
        found = list(pattern.finditer(content))
        if not found:
            return _flip(content, place)
        token = found[_index(place, len(found))]
        value = values[place.number % len(values)] if values else found[place.number % len(found)].group()
        return content[: token.start()] + value + content[token.end() :]

    return replace


MUTATIONS: Final[Mapping[str, Callable[[bytes, Place], bytes]]] = {
    "flip": _flip, "set": _set, "drop": _drop, "cut": _cut, "repeat": _repeat, "insert": _insert,
    "swap lines": _swap_lines, "deep": _deep,
    "number": _of_tokens(_NUMBER, _NUMBERS), "text": _of_tokens(_TEXT, _TEXTS),
    "other number": _of_tokens(_NUMBER, ()), "other text": _of_tokens(_TEXT, ()), "other word": _of_tokens(_WORD, ()),
}  # fmt: skip
"""By name; each makes other content of any."""
