"""Schemas as libraries write them from types: all of an ordinary one is taken, and held to."""

from __future__ import annotations

import datetime
import decimal
import enum
import itertools
import json
import random
import re
import uuid
from typing import Annotated, Literal

import pytest

from bireme.logits.guided.scalars import FORMATS
from tests.logits.guided.answers import Grammars

pydantic = pytest.importorskip("pydantic")
jsonschema = pytest.importorskip("jsonschema")
_DAY = (
    r"(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-"
    r"(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))"
)
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?"
_HEX = "[0-9a-fA-F]"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
# What zod 4 sends of its own texts: format, pattern, an answer that is one and one that is none.
ZOD = [
    (
        "email",
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        "me@example.org",
        "a..b@example.org",
    ),
    (
        "uuid",
        f"^({_HEX}{{8}}-{_HEX}{{4}}-[1-8]{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}|00000000-0000-0000-0000-000000000000"
        "|ffffffff-ffff-ffff-ffff-ffffffffffff)$",
        "01234567-89ab-4def-8123-456789abcdef",
        "01234567-89ab-0def-8123-456789abcdef",
    ),
    ("date-time", f"^{_DAY}T(?:{_CLOCK}(?:Z))$", "2026-11-26T10:30:00Z", "2026-11-26T10:30:00"),
    ("date", f"^{_DAY}$", "2026-11-26", "2026-02-30"),
    ("time", f"^{_CLOCK}$", "10:30:00", "24:00"),
    (
        "duration",
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
        "P1DT2H",
        "P",
    ),
    ("ipv4", rf"^(?:{_OCTET}\.){{3}}{_OCTET}$", "10.0.0.1", "10.0.0.256"),
    (
        "ipv6",
        rf"^(({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}|::|({_HEX}{{1,4}})?::({_HEX}{{1,4}}:?){{0,6}})$",
        "1:2:3:4:5:6:7:8",
        "1:2",
    ),
    ("base64", r"^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$", "YWI=", "YWI"),
    ("base64url", r"^[A-Za-z0-9_-]*$", "YWI", "YW="),
    ("e164", r"^\+(?:[0-9]){6,14}[0-9]$", "+49301234567", "0301234567"),
    ("nanoid", r"^[a-zA-Z0-9_-]{21}$", "V1StGXR8_Z5jdHi6B-myT", "short"),
    ("cuid", r"^[cC][^\s-]{8,}$", "cjld2cjxh0000", "x"),
    ("ulid", r"^[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{26}$", "01ARZ3NDEKTSV4RRFFQ69G5FAV", "01ARZ3"),
    ("lowercase", r"^[^A-Z]*$", "abc", "Abc"),
    ("starts_with", r"^ab.*", "abc", "b"),
]


@pytest.fixture(scope="module")
def grammars():
    pytest.importorskip("xgrammar")
    return Grammars()


@pytest.mark.parametrize(("name", "pattern", "right", "wrong"), ZOD, ids=[row[0] for row in ZOD])
def test_a_format_beside_its_pattern_is_taken(grammars, name, pattern, right, wrong):
    grammar, rng = grammars.of({"type": "string", "format": name, "pattern": pattern}), random.Random(1)
    assert grammars.can_be(grammar, json.dumps(right)) and not grammars.can_be(grammar, json.dumps(wrong))
    answers = [json.loads(text) for _ in range(40) if (text := grammars.answer(grammar, rng)) is not None]
    assert answers and all(re.search(pattern, answer) for answer in answers)


@pytest.mark.parametrize("name", FORMATS)
def test_the_plainer_pattern_of_a_format_allows_nothing_else(grammars, name):
    rng = random.Random(0)
    grammar = grammars.of({"type": "string", "pattern": FORMATS[name][2]})
    answers = [json.loads(text) for _ in range(60) if (text := grammars.answer(grammar, rng)) is not None]
    assert answers
    for answer in answers:
        if name in ("time", "date-time"):  # of jsonschema itself, older than RFC 3339
            whole = answer if name == "date-time" else f"2026-11-26T{answer}"
            datetime.datetime.fromisoformat(re.sub("[.][0-9]+", "", whole))
        else:
            jsonschema.FormatChecker().check(answer, name)  # what it has no package for is let through


class Kind(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, pydantic.Field(ge=0, le=9)]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    tricks: set[str] | None = None


class Order(pydantic.BaseModel):
    """What an application asks a model to fill in."""

    model_config = pydantic.ConfigDict(extra="forbid")

    id: uuid.UUID
    made: datetime.datetime
    due: datetime.date | None
    at: datetime.time
    every: datetime.timedelta
    price: decimal.Decimal
    exact: Annotated[decimal.Decimal, pydantic.Field(max_digits=8, decimal_places=2)]
    sizes: list[Kind]
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    point: tuple[float, float]
    notes: dict[str, int]
    slug: Annotated[str, pydantic.Field(pattern=r"^[a-z0-9]+(?:-[a-z0-9]+)*$", max_length=9)]
    page: pydantic.AnyUrl
    parent: Order | None = None


def test_a_model_of_pydantic_s_types_is_taken_and_answers_are_such_models(grammars):
    schema = Order.model_json_schema()
    schema["$defs"]["Dog"]["properties"]["tricks"]["anyOf"][0].pop("uniqueItems")  # refused by name
    decimals = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}  # since pydantic 2.12
    schema["$defs"]["Order"]["properties"]["price"]["anyOf"][1] = decimals
    order = {
        "id": "01234567-89ab-4def-8123-456789abcdef", "made": "2026-11-26T10:30:00Z", "due": None, "at": "10:30:00Z",
        "every": "P1DT2H", "price": "12.50", "exact": 3.25, "sizes": ["small"], "pet": {"kind": "cat", "lives": 9},
        "point": [1.5, 2], "notes": {"a": 1}, "slug": "a-b", "page": "https://example.org/a",
    }  # fmt: skip
    grammar = grammars.of(schema)
    assert Order.model_validate(order) and grammars.can_be(grammar, json.dumps(order))
    for field, wrong in (
        ("price", "x"),
        ("slug", "a--b"),
        ("id", "1"),
        ("pet", {"kind": "cow"}),
        ("notes", {"a": "b"}),
    ):
        assert not grammars.can_be(grammar, json.dumps({**order, field: wrong})), field


PIECES = (
    "a",
    "b",
    "[ab]",
    "[^a]",
    "(a|bc)",
    "(ab*)?",
    "b*",
    "(a|b+)*",
    "c{1,2}",
    "(?!a)",
    "(?=b|c)",
    "(a(?=b)|b)",
    "$",
    "^",
)


def test_random_patterns_joined_allow_what_both_allow_and_nothing_else(grammars):
    rng, texts = (
        random.Random(3),
        ["".join(text) for size in range(5) for text in itertools.product("abc", repeat=size)],
    )
    num_taken = 0
    for _ in range(60):
        patterns = [
            "^" + "".join(rng.choices(PIECES[:-1], k=rng.randint(1, 4))) + rng.choice(("$", "")) for _ in range(2)
        ]
        wanted = [text for text in texts if all(re.search(pattern, text) for pattern in patterns) and len(text) > 1]
        schema = {
            "allOf": [{"pattern": pattern} for pattern in patterns],
            "type": "string",
            "minLength": 2,
            "maxLength": 4,
        }
        try:
            grammar = grammars.of(schema)
        except ValueError as error:
            assert not wanted or "too much" in str(error) or "repeated" in str(error), (patterns, error)
            continue
        num_taken += 1
        assert [text for text in texts if grammars.can_be(grammar, json.dumps(text))] == wanted, patterns
    assert num_taken > 15
