"""The steps that generate and completion share (chat and the OpenAI frontend use parts of them).

parse -> tokenize -> n sequences (sequence.py), side by side -> answers (answers.py) -> metrics
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import ClassVar

import msgspec
import numpy as np

from bireme.canary_mark import is_canary
from bireme.errors import BiremeError
from bireme.observability.traces import begin_trace
from bireme.pipelines.answers import AnswerFormat, CollectedDeltas, StreamedDeltas, WholeResponse
from bireme.pipelines.inside import make_services
from bireme.pipelines.sequence import SequenceRequest, SequenceRunner
from bireme.pipelines.side_by_side import count_request, run_sequences
from bireme.request import GenerateRequest, Ids, check_prompt_text, check_prompt_tokens, parse_generate
from bireme.request_trace import RequestTrace
from bireme.sampling import expand
from bireme.specs import ModelSpec
from bireme.text.tokenizer import TextTokenizer
from bireme.types import Cancelled, Send, StageContext, Tensors
from bireme.workers.base import WorkerClient


class TextPipeline:
    spec: ClassVar[ModelSpec]

    def __init__(self, workers: WorkerClient | None = None, texts: TextTokenizer | None = None) -> None:
        self._given = workers, texts  # by tests; else made at start
        self._is_started = False

    async def start(self, context: StageContext) -> None:
        self._services, self._tokenizer = make_services(context, *self._given)
        _ = self._tokenizer.longest_token_bytes  # reads the whole vocabulary, now
        self._is_started = True

    async def stop(self) -> None:
        if self._is_started:
            await self._services.close()

    def is_ready(self) -> bool:
        return self._is_started

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        arrived_at, is_probe, metrics = time.monotonic(), False, self._services.metrics
        traces = self._services.traces
        trace = None if traces is None else begin_trace(traces, self.spec.name, inputs, arrived_at)
        try:
            with self._services.admitted():
                requests = self._parse(inputs)
                is_probe = is_canary(requests[0].options.cache_salt)
                cancel_with(cancelled)
                sequences = await self._serve(requests, send, arrived_at, trace)
        except asyncio.CancelledError:
            count_request(metrics, "CANCELLED", arrived_at, is_probe)
            raise
        except BiremeError as error:
            count_request(metrics, error.code, arrived_at, is_probe)
            raise
        finally:
            if traces is not None and trace is not None:
                trace.is_canary = is_probe
                traces.end(trace, sys.exception())
        count_request(metrics, sequences[0].finish_reason, arrived_at, is_probe)

    def _parse(self, inputs: Tensors) -> list[GenerateRequest]:
        """Return the requests; more than one only where the model takes batches."""
        return [parse_generate(inputs, self.spec, self._services.recipe)]

    async def _serve(
        self, requests: list[GenerateRequest], send: Send, arrived_at: float, trace: RequestTrace | None
    ) -> list[SequenceRunner]:
        """Return the sequences, all finished."""
        (request,) = requests
        prompt = await self._tokenize(request, trace)
        sequence_requests = self._sequence_requests(request, prompt, arrived_at, trace)
        form = self._form(request, len(prompt))
        if request.stream:
            streams = [send if form.is_plain else StreamedDeltas(send, form).add for _ in sequence_requests]
            return await run_sequences(self._services, self._tokenizer, sequence_requests, streams, arrived_at)
        collections = [CollectedDeltas() for _ in sequence_requests]
        outputs = [collection.add for collection in collections]
        sequences = await run_sequences(self._services, self._tokenizer, sequence_requests, outputs, arrived_at)
        send(WholeResponse([collection.joined() for collection in collections], form))
        return sequences

    async def _tokenize(self, request: GenerateRequest, trace: RequestTrace | None = None) -> Ids:
        if request.input_ids is not None:
            return request.input_ids
        assert request.text is not None
        capacity = self._services.capacity()
        context = capacity.max_seq_len if capacity else None
        limits, longest = self._services.recipe.limits, self._tokenizer.longest_token_bytes
        check_prompt_text("text_input", request.text, limits, longest, context)
        if trace is None:
            ids = np.array(await self._services.workers.tokenize(request.text), np.int32)
        else:
            with trace.span("tokenize") as span:
                ids = np.array(await self._services.workers.tokenize(request.text), np.int32)
                span.attributes["tokens"] = len(ids)
        check_prompt_tokens(len(ids), limits)
        return ids

    def _sequence_requests(
        self, request: GenerateRequest, prompt: Ids, arrived_at: float, trace: RequestTrace | None = None
    ) -> list[SequenceRequest]:
        params = expand(request.sampling.resolve(self._tokenizer.encode_plain))
        first = SequenceRequest(
            prompt=prompt,
            sampling=params[0],
            options=request.options,
            deadline=arrived_at + request.timeout_ms / 1000 if request.timeout_ms else 0.0,
            trace=trace,
        )
        return [first, *(msgspec.structs.replace(first, sampling=other) for other in params[1:])]

    def _form(self, request: GenerateRequest, num_input_tokens: int) -> AnswerFormat:
        prompt = ""
        if request.echo:
            prompt = request.text or self._tokenizer.decode(_ids(request.input_ids))
        return AnswerFormat(
            request.contract,
            request.extras,
            num_input_tokens,
            self._token_text,
            prompt,
            request.outputs,
            request.hides_logprobs,
        )

    def _token_text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)


def _ids(ids: Ids | None) -> list[int]:
    return [] if ids is None else ids.tolist()


def cancel_with(cancelled: Cancelled) -> None:
    """Cancel the running task when the client goes away: every await below cleans up after itself."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def cancel() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the task
            loop.call_soon_threadsafe(task.cancel)

    cancelled.on_set(cancel)
