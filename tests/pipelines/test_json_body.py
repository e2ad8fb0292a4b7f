"""Bodies whose parsing alone would hold up everybody else are refused before it; large texts are not."""

import msgspec
import pytest

from bireme.errors import RequestError
from bireme.pipelines import json_body
from bireme.pipelines.json_body import decode_body


class Body(msgspec.Struct):
    text: str = ""
    values: list = []


def test_ten_million_empty_lists_are_refused_unparsed():
    with pytest.raises(RequestError, match="600001 objects and lists; the limit is 500000, send fewer"):
        decode_body(b'{"values":[' + b"[]," * 599_999, Body, {})  # no valid JSON: a parser would have said that


def test_millions_of_numbers_are_refused_unparsed():
    with pytest.raises(RequestError, match="4000001 commas; the limit is 4000000, send fewer values"):
        decode_body(b'{"values":[' + b"1," * 4_000_001, Body, {})


@pytest.mark.parametrize("key", ["k%d", "%d\\\\", '%d\\"', ":%d"], ids=["plain", "a backslash", "a quote", "a colon"])
@pytest.mark.parametrize("colon", [":", " \t\n:"], ids=["close", "apart"])
def test_hundreds_of_thousands_of_keys_are_refused_unparsed(key, colon):
    body = "{" + ",".join(f'"{key % number}"{colon}1' for number in range(200_001))  # no valid JSON
    with pytest.raises(RequestError, match=r"\d+ keys; the limit is 200000, send fewer"):
        decode_body(body, Body, {})


@pytest.mark.parametrize("text", ["a" * (8 << 20), "{x}, " * 400_000, 'a: "b": ' * 300_000, '{"a": "b"}' * 300_000])
def test_a_large_text_is_taken(text):
    assert decode_body(msgspec.json.encode(Body(text)), Body, {}).text == text


def test_as_text_it_is_counted_alike():
    with pytest.raises(RequestError, match="objects and lists"):
        decode_body('{"values":[' + "[]," * json_body.MAX_CONTAINERS, Body, {})
