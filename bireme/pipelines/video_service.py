"""Videos and pictures by the deployment's video workers: choose one, follow its progress, return the result.

The `video` model inside Triton and the OpenAI frontend outside run this code.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from bireme.config import Recipe
from bireme.errors import BiremeError, EngineLostError, RequestError, ResourceExhaustedError, UnavailableError
from bireme.metrics import Registry
from bireme.pipelines.video_request import VideoRequest, tensors_of
from bireme.request_trace import RequestTrace
from bireme.types import Array, Tensors
from bireme.video.files import FileStore, StoredFile
from bireme.video.rules import RequestedVideo
from bireme.video.wire import Details

FILES_PATH = "/files/"


class VideoWorker(Protocol):
    """workers.video.VideoWorkers."""

    def generate(self, worker: str, tensors: Mapping[str, bytes | Array]) -> Any:
        """Return an asynchronous generator of responses' tensors."""

    async def is_ready(self, worker: str) -> bool: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class VideoProgress:
    queue_position: int = 0
    step: int = 0
    total_steps: int = 0
    eta_s: float | None = None
    details: Details | None = None  # known once the worker has accepted the request

    @property
    def status(self) -> str:
        return "queued" if self.queue_position else "in_progress"

    @property
    def percent(self) -> int:
        """0 to 99: 100 is the result."""
        return min(99, 100 * self.step // self.total_steps) if self.total_steps else 0

    def tree(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "progress": self.percent,
            "step": self.step,
            "total_steps": self.total_steps,
            "eta_s": self.eta_s,
            "queue_position": self.queue_position,
        }


@dataclass(frozen=True, slots=True)
class VideoResult:
    parts: list[bytes]  # encoded: one video, or pictures
    details: Details
    inference_time_s: float


OnProgress = Callable[[VideoProgress], None]


class VideoService:
    """Used on one loop."""

    def __init__(self, recipe: Recipe, workers: VideoWorker, metrics: Registry) -> None:
        self.recipe, self.workers, self._metrics = recipe, workers, metrics
        self._active = dict.fromkeys(recipe.replicas("video_diffusion"), 0)

    async def run(self, ask: RequestedVideo, on_progress: OnProgress, trace: RequestTrace | None = None) -> VideoResult:
        """Raises errors.py; cancelling the task ends the generation after its step."""
        limit = self.recipe.limits.max_concurrent_requests
        if sum(self._active.values()) >= limit:
            raise ResourceExhaustedError(f"{limit} requests under way (limits.max_concurrent_requests); try later")
        began, outcome = time.monotonic(), "stop"
        try:
            return await self._run_somewhere(ask, on_progress, trace)
        except BiremeError as error:
            outcome = error.code
            raise
        except asyncio.CancelledError:
            outcome = "CANCELLED"
            raise
        finally:
            self._metrics.count_end(outcome, time.monotonic() - began)

    async def _run_somewhere(
        self, ask: RequestedVideo, on_progress: OnProgress, trace: RequestTrace | None
    ) -> VideoResult:
        """Use the worker with the fewest requests; one that is down (and so idle) or full is skipped."""
        workers = sorted(self._active, key=self._active.__getitem__)
        while True:
            worker, attempt = workers.pop(0), _Attempt(on_progress)
            self._active[worker] += 1
            try:
                with contextlib.nullcontext() if trace is None else trace.span("video", worker=worker):
                    return await self._follow(worker, ask, attempt)
            except (UnavailableError, ResourceExhaustedError):
                if attempt.is_accepted or not workers:
                    raise
            finally:
                self._active[worker] -= 1

    async def _follow(self, worker: str, ask: RequestedVideo, attempt: _Attempt) -> VideoResult:
        result = None
        async with aclosing(self.workers.generate(worker, tensors_of(ask))) as responses:
            async for outputs in responses:
                if "inference_time_s" in outputs:
                    result = _result(outputs)
                else:
                    attempt.take(outputs)
        if result is None:
            raise EngineLostError(f"{worker}: it ended the request without a result; try again")
        return result

    async def close(self) -> None:
        await self.workers.close()


class _Attempt:
    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._progress = VideoProgress()
        self.is_accepted = False

    def take(self, outputs: Tensors) -> None:
        self.is_accepted = True
        self._progress = _progress(outputs, self._progress)
        self._on_progress(self._progress)


def _progress(outputs: Tensors, before: VideoProgress) -> VideoProgress:
    if "details" in outputs:
        return replace(before, details=_details(outputs))
    eta_s: float = outputs["eta_s"].item()
    return VideoProgress(
        int(outputs["queue_position"].item()),
        int(outputs["step"].item()),
        int(outputs["total_steps"].item()),
        round(eta_s, 2) if eta_s >= 0 else None,
        before.details,
    )


def _details(outputs: Tensors) -> Details:
    return msgspec.json.decode(bytes(outputs["details"].reshape(-1)[0]), type=Details)


def _result(outputs: Tensors) -> VideoResult:
    parts = outputs["images"] if "images" in outputs else outputs["video"]
    seconds: float = outputs["inference_time_s"].item()
    return VideoResult([bytes(part) for part in parts.reshape(-1)], _details(outputs), round(seconds, 3))


class Delivery:
    """Puts a result into the answer, or into a file, as requested."""

    def __init__(self, files: FileStore, public_url: str) -> None:
        self._files, self._public_url = files, public_url.rstrip("/")

    def check(self, request: VideoRequest) -> None:
        """Raises RequestError for a form that this process can't deliver."""
        if request.response_format == "url" and not self._public_url:
            raise RequestError("response_format: url needs video.public_url in the recipe; send b64_json or file_id")

    async def data(self, result: VideoResult, request: VideoRequest) -> list[dict[str, Any]]:
        """Return OpenAI's `data`. Raises ResourceExhaustedError."""
        if request.response_format == "b64_json":
            return [{"b64_json": base64.b64encode(part).decode()} for part in result.parts]
        files = [await self.store(part, result.details.output_format) for part in result.parts]
        if request.response_format == "file_id":
            return [{"file_id": file.name, "expires_at": int(file.expires_at)} for file in files]
        return [{"url": self.url(file), "expires_at": int(file.expires_at)} for file in files]

    async def store(self, part: bytes, output_format: str) -> StoredFile:
        return await asyncio.to_thread(self._files.put, part, output_format)

    def url(self, file: StoredFile) -> str:
        return f"{self._public_url}{FILES_PATH}{file.name}"


def result_tree(result: VideoResult) -> dict[str, Any]:
    """Return an answer's fields of a result, beside its data."""
    details = msgspec.to_builtins(result.details)
    details.pop("v", None)
    return {**details, "inference_time_s": result.inference_time_s}
