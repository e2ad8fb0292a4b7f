"""The tokenizer model: text, or a conversation through the model's chat template, to token ids.

Plain `text_input` is encoded as in transformers, with bos where the model has it; control tokens in the text count as
such unless the recipe has `raw_control_tokens: false`. In a chat the template writes them; those of callers are text.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

import numpy as np

from bireme.errors import RequestCancelledError, RequestError
from bireme.request import Ids, check_prompt_text, read_tensors
from bireme.specs import TOKENIZER, ModelSpec
from bireme.text.prompt_encoder import PromptEncoder
from bireme.text.tokenizer import TextTokenizer, recipe_tokenizer
from bireme.types import Cancelled, Send, StageContext, TensorResponse, Tensors

_CHAT_ONLY = ("tools", "chat_template_kwargs")

Tokenized = tuple[Ids, str]  # ids, prompt


class Tokenizer:
    """The stage; needs no worker entry, so it serves every recipe."""

    spec: ClassVar[ModelSpec] = TOKENIZER

    def __init__(self, tokenizer: TextTokenizer | None = None) -> None:
        self._given = tokenizer  # by tests; else loaded at start
        self._is_started = False

    async def start(self, context: StageContext) -> None:
        self._limits = context.recipe.limits
        self._tokenizer = await asyncio.to_thread(lambda: self._given or recipe_tokenizer(context.recipe))
        cache_bytes = context.recipe.tokenizer_cache_bytes
        self._encoder = PromptEncoder(self._tokenizer, self._limits, cache_bytes, context.metrics)
        self._is_started = True

    async def stop(self) -> None:
        if self._is_started:
            self._is_started = False
            self._encoder.close()

    def is_ready(self) -> bool:
        return self._is_started

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        values = read_tensors(inputs, self.spec)
        text = self._text_input(values)
        texts = [text] if text is not None else [values[name] for name in ("messages", *_CHAT_ONLY) if name in values]

        def encode() -> Tokenized:
            if cancelled:
                raise RequestCancelledError("the client is gone")
            return self._encode_chat(values) if text is None else (self._encoder.encode(text), text)

        ids, prompt = await self._encoder.run(encode, sum(map(len, texts)))
        if len(ids) == 0:
            raise RequestError("the prompt has no tokens; send at least one")
        outputs = {"input_ids": ids, "prompt": np.array([prompt.encode()], np.object_)}
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
        self._encoder.check("text_input", text)
        return text

    def _encode_chat(self, values: dict[str, Any]) -> Tokenized:
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
        variables = _variables(values.get("chat_template_kwargs"))
        return self._encoder.encode_chat("the rendered chat prompt", messages, tools, variables)


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
