"""/v1/videos in OpenAI's job style, and /v1/videos/generations in one call, with progress as server-sent events."""

from __future__ import annotations

import asyncio
import urllib.parse
from typing import Any

import msgspec

from bireme.errors import BiremeError, NotFoundError, RequestError, drop_frames
from bireme.openai.http.call import Call, ClientGoneError
from bireme.openai.http.error_replies import HttpError, reply_of, shutting_down
from bireme.openai.http.event_stream import COMMENT, DONE, PREFIX, SUFFIX
from bireme.openai.http.file_reply import send_file
from bireme.openai.http.form import json_of
from bireme.openai.http.query import page_size, page_tree
from bireme.openai.video.job_store import Job
from bireme.openai.video.jobs import VideoJobs
from bireme.openai.video.served_video import ServedVideo, VideoModels
from bireme.pipelines.chat_answer import encode_json
from bireme.pipelines.json_body import decode_body
from bireme.pipelines.video import heading_of
from bireme.pipelines.video_request import REFUSED, JobBody, VideoBody, VideoRequest, check_video
from bireme.pipelines.video_service import VideoProgress, VideoResult, result_tree

PATH = "/v1/videos"
_MOST_LISTED = 100


class Videos:
    def __init__(self, models: VideoModels, comment_interval_s: float) -> None:
        self._models, self._comment_interval_s = models, comment_interval_s
        self.jobs = VideoJobs()

    async def create(self, call: Call, data: bytes) -> None:
        body = decode_body(json_of(data, call.header(b"content-type")), JobBody, REFUSED)
        model = self._models.get(body.model)
        call.notes["model"] = model.name
        model.store.require()
        job = await call.unless_gone(self.jobs.create(model, check_video(body), call.tenant))
        await call.reply(200, encode_json(_job_tree(job, model)))

    async def list_jobs(self, call: Call) -> None:
        query = _query(call, ("limit", "after", "order"))
        limit, is_ascending = _limit(query.get("limit")), _is_ascending(query.get("order"))
        after = (await self._find(call, query["after"]))[0] if query.get("after") else None
        jobs: list[tuple[Job, ServedVideo]] = []
        for model in self._models_of_jobs():
            page = await model.store.read(lambda own: own.jobs.page(call.tenant.name, limit + 1, after, is_ascending))
            jobs += [(job, model) for job in page]
        jobs.sort(key=lambda found: found[0].position, reverse=not is_ascending)
        trees = [_job_tree(job, model) for job, model in jobs[:limit]]
        await call.reply(200, encode_json(page_tree(trees, len(jobs) > limit)))

    async def show(self, call: Call) -> None:
        job, model = await self._find(call, _id_in(call.path))
        await call.reply(200, encode_json(_job_tree(job, model)))

    async def content(self, call: Call) -> None:
        variant = _query(call, ("variant",)).get("variant", "video")
        if variant != "video":
            raise HttpError(400, f"variant: {variant[:40]!r}; only video is made here", code="invalid_value")
        job, model = await self._find(call, _id_in(call.path.removesuffix("/content")))
        if job.status != "completed" or job.file is None:
            raise HttpError(409, f"the video is {job.status}; get it when its status is completed", code="not_ready")
        await send_file(call, await asyncio.to_thread(model.files.find, job.file))

    async def delete(self, call: Call) -> None:
        """Also the way to cancel: what is under way ends after its step."""
        job, model = await self._find(call, _id_in(call.path))
        await model.store.do(lambda own: own.jobs.remove(job.id, job.tenant))
        self.jobs.cancel(job.id)
        if job.file is not None:
            await asyncio.to_thread(model.files.remove, job.file)
        await call.reply(200, encode_json({"id": job.id, "object": "video.deleted", "deleted": True}))

    def _models_of_jobs(self) -> list[ServedVideo]:
        self._models.get(next(iter(self._models)).name if list(self._models) else "")  # 404 where there is none
        return list(self._models)

    async def _find(self, call: Call, job_id: str) -> tuple[Job, ServedVideo]:
        for model in self._models_of_jobs():
            try:
                return await model.store.read(lambda own: own.jobs.find(job_id, call.tenant.name)), model
            except NotFoundError as error:
                missing = error
        raise missing

    async def generate(self, call: Call, data: bytes) -> None:
        body = decode_body(data, VideoBody, REFUSED)
        model = self._models.get(body.model)
        call.notes["model"] = model.name
        request = check_video(body)
        model.check(request)
        if request.stream:
            await self._stream(call, model, request)
            return
        result = await call.unless_gone(model.service.run(request.ask, lambda progress: None, call.trace))
        await call.reply(200, encode_json(await _answer(model, request, result, heading_of(model.name))))

    async def _stream(self, call: Call, model: ServedVideo, request: VideoRequest) -> None:
        """Refusals have their status: the first event is the worker's."""
        latest: list[VideoProgress] = []
        news = asyncio.Event()

        def take(progress: VideoProgress) -> None:
            latest[:] = [progress]
            news.set()

        heading = heading_of(model.name)
        task = asyncio.ensure_future(model.service.run(request.ask, take, call.trace))
        task.add_done_callback(lambda _: news.set())
        watch = call.when_gone(task.cancel)
        try:
            while not task.done():
                await self._write_news(call, news, latest, heading)
            answer = await _answer(model, request, await task, heading)
            await call.write_events(PREFIX + encode_json(answer) + SUFFIX + DONE, True)
        except asyncio.CancelledError:
            if watch.is_gone:
                raise ClientGoneError from None
            if call.status:
                await _tell(call, shutting_down())
            raise
        except BiremeError as error:
            if not call.status:
                raise
            await _tell(call, error)
        finally:
            watch.cancel()
            task.cancel()

    async def _write_news(
        self, call: Call, news: asyncio.Event, latest: list[VideoProgress], heading: dict[str, Any]
    ) -> None:
        """Wait for progress and write it; a comment after a long silence."""
        try:
            async with asyncio.timeout(self._comment_interval_s):
                await news.wait()
        except TimeoutError:
            if call.status:
                await call.write_events(COMMENT, False)
            return
        news.clear()
        for progress in latest:
            tree = heading | {"object": "video.progress"} | progress.tree()
            await call.write_events(PREFIX + encode_json(tree) + SUFFIX, False)
        latest.clear()


