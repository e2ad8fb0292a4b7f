"""Workers in memory, for tests of their callers: the test makes every step and every fault.

Tokens depend on prompt and position alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from bireme.errors import BiremeError, EngineLostError, NotFoundError, RequestCancelledError, RequestError, to_message
from bireme.messages import (
    Capacity,
    EmbedRequest,
    EncodeRequest,
    EncodeSource,
    EngineRequest,
    EngineSpan,
    Finish,
    FinishReason,
    Sink,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from bireme.multimodal.wire import EncodeAnswer, Encoded, Multimodal
from bireme.types import Floats
from bireme.workers.base import PrefillResult

PREFILL_USAGE = Usage(queue_ms=2.0, prefill_ms=5.0, cached_tokens=1)
_WAIT_S = 60.0  # for a request that may have been refused
OWN_PREFILL_MS = 3.0  # of a decode worker that computes the prompt itself


def token_at(prompt: list[int], position: int) -> int:
    return 100 + (sum(prompt) + 7 * position) % 800


def logprobs_of(token: int, k: int) -> TokenLogprobs:
    """Return a token's log probabilities: its own, then the k likeliest."""
    chosen = TokenLogprob(token, -0.5, 1)
    others = [TokenLogprob(token + at, -1.0 - at, 1 + at) for at in range(1, k)]
    return [chosen, *([chosen] if k else []), *others]


def embedding_of(tokens: list[int]) -> list[float]:
    return [float(sum(tokens)), float(len(tokens)), float(tokens[0]), 0.1]


def prompt_logprobs_of(prompt: list[int], k: int | None) -> list[TokenLogprobs] | None:
    return None if k is None else [logprobs_of(token, k) for token in prompt[1:]]


def spans_of(request: EngineRequest, *names: str) -> list[EngineSpan] | None:
    """Return what an engine tells that has done everything just now."""
    now_us = time.time_ns() // 1000
    return (
        [EngineSpan(name, now_us + at, now_us + at) for at, name in enumerate(names)] if request.traceparent else None
    )


class FakeGeneration:
    """A request in a fake decode worker."""

    def __init__(self, workers: FakeWorkers, worker: str, request: EngineRequest, sink: Sink) -> None:
        self._workers = workers
        self.worker, self.request, self.sink = worker, request, sink
        self.was_sent = True
        self.failure: BiremeError | None = None
        self.is_aborted = self.is_over = False
        ids: list[int] = np.frombuffer(request.prompt, np.int32).tolist()
        self.prompt = ids[: len(ids) - request.num_resumed]
        self.num_tokens = request.num_resumed

    def abort(self) -> None:
        self.is_aborted = True
        asyncio.get_running_loop().call_soon(self.end, "cancelled")

    def emit(self) -> None:
        """Make the next token; the last one ends it."""
        if self.is_over:
            return
        if self.request.disaggregated_params:
            self._workers.leases.pop(self.request.disaggregated_params.decode(), None)
        token, sampling = token_at(self.prompt, self.num_tokens), self.request.sampling
        prompt = None if self.num_tokens else prompt_logprobs_of(self.prompt, sampling.prompt_logprobs)
        own = None if sampling.logprobs is None else [logprobs_of(token, sampling.logprobs)]
        self.sink.push((token,), own, prompt)
        self.num_tokens += 1
        if self.num_tokens == (self.request.sampling.max_tokens or 1 << 30):
            self.end("length")

    def end(self, reason: FinishReason, error: str = "") -> None:
        if not self.is_over:
            self.is_over = True
            self._workers.running.remove(self)
            usage = Usage(completion_tokens=self.num_tokens, prefill_ms=OWN_PREFILL_MS)
            if self.request.disaggregated_params:  # the figures of its prefill came with them
                usage = msgspec.structs.replace(PREFILL_USAGE, completion_tokens=self.num_tokens)
            usage.drafted_tokens, usage.accepted_tokens = self._workers.drafts
            self.sink.finish(Finish(reason, usage, error=error, spans=spans_of(self.request, "queue", "generate")))

    def fail(self, error: BiremeError) -> None:
        """End it as the bus does."""
        self.failure = error
        self.end("error", to_message(error))


