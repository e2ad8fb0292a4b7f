"""POST /v1/completions: text or token ids, without a chat template."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from bireme.errors import RequestError
from bireme.messages import SamplingParams
from bireme.openai.call_traces import note_response
from bireme.openai.http.call import Call
from bireme.openai.http.event_stream import EventStream
from bireme.openai.text.answering import (
    PLACED,
    TextApi,
    annotation_events,
    answer_events,
    counted,
    for_caller,
    note_usage,
)
from bireme.openai.text.completion_answer import (
    CompletionTemplate,
    LogprobColumns,
    StreamedCompletion,
    WholeCompletion,
    without_tokens,
)
from bireme.openai.text.completion_request import REFUSED, CompletionBody, CompletionRequest, check_completion
from bireme.openai.text.served_model import ServedModel
from bireme.pipelines.chat_answer import ResponseMeta, encode_json
from bireme.pipelines.chat_usage import NvExtReply
from bireme.pipelines.json_body import decode_body
from bireme.pipelines.placement_answer import placement_json
from bireme.pipelines.sequence import SequenceRequest, SequenceRunner
from bireme.pipelines.side_by_side import Output, run_sequences
from bireme.request import Ids, check_ids, check_prompt_tokens
from bireme.sampling import expand


@dataclass(frozen=True, slots=True)
class _CompletionJob:
    """A request, encoded: n sequences a prompt, one after the other."""

    request: CompletionRequest
    sequences: list[SequenceRequest]
    echoes: list[str]  # one a sequence
    num_prompt_tokens: int

    @property
    def n(self) -> int:
        return self.request.sampling.params.n


class Completions(TextApi):
    async def post(self, call: Call, data: bytes) -> None:
        body = decode_body(data, CompletionBody, REFUSED)
        model = self._models.get(body.model)
        with counted(call, model):
            request = for_caller(call, check_completion(body, model.recipe))
            job = await self._prepare(call, model, request)
            if request.options.routing.query_only:
                await self._query(call, model, job)
            elif request.stream:
                await self._stream(call, model, job)
            else:
                await self._whole(call, model, job)

    async def _prepare(self, call: Call, model: ServedModel, request: CompletionRequest) -> _CompletionJob:
        salt = request.options.cache_salt
        span = None if call.trace is None else call.trace.begin("tokenize")
        prompts = [await self._encode(model, prompt, at, salt) for at, prompt in enumerate(request.prompts)]
        num_prompt_tokens = sum(map(len, prompts))
        if call.trace is not None and span is not None:
            call.trace.end(span, tokens=num_prompt_tokens)
        call.tenant.take_prompt(num_prompt_tokens)
        tokenizer = model.tokenizer
        params = request.sampling.resolve(tokenizer.encode_plain)
        deadline = model.services.deadline(call.arrived_at)
        sequences = [
            SequenceRequest(
                prompt=prompt,
                sampling=single,
                options=request.options,
                deadline=deadline,
                trace=call.trace,
            )
            for prompt in prompts
            for single in expand(params)
        ]
        texts = [_echo(model, prompt, params) if request.echo else "" for prompt in request.prompts]
        return _CompletionJob(request, sequences, [text for text in texts for _ in range(params.n)], num_prompt_tokens)

    async def _encode(self, model: ServedModel, prompt: str | list[int], at: int, salt: str) -> Ids:
        if isinstance(prompt, str):
            return (await model.chat.prompts.text(prompt, cache_salt=salt)).ids
        ids = check_ids(f"prompt[{at}]", np.array(prompt, object), model.tokenizer.vocab_size)
        check_prompt_tokens(len(ids), model.recipe.limits)
        return ids

    async def _query(self, call: Call, model: ServedModel, job: _CompletionJob) -> None:
        if len(job.request.prompts) > 1:
            raise RequestError(f"bireme.routing.query_only: {len(job.request.prompts)} prompts; ask for each by itself")
        answer = placement_json(model.services.router, job.sequences[0].routing_request())
        call.notes["outcome"] = PLACED
        await call.reply(200, encode_json(answer))

    async def _whole(self, call: Call, model: ServedModel, job: _CompletionJob) -> None:
        answer = WholeCompletion(_heading(call, model), job.echoes, _columns(model, job))
        sequences = await call.unless_gone(self._run(call, model, job, answer))
        call.notes["outcome"] = sequences[0].finish_reason
        note_usage(call, answer.usages, job.num_prompt_tokens)
        nvext = NvExtReply(job.request.extra_fields, call.arrived_at)
        await call.reply(200, answer.json(job.n, job.request.return_timing, nvext))

    async def _stream(self, call: Call, model: ServedModel, job: _CompletionJob) -> None:
        request = job.request
        template = CompletionTemplate(_heading(call, model), len(job.sequences), request.include_usage)
        stream = EventStream(template, self._pacer, model.recipe.limits.max_stream_buffer_bytes)
        answer = StreamedCompletion(template, stream, job.echoes, _columns(model, job))
        answer.n, answer.include_usage, answer.has_timing = job.n, request.include_usage, request.return_timing
        answer.nvext = NvExtReply(request.extra_fields, call.arrived_at)
        if request.annotations:
            for prompt, first in zip(request.prompts, job.sequences[:: job.n], strict=True):
                text = _echo(model, prompt, first.sampling)
                answer.annotations += annotation_events(request.annotations, call, first.prompt, text)
        work = self._run(call, model, job, answer)
        call.notes["outcome"] = await answer_events(call, work, stream, self._streams)
        note_usage(call, answer.usages, job.num_prompt_tokens)

    async def _run(
        self, call: Call, model: ServedModel, job: _CompletionJob, answer: StreamedCompletion | WholeCompletion
    ) -> list[SequenceRunner]:
        if job.request.return_token_ids:
            answer.prompts = [one.prompt.tolist() for one in job.sequences]
        outputs: list[Output] = [functools.partial(answer.add, index) for index in range(len(job.sequences))]
        if not job.request.wants_tokens:
            outputs = [_prompt_only(output) for output in outputs]
        return await run_sequences(model.services, model.tokenizer, job.sequences, outputs, call.arrived_at)


def _echo(model: ServedModel, prompt: str | list[int], params: SamplingParams) -> str:
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt, params.skip_special_tokens)


def _prompt_only(output: Output) -> Output:
    return lambda delta: output(without_tokens(delta))


def _columns(model: ServedModel, job: _CompletionJob) -> list[LogprobColumns] | None:
    num_top = job.request.logprobs
    if num_top is None:
        return None
    return [
        LogprobColumns(
            model.chat.texts,
            num_top,
            int(one.prompt[0]) if job.request.echo else None,
            one.sampling.skip_special_tokens,
        )
        for one in job.sequences
    ]


def _heading(call: Call, model: ServedModel) -> ResponseMeta:
    heading = ResponseMeta.of(model.name, "cmpl-")
    note_response(call, heading.id)
    return heading
