"""Tokens of long texts by their beginnings: what a text has in common with an earlier one is not encoded again.

A text is cut at places that depend on what stands before them alone (cuts.py), and the parts are kept: texts with a
common beginning have their parts in common, up to the one in which they part. The answer is exact.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from bireme.metrics import Registry
from bireme.request import Ids
from bireme.text.cuts import cuts

PART_CHARACTERS = 4096  # looking a part up takes about 5 us, encoding one again 20 us to 1 ms
_ENTRY_BYTES = 400  # of a part besides its text and tokens

_Key = tuple[str, str]  # salt, text


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
        self._lock = threading.Lock()
        self.num_bytes = 0

    def encode(self, text: str, salt: str = "") -> Ids:
        """Return the tokens of a text. What was encoded under another salt does not make it quicker.

        Raises what encoding raises.
        """
        if self._pattern is None or self._max_bytes == 0 or len(text) <= self._part_characters:
            return _array(self._encode(text))
        ids, start, num_found = [], 0, 0
        for end in cuts(text, self._pattern, self._part_characters):
            key = (salt, text[start:end])
            part = self._find(key)
            if part is None:
                part = self._keep(key, _array(self._encode(key[1])))
            else:
                num_found += len(part)
            ids.append(part)
            start = end
        ids.append(_array(self._encode(text[start:])))
        whole = np.concatenate(ids)
        self._count(num_found, len(whole) - num_found)
        return whole

    def _find(self, key: _Key) -> Ids | None:
        with self._lock:
            if (part := self._parts.get(key)) is not None:
                self._parts.move_to_end(key)
            return part

    def _keep(self, key: _Key, part: Ids) -> Ids:
        with self._lock:
            if key not in self._parts:  # another thread may have been quicker
                self._parts[key] = part
                self.num_bytes += _size(key, part)
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _size(*self._parts.popitem(last=False))
        return part

    def _count(self, num_found: int, num_encoded: int) -> None:
        if self._metrics is not None:
            self._metrics.add("bireme_tokenized_tokens_total", num_found, "cache")
            self._metrics.add("bireme_tokenized_tokens_total", num_encoded, "encoder")
            self._metrics.set("bireme_tokenizer_cache_bytes", self.num_bytes)


def _array(ids: list[int]) -> Ids:
    return np.array(ids, np.int32)


def _size(key: _Key, part: Ids) -> int:
    return sys.getsizeof(key[1]) + part.nbytes + _ENTRY_BYTES
