"""One plain pattern for what several say at once: patterns with lookaheads, formats beside them, lengths.

A pattern becomes an expression of the texts that it is found in. Its derivatives (what may follow a character) are the
states of an automaton; eliminating these gives the pattern.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from re import _constants as op  # type: ignore[attr-defined]
from typing import Any

from bireme.logits.guided.patterns import LAST, Ranges, character_class, parsed, ranges_of, usable, width_of

_MAX_STATES = 400
_MAX_PATTERN = 20_000  # characters of the result
_MAX_COPIES = 32  # of what is repeated and holds an anchor or a lookahead
_TOO_MUCH = "what it allows is too much to be written out"


def joint_pattern(patterns: Iterable[str], shortest: int = 0, longest: int | None = None) -> str | None:
    """Return what the whole of a text matches that all of these are found in; None: no text is.

    Raises ValueError where it can't be said, or is too long.
    """
    texts = _Texts()
    try:
        parts = [texts.with_found(parsed(pattern)) for pattern in patterns]
        length = texts.loop(texts.chars(usable([(0, LAST)])), shortest, math.inf if longest is None else longest)
        return _Automaton(texts, texts.all_of([*parts, length])).pattern()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _Node:
    __slots__ = ("is_nullable", "kind", "parts")

    def __init__(self, kind: str, parts: tuple[Any, ...], is_nullable: bool) -> None:
        self.kind = (
            kind  # chars (ranges), cat (two), any_of, all_of (a set), without (one), loop (one, low, high or infinity)
        )
        self.parts = parts
        self.is_nullable = is_nullable  # the text without characters is one of them


class _Texts:
    """Makes expressions; equal languages mostly have the same, so states are few."""

    def __init__(self) -> None:
        self._nodes: dict[Any, _Node] = {}
        self._after: dict[tuple[_Node, int], _Node] = {}
        self.none, self.empty = self._node("none", (), False), self._node("empty", (), True)
        self.one = self.chars([(0, LAST)])
        self.all = self.loop(self.one, 0, math.inf)

    def _node(self, kind: str, parts: tuple[Any, ...], is_nullable: bool) -> _Node:
        return self._nodes.setdefault((kind, parts), _Node(kind, parts, is_nullable))

    def chars(self, ranges: Ranges) -> _Node:
        return self._node("chars", tuple(_joined(ranges)), False) if ranges else self.none

    def cat(self, first: _Node, second: _Node) -> _Node:
        if self.none in (first, second):
            return self.none
        if first is self.empty or second is self.empty:
            return second if first is self.empty else first
        if first.kind == "cat":
            first, second = first.parts[0], self.cat(first.parts[1], second)
        return self._node("cat", (first, second), first.is_nullable and second.is_nullable)

    def any_of(self, parts: Iterable[_Node]) -> _Node:
        found = _flat("any_of", parts) - {self.none}
        if self.all in found or not found:
            return self.all if found else self.none
        nullable = any(part.is_nullable for part in found)
        return found.pop() if len(found) == 1 else self._node("any_of", (frozenset(found),), nullable)

    def all_of(self, parts: Iterable[_Node]) -> _Node:
        found = _flat("all_of", parts) - {self.all}
        nullable = all(part.is_nullable for part in found)
        if self.none in found or (self.empty in found and not nullable):
            return self.none
        if self.empty in found or not found:
            return self.empty if found else self.all
        return found.pop() if len(found) == 1 else self._node("all_of", (frozenset(found),), nullable)

    def without(self, node: _Node) -> _Node:
        if node in (self.none, self.all):
            return self.all if node is self.none else self.none
        return node.parts[0] if node.kind == "without" else self._node("without", (node,), not node.is_nullable)

    def loop(self, node: _Node, low: int, high: float) -> _Node:
        low = max(low, 0)
        if high == 0 or node is self.empty or (node is self.none and not low):
            return self.empty
        if node is self.none or (low, high) == (1, 1):
            return node
        return self._node("loop", (node, low, high), not low or node.is_nullable)

    def after(self, node: _Node, code: int) -> _Node:
        if (found := self._after.get((node, code))) is None:
            found = self._after[node, code] = self._derivative(node, code)
        return found

    def _derivative(self, node: _Node, code: int) -> _Node:
        parts = node.parts
        if node.kind == "chars":
            return self.empty if any(low <= code <= high for low, high in parts) else self.none
        if node.kind == "cat":
            first = self.cat(self.after(parts[0], code), parts[1])
            return self.any_of([first, self.after(parts[1], code)]) if parts[0].is_nullable else first
        if node.kind == "loop":
            body, low, high = parts
            return self.cat(self.after(body, code), self.loop(body, low - 1, high - 1))
        if node.kind == "without":
            return self.without(self.after(parts[0], code))
        if joined := {"any_of": self.any_of, "all_of": self.all_of}.get(node.kind):
            return joined(self.after(part, code) for part in parts[0])
        return self.none

    # Of a pattern as `re` reads it

    def with_found(self, tree: Any) -> _Node:
        later = self.cat(self.loop(self.one, 1, math.inf), self._then(list(tree), self.all, is_begin=False))
        return self.any_of([self._then(list(tree), self.all, is_begin=True), later])

    def _then(self, items: Sequence[Any], rest: _Node, is_begin: bool | None) -> _Node:
        """Return the texts of these items and then of `rest`.

        `is_begin`: whether the whole text begins here; None: sometimes.
        """
        if not items:
            return rest
        code, value = items[0]
        follow = self._then(items[1:], rest, _is_still_begin(items[0], is_begin))
        if code in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return self.cat(self.chars(ranges_of(code, value)), follow)
        if code is op.SUBPATTERN and not (value[1] or value[2]):
            return self._then(list(value[3]), follow, is_begin)
        if code is op.BRANCH:
            return self.any_of(self._then(list(way), follow, is_begin) for way in value[1])
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, high, body = value
            most = math.inf if high is op.MAXREPEAT else int(high)
            return self._repeated(list(body), int(low), most, follow, is_begin)
        return self._where(code, value, follow, is_begin)

    def _where(self, code: Any, value: Any, follow: _Node, is_begin: bool | None) -> _Node:
        if code in (op.ASSERT, op.ASSERT_NOT) and value[0] > 0:
            ahead = self._then(list(value[1]), self.all, is_begin)
            return self.all_of([ahead if code is op.ASSERT else self.without(ahead), follow])
        if (code, value) == (op.AT, op.AT_BEGINNING) and is_begin is not None:
            return follow if is_begin else self.none
        if (code, value) == (op.AT, op.AT_END):
            return self.empty if follow.is_nullable else self.none
        raise ValueError(f"{str(code).lower().replace('_', ' ')} is not supported here")

    def _repeated(self, body: list[Any], low: int, high: float, follow: _Node, is_begin: bool | None) -> _Node:
        if _is_plain(body):
            return self.cat(self.loop(self._then(body, self.empty, None), low, high), follow)
        if high > _MAX_COPIES:
            raise ValueError("anchors and lookaheads that are repeated are not supported")
        found = follow
        for count in range(int(high), 0, -1):
            once = self._then(body, found, is_begin if count == 1 else None)
            found = once if count <= low else self.any_of([once, follow])
        return found


def _is_still_begin(item: Any, is_begin: bool | None) -> bool | None:
    """Whether the whole text may begin behind this item; None: sometimes."""
    try:
        low, high = width_of(item)
    except IndexError:
        raise ValueError("groupref is not supported here") from None
    if low:
        return False
    return is_begin if not high or is_begin is False else None


def _flat(kind: str, parts: Iterable[_Node]) -> set[_Node]:
    found: set[_Node] = set()
    for part in parts:
        found |= part.parts[0] if part.kind == kind else {part}
    return found


def _is_plain(items: Iterable[Any]) -> bool:
    for code, value in items:
        inner = value[1] if code is op.BRANCH else [value[3]] if code is op.SUBPATTERN else ()
        inner = [value[2]] if code in (op.MAX_REPEAT, op.MIN_REPEAT) else inner
        if code in (op.AT, op.ASSERT, op.ASSERT_NOT) or not all(map(_is_plain, inner)):
            return False
    return True


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: Ranges = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found


class _Automaton:
    """States are numbers, the first is 0; `_ways[state]` has ranges of characters by the state that they lead to."""

    def __init__(self, texts: _Texts, node: _Node) -> None:
        cuts = sorted({0, *_cuts(node)})
        numbers, nodes = {node: 0}, [node]
        self._ways: list[dict[int, Ranges]] = []
        for state in nodes:  # it grows
            ways: dict[int, Ranges] = {}
            for low, after in zip(cuts, [*cuts[1:], LAST + 1], strict=True):
                target = texts.after(state, low)
                if target is texts.none:
                    continue
                if target not in numbers:
                    if len(nodes) == _MAX_STATES:
                        raise ValueError(_TOO_MUCH)
                    numbers[target] = len(nodes)
                    nodes.append(target)
                ways.setdefault(numbers[target], []).append((low, after - 1))
            self._ways.append(ways)
        self._ends = {at for at, one in enumerate(nodes) if one.is_nullable}

    def pattern(self) -> str | None:
        """Return a pattern of what leads to an end; None: nothing does."""
        living = self._living()
        if 0 not in living:
            return None
        group = self._merged(living)
        begin, end = -1, -2
        edges: dict[int, dict[int, str]] = {begin: {group[0]: ""}}
        for state in set(group.values()):
            edges[state] = {target: character_class(ranges) for target, ranges in self._sorted(state, group).items()}
            if state in self._ends:
                edges[state][end] = ""
        return _eliminated(edges, begin, end)

    def _living(self) -> set[int]:
        living = set(self._ends)
        while more := {at for at, ways in enumerate(self._ways) if at not in living and not living.isdisjoint(ways)}:
            living |= more
        return living

    def _merged(self, living: set[int]) -> dict[int, int]:
        """Return, for each state, the first of those that the same texts lead to an end from."""
        group = {state: int(state in self._ends) for state in living}
        while True:
            signs: dict[Any, int] = {}
            finer = {}
            for state in sorted(living):
                ways = frozenset((at, tuple(ranges)) for at, ranges in self._sorted(state, group).items())
                finer[state] = signs.setdefault((group[state], ways), state)
            if len(signs) == len(set(group.values())):
                return finer
            group = finer

    def _sorted(self, state: int, group: dict[int, int]) -> dict[int, Ranges]:
        found: dict[int, Ranges] = {}
        for target, ranges in self._ways[state].items():
            if target in group:
                found.setdefault(group[target], []).extend(ranges)
        return {target: _joined(ranges) for target, ranges in found.items()}


def _eliminated(edges: dict[int, dict[int, str]], begin: int, end: int) -> str:
    sources: dict[int, set[int]] = {}
    for state, ways in edges.items():
        for target in ways:
            sources.setdefault(target, set()).add(state)
    left = set(edges) - {begin}
    while left:
        state = min(left, key=lambda one: (len(sources[one] - {one}) * len(edges[one].keys() - {one}), one))
        left.remove(state)
        ways = edges.pop(state)
        loop = f"({own}){{0,}}" if (own := ways.pop(state, "")) else ""
        for target in ways:
            sources[target].discard(state)
        for source in sources.pop(state) - {state}:
            before = edges[source].pop(state) + loop
            for target, after in ways.items():
                edges[source][target] = text = _either(edges[source].get(target), before + after)
                sources[target].add(source)
                if len(text) > _MAX_PATTERN:
                    raise ValueError(_TOO_MUCH)
    return edges[begin][end]


def _either(one: str | None, other: str) -> str:
    """Write an option as a repeat: behind `(ab*)?` xgrammar lets `b` through, as if `a` had come."""
    if one is None or one == other:
        return other
    return f"({one}|{other})" if one and other else f"({one or other}){{0,1}}"


def _cuts(node: _Node) -> Iterator[int]:
    waiting, seen = [node], set[_Node]()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.kind == "chars":
            yield from (cut for low, high in one.parts for cut in (low, high + 1) if cut <= LAST)
            continue
        for part in one.parts:
            waiting += [part] if isinstance(part, _Node) else part if isinstance(part, frozenset) else ()
