"""Prompts to token ids: checked, short ones encoded at once, long ones on a few threads. Encoding releases the GIL.

Of long prompts, what is known from earlier ones is not encoded again (prefix_cache.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from bireme.config import Limits
from bireme.errors import ResourceExhaustedError
from bireme.metrics import Registry
from bireme.request import Ids, check_prompt_text
from bireme.text.chat_template import Message
from bireme.text.prefix_cache import PrefixCache
from bireme.text.tokenizer import TextTokenizer

_T = TypeVar("_T")
_MAX_THREADS = 4
_INLINE_CHARACTERS = 4096  # these take about as long as a thread switch


class PromptEncoder:
    """One tokenizer with its threads; used on one loop."""

    def __init__(
        self, tokenizer: TextTokenizer, limits: Limits, cache_bytes: int = 0, metrics: Registry | None = None
    ) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        _ = tokenizer.longest_token_bytes  # looks at the whole vocabulary, now
        pattern = tokenizer.cut_pattern if cache_bytes else None
        self._cache = PrefixCache(tokenizer.encode_plain, pattern, cache_bytes, metrics)
        self._pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="prompts")
        self._num_pending = 0

    def check(self, name: str, text: str, context: int | None = None) -> None:
        """Raise RequestError for a text that is too large, or that can't fit whatever its tokens are."""
        check_prompt_text(name, text, self._limits, self._tokenizer.longest_token_bytes, context)

    def encode(self, text: str, add_special_tokens: bool = True, salt: str = "") -> Ids:
        """Encode plain text. Nobody with another `salt` can tell by the time it takes. Raises RequestError."""
        ends = self._tokenizer.ends if add_special_tokens else ([], [])
        if ends is None:
            return _array(self._tokenizer.encode(text))
        ids = self._cache.encode(text, salt)
        return np.concatenate([_array(ends[0]), ids, _array(ends[1])]) if any(ends) else ids

    def encode_chat(
        self,
        name: str,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        context: int | None = None,
        salt: str = "",
    ) -> tuple[Ids, str]:
        """Render and encode a conversation; returns ids and the prompt. Raises RequestError."""
        prompt = self._tokenizer.render_chat(messages, tools, variables)
        text = prompt.text
        self.check(name, text, context)
        ids = [self._cache.encode(part, salt) for part in self._tokenizer.chat_texts(prompt)]
        return ids[0] if len(ids) == 1 else np.concatenate(ids), text

    async def run(self, work: Callable[[], _T], num_characters: int) -> _T:
        """Do the work: here, or on a thread. Raises ResourceExhaustedError when too much waits already."""
        if num_characters <= _INLINE_CHARACTERS:
            return work()
        limit = self._limits.max_concurrent_requests
        if self._num_pending >= limit:
            raise ResourceExhaustedError(f"{limit} requests are being tokenised; try again")
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_pending -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _array(ids: list[int]) -> Ids:
    return np.array(ids, np.int32)
