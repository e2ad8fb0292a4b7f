"""/v1/batches: every line of a file is a request, answered as a live one is and behind all live ones.

A line runs through the code of its endpoint, with a call of its own instead of a connection. What may pass (a full
queue, an engine that starts, a key's limit) is tried again. Processes of one port share the store: one of them runs a
batch, and when it is gone another goes on with the lines that have no answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bireme.child_process import Backoff
from bireme.config import FrontendConfig
from bireme.errors import NotFoundError, RequestError, UnavailableError, drop_frames
from bireme.gathering import end_all
from bireme.metrics import Registry
from bireme.openai.batch.batch_lines import BatchLine, LineReader, answered_line, check_lines, problem_of
from bireme.openai.batch.batch_store import UNFINISHED, StoredBatch
from bireme.openai.batch.files import FilesAndBatches, FilesApi, age_of
from bireme.openai.batch.line_gate import Endpoint, LineGate
from bireme.openai.batch.results import write_results
from bireme.openai.call_traces import CallTraces, note_failure, trace_of
from bireme.openai.http.call import JSON, Call, Message
from bireme.openai.http.error_replies import HttpError, RateLimitError, is_internal
from bireme.openai.http.query import limit_of, page_tree, query_of
from bireme.openai.keys import OPEN, ApiKeys, Tenant
from bireme.openai.store_thread import StoreThread, watch
from bireme.pipelines.chat_answer import encode_json
from bireme.pipelines.chat_request import check_metadata
from bireme.pipelines.json_body import decode_body

PATH = "/v1/batches"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_RETRY_S = 1800.0  # from a line's first failure: its server is away, or its key has used up its limits
_PASSING = frozenset({429, 503, 504})
_LONGEST_WINDOW_S = 7 * 24 * 3600
_WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_PAGE, _PAGE = 100, 20
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_EXPIRY = {"anchor": "output_expires_after.anchor", "seconds": "output_expires_after.seconds"}
# Why lines were not run, as an error file says it: the batch's last status -> code and message.
_REASONS = {
    "expired": ("batch_expired", "the request was not run before the batch's completion_window ended"),
    "cancelled": ("batch_cancelled", "the request was not run because the batch was cancelled"),
    "failed": ("batch_failed", "the request was not run because the batch has failed"),
}
_T = TypeVar("_T")
logger = logging.getLogger("bireme.openai")


class OutputExpiry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    anchor: str | None = None
    seconds: int | None = None


class BatchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None


@dataclass(slots=True)
class _RunningBatch:
    task: asyncio.Task[None]
    lines: asyncio.Task[None] | None = None  # while there are some to run


class Batches:
    """`start` and `stop` on the loop that serves."""

    def __init__(
        self, config: FrontendConfig, store: StoreThread[FilesAndBatches], files: FilesApi,
        endpoints: Mapping[str, Endpoint], keys: Callable[[], ApiKeys | None], metrics: Registry, lines_rest: bool,
        traces: CallTraces | None = None,
    ) -> None:  # fmt: skip
        """`endpoints`: by their paths. `lines_rest`: all engines let lines rest beside other requests."""
        self._config, self._store, self._files = config, store, files
        self._endpoints, self._keys, self._metrics, self._traces = endpoints, keys, metrics, traces
        most, beside_live = config.batches.max_concurrency, config.batches.max_beside_live
        self.gate = LineGate(most, (most if lines_rest else 1) if beside_live is None else beside_live)
        self._watcher: asyncio.Task[None] | None = None
        self._running: dict[str, _RunningBatch] = {}
        self._waits_for_disk = False  # and has told so

    def start(self) -> None:
        """Go on with what other processes have left."""
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(
                watch(self._look, self._sweep, "batches_not_watched")
            )

    async def stop(self) -> None:
        await end_all([*(run.task for run in self._running.values()), *filter(None, [self._watcher])])

    async def create(self, call: Call, data: bytes) -> None:
        body = decode_body(data, BatchBody, {})
        if body.endpoint not in self._endpoints:
            raise RequestError(f"endpoint: {body.endpoint[:80]}; send one of {', '.join(self._endpoints)}")
        window_s = _window_s(body.completion_window)
        check_metadata(body.metadata)
        expiry = body.output_expires_after or OutputExpiry()
        max_age_s = age_of(expiry.anchor, expiry.seconds, _EXPIRY, self._config.files.max_age_s)
        file = await self._files.find(body.input_file_id, call.tenant)
        if file.purpose != "batch":
            raise RequestError(f"input_file_id: {file.id} is of purpose {file.purpose}; upload one of purpose batch")
        tenant, limit = call.tenant.name, self._config.batches.max_unfinished
        now = int(time.time())
        details = {"completion_window": body.completion_window, "metadata": body.metadata, "max_age_s": max_age_s}
        if call.trace is not None:
            details["trace"] = trace_of(call)
        new = StoredBatch(f"batch_{secrets.token_hex(16)}", tenant, "validating", None, now, now + window_s, file.id,
                    body.endpoint, encode_json(details))  # fmt: skip
        batch = await self._store.do(lambda own: own.batches.add(new, limit))
        if batch is None:
            raise RateLimitError(f"{limit} batches of this key have not ended, its limit", 60)
        self._run(batch)
        await call.reply(200, encode_json(await self._tree(batch)))

    async def list_batches(self, call: Call) -> None:
        query = query_of(call, ("after", "limit"))
        limit, after, tenant = limit_of(query, _PAGE, _MAX_PAGE), query.get("after"), call.tenant.name
        found = await self._store.read(lambda own: own.batches.page(tenant, after, limit))
        if found is None:
            raise RequestError(f"after: {after or ''}; no such batch, send the last_id of a page")
        await call.reply(200, encode_json(page_tree([await self._tree(batch) for batch in found[0]], found[1])))

    async def show(self, call: Call) -> None:
        await call.reply(200, encode_json(await self._tree(await self._find(call))))

    async def cancel(self, call: Call) -> None:
        batch = await self._find(call)
        before, now = ("validating", "in_progress"), int(time.time())
        await self._store.do(lambda own: own.batches.move(batch.id, before, "cancelling", cancelling_at=now))
        now_is = await self._find(call)
        if now_is.status not in ("cancelling", "cancelled"):
            raise HttpError(409, f"batch: {batch.id} is {now_is.status}; it can't be cancelled", code="invalid_status")
        self._stop_lines(batch.id)
        await call.reply(200, encode_json(await self._tree(now_is)))

    def _run(self, batch: StoredBatch) -> None:
        self.start()
        task = asyncio.get_running_loop().create_task(self._work(batch))
        self._running[batch.id] = _RunningBatch(task)
        task.add_done_callback(lambda _: self._running.pop(batch.id, None))

    def _stop_lines(self, batch_id: str) -> None:
        run = self._running.get(batch_id)
        if run is not None and run.lines is not None:
            run.lines.cancel()

    async def _work(self, batch: StoredBatch) -> None:
        try:
            problems = await self._run_lines_of(batch)
        except Exception as error:  # a fault of ours must not leave a batch without an end
            logger.exception("batch_failed id=%s", batch.id)
            drop_frames(error)
            problems = [problem_of(HttpError(500, "internal error", code="internal_error"), None)]
        await self._end(batch, problems)

    async def _run_lines_of(self, batch: StoredBatch) -> list[dict[str, Any]]:
        """Check the lines, and run those without an answer; return why the batch has failed, if so."""
        path = await self._input(batch)
        if path is None:
            return [problem_of(RequestError("input_file_id: the file does not exist any more"), None)]
        status = await self._lasting(lambda own: own.batches.status(batch.id))
        if status == "validating":
            limits = self._config
            checked = await asyncio.to_thread(
                check_lines, path, batch.endpoint, self._endpoints[batch.endpoint].check_model,
                limits.batches.max_lines, limits.max_body_bytes,
            )  # fmt: skip
            if checked.problems:
                return checked.problems
            now = int(time.time())
            await self._move(batch, ("validating",), "in_progress", total=checked.count, in_progress_at=now)
        if await self._lasting(lambda own: own.batches.status(batch.id)) != "in_progress":
            return []  # it was cancelled, or all lines have answers
        lines = asyncio.get_running_loop().create_task(self._run_lines(batch, path))
        self._running[batch.id].lines = lines
        try:
            done, _ = await asyncio.wait({lines}, timeout=max(0.0, batch.expires_at - time.time()))
        finally:
            lines.cancel()
        if not done:
            await asyncio.wait({lines})
        if not lines.cancelled() and (error := lines.exception()) is not None:
            if isinstance(error, HttpError):
                return [problem_of(error, None)]
            raise error
        return []

    async def _run_lines(self, batch: StoredBatch, path: Path) -> None:
        """Raises HttpError when the answers are too large, or the batch's key is gone."""
        answered = await self._lasting(lambda own: own.batches.answered(batch.id))
        num_bytes = (await self._lasting(lambda own: own.batches.counts(batch.id))).num_bytes
        reader = LineReader(path, self._config.max_body_bytes)
        rows, running = iter(reader), set[asyncio.Task[int]]()
        try:
            while (data := await asyncio.to_thread(next, rows, None)) is not None:
                if reader.number in answered:
                    continue
                while len(running) >= self._config.batches.max_concurrency:
                    ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    num_bytes += sum(task.result() for task in ended)
                if num_bytes > self._config.files.max_bytes:
                    raise HttpError(400, f"the answers exceed frontend.files.max_bytes {self._config.files.max_bytes}; "
                                    "split the batch", code="output_too_large")  # fmt: skip
                line = msgspec.json.decode(data, type=BatchLine)
                work = self._run_line(batch, reader.number, line, self._tenant(batch))
                running.add(asyncio.get_running_loop().create_task(work))
            await asyncio.gather(*running)
        finally:
            await end_all(running)
            reader.close()

    async def _run_line(self, batch: StoredBatch, number: int, line: BatchLine, tenant: Tenant) -> int:
        failed_at, pauses = None, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            async with self.gate:
                call, body = await self._ask(batch, bytes(line.body), tenant)
            if call.status not in _PASSING:
                break
            failed_at = failed_at or time.monotonic()  # waits at the gate before are no failure
            if time.monotonic() - failed_at > _RETRY_S:
                break
            await asyncio.sleep(pauses.next_s())
        shown = answered_line(batch.id, number, line.custom_id, call.status, call.request_id.decode(), body)
        is_ok = call.status == 200
        await self._lasting(lambda own: own.batches.answer(batch.id, number, is_ok, shown))
        self._metrics.add("bireme_batch_lines_total", 1, str(call.status))
        return len(shown)

    async def _ask(self, batch: StoredBatch, data: bytes, tenant: Tenant) -> tuple[Call, bytes]:
        body, endpoint = bytearray(), batch.endpoint

        async def send(message: Message) -> None:
            body.extend(message.get("body", b""))

        scope = {"type": "http", "method": "POST", "path": endpoint, "query_string": b"", "headers": [JSON]}
        call = Call(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]  # nobody leaves
        call.tenant, call.is_batch = tenant, True
        if self._traces is not None:
            self._traces.begin(call, batch.fields.get("trace", ""))
        try:
            await self._endpoints[endpoint].post(call, data)
        except Exception as error:
            if call.trace is not None:
                note_failure(call.trace, error)
            if is_internal(error):
                logger.error("line_failed %s error=%s", call.shown_ids, error)
            reply = call.error_reply(error)
            drop_frames(error)
            await call.reply(reply.status, reply.body)
        finally:
            if self._traces is not None and call.trace is not None:
                self._traces.end(call)
        return call, bytes(body)

    async def _end(self, batch: StoredBatch, problems: list[dict[str, Any]]) -> None:
        """Put the answers into files, and give the batch its last status. Done again by another process, it is the
        same.
        """
        counts = await self._lasting(lambda own: own.batches.counts(batch.id))
        row = await self._lasting(lambda own: own.batches.find(batch.id, batch.tenant))
        total = (row or batch).fields.get("total", 0)
        if not problems and counts.completed + counts.failed == total:
            await self._move(batch, ("in_progress",), "finalizing", finalizing_at=int(time.time()))
        before = await self._lasting(lambda own: own.batches.status(batch.id))
        ends = {"finalizing": "completed", "cancelling": "cancelled", "in_progress": "expired"}
        last = "failed" if problems else ends.get(before, "failed")
        code, message = _REASONS.get(last, ("", ""))
        own = await self._store.do(lambda own: own)
        results = await self._until_kept(lambda: asyncio.to_thread(write_results, own, batch, total, code, message))
        fields: dict[str, Any] = {f"{last}_at": int(time.time()), "output_file_id": results.output_file_id}
        fields |= {"error_file_id": results.error_file_id, "answered": [counts.completed, total - counts.completed]}
        if problems:
            fields["errors"] = {"object": "list", "data": problems}
        await self._move(batch, UNFINISHED, last, **fields)
        await self._lasting(lambda own: own.batches.forget_answers(batch.id))
        logger.info("batch_ended id=%s status=%s lines=%d completed=%d", batch.id, last, total, counts.completed)

    async def _look(self) -> None:
        """Stop what was cancelled, take what dead processes have left."""
        for batch_id in await self._store.do(lambda own: own.batches.own_cancelled()):
            self._stop_lines(batch_id)
        for orphan in await self._store.do(lambda own: own.batches.take_orphans()):
            logger.info("batch_taken_over id=%s", orphan.id)
            self._run(orphan)

    async def _sweep(self) -> None:
        max_age_s = self._config.files.max_age_s
        await self._store.do(lambda own: own.batches.sweep(max_age_s))
        await self._store.do(lambda own: own.files.sweep(own.batches.used_files()))

    def _tenant(self, batch: StoredBatch) -> Tenant:
        keys = self._keys()
        tenant = OPEN if keys is None else keys.named(batch.tenant)
        if tenant is None:
            raise HttpError(401, "the key that asked is not known here any more", code="invalid_api_key")
        return tenant

    async def _input(self, batch: StoredBatch) -> Path | None:
        file = await self._lasting(lambda own: own.files.find_kept(batch.input_file_id, batch.tenant))
        return None if file is None else await self._store.do(lambda own: own.files.path(file))

    async def _move(self, batch: StoredBatch, before: tuple[str, ...], status: str, **fields: Any) -> bool:
        return await self._lasting(lambda own: own.batches.move(batch.id, before, status, **fields))

    async def _lasting(self, method: Callable[[FilesAndBatches], _T]) -> _T:
        """Call a method of the store until the disk takes it."""
        return await self._until_kept(lambda: self._store.do(method))

    async def _until_kept(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """The log tells once of all lines that wait, and again when one has been kept."""
        while True:
            try:
                result = await attempt()
            except (UnavailableError, OSError) as error:
                if not self._waits_for_disk:
                    logger.error("batch_waits_for_disk error=%s", error)
                self._waits_for_disk = True
                drop_frames(error)
                await asyncio.sleep(_LONGEST_PAUSE_S)
            else:
                if self._waits_for_disk:
                    logger.info("batch_goes_on")
                self._waits_for_disk = False
                return result

    async def _find(self, call: Call) -> StoredBatch:
        name = call.path.removeprefix(f"{PATH}/").partition("/")[0]
        batch: StoredBatch | None = await self._store.read(lambda own: own.batches.find(name, call.tenant.name))
        if batch is None:
            raise NotFoundError(f"batch: {name[:80]} does not exist; it may have been removed by its age")
        return batch

    async def _tree(self, batch: StoredBatch) -> dict[str, Any]:
        fields = batch.fields
        if (answered := fields.get("answered")) is None:
            counts = await self._store.read(lambda own: own.batches.counts(batch.id))
            answered = [counts.completed, counts.failed]
        return {
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.endpoint,
            "errors": fields.get("errors"),
            "input_file_id": batch.input_file_id,
            "completion_window": fields["completion_window"],
            "status": batch.status,
            "output_file_id": fields.get("output_file_id"),
            "error_file_id": fields.get("error_file_id"),
            "created_at": batch.created_at,
            "expires_at": batch.expires_at,
            **{f"{name}_at": fields.get(f"{name}_at") for name in _TIMES},
            "request_counts": {"total": fields.get("total", 0), "completed": answered[0], "failed": answered[1]},
            "metadata": fields["metadata"],
        }


def _window_s(text: str) -> int:
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_WINDOW_S:
        raise RequestError(f"completion_window: {text[:20]}; send 24h, or another time up to 7d (30m, 36h, 2d)")
    return seconds
