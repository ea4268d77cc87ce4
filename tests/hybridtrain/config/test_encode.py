import json
import math
import tomllib
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal, Protocol

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain.config.decode import Unions, decode
from hybridtrain.config.encode import digest, encode, tag_of, to_json, to_toml


class Colour(StrEnum):
    RED = "red"
    DARK_BLUE = "dark blue"


class Part(Protocol):
    kind: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    kind: ClassVar[str] = "wheel"
    radius: float
    spokes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    kind: ClassVar[str] = "frame"
    colour: Colour = Colour.RED
    wheels: tuple[Wheel, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bicycle:
    name: str
    count: int
    price: float
    sold: bool
    colour: Colour
    size: Literal["small", "large"]
    manual: Path
    frame: Frame
    parts: tuple[Part, ...]
    rows: tuple[tuple[Wheel, ...], ...]
    prices: dict[str, float]
    spares: dict[str, Frame]
    note: str | None = None
    spare: Wheel | None = None


UNIONS: Unions = {Part: {"wheel": Wheel, "frame": Frame}}

numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53).map(float)
wheels = st.builds(Wheel, radius=numbers, spokes=st.lists(st.integers()).map(tuple))
frames = st.builds(Frame, colour=st.sampled_from(Colour), wheels=st.lists(wheels, max_size=2).map(tuple))
bicycles = st.builds(
    Bicycle,
    name=st.text(),
    count=st.integers(),
    price=numbers,
    sold=st.booleans(),
    colour=st.sampled_from(Colour),
    size=st.sampled_from(["small", "large"]),
    manual=st.lists(st.sampled_from(["a", "b c", "..", "x.toml"]), max_size=3).map(lambda parts: Path(*parts)),
    frame=frames,
    parts=st.lists(wheels | frames, max_size=3).map(tuple),
    rows=st.lists(st.lists(wheels, max_size=2).map(tuple), max_size=2).map(tuple),
    prices=st.dictionaries(st.text(), numbers, max_size=3),
    spares=st.dictionaries(st.text(), frames, max_size=2),
    note=st.none() | st.text(),
    spare=st.none() | wheels,
)


def read(mapping: object) -> Bicycle:
    return decode(Bicycle, mapping, source="x", unions=UNIONS)


