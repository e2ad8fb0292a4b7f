"""decode: make tokens and text, for plain clients and for consumers of the token bus.

The tensors tell the kind of request:
    subscribe                            a token bus subscription: open; with `consumer`: keep, close
    consumer + commands                  a command batch of a subscription, passed on to the engine unread
    ping                                 is the engine ready? `state`, or the error UNAVAILABLE
    abort + request_id                   stop a plain request
    input_ids (+ sampling tensors)       a plain request: aggregated, or with disaggregated_params taking over
                                         a prefill; resumed_output_ids were generated before
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from bireme.engines.stub.client import EngineClient
from bireme.errors import RequestError
from bireme.observability.entry import open_traces
from bireme.observability.traces import traced_call
from bireme.request import read_tensors
from bireme.request_trace import RequestTrace
from bireme.specs import DECODE, ModelSpec
from bireme.stages.bus import TokenBus
from bireme.stages.engine_stage import EngineStage
from bireme.stages.requests import (
    EngineRun,
    StageRequest,
    failure_of,
    parse_stage_request,
    request_id_of,
    with_trace,
)
from bireme.text.output import TextStream
from bireme.text.tokenizer import TextTokenizer, recipe_tokenizer
from bireme.types import Cancelled, Send, StageContext, Tensors


class Decode(EngineStage[EngineClient]):
    spec: ClassVar[ModelSpec] = DECODE

    def __init__(self, engine: EngineClient | None = None, texts: TextTokenizer | None = None) -> None:
        super().__init__(EngineClient, engine)
        self._given_tokenizer = texts  # by tests; else made at start

    async def start(self, context: StageContext) -> None:
        self._tokenizer = self._given_tokenizer or recipe_tokenizer(context.recipe)
        self._traces = open_traces(context.recipe, context.metrics)
        await super().start(context)
        limit = context.recipe.limits.max_bus_buffer_bytes
        self._bus = TokenBus(context.model_name, self._engine, limit, context.metrics)
        self._bus.start()

    async def stop(self) -> None:
        if hasattr(self, "_bus"):  # else it did not start
            self._bus.stop()
            if self._traces is not None:
                await self._traces.close()
        await super().stop()

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        values = read_tensors(inputs, self.spec)
        if "subscribe" in values:
            await self._serve_bus(values, send, cancelled)
        elif "commands" in values or "consumer" in values:
            self._command(values)
        elif values.get("ping"):
            self._answer_ping(request_id_of(values), send)
        elif values.get("abort"):
            self._abort(request_id_of(values))
        else:
            request = parse_stage_request(values, inputs, self._context.recipe, self._tokenizer.encode_plain)
            if self._traces is None:
                await self._generate(request, send, cancelled)
                return
            with traced_call(self._traces, self.spec.name, inputs) as trace:
                await self._generate(with_trace(request, trace), send, cancelled, trace)

    async def _serve_bus(self, values: Mapping[str, Any], send: Send, cancelled: Cancelled) -> None:
        verb, consumer = values["subscribe"], values.get("consumer")
        if verb == b"open" and consumer is None:
            await self._bus.subscribe(send, cancelled)
        elif verb == b"keep" and consumer is not None:
            self._bus.keep(consumer)
        elif verb == b"close" and consumer is not None:
            self._bus.close(consumer)
        else:
            raise RequestError(f"subscribe: {verb[:20]!r}; send open, or keep or close with consumer")

    def _command(self, values: Mapping[str, Any]) -> None:
        if "consumer" not in values or "commands" not in values:
            missing = "commands" if "consumer" in values else "consumer"
            raise RequestError(f"{missing}: missing; a command batch needs consumer and commands")
        self._bus.command(values["consumer"], values["commands"])

    def _abort(self, name: str) -> None:
        if number := self._names.find(name):
            self._engine.abort(number)

    async def _generate(
        self, request: StageRequest, send: Send, cancelled: Cancelled, trace: RequestTrace | None = None
    ) -> None:
        """Run a plain request; its responses go out as the engine makes them."""
        self._check_ready()
        self._names.reserve(request.request_id)
        try:
            engine_run = EngineRun(self._engine)
            sampling = request.engine.sampling
            detokenizer = self._tokenizer.detokenizer(sampling.skip_special_tokens)
            stream = TextStream(detokenizer, sampling, send, engine_run.done, engine_run.abort)
            stream.replay(_resumed(request))
            engine_run.submit(request.engine, stream)
            self._names.bind(request.request_id, engine_run.number)
            finish = await engine_run.wait(cancelled)
        finally:
            self._names.forget(request.request_id)
        if trace is not None:
            trace.hang(trace.root, finish.spans)
        if not stream.finish_reason:
            raise failure_of(finish)


def _resumed(request: StageRequest) -> list[int]:
    count = request.engine.num_resumed
    ids: list[int] = np.frombuffer(request.engine.prompt, np.int32)[-count:].tolist() if count else []
    return ids
