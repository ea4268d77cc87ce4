import math
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import pytest

from hybridtrain.config.decode import Unions, decode
from hybridtrain.errors import ConfigError


class Schedule(StrEnum):
    HORIZONTAL = "horizontal"
    VERTICAL = "vertical"


class Feature(Protocol):
    kind: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    kind: ClassVar[str] = "recompute"
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every = {self.every} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    kind: ClassVar[str] = "stream"
    prefetch_depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    seq_len: int
    learning_rate: float = 1e-3
    schedule: Schedule = Schedule.HORIZONTAL
    compute_dtype: Literal["bfloat16", "float32"] = "float32"

    def __post_init__(self) -> None:
        faults = []
        if self.seq_len < 1:
            faults.append(f"seq_len = {self.seq_len} must be at least 1")
        if self.learning_rate <= 0:
            faults.append(f"learning_rate = {self.learning_rate} must be positive")
        if faults:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    workload: Workload
    features: tuple[Feature, ...] = ()
    seeds: tuple[int, ...] = (0,)
    bounds: dict[str, float] = field(default_factory=dict)
    corpus: Path | None = None
    exact: bool = False


UNIONS: Unions = {Feature: {"recompute": Recompute, "stream": Stream}}


def read(mapping: object) -> Scenario:
    return decode(Scenario, mapping, source="a.toml", unions=UNIONS)


