"""Prompts to token ids: checked, short ones encoded at once, long ones on a few threads. Encoding releases the GIL.

Of long prompts, what is known from earlier ones is not encoded again (prefix_cache.py), and one of which little else is
left is as good as short.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from bireme.config import Limits
from bireme.errors import ResourceExhaustedError
from bireme.metrics import Registry
from bireme.request import Ids, check_prompt_text
from bireme.text.chat_template import Message
from bireme.text.prefix_cache import CommonText, PrefixCache, array_of
from bireme.text.tokenizer import TextTokenizer

_T = TypeVar("_T")
_MAX_THREADS = 4
_INLINE_CHARACTERS = 4096  # these take about as long as a thread switch
_RENDERED_CHARACTERS = 1 << 20  # rendering more than these holds the loop for milliseconds


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
        ends, texts = self._tokenizer.ends if add_special_tokens else ([], []), self._tokenizer.raw_texts(text)
        if ends is None:
            return np.concatenate([array_of(self._tokenizer.encode(text)) for text in texts])
        ids = self._encode_all([(part, None) for part in texts], salt)
        return np.concatenate([array_of(ends[0]), ids, array_of(ends[1])]) if any(ends) else ids

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
        texts, text = self._rendered(name, messages, tools, variables, context)
        return self._encode_all([(part, None) for part in texts], salt), text

    async def chat(
        self,
        name: str,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
        context: int | None,
        salt: str,
        num_characters: int,
    ) -> tuple[Ids, str]:
        """Do `encode_chat` here or on a thread; the conversation has about so many characters."""
        if num_characters > _RENDERED_CHARACTERS:
            encode = partial(self.encode_chat, name, messages, tools, variables, context, salt)
            return await self.run(encode, num_characters)
        texts, text = self._rendered(name, messages, tools, variables, context)
        parts = [(part, self._cache.beginning(part, salt)) for part in texts]
        num_left = sum(len(part) - len(known.text) for part, known in parts)
        return await self.run(lambda: self._encode_all(parts, salt), num_left), text

    def _rendered(
        self,
        name: str,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        context: int | None,
    ) -> tuple[Iterable[str], str]:
        """Return the texts that a conversation is encoded in, and the prompt."""
        prompt = self._tokenizer.render_chat(messages, tools, variables)
        text = prompt.text
        self.check(name, text, context)
        return self._tokenizer.chat_texts(prompt), text

    def _encode_all(self, parts: Sequence[tuple[str, CommonText | None]], salt: str) -> Ids:
        ids = [self._cache.encode(text, salt, known) for text, known in parts]
        return ids[0] if len(ids) == 1 else np.concatenate(ids)

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
