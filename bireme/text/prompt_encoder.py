"""Prompts to token ids: checked, short ones encoded at once, long ones on a few threads. Encoding releases the GIL."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from bireme.config import Limits
from bireme.errors import ResourceExhaustedError
from bireme.request import check_prompt_text
from bireme.text.chat_template import Message
from bireme.text.tokenizer import TextTokenizer

_T = TypeVar("_T")
_MAX_THREADS = 4
_INLINE_CHARACTERS = 4096  # these take about as long as a thread switch


class PromptEncoder:
    """One tokenizer with its threads; used on one loop."""

    def __init__(self, tokenizer: TextTokenizer, limits: Limits) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        _ = tokenizer.longest_token_bytes  # looks at the whole vocabulary, now
        self._pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="prompts")
        self._num_pending = 0

    def check(self, name: str, text: str, context: int | None = None) -> None:
        """Raise RequestError for a text that is too large, or that can't fit whatever its tokens are."""
        check_prompt_text(name, text, self._limits, self._tokenizer.longest_token_bytes, context)

    def encode_chat(
        self,
        name: str,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        context: int | None = None,
    ) -> tuple[list[int], str]:
        """Render and encode a conversation; returns ids and the prompt. Raises RequestError."""
        prompt = self._tokenizer.render_chat(messages, tools, variables)
        text = prompt.text
        self.check(name, text, context)
        return self._tokenizer.encode_chat(prompt), text

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
