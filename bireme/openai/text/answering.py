"""How an answer gets to its client, whole or as events, for chats and completions alike.

Nothing is sent before the first token, so an error before it has its own status; a later one is an event. A client that
leaves, or reads too slowly, cancels the work at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from bireme import best_effort
from bireme.canary_mark import is_canary
from bireme.errors import BiremeError, RequestCancelledError, drop_frames
from bireme.messages import Usage
from bireme.openai.call_traces import ClientWait, note_failure
from bireme.openai.http.call import Call, ClientGoneError
from bireme.openai.http.error_replies import is_internal, reply_of, shutting_down
from bireme.openai.http.event_stream import DONE, PREFIX, SUFFIX, EventStream
from bireme.openai.http.pace import Pacer
from bireme.openai.keys import Tenant
from bireme.openai.text.completion_request import CompletionRequest
from bireme.openai.text.served_model import FollowedModel, Models, ServedModel
from bireme.pipelines.chat_answer import encode_json
from bireme.pipelines.chat_request import ChatRequest
from bireme.pipelines.chat_usage import server_timing
from bireme.pipelines.extensions import Annotation, lower_tier
from bireme.pipelines.sequence import SequenceRunner
from bireme.pipelines.side_by_side import count_request
from bireme.request import Ids
from bireme.serving_options import check_session

logger = logging.getLogger("bireme.openai")
Streams = set[EventStream]  # the running ones, for comments
PLACED = "placed"  # outcome of a request that only asked where it would run
SESSION_HEADER = b"x-session-id"
_R = TypeVar("_R", ChatRequest, CompletionRequest)


class TextApi:
    """One of the APIs that answer with the language models."""

    def __init__(self, models: Models, pacer: Pacer, streams: Streams) -> None:
        self._models, self._pacer, self._streams = models, pacer, streams

    async def _place(self, call: Call, model: ServedModel, request: ChatRequest) -> None:
        """Tell where a chat would run."""
        work = model.chat.placement(request, call.arrived_at, call.tenant.take_prompt)
        answer = await call.unless_gone(work)
        call.notes["outcome"] = PLACED
        await call.reply(200, answer)


def for_caller(call: Call, request: _R) -> _R:
    """Return the request as its key may have it, with its session (the field's, else the header's), and the least
    priority if it is of a batch.

    Raises RequestError.
    """
    if call.is_batch:
        request = _lowered(request, best_effort.PRIORITY)
    request = within_key(call.tenant, request)
    call.is_canary = is_canary(request.options.cache_salt)
    if not request.options.session_id and (header := call.header(SESSION_HEADER)):
        request = _with(request, session_id=check_session(header.decode("latin-1"), SESSION_HEADER.decode()))
    return request


def within_key(tenant: Tenant, request: _R) -> _R:
    """Return the request with its key's cache salt, and at most its key's priority."""
    if request.options.priority > tenant.max_priority:
        request = _lowered(request, tenant.max_priority)
    if (salt := tenant.cache_salt(request.options.cache_salt)) != request.options.cache_salt:
        request = _with(request, cache_salt=salt)
    return request


def _with(request: _R, **changes: Any) -> _R:
    return replace(request, options=msgspec.structs.replace(request.options, **changes))


def _lowered(request: _R, priority: float) -> _R:
    """Return the request with this priority; its answer tells the service tier that it gets."""
    request = _with(request, priority=priority)
    if isinstance(request, ChatRequest) and request.service_tier is not None:
        request = replace(request, service_tier=lower_tier(request.service_tier, priority))
    return request


def annotation_events(names: Sequence[Annotation], call: Call, ids: Ids, prompt: str) -> bytes:
    """Return Dynamo's events that tell what was made of a request: no data, the value as JSON in a comment."""
    values = {"request_id": call.request_id.decode(), "formatted_prompt": prompt, "token_ids": ids.tolist()}
    return b"".join(b"event: %b\n: %b\n\n" % (name.encode(), encode_json(values[name])) for name in names)


def error_events(error: BaseException) -> bytes:
    return PREFIX + reply_of(error).body + SUFFIX + DONE


async def answer_events(
    call: Call, work: Awaitable[list[SequenceRunner]], stream: EventStream, streams: Streams,
    last_events: Callable[[BaseException], bytes] = error_events,
) -> str:  # fmt: skip
    """Write events until all are out; return the finish reason, or the code of the error sent.

    `last_events`: of a stream that an error ends. Raises errors before the first event, and ClientGoneError.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda _: stream.close())
    watch = call.when_gone(task.cancel)
    streams.add(stream)
    try:
        await _write(call, stream)
        return (await task)[0].finish_reason
    except BiremeError as error:
        if not call.status:
            raise
        return await _fail(call, stream, error, last_events)
    except asyncio.CancelledError:
        if watch.is_gone:
            raise ClientGoneError from None
        if call.status:
            await _fail(call, stream, shutting_down(), last_events)
        raise
    finally:
        streams.discard(stream)
        watch.cancel()
        task.cancel()


async def _write(call: Call, stream: EventStream) -> None:
    waits = None if call.trace is None else ClientWait(call)
    write, is_over = call.write_events if waits is None else waits.write, False
    try:
        while not is_over:
            await stream.wait()
            is_over = stream.is_complete or stream.is_closed
            if data := stream.take():
                await write(data, stream.is_complete, stream.wait)
                stream.go_on(call.direct_write())
    finally:
        if waits is not None:
            waits.end()


async def _fail(
    call: Call, stream: EventStream, error: BiremeError, last_events: Callable[[BaseException], bytes]
) -> str:
    drop_frames(error)
    if call.trace is not None:
        note_failure(call.trace, error)
    if not stream.is_complete:
        if is_internal(error):
            logger.error("stream_failed %s error=%s", call.shown_ids, error)
        stream.collect()
        stream.end(last_events(error))
        await call.write_events(stream.take(), True)
    return error.code


@contextmanager
def counted(call: Call, model: FollowedModel) -> Iterator[None]:
    """Count a running request, with its key's limits and its outcome in `call.notes`."""
    metrics = model.services.metrics
    call.notes["model"] = model.name
    try:
        with model.services.admitted():
            yield
    except (ClientGoneError, asyncio.CancelledError):
        call.notes["outcome"] = RequestCancelledError.code
        raise
    except BiremeError as error:
        call.notes["outcome"] = error.code
        raise
    finally:
        if outcome := call.notes.get("outcome"):
            count_request(metrics, str(outcome), call.arrived_at, call.is_canary)


def note_usage(call: Call, usages: list[Usage], num_prompt_tokens: int) -> None:
    """Charge the generated tokens, and put the counts into the access log and the times into a header."""
    num_generated = sum(usage.completion_tokens for usage in usages)
    call.tenant.take_generated(num_generated)
    call.notes |= {"prompt_tokens": num_prompt_tokens, "generated_tokens": num_generated}
    if usages and not call.status:  # else it is a stream, or one that failed
        call.add_header(b"server-timing", server_timing(usages[0], time.monotonic() - call.arrived_at))