def faults_of(mapping: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read(mapping)
    assert caught.value.source == "a.toml"
    return caught.value.faults


def test_a_full_mapping_becomes_the_dataclasses() -> None:
    scenario = read(
        {
            "name": "tiny",
            "workload": {
                "seq_len": 64,
                "learning_rate": 1,
                "schedule": "vertical",
                "compute_dtype": "bfloat16",
            },
            "features": [{"kind": "stream", "prefetch_depth": 2}, {"kind": "recompute"}],
            "seeds": [1, 2],
            "bounds": {"peak": 3},
            "corpus": "data/train.bin",
            "exact": True,
        }
    )
    assert scenario == Scenario(
        name="tiny",
        workload=Workload(seq_len=64, learning_rate=1.0, schedule=Schedule.VERTICAL, compute_dtype="bfloat16"),
        features=(Stream(prefetch_depth=2), Recompute(every=1)),
        seeds=(1, 2),
        bounds={"peak": 3.0},
        corpus=Path("data/train.bin"),
        exact=True,
    )
    assert isinstance(scenario.workload.schedule, Schedule)
    assert isinstance(scenario.workload.learning_rate, float)
    assert isinstance(scenario.bounds["peak"], float)


def test_absent_keys_take_their_defaults() -> None:
    assert read({"name": "tiny", "workload": {"seq_len": 1}}) == Scenario(name="tiny", workload=Workload(seq_len=1))


def test_nine_faults_are_reported_at_once() -> None:
    faults = faults_of(
        {
            "name": "tiny",
            "exat": True,
            "workload": {
                "seq_len": "12",
                "learning_rate": math.nan,
                "schedule": "vertcal",
                "compute_dtype": "int8",
            },
            "features": [{"kind": "recompute", "every": 0}, {"kind": "streem"}, {"kind": "stream"}],
            "seeds": [1, True],
        }
    )
    allowed = "allowed: name, workload, features, seeds, bounds, corpus, exact"
    assert len(faults) == 9
    assert faults == (
        f"$.exat: is an unknown key (found True); {allowed}; did you mean 'exact'?",
        "$.workload.seq_len: found '12' (a string); an integer is required",
        "$.workload.learning_rate: found nan (a number); a finite number is required",
        "$.workload.schedule: 'vertcal' is not one of horizontal, vertical; did you mean 'vertical'?",
        "$.workload.compute_dtype: 'int8' is not one of bfloat16, float32",
        "$.features[0]: every = 0 must be at least 1",
        "$.features[1].kind: 'streem' is not one of recompute, stream; did you mean 'stream'?",
        "$.features[2].prefetch_depth: is missing; an integer is required",
        "$.seeds[1]: found True (a boolean); an integer is required",
    )


def test_every_line_of_a_value_error_is_a_fault() -> None:
    assert faults_of({"name": "tiny", "workload": {"seq_len": 0, "learning_rate": -1.0}}) == (
        "$.workload: seq_len = 0 must be at least 1",
        "$.workload: learning_rate = -1.0 must be positive",
    )


def test_value_rules_wait_for_sound_fields() -> None:
    assert faults_of({"name": "tiny", "workload": {"seq_len": 0, "learning_rate": "fast"}}) == (
        "$.workload.learning_rate: found 'fast' (a string); a finite number is required",
    )


def test_a_value_error_without_words_is_still_a_fault() -> None:
    @dataclass(frozen=True)
    class Mute:
        def __post_init__(self) -> None:
            raise ValueError

    with pytest.raises(ConfigError) as caught:
        decode(Mute, {}, source="x")
    assert caught.value.faults == ("$: invalid values",)


def test_unknown_keys_come_sorted() -> None:
    faults = faults_of({"name": "n", "workload": {"seq_len": 1}, "zebra": 1, "aardvark": 2, "moose": 3})
    assert [fault.split(":")[0] for fault in faults] == ["$.aardvark", "$.moose", "$.zebra"]


@pytest.mark.parametrize(
    ("annotation", "value", "words"),
    [
        (bool, 1, "found 1 (an integer); true or false is required"),
        (int, True, "found True (a boolean); an integer is required"),
        (int, 1.0, "found 1.0 (a number); an integer is required"),
        (float, True, "found True (a boolean); a finite number is required"),
        (float, math.inf, "found inf (a number); a finite number is required"),
        (float, "1", "found '1' (a string); a finite number is required"),
        (str, 3, "found 3 (an integer); a string is required"),
        (str, None, "found None (null); a string is required"),
        (str, "\ud800", "found '\\ud800' (an unpaired surrogate, which is not text); a string is required"),
        (Path, "", "found '' (a string); a path is required"),
        (int | None, "x", "found 'x' (a string); an integer is required"),
        (tuple[int, ...], 3, "found 3 (an integer); an array is required"),
        (dict[str, int], [1], "found [1] (an array); a table is required"),
        (Workload, 3, "found 3 (an integer); a table is required"),
        (Feature, 3, 'found 3 (an integer); a table with kind = "..." is required'),
        (Literal[1, 2], 3, "3 is not one of 1, 2"),
        (Literal[1, 2], True, "True is not one of 1, 2"),
        (Literal[True], 1, "1 is not one of True"),
        (Schedule, 3, "3 is not one of horizontal, vertical"),
    ],
)
def test_wrong_types_are_refused(annotation: object, value: object, words: str) -> None:
    holder = make_dataclass("Holder", [("held", annotation)], frozen=True)
    with pytest.raises(ConfigError) as caught:
        decode(holder, {"held": value}, source="x", unions=UNIONS)
    assert caught.value.faults == (f"$.held: {words}",)


@pytest.mark.parametrize(
    ("kind", "items", "place"),
    [
        (float, [1.0, math.nan], 1),
        (float, [1.0, "2"], 1),
        (float, [-math.inf, 2.0], 0),
        (int, [1, 2.0], 1),
        (int, [True], 0),
    ],
)
def test_one_wrong_number_of_an_array_is_named(kind: type, items: list[object], place: int) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(make_dataclass("Held", [("items", tuple[kind, ...])]), {"items": items}, source="x")  # type: ignore[valid-type]
    (fault,) = caught.value.faults
    assert fault.startswith(f"$.items[{place}]: found ")


def test_integers_among_floats_become_floats() -> None:
    held = make_dataclass("Held", [("items", tuple[float, ...])])
    found = decode(held, {"items": [1, 2.5]}, source="x").items  # type: ignore[attr-defined]
    assert found == (1.0, 2.5)
    assert set(map(type, found)) == {float}


def test_an_integer_too_large_for_a_float_is_refused() -> None:
    faults = faults_of({"name": "n", "workload": {"seq_len": 1, "learning_rate": 10**400}})
    assert len(faults) == 1
    assert faults[0].startswith("$.workload.learning_rate: found 1000")
    assert len(faults[0]) < 200, "long values must be cut"


def test_null_is_none_only_where_optional() -> None:
    assert read({"name": "n", "workload": {"seq_len": 1}, "corpus": None}).corpus is None
    assert faults_of({"name": None, "workload": {"seq_len": 1}}) == ("$.name: found None (null); a string is required",)


def test_a_root_that_is_no_table_is_a_fault() -> None:
    assert faults_of([1]) == ("$: found [1] (an array); a table is required",)


def test_a_missing_kind_names_the_kinds() -> None:
    assert faults_of({"name": "n", "workload": {"seq_len": 1}, "features": [{}]}) == (
        "$.features[0].kind: is missing; one of recompute, stream is required",
    )


def test_a_missing_table_and_choice_say_what_is_required() -> None:
    @dataclass(frozen=True)
    class Needs:
        table: Workload
        items: tuple[int, ...]
        choice: Schedule
        maybe: int | None

    with pytest.raises(ConfigError) as caught:
        decode(Needs, {}, source="x")
    assert caught.value.faults == (
        "$.table: is missing; a table is required",
        "$.items: is missing; an array is required",
        "$.choice: is missing; one of horizontal, vertical is required",
        "$.maybe: is missing; an integer is required",
    )


def test_a_tagged_class_may_stand_alone_with_its_own_kind_only() -> None:
    assert decode(Stream, {"kind": "stream", "prefetch_depth": 1}, source="x") == Stream(prefetch_depth=1)
    with pytest.raises(ConfigError) as caught:
        decode(Stream, {"kind": "recompute", "prefetch_depth": 1}, source="x")
    assert caught.value.faults == ("$.kind: 'recompute' is not one of stream",)


def test_an_untagged_class_knows_no_kind() -> None:
    faults = faults_of({"name": "n", "workload": {"kind": "workload", "seq_len": 1}})
    allowed = "seq_len, learning_rate, schedule, compute_dtype"
    assert faults == (f"$.workload.kind: is an unknown key (found 'workload'); allowed: {allowed}",)


def test_odd_keys_are_quoted_in_the_path() -> None:
    faults = faults_of({"name": "n", "workload": {"seq_len": 1}, "bounds": {"step time": "x", "ok": "y"}})
    assert [fault.split(": ")[0] for fault in faults] == ["$.bounds['step time']", "$.bounds.ok"]


def test_derived_fields_are_no_keys() -> None:
    @dataclass(frozen=True)
    class Derived:
        given: int
        twice: int = field(init=False, default=0)

    with pytest.raises(ConfigError) as caught:
        decode(Derived, {"given": 1, "twice": 2}, source="x")
    assert caught.value.faults == ("$.twice: is an unknown key (found 2); allowed: given",)


def test_a_mapping_annotation_is_read_as_a_dict() -> None:
    @dataclass(frozen=True)
    class Holder:
        held: Mapping[str, int]

    assert decode(Holder, {"held": {"a": 1}}, source="x").held == {"a": 1}


@pytest.mark.parametrize("annotation", [int | str, tuple[int, int], dict[int, str], set[int], complex])
def test_an_unsupported_annotation_is_a_fault_of_the_program(annotation: object) -> None:
    holder = make_dataclass("Holder", [("held", annotation)], frozen=True)
    with pytest.raises(TypeError, match=r"\$\.held: the decoder does not know the annotation"):
        decode(holder, {"held": 1}, source="x")
