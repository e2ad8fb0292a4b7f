"""POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

import time
from dataclasses import replace

from bireme.openai.call_traces import note_response
from bireme.openai.http.call import Call
from bireme.openai.http.event_stream import EventStream
from bireme.openai.http.pace import Pacer
from bireme.openai.text.answering import Streams, TextApi, answer_events, counted, for_caller, note_usage
from bireme.openai.text.response_answer import ResponseAnswer, ResponseEvents, ResponseForm
from bireme.openai.text.response_request import REFUSED, ResponseBody, ResponseRequest, check_response
from bireme.openai.text.response_store import response_id
from bireme.openai.text.served_model import Models, ServedModel
from bireme.openai.text.stored_responses import StoredResponses
from bireme.openai.text.truncation import truncated
from bireme.pipelines.chat_answer import ResponseMeta, encode_json
from bireme.pipelines.json_body import decode_body
from bireme.pipelines.sequence import SequenceRunner


class Responses(TextApi):
    def __init__(self, models: Models, stored: StoredResponses, pacer: Pacer, streams: Streams) -> None:
        super().__init__(models, pacer, streams)
        self._stored = stored

    async def post(self, call: Call, data: bytes) -> None:
        body = decode_body(data, ResponseBody, REFUSED)
        model = self._models.get(body.model)
        with counted(call, model):
            request = await self._checked(call, model, body)
            heading = ResponseMeta(response_id(), model.name, int(time.time()))
            note_response(call, heading.id)
            form = request.form(heading)
            if body.background:
                await self._stored.begin(call, model, body, request, form)
            elif request.chat.stream:
                await self._stream(call, model, request, form)
            else:
                await self._whole(call, model, request, form)
        if body.background and request.chat.stream:
            await self._stored.follow(call, form.id)

    async def count(self, call: Call, data: bytes) -> None:
        body = decode_body(data, ResponseBody, REFUSED)
        model = self._models.get(body.model)
        request = await self._checked(call, model, body)
        num_tokens = await call.unless_gone(model.chat.count(request.chat, call.arrived_at))
        await call.reply(200, encode_json({"object": "response.input_tokens", "input_tokens": num_tokens}))

    async def _checked(self, call: Call, model: ServedModel, body: ResponseBody) -> ResponseRequest:
        self._stored.check(body)
        history = await self._stored.history(body, call.tenant)
        request = check_response(body, model.recipe, history)
        chat = for_caller(call, request.chat)
        if request.is_truncated:
            chat = await truncated(model, chat)
        return replace(request, chat=chat)

    async def _whole(self, call: Call, model: ServedModel, request: ResponseRequest, form: ResponseForm) -> None:
        answer = request.answer(form)
        sequences = await call.unless_gone(self._run(call, model, request, form, answer))
        call.notes["outcome"] = sequences[0].finish_reason
        await call.reply(200, answer.json())

    async def _stream(self, call: Call, model: ServedModel, request: ResponseRequest, form: ResponseForm) -> None:
        events = ResponseEvents()
        stream = EventStream(events, self._pacer, model.recipe.limits.max_stream_buffer_bytes)
        answer = request.answer(form, events, stream)
        work = self._run(call, model, request, form, answer)
        call.notes["outcome"] = await answer_events(call, work, stream, self._streams, answer.last_events)

    async def _run(
        self, call: Call, model: ServedModel, request: ResponseRequest, form: ResponseForm, answer: ResponseAnswer
    ) -> list[SequenceRunner]:
        """Run the chat and keep the response: who has seen its end can go on from it."""
        take_prompt = call.tenant.take_prompt
        sequences = await model.chat.run(request.chat, answer, call.arrived_at, take_prompt, trace=call.trace)
        assert answer.usage is not None, "an answer without an error has finished"
        note_usage(call, [answer.usage], answer.usage.prompt_tokens)
        await self._stored.keep(form.id, call.tenant, request, answer)
        answer.end()
        return sequences
