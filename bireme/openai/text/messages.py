"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages."""

from __future__ import annotations

from dataclasses import replace

from bireme.openai.call_traces import note_response
from bireme.openai.http.call import Call
from bireme.openai.http.event_stream import SUFFIX, EventStream
from bireme.openai.text.answering import TextApi, answer_events, counted, for_caller, note_usage
from bireme.openai.text.messages_answer import PING, MessageTemplate, StreamedMessage, WholeMessage
from bireme.openai.text.messages_request import (
    REFUSED,
    CountBody,
    MessagesBody,
    MessagesRequest,
    check_count,
    check_messages,
)
from bireme.openai.text.served_model import ServedModel
from bireme.pipelines.chat_answer import encode_json
from bireme.pipelines.json_body import decode_body


class Messages(TextApi):
    async def post(self, call: Call, data: bytes) -> None:
        body = decode_body(data, MessagesBody, REFUSED)
        model = self._models.get(body.model)
        with counted(call, model):
            request = check_messages(body, model.recipe)
            request = replace(request, chat=for_caller(call, request.chat))
            if request.chat.options.routing.query_only:
                await self._place(call, model, request.chat)
            elif request.chat.stream:
                await self._stream(call, model, request)
            else:
                await self._whole(call, model, request)

    async def count(self, call: Call, data: bytes) -> None:
        body = decode_body(data, CountBody, REFUSED)
        model = self._models.get(body.model)
        request = for_caller(call, check_count(body, model.recipe))
        num_tokens = await call.unless_gone(model.chat.count(request, call.arrived_at))
        await call.reply(200, encode_json({"input_tokens": num_tokens}))

    async def _whole(self, call: Call, model: ServedModel, request: MessagesRequest) -> None:
        answer = WholeMessage(request)
        note_response(call, answer.id)
        work = model.chat.run(request.chat, answer, call.arrived_at, call.tenant.take_prompt, trace=call.trace)
        sequences = await call.unless_gone(work)
        call.notes["outcome"] = sequences[0].finish_reason
        note_usage(call, [answer.usage], answer.usage.prompt_tokens)
        await call.reply(200, answer.json())

    async def _stream(self, call: Call, model: ServedModel, request: MessagesRequest) -> None:
        template = MessageTemplate(request)
        note_response(call, template.id)
        stream = EventStream(template, self._pacer, model.recipe.limits.max_stream_buffer_bytes, PING)
        answer = StreamedMessage(request, template, stream)

        def on_prompt(num_tokens: int) -> None:
            call.tenant.take_prompt(num_tokens)
            template.num_prompt_tokens = num_tokens

        def last_events(error: BaseException) -> bytes:
            return b"event: error\ndata: " + call.error_reply(error).body + SUFFIX

        work = model.chat.run(request.chat, answer, call.arrived_at, on_prompt, trace=call.trace)
        call.notes["outcome"] = await answer_events(call, work, stream, self._streams, last_events)
        if answer.usage is not None:
            note_usage(call, [answer.usage], answer.usage.prompt_tokens)
