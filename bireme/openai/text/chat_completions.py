"""POST /v1/chat/completions."""

from __future__ import annotations

from bireme.openai.call_traces import note_response
from bireme.openai.http.call import Call
from bireme.openai.http.event_stream import PREFIX, SUFFIX, EventStream
from bireme.openai.text.answering import TextApi, annotation_events, answer_events, counted, for_caller, note_usage
from bireme.openai.text.served_model import ServedModel
from bireme.pipelines.chat_answer import ResponseMeta, WholeAnswer, token_ids
from bireme.pipelines.chat_request import REFUSED, ChatBody, ChatRequest, check_chat
from bireme.pipelines.chat_stream import ChunkTemplate, streamed_answer
from bireme.pipelines.chat_usage import NvExtReply
from bireme.pipelines.json_body import decode_body


class ChatCompletions(TextApi):
    async def post(self, call: Call, data: bytes) -> None:
        body = decode_body(data, ChatBody, REFUSED)
        model = self._models.get(body.model)
        with counted(call, model):
            request = for_caller(call, check_chat(body, model.recipe))
            if request.options.routing.query_only:
                await self._place(call, model, request)
            elif request.stream:
                await self._stream(call, model, request)
            else:
                await self._whole(call, model, request)

    async def _whole(self, call: Call, model: ServedModel, request: ChatRequest) -> None:
        heading = _heading(call, model, request)
        nvext = NvExtReply(request.extra_fields, call.arrived_at)
        n = request.sampling.params.n
        ids = token_ids(request.return_token_ids, n)
        answer = WholeAnswer(heading, n, request.return_timing, nvext, ids)
        work = model.chat.run(request, answer, call.arrived_at, call.tenant.take_prompt, ids, call.trace)
        sequences = await call.unless_gone(work)
        call.notes["outcome"] = sequences[0].finish_reason
        note_usage(call, answer.usages, answer.usages[0].prompt_tokens)
        await call.reply(200, answer.json())

    async def _stream(self, call: Call, model: ServedModel, request: ChatRequest) -> None:
        n, annotations = request.sampling.params.n, b""
        if request.annotations:
            shown = await model.chat.prompts.shown(
                request.messages, request.tools, request.variables, request.options.cache_salt
            )
            annotations = annotation_events(request.annotations, call, *shown)
        heading = _heading(call, model, request)
        template = ChunkTemplate(heading, n, request.include_usage, PREFIX, SUFFIX)
        stream = EventStream(template, self._pacer, model.recipe.limits.max_stream_buffer_bytes)
        nvext = NvExtReply(request.extra_fields, call.arrived_at)
        ids, timing = token_ids(request.return_token_ids, n), request.return_timing
        answer = streamed_answer(ids, template, stream, n, request.include_usage, timing, nvext, annotations)
        work = model.chat.run(request, answer, call.arrived_at, call.tenant.take_prompt, ids, call.trace)
        call.notes["outcome"] = await answer_events(call, work, stream, self._streams)
        if usages := answer.usages:
            note_usage(call, usages, usages[0].prompt_tokens)


def _heading(call: Call, model: ServedModel, request: ChatRequest) -> ResponseMeta:
    names = model.recipe.chat.reasoning_names
    heading = ResponseMeta.of(model.name, service_tier=request.service_tier, reasoning_names=names)
    note_response(call, heading.id)
    return heading
