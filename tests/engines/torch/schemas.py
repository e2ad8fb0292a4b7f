"""Random JSON schemas of the subset that guided decoding supports, each with finitely many characters to say."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("name", "age", "city", "is_open", "tags", "price", "note", "kind", "x", "items")
WORDS = ("red", "green", "blue", "on", "off", "north", "ünï", 'a "b"')


def make_schemas(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [_object(rng, 3) for _ in range(count)]


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_enum, _const, _integer, _boolean, _string, _pattern, _nullable]
    if depth:
        makers += [_object, _array, _any_of, _reference]
    maker = rng.choice(makers)
    return maker(rng, depth - 1) if maker in (_object, _array, _any_of, _nullable, _reference) else maker(rng)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.7] or names[:1]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(rng, max(0, depth - 1)) for name in names},
        "required": required,
    }
    if rng.random() < 0.8:
        schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _schema(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(1, 3))]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"$defs": {"inner": _integer(rng)}, "type": "integer", **_integer(rng)}


def _nullable(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, 0), {"type": "null"}]}


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, 2.5, True, None], rng.randint(1, 4))}


def _const(rng: random.Random) -> dict[str, Any]:
    return {"const": rng.choice(WORDS)}


def _integer(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 1000)}


def _boolean(rng: random.Random) -> dict[str, Any]:
    return {"type": "boolean"}


def _string(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}


def _pattern(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(("^[a-c]{1,4}$", "^[0-9]{2}-[0-9]{2}$", "^(yes|no)$"))}
