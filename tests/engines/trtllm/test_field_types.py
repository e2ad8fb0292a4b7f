"""The contract's type notation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.engines.trtllm.field_types import parse_type

TAKEN = {
    "bool": [True, False],
    "int": [0, -3],
    "int >= 1": [1, 10**12],
    "int 0..100": [0, 100],
    "float": [1, 0.5],
    "float 0..1": [0, 1, 0.3],
    "str": ["", "x"],
    "null": [None],
    "int | null": [3, None],
    "any": [None, 3, "x", {}],
    "list[int >= 1]": [[], [1, 2]],
    "list[list[int]]": [[], [[1], []]],
    "dict[str, str]": [{}, {"a": "b"}],
    "AUTO | CUTLASS": ["AUTO", "CUTLASS"],
    "KvCacheConfig | null": [{}, {"a": 1}, None],
    "bool | auto": [True, "auto"],
}
REFUSED = {
    "bool": [0, 1, "true", None],
    "int": [True, 1.0, "1", None],
    "int >= 1": [0, -1],
    "int 0..100": [-1, 101],
    "float": [True, "0.5"],
    "float 0..1": [-0.1, 1.1, float("nan")],
    "str": [1, None],
    "null": [0, ""],
    "object": [1, {}, "x"],
    "list[int >= 1]": [[0], ["1"], 1, {}],
    "list[list[int]]": [[1]],
    "dict[str, str]": [{"a": 1}, []],
    "AUTO | CUTLASS": ["auto", "", 1],
    "KvCacheConfig | null": [[], "x"],
}


@pytest.mark.parametrize(("text", "value"), [(text, value) for text, values in TAKEN.items() for value in values])
def test_a_fitting_value_is_taken(text, value):
    assert parse_type(text).takes(value)


@pytest.mark.parametrize(("text", "value"), [(text, value) for text, values in REFUSED.items() for value in values])
def test_another_value_is_refused(text, value):
    assert not parse_type(text).takes(value)


@pytest.mark.parametrize("text", ["int > 0", "list(int)", "a b", ""])
def test_what_the_notation_does_not_have_is_refused(text):
    with pytest.raises(ValueError, match="type "):
        parse_type(text)


def test_a_type_says_what_it_takes():
    assert parse_type("int >= 1 | null").describe() == "a whole number, 1 or more or null"
    assert parse_type("float 0..1").describe() == "a number from 0 to 1"
    assert parse_type("list[int >= 1]").describe() == "a list of: a whole number, 1 or more"
    assert parse_type("str | MoeLoadBalancerConfig").describe() == "a string or a mapping (MoeLoadBalancerConfig)"


@given(st.integers(), st.integers(), st.integers())
def test_a_range_takes_what_lies_in_it(low, high, value):
    assert parse_type(f"int {low}..{high}").takes(value) == (low <= value <= high)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner), max_leaves=5))
def test_any_value_gets_an_answer(value):
    for text in TAKEN:
        assert parse_type(text).takes(value) in (True, False)
