"""Arrays and objects that satisfy several schemas at once, in xgrammar's words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bireme.logits.guided.instance import Instances, tuple_of
from bireme.logits.guided.patterns import any_text, literal_prefix, other_than, whole_pattern
from bireme.logits.guided.references import UnsupportedError
from bireme.logits.guided.scalars import NothingError, bounds, sized

Schema = dict[str, Any]
Place = Callable[[Iterable[Any]], Schema | None]  # what holds where all of these schemas do; None: nothing can

_TEXT: Schema = {"type": "string"}


def is_open(flats: Sequence[Schema]) -> bool:
    """Whether it may have properties that no schema names."""
    said = [flat["additionalProperties"] for flat in flats if "additionalProperties" in flat]
    if said:
        return all(one is not False for one in said)
    if any("patternProperties" in flat for flat in flats):
        return False
    return not any(flat.get("properties") for flat in flats)


def names_in(flats: Sequence[Schema], *keywords: str) -> list[str]:
    """Return what these keywords name, each once."""
    return list(dict.fromkeys(name for keyword in keywords for flat in flats for name in flat.get(keyword, ())))


class Arrays:
    def __init__(self, place: Place) -> None:
        self._place = place

    def shape(self, flats: Sequence[Schema]) -> Schema:
        """Raises NothingError, UnsupportedError."""
        low, high = bounds(flats, "Items")
        tuples = [tuple_of(flat) for flat in flats]
        places, is_cut = self._places(tuples, high)
        rest = None if is_cut else self._rest(flats, tuples, len(places), low, high)
        high = len(places) if rest is None else high
        if high is not None and low > high:
            raise NothingError(f"no array has {low} to {high} items")
        for flat in flats:
            _check_array(flat, high)
        return _array_shape(places, rest, low, high)

    def _places(self, tuples: Sequence[tuple[list[Any], Any]], high: int | None) -> tuple[list[Schema], bool]:
        """Return the first items' schemas, and whether an array ends with them."""
        size = max((len(first) for first, _ in tuples), default=0)
        places: list[Schema] = []
        for at in range(size if high is None else min(size, max(high, 0))):
            one = self._place(first[at] if at < len(first) else rest for first, rest in tuples)
            if one is None:
                return places, True
            places.append(one)
        return places, False

    def _rest(
        self, flats: Sequence[Schema], tuples: Sequence[tuple[list[Any], Any]], count: int, low: int, high: int | None
    ) -> Schema | None:
        """Return what comes behind the first `count` items; None: nothing."""
        says_more = any(flat.get("items", flat.get("additionalItems")) is not None for flat in flats)
        has_room = high is None or high > count
        if not has_room or not (says_more or not count or low > count):
            return None
        return self._place(rest for _, rest in tuples)


def _check_array(flat: Schema, high: int | None) -> None:
    if flat.get("uniqueItems") and (high is None or high > 1):
        raise UnsupportedError(flat, "uniqueItems", "uniqueItems can't be enforced; leave it out and check the answer")
    if "contains" in flat and not (flat.get("minContains") == 0 and "maxContains" not in flat):
        raise UnsupportedError(flat, "contains", "contains can't be enforced; leave it out and check the answer")


def _array_shape(places: list[Schema], rest: Schema | None, low: int, high: int | None) -> Schema:
    shape: Schema = {"type": "array", "items": False if rest is None else rest}
    if places:
        shape["prefixItems"] = places
    if rest is not None:
        shape |= sized("Items", low, high)
    return {"type": "array"} if shape == {"type": "array", "items": {}} else shape


