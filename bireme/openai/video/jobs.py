"""The running jobs of this process: each is a task that follows one generation and records its progress."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from bireme.config import VideoConfig
from bireme.errors import BiremeError, UnavailableError, drop_frames
from bireme.gathering import end_all
from bireme.openai.http.error_replies import is_internal, reply_of
from bireme.openai.keys import Tenant
from bireme.openai.video.job_store import FilesAndJobs, Job
from bireme.openai.video.served_video import ServedVideo
from bireme.pipelines.video_request import VideoRequest
from bireme.pipelines.video_service import VideoProgress, VideoResult
from bireme.video.wire import Details

logger = logging.getLogger("bireme.openai")
_REPORT_S = 0.25  # the shortest time between two records
_RECORD_AGAIN_S = 1.0
_STOPPED = "the server was stopped before the video was done; create the job again"


class VideoJobs:
    """Used on one loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def create(self, model: ServedVideo, request: VideoRequest, tenant: Tenant) -> Job:
        """Start a job; return when the worker has accepted it. Raises the error of a refused one."""
        run = _JobRun(model, request, tenant.name)
        task = asyncio.get_running_loop().create_task(run.follow(), name=run.id)
        self._tasks[run.id] = task
        tenant.keep()
        task.add_done_callback(lambda _: self._forget(run.id, tenant))
        try:
            return await asyncio.shield(run.accepted)
        except asyncio.CancelledError:  # its client has left before it got the job's id
            task.cancel()
            raise

    def cancel(self, job_id: str) -> None:
        """End a job that runs here; after its step."""
        task = self._tasks.get(job_id)
        if task is not None:
            task.cancel()

    async def stop(self) -> None:
        """End all; they are recorded as failed."""
        await end_all(self._tasks.values())

    def _forget(self, job_id: str, tenant: Tenant) -> None:
        self._tasks.pop(job_id, None)
        tenant.end()


class _JobRun:
    def __init__(self, model: ServedVideo, request: VideoRequest, tenant: str) -> None:
        self.id = f"video_{uuid.uuid4().hex}"
        self._model, self._request, self._tenant = model, request, tenant
        self._progress = VideoProgress()
        self._news = asyncio.Event()
        self._accepting = asyncio.Lock()
        self.accepted: asyncio.Future[Job] = asyncio.get_running_loop().create_future()

    async def follow(self) -> None:
        reporter = asyncio.ensure_future(self._report())
        try:
            result = await self._run(reporter)
            await self._complete(result)
        except BiremeError as error:
            await self._fail(error)
        except asyncio.CancelledError:
            with contextlib.suppress(UnavailableError):
                await self._model.store.do(lambda own: own.jobs.fail(self.id, "server_error", _STOPPED))
            raise
        except Exception as error:
            logger.exception("job_failed id=%s", self.id)
            await self._fail(BiremeError(str(error)))
        finally:
            reporter.cancel()
            if not self.accepted.done():
                self.accepted.cancel()

    async def _run(self, reporter: asyncio.Future[None]) -> VideoResult:
        """Return the result; when the reporter ends (the job was deleted elsewhere), end with it."""
        work = asyncio.ensure_future(self._model.service.run(self._request.ask, self._take))
        try:
            both: set[asyncio.Future[Any]] = {work, reporter}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                reporter.result()  # raises what has ended it
                raise asyncio.CancelledError
            return await work
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, BiremeError):
                await work

    def _take(self, progress: VideoProgress) -> None:
        self._progress = progress
        self._news.set()

    async def _report(self) -> None:
        """Record progress; return when the job is deleted."""
        store = self._model.store
        while True:
            await self._news.wait()
            self._news.clear()
            progress = self._progress
            if not self.accepted.done():
                if progress.details is None:
                    continue
                await self._accept(progress.details)
            try:
                news = self.id, progress.status, progress.percent
                if not await store.do(lambda own, *news: own.jobs.report(*news), *news):
                    return
            except UnavailableError as error:  # the work goes on, and the next progress may be noted
                logger.error("progress_not_kept id=%s error=%s", self.id, error)
                drop_frames(error)
            await asyncio.sleep(_REPORT_S)

    async def _accept(self, details: Details) -> None:
        async with self._accepting:
            if self.accepted.done():
                return
            text, prompt, model = msgspec.json.encode(details).decode(), self._request.ask.prompt, self._model
            self.accepted.set_result(
                await model.store.do(lambda own: own.jobs.add(self.id, self._tenant, model.name, prompt, text))
            )

    async def _complete(self, result: VideoResult) -> None:
        await self._accept(result.details)  # when it was so quick that nothing has been reported yet
        file = await self._model.delivery.store(result.parts[0], result.details.output_format)
        tree = msgspec.to_builtins(result.details) | {"inference_time_s": result.inference_time_s}
        details = msgspec.json.encode(tree).decode()
        if not await self._record(lambda own: own.jobs.complete(self.id, details, file.name)):
            self._model.files.remove(file.name)

    async def _fail(self, error: BiremeError) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)
            return
        if is_internal(error):
            logger.error("job_failed id=%s error=%s", self.id, error)
        told = msgspec.json.decode(reply_of(error).body)["error"]
        drop_frames(error)
        await self._record(lambda own: own.jobs.fail(self.id, told["code"] or told["type"], told["message"]))

    async def _record(self, method: Callable[[FilesAndJobs], bool]) -> bool:
        """Note the end as soon as that can be done: a job whose end is not noted would be under way for ever."""
        while True:
            try:
                return await self._model.store.do(method)
            except UnavailableError as error:
                drop_frames(error)
                await asyncio.sleep(_RECORD_AGAIN_S)


def sweep(kept: FilesAndJobs, config: VideoConfig) -> tuple[int, dict[str, int]]:
    """Remove old results; return the bytes left and the number of jobs by status. Raises UnavailableError."""
    began = time.monotonic()
    for file in kept.jobs.expire(config.expiry_s, config.max_jobs):
        kept.files.remove(file)
    num_bytes = kept.files.sweep()
    kept.check()
    kept.jobs.fail_orphans()
    logger.debug("video_swept bytes=%d seconds=%.3f", num_bytes, time.monotonic() - began)
    return num_bytes, kept.jobs.counts()
