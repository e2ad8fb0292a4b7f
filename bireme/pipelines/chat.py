"""chat: an OpenAI chat completion request in, its answer out; chunks where the request says `"stream": true`.

The same code as the OpenAI frontend's /v1/chat/completions. Chunks carry no framing: one response, one JSON object; a
slow reader gets neighboring pieces of text as one chunk.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import ClassVar

import numpy as np

from bireme.canary_mark import is_canary
from bireme.errors import BiremeError, RequestError
from bireme.observability.traces import begin_trace
from bireme.pipelines.chat_answer import ResponseMeta, WholeAnswer, token_ids
from bireme.pipelines.chat_request import ChatRequest, parse_chat
from bireme.pipelines.chat_service import ChatService
from bireme.pipelines.chat_stream import ChunkTemplate, streamed_answer
from bireme.pipelines.chat_usage import NvExtReply
from bireme.pipelines.inside import make_services
from bireme.pipelines.sequence import SequenceRunner
from bireme.pipelines.side_by_side import count_request
from bireme.pipelines.text import cancel_with
from bireme.request import read_tensors
from bireme.request_trace import RequestTrace
from bireme.specs import CHAT, ModelSpec
from bireme.text.output import TokenDelta
from bireme.text.tokenizer import TextTokenizer
from bireme.types import Cancelled, Response, Send, StageContext, Tensors
from bireme.workers.base import WorkerClient


class Chat:
    """The stage. Given workers and tokenizer by tests; else made at start."""

    spec: ClassVar[ModelSpec] = CHAT

    def __init__(self, workers: WorkerClient | None = None, texts: TextTokenizer | None = None) -> None:
        self._workers, self._tokenizer = workers, texts
        self._service: ChatService | None = None

    async def start(self, context: StageContext) -> None:
        services, tokenizer = make_services(context, self._workers, self._tokenizer)
        self._service = ChatService(services, tokenizer)

    async def stop(self) -> None:
        if self._service is not None:
            self._service.close()
            await self._service.services.close()

    def is_ready(self) -> bool:
        return self._service is not None

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        assert self._service is not None
        arrived_at, is_probe, services = time.monotonic(), False, self._service.services
        traces = services.traces
        trace = None if traces is None else begin_trace(traces, self.spec.name, inputs, arrived_at)
        try:
            with services.admitted():
                request = self._parse(inputs)
                is_probe = is_canary(request.options.cache_salt)
                cancel_with(cancelled)
                if request.options.routing.query_only:
                    send(JsonResponse(await self._service.placement(request, arrived_at), is_last=True))
                    return
                sequences = await self._serve(self._service, request, send, arrived_at, trace)
        except asyncio.CancelledError:
            count_request(services.metrics, "CANCELLED", arrived_at, is_probe)
            raise
        except BiremeError as error:
            count_request(services.metrics, error.code, arrived_at, is_probe)
            raise
        finally:
            if traces is not None and trace is not None:
                trace.is_canary = is_probe
                traces.end(trace, sys.exception())
        count_request(services.metrics, sequences[0].finish_reason, arrived_at, is_probe)

    def _parse(self, inputs: Tensors) -> ChatRequest:
        assert self._service is not None
        values = read_tensors(inputs, self.spec)
        if "request" not in values:
            raise RequestError("request: missing; send an OpenAI chat completion request as JSON")
        request = parse_chat(values["request"], self._service.services.recipe)
        if request.annotations:
            raise RequestError("nvext.annotations: responses of this model are no events; ask the OpenAI frontend")
        return request

    async def _serve(
        self,
        service: ChatService,
        request: ChatRequest,
        send: Send,
        arrived_at: float,
        trace: RequestTrace | None,
    ) -> list[SequenceRunner]:
        n, names = request.sampling.params.n, service.services.recipe.chat.reasoning_names
        heading = ResponseMeta.of(request.model, service_tier=request.service_tier, reasoning_names=names)
        nvext, ids = NvExtReply(request.extra_fields, arrived_at), token_ids(request.return_token_ids, n)
        if request.stream:
            template = ChunkTemplate(heading, n, request.include_usage)
            sink = _Sink(template, send)
            answer = streamed_answer(ids, template, sink, n, request.include_usage, request.return_timing, nvext)
            return await service.run(request, answer, arrived_at, ids=ids, trace=trace)
        whole = WholeAnswer(heading, n, request.return_timing, nvext, ids)
        sequences = await service.run(request, whole, arrived_at, ids=ids, trace=trace)
        send(JsonResponse(whole.json(), is_last=True))
        return sequences


class JsonResponse:
    def __init__(self, data: bytes, is_last: bool = False) -> None:
        self._data, self.is_last = data, is_last

    @property
    def num_bytes(self) -> int:
        return len(self._data)

    def merge(self, later: Response) -> Response | None:
        return None

    def tensors(self) -> Tensors:
        return {"response": np.array([self._data], np.object_)}


class _TextChunk:
    """A chunk of content, made when it is sent; later content of the choice joins it until then."""

    __slots__ = ("_index", "_template", "_texts")

    def __init__(self, template: ChunkTemplate, index: int, text: str) -> None:
        self._template, self._index, self._texts = template, index, [text]

    def merge(self, later: Response) -> Response | None:
        if not isinstance(later, _TextChunk) or later._index != self._index:
            return None
        self._texts += later._texts
        return self

    def tensors(self) -> Tensors:
        data = self._template.text(self._index, "".join(self._texts))
        return {"response": np.array([data], np.object_)}


class _Sink:
    def __init__(self, template: ChunkTemplate, send: Send) -> None:
        self._template, self._send = template, send

    def text(self, index: int, text: str) -> None:
        self._send(_TextChunk(self._template, index, text))

    def delta(self, index: int, delta: TokenDelta) -> None:
        if text := delta.text:
            self.text(index, text)

    def chunk(self, data: bytes) -> None:
        self._send(JsonResponse(data))

    def end(self) -> None:
        return None
