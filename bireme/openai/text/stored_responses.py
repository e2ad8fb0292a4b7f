"""Responses that are kept: what requests go on from, what is asked for later, and what runs in the background.

Processes of one port share the database. A background response runs in one of them; when that process is gone, another
runs it again from its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from bireme.child_process import Backoff
from bireme.config import FrontendConfig
from bireme.errors import BiremeError, NotFoundError, RequestError, UnavailableError, drop_frames
from bireme.gathering import end_all
from bireme.openai.call_traces import CallTraces, note_failure, trace_of
from bireme.openai.http.call import Call, Handler, Post
from bireme.openai.http.error_replies import HttpError, RateLimitError, is_internal
from bireme.openai.http.pace import Pacer
from bireme.openai.http.query import query_of
from bireme.openai.keys import OPEN, ApiKeys, Tenant
from bireme.openai.store_thread import StoreThread, watch
from bireme.openai.text.answering import within_key
from bireme.openai.text.conversations import PATH as CONVERSATIONS
from bireme.openai.text.conversations import Conversations, page_json
from bireme.openai.text.response_answer import ResponseAnswer, ResponseForm, failure_json
from bireme.openai.text.response_events import EventLog, tell_events
from bireme.openai.text.response_items import Item, listed
from bireme.openai.text.response_request import ResponseBody, ResponseRequest, check_response
from bireme.openai.text.response_store import CONVERSATION, NewResponse, ResponseStore, StoredResponse
from bireme.openai.text.served_model import Models, ServedModel
from bireme.openai.text.truncation import truncated
from bireme.pipelines.chat_answer import ResponseMeta, encode_json
from bireme.pipelines.side_by_side import count_request
from bireme.request_trace import RequestTrace

PATH = "/v1/responses"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _RETRY_S = 0.25, 10.0, 300.0  # of a background response whose server is away
_MAX_DIGITS = 12
_NOT_IDS = ("", "compact")  # the second is a path of OpenAI's that is not served
_RETRIEVE = ("include", "stream", "starting_after", "include_obfuscation")
logger = logging.getLogger("bireme.openai")


@dataclass(frozen=True, slots=True)
class _BackgroundJob:
    id: str
    tenant: Tenant
    model: ServedModel
    request: ResponseRequest
    form: ResponseForm
    link: str = ""  # the traceparent of the request that began it


@dataclass(slots=True)
class _Orphan:
    """What a dead process has left, this process's now, and not running yet."""

    row: StoredResponse
    taken_at: float
    told: str = ""  # why it waits, as the log has it


