"""What a value must look like, said by a type: what fits comes back, anything else is refused by its place."""

import itertools
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pytest

from blockcache.errors import BlockcacheError, ContentError, short
from blockcache.files import Count, Fields, Limit, Name, Steps, dict_of, list_of, read

DEEP: Any = 1
for _ in range(400):
    DEEP = [DEEP]


@dataclass(frozen=True)
class Point:
    x: float
    label: str | None


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, 3),
        (int, -(2**64) + 1),
        (float, 3),
        (float, 1.5),
        (bool, True),
        (str, "héllo"),
        (str | None, None),
        (Steps, 10_000),
        (Name, "x" * 200),
        (list[int], []),
        (dict[str, list[float]], {"a": [1, 2.5]}),
        (Annotated[list[Count], Limit(2, 2)], [1, 2]),
        (Fields({"a": int}, {"b": str}), {"a": 1}),
        (Fields({"a": int}, others=True), {"a": 1, "z": {"deep": [None]}}),
        (list_of(Fields({"a": int})), [{"a": 1}]),
        (dict_of(Fields({"a": int})), {"x": {"a": 1}}),
        (Any, {"a": [1, None, True, "x", 1.5, {}]}),
    ],
)
def test_what_fits_comes_back(kind, value):
    assert read(kind, value) == value


def test_objects_become_dataclasses_and_lists_tuples():
    assert read(tuple[Point, ...], [{"x": 1.5, "label": None}]) == (Point(1.5, None),)
    assert read(Any, {"a": (1, np.float64(2.5))}) == {"a": [1, 2.5]}
    assert type(read(Any, np.float64(2.5))) is float


@pytest.mark.parametrize(
    ("kind", "value", "sentence"),
    [
        (int, True, "it needs a whole number, got True"),
        (int, 1.0, "it needs a whole number, got 1.0"),
        (int, "3", "it needs a whole number, got '3'"),
        (int, 2**64, "it needs a whole number of 64 bits"),
        (int, [10**5000], "a whole number, got .* too large to be shown"),
        (int, np.int64(3), "it needs a whole number"),
        (float, True, "it needs a whole number, got True"),
        (float, float("inf"), "it needs a finite number, got inf"),
        (float, float("nan"), "it needs a finite number, got nan"),
        (float, "1.5", "it needs a number, got '1.5'"),
        (float, np.float32(1), "it needs a number"),
        (bool, 1, "it needs true or false, got 1"),
        (str, None, "it needs a text, got None"),
        (str, ["x"], r"it needs a text, got \['x'\]"),
        (str, "\ud800", "it needs a text in Unicode"),
        (str, "x" * 100_001, "it needs a text of 100,000 characters at most"),
        (str | None, 3, "it needs a text, got 3"),
        (Steps, 0, "it needs 1 or more and 10,000 at most, got 0"),
        (Steps, 10_001, "1 or more and 10,000 at most"),
        (Count, -1, "it needs 0 or more, got -1"),
        (Name, "", "it needs a length of 1 or more and 200 at most, got ''"),
        (list[int], {}, "it needs a list, got {}"),
        (list[int], "12", "it needs a list, got '12'"),
        (list[int], [1, "2"], r"it needs a whole number under '\[1\]', got '2'"),
        (list[int], [1] * 1_000_001, "it needs a list of 1,000,000 values at most"),
        (dict[str, int], [1], "it needs an object"),
        (dict[str, list[float]], {"a": [1, None]}, r"a number under 'a\[1\]', got None"),
        (Fields({"a": int}), {}, "missing or unknown keys: a"),
        (Fields({"a": int}), {"a": 1, "b": 2}, "missing or unknown keys: b"),
        (Fields({}), {f"k{i}" * 100: 1 for i in range(9)}, "missing or unknown keys: k0.* and 4 more"),
        (list[Point], [{"x": 1.5}], r"missing or unknown keys under '\[0\]': label"),
        (list[Point], [{"x": 1.5, "label": 3}], r"a text under '\[0\].label', got 3"),
        (Any, {"a": {1: 2}}, "it needs a text under 'a', got 1"),
        (Any, {"a": object()}, "something that JSON can hold under 'a'"),
        (Any, {"a": np.zeros(2)}, "something that JSON can hold under 'a'"),
        (Any, DEEP, "there are lists within lists under .*, more than 20 of them"),
    ],
    ids=itertools.count(),
)
def test_what_does_not_fit_is_refused_by_its_place(kind, value, sentence):
    with pytest.raises(ContentError, match=sentence) as caught:
        read(kind, value)
    assert len(str(caught.value)) < 500


def test_errors_are_short_whatever_they_speak_of():
    long = BlockcacheError("begins " + "x" * 100_000 + " ends")
    assert len(str(long)) <= 1000
    assert str(long).startswith("begins xxx")
    assert str(long).endswith("xxx ends")
    assert str(BlockcacheError("a\n" * 500 + "end")).count("\n") < 4
    assert str(BlockcacheError("what, expected, got")) == "what, expected, got"
    for value in ("x" * 10_000, [["y" * 99] * 99] * 99, dict.fromkeys(range(99), "z" * 50), 10**5000, 10**400, DEEP):
        assert len(short(value)) <= 100
    assert short([1, "a"]) == "[1, 'a']"
