"""The tokenizer model: text, or a conversation through the model's chat template, to token ids.

Plain `text_input` is encoded as in transformers, with bos where the model has it; special tokens in the text count as
such. In `messages` the template writes the special tokens; in user and tool messages they are text. Short texts are
encoded at once, longer ones on a few threads: encoding releases the GIL.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np

from bireme.errors import RequestCancelledError, RequestError, ResourceExhaustedError
from bireme.request import check_prompt_text, read_tensors
from bireme.specs import TOKENIZER, ModelSpec
from bireme.text.tokenizer import TextTokenizer, recipe_tokenizer
from bireme.types import Cancelled, Send, StageContext, TensorResponse, Tensors

_MAX_THREADS = 4
_INLINE_CHARACTERS = 1024  # encoding these takes about as long as a thread switch
_CHAT_ONLY = ("tools", "chat_template_kwargs")

Tokenized = tuple[list[int], str]  # ids, prompt


class Tokenizer:
    """The stage; needs no worker entry, so it serves every recipe."""

    spec: ClassVar[ModelSpec] = TOKENIZER

    def __init__(self, tokenizer: TextTokenizer | None = None) -> None:
        self._tokenizer = tokenizer  # given by tests; else loaded at start
        self._pool: ThreadPoolExecutor | None = None
        self._num_pending = 0

    async def start(self, context: StageContext) -> None:
        self._limits = context.recipe.limits
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(recipe_tokenizer, context.recipe)
        _ = self._tokenizer.longest_token_bytes  # looks at the whole vocabulary, now

    async def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def is_ready(self) -> bool:
        return self._tokenizer is not None and self._pool is not None

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        values = read_tensors(inputs, self.spec)
        text = self._text_input(values)
        if text is not None and len(text) <= _INLINE_CHARACTERS:
            ids, prompt = self._encode(text)
        elif text is not None:
            ids, prompt = await self._in_pool(functools.partial(self._encode, text), cancelled)
        else:
            ids, prompt = await self._in_pool(functools.partial(self._encode_chat, values), cancelled)
        if not ids:
            raise RequestError("the prompt has no tokens; send at least one")
        outputs = {"input_ids": np.array(ids, np.int32), "prompt": np.array([prompt.encode()], np.object_)}
        send(TensorResponse(outputs))

    def _text_input(self, values: dict[str, Any]) -> str | None:
        """Return the plain prompt, None for a conversation. Raises RequestError when it is neither or both."""
        has_text, has_messages = "text_input" in values, "messages" in values
        if has_text and has_messages:
            raise RequestError("text_input and messages are both given; send one of them")
        if has_messages:
            return None
        if not has_text:
            raise RequestError("text_input: missing; send text_input, or messages (JSON)")
        for name in _CHAT_ONLY:
            if name in values:
                raise RequestError(f"{name} goes with messages only; remove it")
        text: str = values["text_input"]
        if not text:
            raise RequestError("text_input: empty; send at least one character")
        assert self._tokenizer is not None
        check_prompt_text("text_input", text, self._limits, self._tokenizer.longest_token_bytes)
        return text

    async def _in_pool(self, work: Callable[[], Tokenized], cancelled: Cancelled) -> Tokenized:
        """Run on the stage's threads. Raises ResourceExhaustedError when too many requests wait."""
        assert self._pool is not None
        limit = self._limits.max_concurrent_requests
        if self._num_pending >= limit:
            raise ResourceExhaustedError(f"{limit} requests are being tokenised; try again")
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, _unless(cancelled, work))
        finally:
            self._num_pending -= 1

    def _encode(self, text: str) -> Tokenized:
        assert self._tokenizer is not None
        return self._tokenizer.encode(text), text

    def _encode_chat(self, values: dict[str, Any]) -> Tokenized:
        assert self._tokenizer is not None
        for name in ("messages", *_CHAT_ONLY):
            if name in values:
                check_prompt_text(name, values[name], self._limits)
        messages = _objects("messages", values["messages"])
        if not messages:
            raise RequestError("messages: empty; send at least one message")
        for at, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise RequestError(f"messages[{at}].role: {message.get('role')!r}; a string is needed, such as user")
        tools = _objects("tools", values["tools"]) if values.get("tools") else None
        prompt = self._tokenizer.render_chat(messages, tools, _variables(values.get("chat_template_kwargs")))
        text = prompt.text
        check_prompt_text("the rendered chat prompt", text, self._limits, self._tokenizer.longest_token_bytes)
        return self._tokenizer.encode_chat(prompt), text


def _unless(cancelled: Cancelled, work: Callable[[], Tokenized]) -> Callable[[], Tokenized]:
    """Skip the work of cancelled requests."""

    def run() -> Tokenized:
        if cancelled:
            raise RequestCancelledError("the client is gone")
        return work()

    return run


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}: not valid JSON: {error}") from error


def _objects(name: str, text: str) -> list[dict[str, Any]]:
    tree = _json(name, text)
    if not isinstance(tree, list) or not all(isinstance(item, dict) for item in tree):
        raise RequestError(f"{name}: a JSON list of objects is needed")
    return tree


def _variables(text: str | None) -> dict[str, Any]:
    tree = _json("chat_template_kwargs", text) if text else {}
    if not isinstance(tree, dict):
        raise RequestError("chat_template_kwargs: a JSON object is needed")
    return tree