class Objects:
    def __init__(self, place: Place, instances: Instances) -> None:
        self._place = place
        self._instances = instances

    def shape(self, flats: Sequence[Schema], has_tags: bool) -> Schema:
        """Raises NothingError, UnsupportedError."""
        required, names = names_in(flats, "required"), names_in(flats, "properties", "required")
        low, high = bounds(flats, "Properties")
        free = self._free_names(flats, names, is_open(flats) or low > len(names))
        if isinstance(free, list):  # they are counted up: as good as properties
            names, free = list(dict.fromkeys((*names, *free))), None
        properties = self._properties(names, required, flats)
        keys = self._keys(flats, names, free)
        if (high is not None and max(len(required), low) > high) or (not keys and low > len(properties)):
            raise NothingError(f"no object has {low} to {len(properties) if high is None else high} of its properties")
        counts = _counts(flats, low, high, len(required), has_keys=bool(keys))
        shape: Schema = {"type": "object"}
        if properties:
            shape |= {"properties": properties, "required": required}
        return _closed(shape, keys, counts, is_free=has_tags or (not names and "" in keys))

    def _properties(self, names: Sequence[str], required: Sequence[str], flats: Sequence[Schema]) -> dict[str, Schema]:
        found: dict[str, Schema] = {}
        for name in names:
            one = self._property(name, flats)
            if one is not None:
                found[name] = one
            elif name in required:
                raise NothingError(f"required {name}: no value is allowed for it")
        return found

    def _property(self, name: str, flats: Sequence[Schema]) -> Schema | None:
        if not all(self._instances.satisfies(name, flat.get("propertyNames", True)) for flat in flats):
            return None
        return self._place([one for flat in flats for one in self._instances.of_property(name, flat)])

    def _free_names(self, flats: Sequence[Schema], names: Sequence[str], has_more: bool) -> str | list[str] | None:
        """Return what names beside `names` are like: a pattern ("": any), a list, or None for no others."""
        if not has_more:
            return None
        said = [flat["propertyNames"] for flat in flats if flat.get("propertyNames", True) is not True]
        shape = self._place([_TEXT, *said]) if said else _TEXT
        if shape is None:
            return None
        if "enum" in shape:
            return list(shape["enum"])
        if shape == _TEXT:
            return ""
        return None if names else _name_pattern(shape, flats)  # it could not keep from naming these once more

    def _keys(self, flats: Sequence[Schema], names: Sequence[str], free: str | None) -> dict[str, Schema]:
        keys, prefixes = self._patterned(flats, names)
        if free is None or not all(prefixes):
            return keys
        rest = self._place([flat["additionalProperties"] for flat in flats if "additionalProperties" in flat])
        if rest is not None and not (free and prefixes):
            keys[free or other_than(names, prefixes)] = rest
        return keys

    def _patterned(self, flats: Sequence[Schema], names: Sequence[str]) -> tuple[dict[str, Schema], list[str]]:
        """Return `patternProperties` by whole pattern, and what each one's names begin with."""
        holders = {pattern: flat for flat in flats for pattern in flat.get("patternProperties", ())}
        keys: dict[str, Schema] = {}
        prefixes: list[str] = []
        for pattern, holder in holders.items():
            whole, prefix = _read(pattern, holder)
            said = [
                flat.get("patternProperties", {}).get(pattern, flat.get("additionalProperties", True)) for flat in flats
            ]
            one = self._place(said)
            _check_overlap(holder, prefix, prefixes)
            prefixes.append(prefix)
            is_named = any(pattern in self._patterns_of(name, holder) for name in names)
            if one is not None and not is_named and not any("propertyNames" in flat for flat in flats):
                keys[whole] = one
        return keys, prefixes

    def _patterns_of(self, name: str, flat: Schema) -> list[str]:
        only = {"patternProperties": {pattern: pattern for pattern in flat["patternProperties"]}}
        return self._instances.of_property(name, only)


def _name_pattern(shape: Schema, flats: Sequence[Schema]) -> str:
    if "pattern" in shape:
        return str(shape["pattern"])
    if shape.keys() <= {"type", "minLength", "maxLength"}:
        return any_text(shape.get("minLength", 0), shape.get("maxLength"))
    holder = next(flat for flat in flats if "propertyNames" in flat)
    raise UnsupportedError(holder, "propertyNames", "propertyNames: only a pattern, lengths or enum are enforced")


def _counts(flats: Sequence[Schema], low: int, high: int | None, num_required: int, has_keys: bool) -> Schema:
    low = 0 if low <= num_required else low
    if has_keys and low > num_required + 1:
        holder = next(flat for flat in flats if "minProperties" in flat)
        raise UnsupportedError(
            holder, "minProperties", "minProperties can't be enforced where names are free, since one may come twice;"
            " name them in required",
        )  # fmt: skip
    return sized("Properties", low, high)


def _read(pattern: str, holder: Schema) -> tuple[str, str]:
    try:
        return whole_pattern(pattern), literal_prefix(pattern)
    except ValueError as error:
        reason = f"patternProperties: pattern {pattern[:60]}: {error}"
        raise UnsupportedError(holder, "patternProperties", reason) from error


def _check_overlap(holder: Schema, prefix: str, others: Iterable[str]) -> None:
    for other in others:
        if prefix.startswith(other) or other.startswith(prefix):
            raise UnsupportedError(
                holder, "patternProperties", "patternProperties that may take the same name can't be enforced; begin"
                " each with its own letters, as in ^a_",
            )  # fmt: skip


def _closed(shape: Schema, keys: dict[str, Schema], counts: Schema, is_free: bool) -> Schema:
    """`is_free`: a name of `keys` may be any."""
    if is_free and len(keys) == 1:
        (rest,) = keys.values()
        shape = {**shape, "additionalProperties": rest, **counts}
        return {"type": "object"} if shape == {"type": "object", "additionalProperties": {}} else shape
    if keys:
        return {**shape, "patternProperties": keys, "additionalProperties": False, **counts}
    return {**shape, "additionalProperties": False, **(counts if "properties" in shape else {})}
