"""Prompts of chats and completions as token ids.

Rendering and encoding happen in the process that has the tokenizer for detokenizing anyway: a call of the tokenizer
model would cost more than the work. Encoding releases the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bireme.config import Recipe
from bireme.messages import Capacity
from bireme.metrics import Registry
from bireme.request import Ids, check_prompt_tokens
from bireme.text.chat_template import Message
from bireme.text.prompt_encoder import PromptEncoder
from bireme.text.tokenizer import TextTokenizer

_NUM_END_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    ids: Ids  # CPU 1D
    end: str = ""  # the last characters of a rendered chat


class Prompts:
    """Encodes with one tokenizer; used on one loop."""

    def __init__(
        self, tokenizer: TextTokenizer, recipe: Recipe, capacity: Callable[[], Capacity | None], metrics: Registry
    ) -> None:
        """`capacity`: of the decode workers, once it is known."""
        self._limits, self._capacity = recipe.limits, capacity
        self._encoder = PromptEncoder(tokenizer, recipe.limits, recipe.tokenizer_cache_bytes, metrics)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
        cache_salt: str = "",
    ) -> EncodedPrompt:
        """Render and encode a conversation. Raises RequestError."""
        ids, text = await self.shown(messages, tools, variables, cache_salt)
        return self._checked(ids, text[-_NUM_END_CHARACTERS:])

    async def shown(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
        cache_salt: str,
    ) -> tuple[Ids, str]:
        """Return a conversation's ids and its rendered text. Raises RequestError."""
        size = sum(_num_characters(message["content"]) for message in messages) + 1000 * len(tools)
        return await self._encoder.chat("prompt", messages, tools, variables, self._context(), cache_salt, size)

    async def text(self, text: str, add_special_tokens: bool = True, cache_salt: str = "") -> EncodedPrompt:
        """Encode plain text. Raises RequestError."""
        self._encoder.check("prompt", text, self._context())
        return await self._encoder.run(
            lambda: self._checked(self._encoder.encode(text, add_special_tokens, cache_salt)), len(text)
        )

    def close(self) -> None:
        self._encoder.close()

    def _checked(self, ids: Ids, end: str = "") -> EncodedPrompt:
        check_prompt_tokens(len(ids), self._limits)
        return EncodedPrompt(ids, end)

    def _context(self) -> int | None:
        capacity = self._capacity()
        return capacity.max_seq_len if capacity else None


def _num_characters(content: str | list[dict[str, Any]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)
