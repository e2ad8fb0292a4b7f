"""Prompts of chats and completions as token ids: short ones at once, long ones on a few threads.

Rendering and encoding happen in the process that has the tokenizer for detokenizing anyway: a call of the tokenizer
model would cost more than the work. Encoding releases the GIL.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from bireme.config import Limits
from bireme.messages import Capacity
from bireme.request import Ids, check_prompt_text, check_prompt_tokens
from bireme.text.chat_template import Message
from bireme.text.tokenizer import TextTokenizer

_T = TypeVar("_T")
_MAX_THREADS = 4
_INLINE_CHARACTERS = 4096  # these take about as long as a thread switch
_NUM_END_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    ids: Ids  # CPU 1D
    end: str = ""  # the last characters of a rendered chat


class Prompts:
    """Encodes with one tokenizer; used on one loop."""

    def __init__(self, tokenizer: TextTokenizer, limits: Limits, capacity: Callable[[], Capacity | None]) -> None:
        """`capacity`: of the decode workers, once it is known."""
        self._tokenizer, self._limits, self._capacity = tokenizer, limits, capacity
        _ = tokenizer.longest_token_bytes  # reads the whole vocabulary, now
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="prompts")

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], variables: Mapping[str, Any]
    ) -> EncodedPrompt:
        """Render and encode a conversation. Raises RequestError."""
        size = sum(_num_characters(message["content"]) for message in messages)
        return await self._run(lambda: self._encode_chat(messages, tools, variables), size + 1000 * len(tools))

    async def text(self, text: str, add_special_tokens: bool = True) -> EncodedPrompt:
        """Encode plain text. Raises RequestError."""
        self._check_text(text)
        return await self._run(lambda: self._checked(self._tokenizer.encode(text, add_special_tokens)), len(text))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], _T], num_characters: int) -> _T:
        if num_characters <= _INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _encode_chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], variables: Mapping[str, Any]
    ) -> EncodedPrompt:
        prompt = self._tokenizer.render_chat(messages, tools, variables)
        text = prompt.text
        self._check_text(text)
        return self._checked(self._tokenizer.encode_chat(prompt), text[-_NUM_END_CHARACTERS:])

    def _checked(self, ids: list[int], end: str = "") -> EncodedPrompt:
        check_prompt_tokens(len(ids), self._limits)
        return EncodedPrompt(np.array(ids, np.int32), end)

    def _check_text(self, text: str) -> None:
        capacity = self._capacity()
        context = capacity.max_seq_len if capacity else None
        check_prompt_text("prompt", text, self._limits, self._tokenizer.longest_token_bytes, context)


def _num_characters(content: str | list[dict[str, Any]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)
