"""Tokens of long texts by their beginnings: what a text has in common with an earlier one is not encoded again.

A text is cut at places that depend on what stands before them alone (cuts.py), and the parts are kept. What several
texts have begun with is kept whole as well, and found by one comparison. The answer is exact.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from bireme.metrics import Registry
from bireme.request import Ids
from bireme.text.cuts import cuts

PART_CHARACTERS = 4096  # looking a part up takes about 5 us, encoding one again 20 us to 1 ms
_ENTRY_BYTES = 400  # of a part besides its text and tokens
_RUN_PARTS = 8  # so many parts in a row are worth a comparison of their own
_RUN_SHARE = 4  # the whole beginnings take this part of the bytes at most

_Key = tuple[str, str]  # salt, text


class CommonText(NamedTuple):
    """A beginning that several texts have had, up to a cut."""

    text: str
    ids: Ids


_NOTHING = CommonText("", np.zeros(0, np.int32))


class PrefixCache:
    """The least recently used parts go first. Thread-safe."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        pattern: re.Pattern[str] | None,
        max_bytes: int,
        metrics: Registry | None = None,
        part_characters: int = PART_CHARACTERS,
    ) -> None:
        """`encode` makes the tokens of a text without special ones around them; `pattern`: of cuts.cut_pattern."""
        self._encode, self._pattern, self._max_bytes, self._metrics = encode, pattern, max_bytes, metrics
        self._part_characters = part_characters
        self._parts: OrderedDict[_Key, Ids] = OrderedDict()
        self._runs: OrderedDict[_Key, CommonText] = OrderedDict()  # by their first part
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_run_bytes = 0  # of these, of whole beginnings

    def beginning(self, text: str, salt: str = "") -> CommonText:
        """Return what is known whole of a text's beginning; empty: nothing is."""
        if self._pattern is None or self._max_bytes == 0 or len(text) <= self._part_characters:
            return _NOTHING
        first = self._first(text, salt)
        with self._lock:
            run = self._runs.get(first, _NOTHING)
            if run.text and text.startswith(run.text):
                self._runs.move_to_end(first)
                return run
            return _NOTHING

    def encode(self, text: str, salt: str = "", run: CommonText | None = None) -> Ids:
        """Return the tokens of a text. What was encoded under another salt does not make it quicker.

        `run`: its `beginning`, where that has been looked up. Raises what encoding raises.
        """
        if self._pattern is None or self._max_bytes == 0 or len(text) <= self._part_characters:
            return array_of(self._encode(text))
        run = self.beginning(text, salt) if run is None else run
        ids, start, num_found = [run.ids], len(run.text), len(run.ids)
        num_known, known_end = 1, start  # parts from the text's beginning that were there
        for end in cuts(text, self._pattern, self._part_characters, start):
            key = (salt, text[start:end])
            part = self._find(key)
            if part is None:
                part = self._keep(key, array_of(self._encode(key[1])))
            else:
                num_found += len(part)
                if known_end == start:
                    num_known, known_end = len(ids) + 1, end
            ids.append(part)
            start = end
        if num_known > _RUN_PARTS:
            self._keep_run(self._first(text, salt), CommonText(text[:known_end], np.concatenate(ids[:num_known])))
        ids.append(array_of(self._encode(text[start:])))
        whole = np.concatenate(ids)
        self._count(num_found, len(whole) - num_found)
        return whole

    def _find(self, key: _Key) -> Ids | None:
        with self._lock:
            if (part := self._parts.get(key)) is not None:
                self._parts.move_to_end(key)
            return part

    def _first(self, text: str, salt: str) -> _Key:
        """Return the key of a text's first part."""
        assert self._pattern is not None
        return salt, text[: next(cuts(text, self._pattern, self._part_characters), 0)]

    def _keep(self, key: _Key, part: Ids) -> Ids:
        with self._lock:
            if key not in self._parts:  # another thread may have been quicker
                self._parts[key] = part
                self.num_bytes += _size(key[1], part)
            self._shrink()
        return part

    def _keep_run(self, first: _Key, run: CommonText) -> None:
        with self._lock:
            if (before := self._runs.pop(first, None)) is not None:
                self._drop_run(before)
            size = _size(run.text, run.ids)
            self._runs[first] = run
            self.num_run_bytes += size
            self.num_bytes += size
            while self.num_run_bytes > self._max_bytes // _RUN_SHARE:
                self._drop_run(self._runs.popitem(last=False)[1])
            self._shrink()

    def _drop_run(self, run: CommonText) -> None:
        size = _size(run.text, run.ids)
        self.num_run_bytes -= size
        self.num_bytes -= size

    def _shrink(self) -> None:
        while self.num_bytes > self._max_bytes and self._parts:
            (_, text), part = self._parts.popitem(last=False)
            self.num_bytes -= _size(text, part)

    def _count(self, num_found: int, num_encoded: int) -> None:
        if self._metrics is not None:
            self._metrics.add("bireme_tokenized_tokens_total", num_found, "cache")
            self._metrics.add("bireme_tokenized_tokens_total", num_encoded, "encoder")
            self._metrics.set("bireme_tokenizer_cache_bytes", self.num_bytes)


def array_of(ids: list[int]) -> Ids:
    return np.array(ids, np.int32)


def _size(text: str, ids: Ids) -> int:
    return sys.getsizeof(text) + ids.nbytes + _ENTRY_BYTES