class StoredResponses:
    """`start` and `stop` on the loop that serves."""

    def __init__(
        self, frontend: FrontendConfig, models: Models, keys: ApiKeys | None, folder: Path | None,
        traces: CallTraces | None = None,
    ) -> None:  # fmt: skip
        """`folder`: of the database; None: one that goes with this process."""
        config = self._config = frontend.responses
        self._models, self._keys, self._frontend, self._traces = models, keys, frontend, traces
        self._is_shared = folder is not None
        self.store = StoreThread(folder, lambda place: ResponseStore(place, config), "responses")
        self._do = self.store.do
        self.conversations = Conversations(self.store, frontend.max_body_bytes)
        self._watcher: asyncio.Task[None] | None = None
        self._unwritten: list[tuple[NewResponse, asyncio.Future[bool]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._logs: dict[str, EventLog] = {}  # of the running ones that are streamed
        self._orphans: list[_Orphan] = []

    @property
    def is_on(self) -> bool:
        return self._config.max_responses > 0

    def start(self) -> None:
        """Go on with what other processes have left."""
        self._pacer = Pacer()
        if self.is_on and self._is_shared:
            self._watch()

    def _watch(self) -> None:
        if self._watcher is None:
            watching = watch(self._look, lambda: self._do(ResponseStore.sweep), "responses_not_watched")
            self._watcher = asyncio.get_running_loop().create_task(watching)

    async def stop(self) -> None:
        """Leave what is under way to other processes, or the next start."""
        await end_all([*self._running.values(), *filter(None, [self._watcher])])
        await self.store.close()

    def routes(self, with_body: Callable[[Post], Handler]) -> dict[str, dict[str, Handler]]:
        return {CONVERSATIONS: {"POST": with_body(self.conversations.create)}} if self.is_on else {}

    def match(self, path: str, with_body: Callable[[Post], Handler]) -> dict[str, Handler] | None:
        if path.startswith(f"{CONVERSATIONS}/"):
            return self.conversations.match(path, with_body) if self.is_on else None
        name, _, part = path.removeprefix(f"{PATH}/").partition("/")
        if not path.startswith(f"{PATH}/") or name in _NOT_IDS:
            return None
        parts: dict[str, dict[str, Handler]] = {
            "": {"GET": self._retrieve, "DELETE": self._delete},
            "input_items": {"GET": self._list_input},
            "cancel": {"POST": self._cancel},
        }
        return parts.get(part)

    def check(self, body: ResponseBody) -> None:
        """Raises RequestError for what needs a store where there is none."""
        if not self.is_on:
            for name in ("previous_response_id", "conversation", "background", "store"):
                if getattr(body, name):
                    raise RequestError(
                        f"{name}: nothing is kept here (frontend.responses.max_responses is 0); remove it"
                    )

    async def history(self, body: ResponseBody, tenant: Tenant) -> list[Item]:
        """Return the items that a request goes on from. Raises HttpError 400, NotFoundError."""
        if body.conversation_id is not None:
            return await self.conversations.items(body.conversation_id, tenant)
        previous = body.previous_response_id
        if previous is None:
            return []
        rows = await self._do(ResponseStore.history, previous, tenant.name, self._frontend.max_body_bytes)
        if rows is None:
            raise HttpError(
                400, f"previous_response_id: {previous[:80]} is not kept here, has not ended, or goes on from one that"
                " is not kept; send the items themselves", code="previous_response_not_found",
            )  # fmt: skip
        return [item for row in rows for item in (*row.input, *row.output)]

    async def keep(self, name: str, tenant: Tenant, request: ResponseRequest, answer: ResponseAnswer) -> None:
        """Keep what is asked to be kept of an answer that has ended; its client gets it even where that fails."""
        conversation, is_kept = request.conversation, request.is_kept and self.is_on
        if not is_kept and conversation is None:
            return
        items = listed(request.items)
        turn = [*items, *answer.items]
        previous = request.shown["previous_response_id"] or conversation
        new = NewResponse(
            name, tenant.name, previous, answer.json(), items, turn=None if conversation is None else turn
        )
        if is_kept and await self._is_written(answer, new):
            return
        if conversation is not None:
            try:
                await self.conversations.add(conversation, tenant, turn)
            except BiremeError as error:  # it was deleted meanwhile, or can't be written
                _note_not_added(conversation, name, error)
                drop_frames(error)

    async def _is_written(self, answer: ResponseAnswer, new: NewResponse) -> bool:
        """Write a response and its turn, and return whether that went well; else the answer says so."""
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._unwritten.append((new, written))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())
        try:
            if not await written:
                _note_not_added(new.previous, new.id, "it does not exist")
        except Exception as error:  # also of a store that can't be opened: the answer is there, and paid for
            logger.error("response_not_kept id=%s error=%s", new.id, error)
            drop_frames(error)
            answer.is_not_kept()
            return False
        return True

    async def _write(self) -> None:
        """Write what there is, in one transaction: what ends meanwhile is the next one's."""
        try:
            while self._unwritten:
                waiting, self._unwritten = self._unwritten, []
                error: Exception | None = None
                missing: frozenset[str] = frozenset()
                try:
                    missing = await self._do(ResponseStore.add, *(new for new, _ in waiting))
                except Exception as failure:  # each of their requests raises it
                    error = failure
                for new, written in waiting:
                    if written.done():  # its client has left
                        continue
                    if error is None:
                        written.set_result(new.id not in missing)
                    else:
                        written.set_exception(error)
        finally:
            self._writer = None

    async def begin(
        self, call: Call, model: ServedModel, body: ResponseBody, request: ResponseRequest, form: ResponseForm
    ) -> None:
        """Run the response; answer that it is queued, unless it is streamed: `follow` does.

        Raises RateLimitError, UnavailableError.
        """
        tenant, limit = call.tenant, self._config.max_background
        own = msgspec.structs.replace(body.bireme, session_id=request.chat.options.session_id)
        again = encode_json(msgspec.structs.replace(body, bireme=own))
        queued, items = form.json("queued", []), listed(request.items)
        new = NewResponse(form.id, tenant.name, body.previous_response_id or request.conversation, queued, items, again)
        if not await self._do(ResponseStore.begin, new, limit):
            raise RateLimitError(f"{limit} background responses of this key have not ended, its limit", 1)
        self._run(_BackgroundJob(form.id, tenant, model, request, form, trace_of(call)))
        call.notes["outcome"] = "queued"
        if not request.chat.stream:
            await call.reply(200, queued)

    async def follow(self, call: Call, response_id: str, after: int = -1) -> None:
        """Write the events of a response after number `after`, to its end. Raises ClientGoneError, UnavailableError."""
        interval_s = self._frontend.comment_interval_s
        await call.unless_gone(tell_events(call, self.store, response_id, after, interval_s, self._logs.get))

    def _run(self, job: _BackgroundJob) -> None:
        self._watch()
        job.tenant.keep()
        task = asyncio.get_running_loop().create_task(self._work(job))
        self._running[job.id] = task

        def end(_: asyncio.Task[None]) -> None:
            self._running.pop(job.id, None)
            job.tenant.end()

        task.add_done_callback(end)

    def _stop(self, response_id: str) -> None:
        if (task := self._running.get(response_id)) is not None:
            task.cancel()

    async def _work(self, job: _BackgroundJob) -> None:
        trace = None if self._traces is None else self._traces.begin_background(PATH, job)
        try:
            async with self._logged(job) as log:
                response, output = await self._answer(job, log, trace)
                if log is not None:
                    await log.finish()
                await self._end(job, response, output)
        except Exception as error:  # such as no thread left: its client asks again and again until there is an end
            logger.exception("response_failed id=%s", job.id)
            drop_frames(error)
            await self._end(job, job.form.json("failed", [], error=failure_json(error)), None)
        finally:
            if self._traces is not None and trace is not None:
                self._traces.end_background(trace, sys.exception(), response=job.id)

    @contextlib.asynccontextmanager
    async def _logged(self, job: _BackgroundJob) -> AsyncIterator[EventLog | None]:
        """Keep the events of one that is streamed; None: there are none, or they can't be kept."""
        if not job.request.chat.stream:
            yield None
            return
        log = EventLog(job.id, self.store, self._pacer, job.model.recipe.limits.max_stream_buffer_bytes)
        self._logs[job.id] = log
        try:
            yield log if await log.begin(job.form.json("queued", [])) else None
        finally:
            del self._logs[job.id]
            log.stop()

    async def _end(self, job: _BackgroundJob, response: bytes, output: list[Item] | None) -> None:
        """Keep the response. Its conversation is added to with that: nobody runs it again, and adds once more."""
        told, conversation = "", job.request.conversation if output is not None else None
        while True:
            try:
                if conversation is None or not await self._do(ResponseStore.end_turn, job.id, response, output):
                    is_ended = await self._do(ResponseStore.end, job.id, response)
                    if is_ended and conversation is not None:  # it was deleted meanwhile
                        _note_not_added(conversation, job.id, "it does not exist")
                return
            except Exception as error:  # the disk is full, or broken; whatever it is, it must not be the last try
                if str(error) != told:
                    told = str(error)
                    logger.error("response_not_kept id=%s error=%s", job.id, error)
                drop_frames(error)
                await asyncio.sleep(_LONGEST_PAUSE_S)

    async def _answer(
        self, job: _BackgroundJob, log: EventLog | None, trace: RequestTrace | None
    ) -> tuple[bytes, list[Item] | None]:
        """Return the response, failed or not, and what its conversation gets; what may pass is tried again."""
        began_at, pauses = time.monotonic(), Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        services, chat = job.model.services, job.request.chat
        with contextlib.suppress(UnavailableError):
            await self._do(ResponseStore.report, job.id, job.form.json("in_progress", []))
        while True:
            answer = job.request.answer(job.form, *((log.events, log.stream) if log is not None else ()))
            try:
                with services.admitted():
                    take_prompt = job.tenant.take_prompt
                    await job.model.chat.run(chat, answer, time.monotonic(), take_prompt, trace=trace)
                response = answer.json()
            except Exception as error:  # whatever it is: its client asks again and again until there is an end
                if trace is not None:
                    note_failure(trace, error)
                if not _is_passing(error) or time.monotonic() - began_at >= _RETRY_S:
                    return _failed(job, answer, error, began_at), None
                drop_frames(error)
                await asyncio.sleep(pauses.next_s())
                if log is not None and answer.has_begun:
                    log.begin_anew(job.form.json("queued", []))
                continue
            if trace is not None:
                trace.root.error = ""
            assert answer.usage is not None, "an answer without an error has finished"
            job.tenant.take_generated(answer.usage.completion_tokens)
            count_request(services.metrics, answer.status, began_at)
            return response, answer.items

    async def _look(self) -> None:
        """Stop what was cancelled or deleted, take what dead processes have left."""
        mine = frozenset(self._running)  # before the rows are read: those that begin meanwhile stay
        unfinished = await self._do(ResponseStore.own_unfinished)
        for gone in mine - unfinished:
            self._stop(gone)
        self._orphans = [orphan for orphan in self._orphans if orphan.row.id in unfinished]
        await self._take_orphans()

    async def _take_orphans(self) -> None:
        max_rows = self._config.max_background - len(self._orphans)
        rows = await self._do(ResponseStore.take_orphans, max_rows)
        self._orphans += [_Orphan(row, time.monotonic()) for row in rows]
        for orphan in self._orphans.copy():
            try:
                await self._take_over(orphan.row, orphan.taken_at)
            except Exception as error:  # of one row: it must not keep the others from being taken over
                if _is_passing(error):  # until the next look
                    if str(error) != orphan.told:
                        orphan.told = str(error)
                        logger.warning("response_waits id=%s error=%s", orphan.row.id, error)
                    drop_frames(error)
                    continue
                logger.exception("response_not_taken_over id=%s", orphan.row.id)
            self._orphans.remove(orphan)

    async def _take_over(self, orphan: StoredResponse, taken_at: float) -> None:
        """Run it, or end it as failed. Raises what may pass."""
        shown: dict[str, Any] = msgspec.json.decode(orphan.response)
        heading = ResponseMeta(orphan.id, shown["model"], shown["created_at"])
        try:
            body = msgspec.json.decode(orphan.request or b"", type=ResponseBody)
            tenant = OPEN if self._keys is None else self._keys.named(orphan.tenant)
            if tenant is None:
                raise RequestError("the key that asked is not known here any more")
            model = self._models.get(body.model)
            history = await self.history(body, tenant)
            request = check_response(body, model.recipe, history)
            chat = within_key(tenant, request.chat)
            if request.is_truncated:
                chat = await truncated(model, chat)
            request = replace(request, chat=chat)
        except Exception as error:
            if _is_passing(error) and time.monotonic() - taken_at < _RETRY_S:
                raise
            if not isinstance(error, (BiremeError, HttpError, msgspec.MsgspecError)):
                logger.exception("response_not_taken_over id=%s", orphan.id)
            drop_frames(error)  # whatever it is, the next process would meet it as well
            failed = ResponseForm(heading, shown).json("failed", [], error=failure_json(error))
            await self._do(ResponseStore.end, orphan.id, failed)
            return
        logger.info("response_taken_over id=%s", orphan.id)
        self._run(_BackgroundJob(orphan.id, tenant, model, request, request.form(heading)))

    async def _retrieve(self, call: Call) -> None:
        query = query_of(call, _RETRIEVE)
        is_streamed, after = _stream_of(query)
        row = await self._find(call)
        if not is_streamed:
            await call.reply(200, row.response)
            return
        await self._check_stream(row, after)
        await call.end_body()
        call.tenant.begin()
        try:
            await self.follow(call, row.id, after)
        finally:
            call.tenant.end()

    async def _check_stream(self, row: StoredResponse, after: int) -> None:
        last = await self.store.read(ResponseStore.last_event, row.id)
        is_to_come = row.process is not None and row.is_streamed
        if last is None and not is_to_come:
            raise RequestError(
                f"stream: {row.id} was not made with background and stream, so its events are not kept; ask without it"
            )
        if last is not None and after > (most := last + (row.process is None)):
            raise RequestError(f"starting_after: {after}; the response's last event so far has number {most}")

    async def _delete(self, call: Call) -> None:
        row = await self._find(call)
        await self._do(ResponseStore.remove, row.id, row.tenant)
        self._stop(row.id)
        await call.reply(200, encode_json({"id": row.id, "object": "response", "deleted": True}))

    async def _cancel(self, call: Call) -> None:
        row = await self._find(call)
        shown: dict[str, Any] = msgspec.json.decode(row.response)
        if not shown["background"]:
            raise RequestError(f"response: {row.id} does not run in the background; close its connection instead")
        cancelled = encode_json({**shown, "status": "cancelled"})
        if row.process is not None and await self._do(ResponseStore.cancel, row, cancelled):
            self._stop(row.id)
        await call.reply(200, (await self._find(call)).response)

    async def _list_input(self, call: Call) -> None:
        row = await self._find(call)
        before: list[StoredResponse] | None = []
        if row.previous is not None:
            before = await self._do(ResponseStore.history, row.previous, row.tenant, self._frontend.max_body_bytes)
        items = [item for one in before or [] for item in (*one.input, *one.output)] + row.input
        await call.reply(200, page_json(call, items))

    async def _find(self, call: Call) -> StoredResponse:
        name = call.path.removeprefix(f"{PATH}/").partition("/")[0]
        row = None
        if self.is_on and not name.startswith(CONVERSATION):
            row = await self.store.read(ResponseStore.find, name, call.tenant.name)
        if row is None:
            raise NotFoundError(f"response: {name[:80]} does not exist; it may have been deleted or have expired")
        return row


def _note_not_added(conversation: str | None, name: str, error: object) -> None:
    logger.error("conversation_not_kept id=%s response=%s error=%s", conversation, name, error)


def _failed(job: _BackgroundJob, answer: ResponseAnswer, error: Exception, began_at: float) -> bytes:
    is_known = isinstance(error, (BiremeError, HttpError))
    if is_internal(error):
        logger.error("response_failed id=%s error=%s", job.id, error, exc_info=None if is_known else error)
    drop_frames(error)
    count_request(job.model.services.metrics, getattr(error, "code", None) or "INTERNAL", began_at)
    if is_known:
        return answer.failed(error)
    return job.form.json("failed", [], error=failure_json(error))  # what has come so far may not be shown


def _stream_of(query: Mapping[str, str]) -> tuple[bool, int]:
    """Return whether events are wanted, and after which number; -1: all. Raises RequestError."""
    stream, after = query.get("stream", "false"), query.get("starting_after")
    if stream not in ("true", "false"):
        raise RequestError(f"stream: {stream[:20]}; send true or false")
    if after is not None and "stream" not in query:
        raise RequestError("starting_after: only with stream=true; add it, or remove starting_after")
    if after is None or stream == "false":
        return stream == "true", -1
    if not (after.isascii() and after.isdecimal() and len(after) <= _MAX_DIGITS):
        raise RequestError(f"starting_after: {after[:20]}; send an event's sequence_number")
    return True, int(after)


def _is_passing(error: Exception) -> bool:
    return isinstance(error, RateLimitError) or (isinstance(error, BiremeError) and error.retryable)
