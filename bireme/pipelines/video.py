"""video: an OpenAI video request in, progress with each step, the answer last; all JSON.

The same code as the frontend's /v1/videos/generations. Workers are reached over gRPC loopback (BIREME_GRPC).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any, ClassVar

import numpy as np

from bireme.errors import RequestError, UnavailableError
from bireme.observability.entry import open_traces
from bireme.observability.traces import Traces, traced_call
from bireme.pipelines.chat_answer import encode_json
from bireme.pipelines.text import cancel_with
from bireme.pipelines.video_request import parse_video
from bireme.pipelines.video_service import Delivery, VideoProgress, VideoService, VideoWorker, result_tree
from bireme.request import read_tensors
from bireme.specs import VIDEO, ModelSpec
from bireme.types import Cancelled, Response, Send, StageContext, Tensors
from bireme.video.files import open_files, video_folder
from bireme.workers.grpc_tls import GrpcTls
from bireme.workers.video import VideoWorkers

logger = logging.getLogger("bireme.video")


class Video:
    """The stage. Given workers by tests; else made at start."""

    spec: ClassVar[ModelSpec] = VIDEO

    def __init__(self, workers: VideoWorker | None = None) -> None:
        self._workers = workers
        self._service: VideoService | None = None
        self._traces: Traces | None = None

    async def start(self, context: StageContext) -> None:
        recipe = context.recipe
        workers = self._workers or VideoWorkers(recipe.pipeline.stall_timeout_s, tls=GrpcTls.of(recipe))
        self._service = VideoService(recipe, workers, context.metrics)
        self._name = recipe.video_name
        self._traces = open_traces(recipe, context.metrics)
        files = open_files(recipe)
        self._delivery = Delivery(files, recipe.video.public_url)
        try:
            await asyncio.to_thread(files.check)
        except UnavailableError as error:  # what is sent within the answer needs no folder
            logger.error("video_folder_unusable folder=%s problem=%s", video_folder(recipe), error)

    async def stop(self) -> None:
        if self._service is not None:
            await self._service.close()
        if self._traces is not None:
            await self._traces.close()

    def is_ready(self) -> bool:
        return self._service is not None

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        assert self._service is not None
        values = read_tensors(inputs, self.spec)
        if "request" not in values:
            raise RequestError("request: missing; send an OpenAI video request as JSON")
        request = parse_video(values["request"])
        self._delivery.check(request)
        cancel_with(cancelled)
        heading = heading_of(self._name)
        with traced_call(self._traces, self.spec.name, inputs) as trace:
            result = await self._service.run(request.ask, lambda made: send(ProgressResponse(heading, made)), trace)
        answer = heading | {"object": "video", "status": "completed", "progress": 100} | result_tree(result)
        send(JsonResult(encode_json(answer | {"data": await self._delivery.data(result, request)})))


def heading_of(model: str) -> dict[str, Any]:
    return {"id": f"video_{uuid.uuid4().hex}", "created": int(time.time()), "model": model}


class ProgressResponse:
    """Of several unsent ones only the last is sent."""

    num_bytes = 256

    def __init__(self, heading: dict[str, Any], progress: VideoProgress) -> None:
        self._heading, self._progress = heading, progress

    def merge(self, later: Response) -> Response | None:
        return later if isinstance(later, ProgressResponse) else None

    def tensors(self) -> Tensors:
        tree = self._heading | {"object": "video.progress"} | self._progress.tree()
        return {"response": np.array([encode_json(tree)], np.object_)}


class JsonResult:
    is_last = True
    num_bytes = 256  # not its real size: one result a request, within video.max_inline_bytes, is no slow reader

    def __init__(self, data: bytes) -> None:
        self._data = data

    def merge(self, later: Response) -> Response | None:
        return None

    def tensors(self) -> Tensors:
        return {"response": np.array([self._data], np.object_)}
