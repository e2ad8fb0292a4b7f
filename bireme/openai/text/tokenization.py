"""POST /tokenize and /detokenize: what a prompt is in tokens (as vLLM has them)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np

from bireme.errors import RequestError
from bireme.openai.http.call import Call
from bireme.openai.text.served_model import Models
from bireme.pipelines.chat_answer import encode_json
from bireme.pipelines.chat_request import ChatBody, ChatMessage, Tool, check_chat
from bireme.pipelines.json_body import decode_body
from bireme.request import check_ids

_MAX_IDS = 1_000_000  # while no worker has told its context


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of prompt and messages."""

    model: str = ""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str = ""


class Tokenization:
    def __init__(self, models: Models) -> None:
        self._models = models

    async def tokenize(self, call: Call, data: bytes) -> None:
        body = decode_body(data, TokenizeBody, {})
        model = self._models.get(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt: send exactly one of prompt and messages")
        salt = call.tenant.cache_salt("")
        if body.prompt is not None:
            prompt = await model.chat.prompts.text(body.prompt, body.add_special_tokens, salt)
        else:
            chat = ChatBody(
                messages=body.messages or [],
                tools=body.tools,
                chat_template_kwargs=body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
            )
            request = check_chat(chat, model.recipe)
            if request.pictures:
                where = request.pictures[0].where
                raise RequestError(f"{where}: a picture's tokens are known once it is encoded; tokenize text alone")
            prompt = await model.chat.prompts.chat(request.messages, request.tools, request.variables, salt)
        ids = prompt.ids.tolist()
        capacity = model.capacity
        texts = [model.chat.texts.text(token) for token in ids] if body.return_token_strs else None
        reply = {
            "count": len(ids),
            "max_model_len": capacity.max_seq_len if capacity else None,
            "tokens": ids,
            "token_strs": texts,
        }
        await call.reply(200, encode_json(reply))

    async def detokenize(self, call: Call, data: bytes) -> None:
        body = decode_body(data, DetokenizeBody, {})
        model = self._models.get(body.model)
        limit = model.capacity.max_seq_len if model.capacity else _MAX_IDS
        if len(body.tokens) > limit:
            raise RequestError(f"tokens: {len(body.tokens)} ids; the context is {limit}, send fewer")
        check_ids("tokens", np.array(body.tokens, object), model.tokenizer.vocab_size)
        text = await asyncio.to_thread(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
        await call.reply(200, encode_json({"prompt": text}))