class FakeWorkers:
    """WorkerClient. `down`: calls of a worker fail; `hold`: unary calls wait."""

    def __init__(self) -> None:
        self.down: dict[str, BiremeError] = {}
        self.hold: set[str] = set()  # tokenizer, or a prefill worker
        self.waiting: dict[str, asyncio.Future[None]] = {}  # request id (or tokenizer) -> goes on when set
        self.drafts = 0, 0  # tokens that each request had drafted and accepted
        self.leases: dict[str, str] = {}  # request id -> prefill worker
        self.handles: set[str] = set()  # embeddings that wait to be fetched
        self.running: list[FakeGeneration] = []
        self.log: list[str] = []  # worker and request type, or what was aborted
        self.errors: deque[BiremeError] = deque()  # the next decode requests end with these, as engines do
        self.capacities: dict[str, Capacity] = {}
        self.members: frozenset[str] = frozenset()  # of the last set_workers
        self.on_silence: Callable[[str, bool], None] = lambda server, is_silent: None
        self.is_closed = False

    def set_workers(self, workers: Mapping[str, int]) -> None:
        self.members = frozenset(workers)

    async def tokenize(self, text: str) -> list[int]:
        await self._wait("tokenizer", "tokenizer")
        return [ord(character) for character in text]

    async def prefill(self, worker: str, request: EngineRequest, request_id: str) -> PrefillResult:
        self.log.append(f"{worker} {request.request_type}")
        self._check(worker)
        await self._wait(worker, request_id)
        self._check(worker)
        self.leases[request_id] = worker
        self._fetch(request)
        ids: list[int] = np.frombuffer(request.prompt, np.int32).tolist()
        return PrefillResult(
            request_id.encode(),
            (token_at(ids, 0),),
            PREFILL_USAGE,
            prompt_logprobs_of(ids, request.sampling.prompt_logprobs),
            spans_of(request, "queue", "prefill_chunk"),
        )

    async def abort_prefill(self, worker: str, request_id: str) -> None:
        self.log.append(f"{worker} abort")
        waiting = self.waiting.pop(request_id, None)
        if waiting is not None:
            waiting.set_exception(RequestCancelledError("the prefill was aborted"))
        elif self.leases.pop(request_id, None) is None:
            raise NotFoundError(f"request_id: {request_id} is not under way")

    async def encode(self, worker: str, request: EncodeRequest, request_id: str) -> EncodeAnswer:
        """A picture has as many tokens as its source bytes."""
        self.log.append(f"{worker} encode")
        self._check(worker)
        await self._wait(worker, request_id)
        self._check(worker)
        return EncodeAnswer(
            pictures=tuple(self._encoded(source, request_id, request.copies) for source in request.sources)
        )

    async def abort_encode(self, worker: str, request_id: str) -> None:
        self.log.append(f"{worker} abort encode")
        if (waiting := self.waiting.pop(request_id, None)) is not None:
            waiting.set_exception(RequestCancelledError("the encode was aborted"))

    async def embed(self, worker: str, request: EmbedRequest, request_id: str) -> Floats:
        """An embedding has 4 dimensions."""
        self.log.append(f"{worker} embed {len(request.prompts)}")
        self._check(worker)
        await self._wait(worker, request_id)
        rows = [embedding_of(np.frombuffer(prompt, "<i4").tolist()) for prompt in request.prompts]
        return np.array(rows, np.float32)[:, : request.dimensions or 4]

    async def abort_embed(self, worker: str, request_id: str) -> None:
        self.log.append(f"{worker} abort embed")
        if (waiting := self.waiting.pop(request_id, None)) is not None:
            waiting.set_exception(RequestCancelledError("the embed was aborted"))

    async def release(self, worker: str, handles: tuple[str, ...]) -> None:
        self.handles.difference_update(handles)

    def _fetch(self, request: EngineRequest) -> None:
        """Take the embeddings of the request's pictures."""
        if request.multimodal is not None:
            items = msgspec.json.decode(request.multimodal, type=Multimodal).items
            self.handles -= {item.handle for item in items if item.handle is not None}

    def _encoded(self, source: EncodeSource, request_id: str, copies: int) -> Encoded:
        if not source.content:
            raise RequestError("images[0]: empty; send a picture")
        handles = tuple(f"{request_id}-{copy}-{len(self.handles) + copy}" for copy in range(copies))
        self.handles.update(handles)
        name = hashlib.sha256(source.content).hexdigest()
        return Encoded(hash=name, num_tokens=len(source.content), hidden_size=4, handles=handles)

    def decode(self, worker: str, request: EngineRequest, sink: Sink) -> FakeGeneration:
        self.log.append(f"{worker} {request.request_type} {request.num_resumed}")
        generation = FakeGeneration(self, worker, request, sink)
        self.running.append(generation)
        self._fetch(request)
        loop = asyncio.get_running_loop()
        blob = request.disaggregated_params
        if worker in self.down:
            generation.was_sent = False
            loop.call_soon(generation.fail, self.down[worker])
        elif self.errors:
            loop.call_soon(generation.end, "error", to_message(self.errors.popleft()))
        elif blob is not None and blob.decode() not in self.leases:
            loop.call_soon(generation.end, "error", "NOT_FOUND: the lease is gone")
        return generation

    def capacity(self, worker: str) -> Capacity | None:
        return self.capacities.get(worker)

    async def check(self, worker: str) -> None:
        self._check(worker)

    async def close(self) -> None:
        self.is_closed = True

    async def emit(self, count: int = 1) -> None:
        """Every running request makes tokens, once there is one."""
        async with asyncio.timeout(_WAIT_S):
            while not self.running:
                await asyncio.sleep(0)
        for _ in range(count):
            for generation in list(self.running):
                generation.emit()
            await asyncio.sleep(0)

    async def lose(self, worker: str) -> None:
        """The worker's engine dies."""
        for generation in list(self.running):
            if generation.worker == worker:
                generation.fail(EngineLostError(f"{worker}: its engine died"))
        await asyncio.sleep(0)

    async def reached(self, name: str) -> None:
        """Return when a held call waits, or (worker) when a decode request runs there."""
        async with asyncio.timeout(_WAIT_S):
            while name not in self.waiting and not any(generation.worker == name for generation in self.running):
                await asyncio.sleep(0)

    def go_on(self, name: str) -> None:
        self.waiting.pop(name).set_result(None)

    def _check(self, worker: str) -> None:
        if worker in self.down:
            raise self.down[worker]

    async def _wait(self, worker: str, name: str) -> None:
        if worker in self.hold:
            future = self.waiting[name] = asyncio.get_running_loop().create_future()
            await future