async def _tell(call: Call, error: BiremeError) -> None:
    drop_frames(error)
    call.notes["outcome"] = error.code
    await call.write_events(PREFIX + reply_of(error).body + SUFFIX + DONE, True)


async def _answer(
    model: ServedVideo, request: VideoRequest, result: VideoResult, heading: dict[str, Any]
) -> dict[str, Any]:
    data = await model.delivery.data(result, request)
    done = {"object": "video", "status": "completed", "progress": 100}
    return heading | done | result_tree(result) | {"data": data}


def _job_tree(job: Job, model: ServedVideo) -> dict[str, Any]:
    details = msgspec.json.decode(job.details)
    details.pop("v", None)
    seconds = details.pop("seconds", None)
    expires_at = None if job.completed_at is None else int(job.completed_at + model.recipe.video.expiry_s)
    return {
        "id": job.id,
        "object": "video",
        "model": job.model,
        "status": job.status,
        "progress": job.progress,
        "created_at": job.created_at,
        "completed_at": job.completed_at,
        "expires_at": expires_at,
        "prompt": job.prompt,
        "seconds": None if seconds is None else f"{seconds:g}",
        "remixed_from_video_id": None,
        "error": {"code": job.error_code, "message": job.error_message} if job.error_code else None,
        **details,
    }


def _id_in(path: str) -> str:
    return path[len(PATH) + 1 :]


def _query(call: Call, known: tuple[str, ...]) -> dict[str, str]:
    found = dict(urllib.parse.parse_qsl(call.query.decode("ascii", "replace"), keep_blank_values=True))
    for name in found:
        if name not in known:
            raise RequestError(f"{name[:80]}: unknown parameter; known are {', '.join(known)}")
    return found


def _limit(text: str | None) -> int:
    if text is None:
        return 20
    size = page_size(text, _MOST_LISTED)
    if size is None:
        raise RequestError(f"limit: {text[:20]!r}; 1 to {_MOST_LISTED}")
    return size


def _is_ascending(text: str | None) -> bool:
    if text not in (None, "asc", "desc"):
        raise RequestError(f"order: {str(text)[:20]!r}; asc or desc")
    return text == "asc"
