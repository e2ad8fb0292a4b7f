"""Chat requests through the deployment's workers, for the chat model and the frontend.

render and encode -> parser and guide -> n sequences side by side -> the answer's choices
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from bireme.errors import RequestError
from bireme.messages import SamplingParams
from bireme.multimodal.model_config import picture_model_of
from bireme.pipelines.call_tags import CallTags
from bireme.pipelines.chat_answer import ChatOutput, Choice, TokenIds, encode_json
from bireme.pipelines.chat_request import ChatRequest
from bireme.pipelines.pictures import RequestPictures
from bireme.pipelines.placement_answer import placement_json
from bireme.pipelines.prompts import EncodedPrompt, Prompts
from bireme.pipelines.sequence import SequenceRequest, SequenceRunner
from bireme.pipelines.services import Services
from bireme.pipelines.side_by_side import Output, run_sequences
from bireme.pipelines.token_logprobs import TokenTexts
from bireme.request import check_prompt_tokens
from bireme.request_trace import RequestTrace
from bireme.sampling import expand
from bireme.text.parsers import create_parser, reasoning_format, tool_format
from bireme.text.parsers.base import Parser, ParserRequest
from bireme.text.tokenizer import TextTokenizer

OnPrompt = Callable[[int], None]  # gets the number of prompt tokens before anything is generated; may refuse


def _ignore(num_tokens: int) -> None:
    return None


class ChatService:
    def __init__(self, services: Services, tokenizer: TextTokenizer) -> None:
        """Raises ConfigError when the recipe names unknown formats."""
        self.services, self.tokenizer = services, tokenizer
        self.prompts = Prompts(tokenizer, services.recipe, services.capacity, services.metrics)
        self.texts = TokenTexts(tokenizer)
        self._reasoning = reasoning_format(services.recipe.chat.reasoning_parser)
        self._tools = tool_format(services.recipe.chat.tool_parser)
        self._call_tags = CallTags(services.recipe, self._tools, tokenizer)
        self._picture_model = picture_model_of(services.recipe)

    @property
    def takes_pictures(self) -> bool:
        return self._picture_model is not None

    async def run(
        self, request: ChatRequest, answer: ChatOutput, arrived_at: float, on_prompt: OnPrompt = _ignore,
        ids: TokenIds | None = None, trace: RequestTrace | None = None,
    ) -> list[SequenceRunner]:  # fmt: skip
        """Return when the answer is complete. Raises the error that ended it otherwise. `ids`: if they are told."""
        async with self._prepared(request, arrived_at, trace) as (prompt, pictures):
            on_prompt(len(prompt.ids))
            predicted = await self._predicted(request.prediction)
            return await self._generate(request, prompt, pictures, answer, arrived_at, ids, trace, predicted)

    async def _predicted(self, text: str) -> bytes:
        """Return what the answer may hold as ids, as far as an answer can be long."""
        if not text:
            return b""
        capacity = self.services.capacity()
        ids = await asyncio.to_thread(self.tokenizer.encode_plain, text)
        return np.array(ids[: capacity.max_seq_len if capacity else None], "<i4").tobytes()

    async def placement(self, request: ChatRequest, arrived_at: float, on_prompt: OnPrompt = _ignore) -> bytes:
        """Return where the request would run now, as JSON; nothing but its pictures is computed."""
        async with self._prepared(request, arrived_at) as (prompt, pictures):
            on_prompt(len(prompt.ids))
            sequence_requests = self._sequence_requests(request, prompt, request.sampling.params, pictures, arrived_at)
            return encode_json(placement_json(self.services.router, sequence_requests[0].routing_request()))

    async def count(self, request: ChatRequest, arrived_at: float) -> int:
        """Return the number of prompt tokens, pictures included; nothing else is computed."""
        async with self._prepared(request, arrived_at) as (prompt, _):
            return len(prompt.ids)

    @contextlib.asynccontextmanager
    async def _prepared(
        self, request: ChatRequest, arrived_at: float, trace: RequestTrace | None = None
    ) -> AsyncIterator[tuple[EncodedPrompt, RequestPictures | None]]:
        """Render, encode and fetch; the pictures are closed at the end."""
        if request.functions and self._tools is None:
            name = self.services.recipe.name
            raise RequestError(f"tools: the model has no tool parser (chat.tool_parser in recipe {name}); remove them")
        span = None if trace is None else trace.begin("tokenize")
        prompt = await self.prompts.chat(request.messages, request.tools, request.variables, request.options.cache_salt)
        if trace is not None and span is not None:
            trace.end(span, tokens=len(prompt.ids))
        pictures = self._pictures(request, arrived_at)
        try:
            if pictures is not None:
                with contextlib.nullcontext() if trace is None else trace.span("pictures"):
                    prompt = replace(prompt, ids=await pictures.expand(prompt.ids, request.sampling.params.n))
                check_prompt_tokens(len(prompt.ids), self.services.recipe.limits)  # again: with room for each picture
            yield prompt, pictures
        finally:
            if pictures is not None:
                pictures.close()

    async def _generate(
        self,
        request: ChatRequest,
        prompt: EncodedPrompt,
        pictures: RequestPictures | None,
        answer: ChatOutput,
        arrived_at: float,
        ids: TokenIds | None,
        trace: RequestTrace | None,
        predicted: bytes,
    ) -> list[SequenceRunner]:
        parsing = ParserRequest(request.functions, prompt.end)
        sequence_requests = self._sequence_requests(
            request, prompt, self._params(request, parsing), pictures, arrived_at, trace, predicted
        )
        choices = [self._choice(index, request, parsing, answer) for index in range(len(sequence_requests))]
        outputs: list[Output] = [choice.add for choice in choices]
        if ids is not None:
            ids.prompt = prompt.ids.tolist()
            outputs = [ids.noting(index, output) for index, output in enumerate(outputs)]
        return await run_sequences(self.services, self.tokenizer, sequence_requests, outputs, arrived_at)

    def close(self) -> None:
        self.prompts.close()

    def _params(self, request: ChatRequest, parsing: ParserRequest) -> SamplingParams:
        params = request.sampling.resolve(self.tokenizer.encode_plain)
        changes: dict[str, Any] = {}
        guide = request.guide
        if request.tool_mode == "required":
            assert self._tools is not None
            guide = self._tools.guide(request.functions, request.is_parallel)
        elif request.functions:
            guide = self._call_tags.guide(request)
        if guide is not None:
            changes["guided_decoding"] = guide if self._reasoning is None else self._reasoning.exempt(guide, parsing)
        if self._needs_special_tokens(request):
            changes["skip_special_tokens"] = False
        return msgspec.structs.replace(params, **changes) if changes else params

    def _needs_special_tokens(self, request: ChatRequest) -> bool:
        tools = self._tools is not None and bool(request.functions) and self._tools.needs_special_tokens
        return tools or (self._reasoning is not None and self._reasoning.needs_special_tokens)

    def _pictures(self, request: ChatRequest, arrived_at: float) -> RequestPictures | None:
        if not request.pictures:
            return None
        if self._picture_model is None:
            first = request.pictures[0]
            raise RequestError(f"{first.where.rpartition('.')[0]}.type: {first.part}; this model reads text parts only")
        deadline = self.services.deadline(arrived_at)
        return RequestPictures(
            self.services, self._picture_model, request.pictures, deadline, request.options.cache_salt,
            request.options.session_id, request.options.routing.generation,
        )  # fmt: skip

    def _sequence_requests(
        self,
        request: ChatRequest,
        prompt: EncodedPrompt,
        params: SamplingParams,
        pictures: RequestPictures | None,
        arrived_at: float,
        trace: RequestTrace | None = None,
        predicted: bytes = b"",
    ) -> list[SequenceRequest]:
        deadline = self.services.deadline(arrived_at)
        return [
            SequenceRequest(
                prompt=prompt.ids,
                sampling=single,
                options=request.options,
                deadline=deadline,
                prediction=predicted,
                pictures=pictures,
                trace=trace,
            )
            for single in expand(params)
        ]

    def _choice(self, index: int, request: ChatRequest, parsing: ParserRequest, answer: ChatOutput) -> Choice:
        texts = self.texts if request.logprobs else None
        num_top = request.sampling.params.logprobs or 0
        return Choice(index, answer, self._parser(parsing), texts, num_top, request.is_parallel)

    def _parser(self, parsing: ParserRequest) -> Parser | None:
        """Return None where all text is content."""
        if self._reasoning is None and not parsing.functions:
            return None
        return create_parser(self._reasoning, self._tools, parsing)
