"""Write docs/api.md from the frontend's operations and the structs that read its requests.

python tools/make_api_page.py             write it
python tools/make_api_page.py --check     exit with 1 when the file is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.config import CHECKOUT
from bireme.openai.openapi import OPERATIONS, REF, UPLOAD, Operation, answer_schemas, schemas

PAGE = CHECKOUT / "docs" / "api.md"
HEAD = """\
# Every endpoint and field

Written by `tools/make_api_page.py` from `bireme/openai/openapi.py` and the structs that read requests. What fields \
mean: [openai.md](openai.md), [messages.md](messages.md), [video.md](video.md), [parsers.md](parsers.md). A field in \
no table is refused by its name with status 400; so is one that is called refused, with the reason given here. Ranges \
of values, and which ones go together, are checked besides. Paths of videos and pictures are there where a recipe \
makes them, those of files and batches unless `frontend.files.max_files` is 0. `GET` answers `HEAD` too.
"""
_TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "object"}


def text() -> str:
    """Return the page."""
    return "\n".join([HEAD, *_endpoints(), *_bodies(), *_objects(), *_answers()])


def _endpoints() -> Iterator[str]:
    yield "| method | path | what |\n|---|---|---|"
    for one in OPERATIONS:
        path = f"[`{one.path}`](#{_target(one)})" if _schema(one) or one.answer else f"`{one.path}`"
        yield f"| {one.method} | {path} | {one.text} |"
    yield ""


def _target(one: Operation) -> str:
    return one.answer.__name__.lower() if one.answer is not None else _anchor(_title(_first(one)))


def _bodies() -> Iterator[str]:
    for one in OPERATIONS:
        if (schema := _schema(one)) is None or _first(one) is not one:
            continue
        yield f"## {_title(one)}\n"
        yield from _fields(schema)
        for name, reason in sorted(one.refused.items()):
            yield f"| `{name}` | refused | {reason} |"
        yield ""


def _first(one: Operation) -> Operation:
    """Return the operation whose table is this one's: the first that takes the same body."""
    return next(other for other in OPERATIONS if other is one or (one.body is not None and other.body is one.body))


def _schema(one: Operation) -> dict[str, Any] | None:
    """Return what a request's body is to be; None: it has none."""
    if one.body is not None:
        schema: dict[str, Any] = schemas()[one.body.__name__]
        return schema
    return UPLOAD if (one.method, one.path) == ("POST", "/v1/files") else None


def _objects() -> Iterator[str]:
    bodies = {one.body.__name__ for one in OPERATIONS if one.body is not None}
    yield "## Objects within requests\n"
    for name, schema in sorted(schemas().items()):
        if name not in bodies and "properties" in schema:
            yield f"### {name}\n"
            yield from _fields(schema)
            yield ""


def _answers() -> Iterator[str]:
    """What answers hold that have no counterpart in other servers' APIs."""
    yield "## Objects within answers\n"
    yield "`..._ms`: milliseconds, `..._s`: seconds, `at` and `..._at`: seconds of Unix time.\n"
    for name, schema in sorted(answer_schemas().items()):
        yield f"### {name}\n"
        yield "| field | type |\n|---|---|"
        for field, kind in schema["properties"].items():
            yield f"| `{field}` | {_type(kind)} |"
        yield ""


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    yield "| field | | type, or why it is refused |\n|---|---|---|"
    required = schema.get("required", [])
    taken = {name: kind for name, kind in schema["properties"].items() if kind.get("type") != "null"}
    for name, kind in sorted(taken.items(), key=lambda item: (item[0] not in required, item[0])):
        yield f"| `{name}` | {'required' if name in required else 'served'} | {_type(kind)} |"


def _type(schema: dict[str, Any]) -> str:
    if (ref := schema.get("$ref")) is not None:
        name = ref.removeprefix(REF)
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if "prefixItems" in schema:
        return f"[{', '.join(map(_type, schema['prefixItems']))}]"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    if isinstance(schema.get("additionalProperties"), dict) and schema["additionalProperties"]:
        return f"object of {_type(schema['additionalProperties'])}"
    return _TYPES.get(schema.get("type", ""), "any value") + _range(schema)


def _range(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    return "".join((f", from {low}" if low is not None else "", f" to {high}" if high is not None else ""))


def _title(one: Operation) -> str:
    return f"{one.method} {one.path}"


def _anchor(title: str) -> str:
    """Return the name that GitHub gives to a heading."""
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        return 0 if PAGE.exists() and PAGE.read_text() == text() else 1
    PAGE.write_text(text())
    print(f"wrote {PAGE.relative_to(CHECKOUT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
