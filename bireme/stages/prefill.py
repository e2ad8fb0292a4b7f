"""prefill: run a prompt, make its first token, leave its KV leased for a decode worker.

Unary. The answer has signed disaggregated_params, which name the lease. `abort` with a request id stops a prefill, and
frees the lease of an answered one, which is found by its id until the lease would expire. `ping` asks for the engine's
`state`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np

from bireme.engines.stub.client import EngineClient
from bireme.errors import BiremeError, RequestCancelledError, RequestError
from bireme.messages import Encode, Finish, Logprobs, Release, Submit, Usage, encode
from bireme.observability.entry import open_traces
from bireme.observability.traces import Traces, traced_call
from bireme.request import read_tensors
from bireme.request_trace import RequestTrace
from bireme.specs import PREFILL, ModelSpec
from bireme.stages.encoding import answer_json, run_command
from bireme.stages.engine_stage import EngineStage
from bireme.stages.requests import (
    EngineRun,
    StageRequest,
    failure_of,
    parse_stage_request,
    read_command,
    request_id_of,
    with_trace,
)
from bireme.text.tokenizer import TextTokenizer, recipe_tokenizer
from bireme.types import Array, Cancelled, Send, StageContext, TensorResponse, Tensors

_encode_json = msgspec.json.Encoder().encode


class Prefill(EngineStage[EngineClient]):
    spec: ClassVar[ModelSpec] = PREFILL

    def __init__(self, engine: EngineClient | None = None, texts: TextTokenizer | None = None) -> None:
        super().__init__(EngineClient, engine)
        self._given_tokenizer = texts  # by tests; else made at start
        self._traces: Traces | None = None

    async def start(self, context: StageContext) -> None:
        self._leased: deque[tuple[float, str]] = deque()  # answered requests: when to forget, request id
        self._tokenizer = self._given_tokenizer or recipe_tokenizer(context.recipe)
        self._traces = open_traces(context.recipe, context.metrics)
        await super().start(context)

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        values = read_tensors(inputs, self.spec)
        self._forget_expired()
        if values.get("ping"):
            self._answer_ping(request_id_of(values), send)
            return
        if values.get("abort"):
            self._abort(request_id_of(values), send)
            return
        if "engine_request" in values:
            command = read_command(values["engine_request"])
            if not isinstance(command, Submit):
                await self._serve_encode(command, request_id_of(values), send, cancelled)
                return
        request = parse_stage_request(values, inputs, self._context.recipe, self._tokenizer.encode_plain)
        if self._traces is None or "engine_request" in values:
            await self._serve(request, send, cancelled)
            return
        with traced_call(self._traces, self.spec.name, inputs) as trace:
            await self._serve(with_trace(request, trace), send, cancelled, trace)

    async def stop(self) -> None:
        if self._traces is not None:
            await self._traces.close()
        await super().stop()

    async def _serve(
        self, request: StageRequest, send: Send, cancelled: Cancelled, trace: RequestTrace | None = None
    ) -> None:
        self._check(request)
        self._names.reserve(request.request_id)
        try:
            sink = await self._run(request, cancelled, trace)
        except BaseException:
            self._names.forget(request.request_id)
            raise
        self._keep(request.request_id)
        send(sink.answer(is_traced=trace is not None))

    def _check(self, request: StageRequest) -> None:
        if request.engine.disaggregated_params:
            raise RequestError("disaggregated_params: prefill makes them; send them to decode")
        self._check_ready()

    async def _serve_encode(self, command: Encode | Release, request_id: str, send: Send, cancelled: Cancelled) -> None:
        self._check_ready()
        answer = await run_command(self._engine, self._names, command, request_id, cancelled)
        send(TensorResponse({"embedding_handles": np.array([answer_json(answer)], np.object_)}))

    async def _run(self, request: StageRequest, cancelled: Cancelled, trace: RequestTrace | None) -> _FirstToken:
        """Return the sink, finished well. Raises the request's error."""
        engine_run = EngineRun(self._engine)
        sink = _FirstToken(engine_run)
        engine_run.submit(msgspec.structs.replace(request.engine, request_type="context_only"), sink)
        self._names.bind(request.request_id, engine_run.number)
        sink.ending = await engine_run.wait(cancelled)
        if trace is not None:
            trace.hang(trace.root, sink.ending.spans)
        if sink.ending.reason not in ("stop", "length", "not_finished"):
            raise failure_of(sink.ending)
        if sink.ending.disaggregated_params is None:
            raise BiremeError("prefill: the engine made no disaggregated_params")
        if cancelled:
            engine_run.abort()  # nobody will claim the lease
            raise RequestCancelledError("the client is gone")
        return sink

    def _abort(self, name: str, send: Send) -> None:
        self._check_ready()
        number = self._names.find(name)
        if number:
            self._engine.abort(number)
        send(TensorResponse(_tensors(b"", [], Usage())))

    def _keep(self, name: str) -> None:
        """Let `abort` find an answered request as long as its lease may live."""
        entry = self._context.entry
        lease_s = entry.engine_config.cache_transceiver_config.kv_transfer_timeout_ms / 1000 if entry else 60.0
        if name:
            self._leased.append((asyncio.get_running_loop().time() + lease_s, name))

    def _forget_expired(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._leased and self._leased[0][0] < now:
            self._names.forget(self._leased.popleft()[1])


class _FirstToken:
    """Sink of one prefill; called on the engine client's thread."""

    def __init__(self, engine_run: EngineRun) -> None:
        self._engine_run = engine_run
        self.tokens: list[int] = []
        self.prompt_logprobs: Logprobs = None
        self.ending: Finish | None = None

    def push(self, tokens: Sequence[int], logprobs: Logprobs = None, prompt_logprobs: Logprobs = None) -> None:
        self.tokens.extend(tokens)
        if prompt_logprobs is not None:
            self.prompt_logprobs = [*(self.prompt_logprobs or ()), *prompt_logprobs]

    def finish(self, finish: Finish) -> None:
        self._engine_run.done(finish)

    def answer(self, is_traced: bool) -> TensorResponse:
        """`is_traced`: here, so that nobody else is told the engine's spans."""
        finish = self.ending
        assert finish is not None and finish.disaggregated_params is not None
        tensors = _tensors(finish.disaggregated_params, self.tokens, finish.usage)
        if self.prompt_logprobs is not None:  # nothing predicts the first token of a prompt
            tensors["prompt_log_probs"] = np.array([_encode_json([None, *self.prompt_logprobs])], np.object_)
        if finish.spans is not None and not is_traced:
            tensors["spans"] = np.array([encode(finish.spans)], np.object_)
        return TensorResponse(tensors)


def _tensors(params: bytes, tokens: list[int], usage: Usage) -> dict[str, Array]:
    return {
        "disaggregated_params": np.array([params], np.object_),
        "output_ids": np.array(tokens, np.int32),
        "usage": np.array([_encode_json(usage)], np.object_),
    }