@settings(max_examples=150, deadline=None)
@given(bicycles)
def test_whatever_is_written_is_read_back(bicycle: Bicycle) -> None:
    assert read(encode(bicycle)) == bicycle
    assert read(json.loads(to_json(bicycle))) == bicycle
    assert read(tomllib.loads(to_toml(bicycle))) == bicycle
    assert digest(read(tomllib.loads(to_toml(bicycle)))) == digest(bicycle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    rate: float = 0.5
    names: dict[str, int] = field(default_factory=dict)
    limit: int | None = None
    twice: float = field(init=False, default=0.0)


def test_encode_gives_plain_values_in_field_order() -> None:
    frame = Frame(colour=Colour.DARK_BLUE, wheels=(Wheel(radius=1.5),))
    encoded = encode(frame)
    assert json.dumps(encoded) == (
        '{"kind": "frame", "colour": "dark blue", "wheels": [{"kind": "wheel", "radius": 1.5, "spokes": []}]}'
    )
    assert type(encoded["colour"]) is str


def test_encode_keeps_none_and_leaves_out_derived_fields() -> None:
    assert encode(Small()) == {"rate": 0.5, "names": {}, "limit": None}


def test_canonical_json_is_sorted_compact_and_ascii() -> None:
    assert to_json(Small(names={"b": 1, "\u00e4": 2})) == ('{"limit":null,"names":{"b":1,"\\u00e4":2},"rate":0.5}')


def test_equal_objects_have_equal_digests() -> None:
    # -0.0 equals 0, and an integer given for a float equals it; neither may change a digest.
    assert digest(Small(rate=1)) == digest(Small(rate=1.0))
    assert digest(Small(rate=-0.0)) == digest(Small(rate=0.0))
    assert digest(Small(names={"a": 1, "b": 2})) == digest(Small(names={"b": 2, "a": 1}))


def test_large_floats_stay_floats_in_json() -> None:
    assert to_json(Small(rate=1e300)) == '{"limit":null,"names":{},"rate":1e+300}'
    assert to_json(Small(rate=2.0**53)) == '{"limit":null,"names":{},"rate":9007199254740992}'


def test_a_digest_is_sixteen_hex_characters_and_follows_every_value() -> None:
    digests = {
        digest(Small()),
        digest(Small(rate=0.25)),
        digest(Small(limit=0)),
        digest(Small(names={"a": 0})),
    }
    assert len(digests) == 4
    assert all(len(text) == 16 and set(text) <= set("0123456789abcdef") for text in digests)


def test_a_digest_never_changes() -> None:
    assert digest(Wheel(radius=0.5, spokes=(1, 2))) == "6f4aa66c39e284f4"


def test_numpy_floats_are_written_as_floats() -> None:
    assert to_toml(Wheel(radius=np.float64(0.1))) == 'kind = "wheel"\nradius = 0.1\nspokes = []\n'


def test_a_read_only_mapping_is_written_as_a_table() -> None:
    @dataclass(frozen=True)
    class Holder:
        held: MappingProxyType[str, int]

    assert encode(Holder(held=MappingProxyType({"a": 1}))) == {"held": {"a": 1}}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused_with_their_path(number: float) -> None:
    frame = Frame(wheels=(Wheel(radius=1.0), Wheel(radius=number)))
    for write in (encode, to_json, digest, to_toml):
        with pytest.raises(ValueError, match=r"\$\.wheels\[1\]\.radius: .* cannot be encoded;"):
            write(frame)


@pytest.mark.parametrize("value", [{1}, [1], 1j, b"x", np.int64(1)])
def test_values_the_decoder_cannot_read_are_refused(value: object) -> None:
    @dataclass(frozen=True)
    class Holder:
        held: object

    with pytest.raises(TypeError, match=r"\$\.held: .* which the decoder cannot read"):
        encode(Holder(held=value))


def test_only_dataclass_instances_are_written() -> None:
    for value in ({"a": 1}, Small):
        with pytest.raises(TypeError, match="is not a dataclass instance"):
            encode(value)


def test_only_text_is_a_key() -> None:
    @dataclass(frozen=True)
    class Holder:
        held: dict[int, int]

    with pytest.raises(TypeError, match=r"\$\.held: key 1 is a int"):
        encode(Holder(held={1: 2}))


def test_toml_leaves_none_out_where_it_is_the_default() -> None:
    assert to_toml(Small()) == "rate = 0.5\n\n[names]\n"


def test_toml_refuses_a_none_it_cannot_say() -> None:
    @dataclass(frozen=True)
    class Holder:
        limit: int | None = 3
        items: tuple[int | None, ...] = ()

    with pytest.raises(ValueError, match=r"\$\.limit: TOML cannot express None"):
        to_toml(Holder(limit=None))
    with pytest.raises(ValueError, match=r"\$\.items\[0\]: TOML cannot express None"):
        to_toml(Holder(items=(None,)))
    assert encode(Holder(limit=None, items=(None,))) == {"limit": None, "items": [None]}


def test_toml_puts_values_before_tables_and_quotes_what_it_must() -> None:
    @dataclass(frozen=True)
    class Holder:
        frame: Frame
        bounds: dict[str, str]
        last: bool = True

    holder = Holder(frame=Frame(wheels=(Wheel(radius=2.0),)), bounds={"a b": 'say "\\\x7f\n"', "c": ""})
    assert to_toml(holder) == (
        "last = true\n"
        "\n[frame]\n"
        'kind = "frame"\n'
        'colour = "red"\n'
        "\n[[frame.wheels]]\n"
        'kind = "wheel"\n'
        "radius = 2.0\n"
        "spokes = []\n"
        "\n[bounds]\n"
        '"a b" = "say \\"\\\\\\u007f\\n\\""\n'
        'c = ""\n'
    )


def test_toml_loses_nothing_of_a_mixed_array() -> None:
    @dataclass(frozen=True)
    class Holder:
        held: tuple[object, ...]

    text = to_toml(Holder(held=(1, Wheel(radius=2.0))))
    assert tomllib.loads(text) == {"held": [1, {"kind": "wheel", "radius": 2.0, "spokes": []}]}


def test_tag_is_a_class_variable_not_a_field() -> None:
    @dataclass(frozen=True)
    class Field:
        kind: str = "x"

    assert tag_of(Wheel) == "wheel"
    assert tag_of(Field) is None
    assert tag_of(Small) is None
