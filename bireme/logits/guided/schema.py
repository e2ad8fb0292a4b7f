"""JSON Schema as its specification means it, rewritten into what xgrammar enforces.

Each keyword is enforced, or refused by name. A place in the answer is a set of schemas that all hold there. It is
multiplied out into alternatives without `anyOf`. Each becomes, type by type, a schema of the few words whose meaning in
xgrammar is exact. Where a choice is ours the answer is narrower: properties come in the schema's order, an object with
`properties` has no others unless it says so, and a schema without `type` means the types that its keywords speak of.

Exclusions (`not`, all but one of `oneOf`, `else`) hold where it can be shown that nothing is allowed and excluded.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bireme.logits.guided.containers import Arrays, Objects, is_open, names_in
from bireme.logits.guided.instance import Instances, tuple_of, type_of
from bireme.logits.guided.keywords import KEYWORDS, TYPES, check, types_of
from bireme.logits.guided.references import Document, UnsupportedError
from bireme.logits.guided.scalars import MAX_INTEGER, NothingError, number, string

Schema = dict[str, Any]

_NOTES = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"}
    | {"$schema", "$id", "$anchor", "$defs", "definitions"}
)
_MAX_BRANCHES = 1024
_MAX_STEPS = 300_000  # of one schema's rewriting; alternatives multiply


def rewritten(schema: Any, is_loose: bool = False, has_tags: bool = False) -> tuple[Schema, list[str]]:
    """Return the schema for xgrammar, and what was left out because it can't be enforced.

    Raises ValueError with the keyword, its place and the remedy; `is_loose` leaves the keyword out instead.
    `has_tags`: its own properties come between tags, not in JSON.
    """
    left_out: list[str] = []
    if is_loose:
        schema = copy.deepcopy(schema)
    while True:
        document = Document(schema)
        try:
            return _Rewriter(document, has_tags).root(schema), left_out
        except UnsupportedError as error:
            text = f"{document.place(error.schema)}: {error.reason}"
            if not is_loose or error.keyword not in error.schema:
                raise ValueError(text) from error
            given = error.schema.pop(error.keyword)
            if error.keyword == "oneOf":  # the most of it that can be enforced
                error.schema["anyOf"] = given if "anyOf" not in error.schema else error.schema["anyOf"]
            left_out.append(text)
        except RecursionError:
            raise ValueError("schema: it is nested too deeply; simplify it") from None


@dataclass(frozen=True, slots=True)
class _Branch:
    """One way to satisfy a place: all of `flats` without their `anyOf` and the like, none of `excluded`."""

    flats: tuple[Schema, ...] = ()
    excluded: tuple[tuple[Schema, str, Any], ...] = ()  # (who says so, its keyword, what must not hold)

    def __and__(self, other: _Branch) -> _Branch:
        known = {id(flat) for flat in self.flats}
        flats = (*self.flats, *(flat for flat in other.flats if id(flat) not in known))
        return _Branch(flats, (*self.excluded, *other.excluded))


class _Rewriter:
    def __init__(self, document: Document, has_tags: bool) -> None:
        self._document = document
        self._instances = Instances(document)
        self._arrays, self._objects = Arrays(self._place), Objects(self._place, self._instances)
        self._has_tags = has_tags
        self._is_probing = False  # whether something is allowed at all: no choice of ours may narrow it
        self._names: dict[Any, str] = {}  # by the identities of a place's schemas
        self._made: dict[str, Schema | None] = {}  # by name
        self._kept: list[Any] = []  # whose identities stand in keys
        self._num_steps = 0
        self._why = ""

    def root(self, schema: Any) -> Schema:
        made = self._alternatives([schema], self._has_tags)
        if made is None:
            raise ValueError(f"schema: it cannot accept any value{self._why and f' ({self._why})'}")
        used = self._used(made)
        return {**made, "$defs": {name: self._made[name] for name in used}} if used else made

    def _used(self, made: Schema) -> list[str]:
        found: dict[str, None] = {}
        waiting: list[Any] = [made]
        while waiting:
            node = waiting.pop()
            if isinstance(node, list):
                waiting += node
            elif isinstance(node, dict):
                name = node["$ref"].rpartition("/")[2] if isinstance(node.get("$ref"), str) else ""
                if name and name not in found:
                    found[name] = None
                    waiting.append(self._made[name])
                waiting += [inner for key, inner in node.items() if key not in ("enum", "const", "$ref")]
        return list(found)

    # A place and its alternatives

    def _place(self, schemas: Iterable[Any]) -> Schema | None:
        """Return what holds where all of these do; None: nothing can."""
        unique = {id(one): one for one in map(self._target, schemas) if not _allows_all(one)}
        if not unique:
            return {}
        if id(False) in unique:
            return None
        self._kept.append(unique)
        key = (self._is_probing, *sorted(unique))
        if (name := self._names.get(key)) is None:
            name = self._names[key] = f"p{len(self._names)}"
            self._made[name] = self._alternatives(list(unique.values()))
        if name not in self._made:  # it is being made: it holds itself
            return {"$ref": f"#/$defs/{name}"}
        made = self._made[name]
        if made is None or not made.keys() & {"properties", "patternProperties", "items", "prefixItems", "anyOf"}:
            return made
        return {"$ref": f"#/$defs/{name}"}

    def _target(self, schema: Any) -> Any:
        for _ in range(_MAX_BRANCHES):
            if not isinstance(schema, dict) or "$ref" not in schema or schema.keys() - _NOTES - {"$ref"}:
                return schema
            schema = self._document.follow(schema)
        raise ValueError("schema: a $ref leads back to itself")

    def _alternatives(self, schemas: Sequence[Any], has_tags: bool = False) -> Schema | None:
        branches = [_Branch()]
        for schema in schemas:
            branches = self._product(branches, self._expand(schema, ()))
        return self._joined(branches, has_tags)

    def _joined(self, branches: Iterable[_Branch], has_tags: bool) -> Schema | None:
        found: list[Schema] = []
        for branch in branches:
            found += [one for one in self._shapes(branch, has_tags) if one not in found]
        if not found:
            return None
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _product(self, branches: list[_Branch], others: list[_Branch]) -> list[_Branch]:
        self._count(len(branches) * len(others))
        if len(branches) * len(others) > _MAX_BRANCHES:
            raise ValueError(f"schema: its anyOf, oneOf and allOf make more than {_MAX_BRANCHES} alternatives")
        return [branch & other for branch in branches for other in others]

    def _count(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > _MAX_STEPS:
            raise ValueError("schema: its alternatives are too many; simplify it")

    def _expand(self, schema: Any, trail: tuple[int, ...]) -> list[_Branch]:
        if schema is True:
            return [_Branch()]
        if schema is False:
            return []
        check(schema)
        if id(schema) in trail:
            raise UnsupportedError(schema, "$ref", "$ref: it leads back to itself")
        trail = (*trail, id(schema))
        branches = [_Branch((schema,))]
        for ways in self._applied(schema, trail):
            branches = self._product(branches, ways)
        return [self._evaluated(schema, branch) for branch in branches]

    def _applied(self, schema: Schema, trail: tuple[int, ...]) -> Iterator[list[_Branch]]:
        if "$ref" in schema:
            yield self._expand(self._document.follow(schema), trail)
        for one in schema.get("allOf", ()):
            yield self._expand(one, trail)
        if "anyOf" in schema:
            yield [way for one in schema["anyOf"] for way in self._expand(one, trail)]
        if "oneOf" in schema:
            yield self._one_of(schema, trail)
        if "not" in schema:
            yield [_Branch((), ((schema, "not", schema["not"]),))]
        if "if" in schema and schema.keys() & {"then", "else"}:
            yield self._if(schema, trail)
        yield from self._dependencies(schema, trail)

    def _one_of(self, schema: Schema, trail: tuple[int, ...]) -> list[_Branch]:
        ways: list[_Branch] = []
        for at, one in enumerate(schema["oneOf"]):
            others = [other for where, other in enumerate(schema["oneOf"]) if where != at]
            excluded = _Branch((), tuple((schema, "oneOf", other) for other in others))
            ways += [way & excluded for way in self._expand(one, trail)]
        return ways

    def _if(self, schema: Schema, trail: tuple[int, ...]) -> list[_Branch]:
        then = self._product(self._expand(schema["if"], trail), self._expand(schema.get("then", True), trail))
        fails = _Branch((), ((schema, "if", schema["if"]),))
        return then + [fails & way for way in self._expand(schema.get("else", True), trail)]

    def _dependencies(self, schema: Schema, trail: tuple[int, ...]) -> Iterable[list[_Branch]]:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needed in schema.get(keyword, {}).items():
                without, with_it = {"properties": {name: False}}, {"required": [name]}
                if isinstance(needed, list):
                    with_it["required"] = [name, *needed]
                self._kept.append((without, with_it))
                ways = [_Branch((with_it,))]
                if not isinstance(needed, list):
                    ways = self._product(ways, self._expand(needed, trail))
                yield [_Branch((without,)), *ways]

    def _evaluated(self, schema: Schema, branch: _Branch) -> _Branch:
        added: Schema = {}
        if "unevaluatedProperties" in schema and not any("additionalProperties" in flat for flat in branch.flats):
            added = _named(branch.flats, "properties") | {"additionalProperties": schema["unevaluatedProperties"]}
        if "unevaluatedItems" in schema and not any(
            isinstance(flat.get("items"), (dict, bool)) for flat in branch.flats
        ):
            added["prefixItems"] = [True] * max(len(tuple_of(flat)[0]) for flat in branch.flats)
            added["items"] = schema["unevaluatedItems"]
        if not added:
            return branch
        self._kept.append(added)
        return branch & _Branch((added,))

    # An alternative and its types

    def _shapes(self, branch: _Branch, has_tags: bool) -> list[Schema]:
        flats = branch.flats
        if values := next((flat for flat in flats if flat.keys() & {"enum", "const"}), None):
            return self._values(values.get("enum", [values.get("const")]), branch)
        found: list[Schema] = []
        for name in self._types(flats):
            shape = self._shape(name, flats, has_tags)
            if shape is not None and not self._is_excluded(name, branch):
                found.append(shape)
        if len(found) == len(TYPES) - 1 and all(shape.keys() == {"type"} for shape in found):
            return [{}]
        return found

    def _values(self, values: list[Any], branch: _Branch) -> list[Schema]:
        excluded = [one for _, _, one in branch.excluded]
        left = [
            value
            for value in values
            if all(self._instances.satisfies(value, flat) for flat in branch.flats)
            and not any(self._instances.satisfies(value, one) for one in excluded)
        ]
        for value in left:
            _check_value(branch.flats[0], value)
        return [{"enum": left}] if left else []

    def _types(self, flats: Sequence[Schema]) -> list[str]:
        named = [types for flat in flats if (types := types_of(flat)) is not None]
        allowed = set(TYPES).intersection(*named)
        given = set[str]().union(*flats)
        spoken = {name for name, words in KEYWORDS.items() if not given.isdisjoint(words)}
        if not named and spoken and not self._is_probing:
            allowed = spoken
        if "number" in allowed:
            allowed.discard("integer")
        return sorted(allowed, key=TYPES.index)

    def _is_excluded(self, name: str, branch: _Branch) -> bool:
        """Whether nothing of this type is left. Raises UnsupportedError where some is."""
        for schema, keyword, one in branch.excluded:
            if self._takes_all(name, one):
                return True
            if not self._is_empty(_Branch((*branch.flats, self._narrowed(name, branch.flats))), one):
                reason = {
                    "oneOf": "oneOf of schemas that may hold at once can't be enforced; send anyOf",
                    "not": "not can't be enforced here; leave it out and check the answer",
                    "if": "if can't be enforced here; send anyOf of the cases",
                }[keyword]
                raise UnsupportedError(schema, keyword, reason)
        return False

    def _takes_all(self, name: str, schema: Any) -> bool:
        schema = self._target(schema)
        if not isinstance(schema, dict):
            return schema is True
        types = types_of(schema)
        return (types is None or name in types) and not schema.keys() - _NOTES - {"type", "nullable"} - {
            word for kind, words in KEYWORDS.items() if kind != name for word in words
        }

    def _narrowed(self, name: str, flats: Sequence[Schema]) -> Schema:
        added: Schema = {"type": name}
        if name == "object" and not is_open(flats):
            added |= _named(flats, "properties", "required") | {"additionalProperties": False}
        self._kept.append(added)
        return added

    def _is_empty(self, branch: _Branch, schema: Any) -> bool:
        """Whether it can be shown that nothing of the branch satisfies the schema."""
        was, why, self._is_probing = self._is_probing, self._why, True
        try:
            return self._joined(self._product([branch], self._expand(schema, ())), False) is None
        except UnsupportedError:
            return False
        finally:
            self._is_probing, self._why = was, why

    def _shape(self, name: str, flats: Sequence[Schema], has_tags: bool) -> Schema | None:
        self._count(1)
        try:
            if name in ("number", "integer"):
                return number(name, flats)
            if name == "string":
                return string(flats)
            if name == "array":
                return self._arrays.shape(flats)
            return self._objects.shape(flats, has_tags) if name == "object" else {"type": name}
        except NothingError as error:
            self._why = str(error)
            return None


def _allows_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _NOTES)


def _named(flats: Sequence[Schema], *keywords: str) -> Schema:
    return {
        "properties": dict.fromkeys(names_in(flats, *keywords), True),
        "patternProperties": dict.fromkeys(names_in(flats, "patternProperties"), True),
    }


def _check_value(holder: Schema, value: Any) -> None:
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (list, dict)):
            waiting += node.values() if isinstance(node, dict) else node
        elif type_of(node) == "integer" and abs(node) > MAX_INTEGER:  # xgrammar reads numbers as 64 bits
            raise ValueError(f"schema: {json.dumps(node)[:40]} in enum or const; numbers of 64 bits are enforced")
