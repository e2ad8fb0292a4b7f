"""A field that takes a text, its token ids, or a list of either."""

from __future__ import annotations

from typing import NamedTuple, cast

from bireme.errors import RequestError


class ListedTexts(NamedTuple):
    field: str
    one: str  # what it takes, for errors: "a text", "texts"
    many: str
    limit: str  # the recipe's key

    def split(self, given: str | list[str | int | list[int]], most: int) -> list[tuple[str, str | list[int]]]:
        """Return each text, or its ids, with its place. Raises RequestError."""
        if isinstance(given, str):
            return [(self.field, given)]
        if not given:
            raise RequestError(f"{self.field}: empty; send {self.one}, token ids, or a list of either")
        if all(isinstance(item, int) for item in given):
            return [(self.field, cast(list[int], given))]
        if len(given) > most:
            raise RequestError(f"{self.field}: {len(given)} {self.many}; {self.limit} is {most}, send fewer")
        placed = [(f"{self.field}[{at}]", item) for at, item in enumerate(given)]
        if mixed := [where for where, item in placed if isinstance(item, int)]:
            raise RequestError(f"{mixed[0]}: a token id among {self.many}; send either ids or {self.many}")
        return cast(list[tuple[str, str | list[int]]], placed)
