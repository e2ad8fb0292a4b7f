"""video_diffusion: one video, or pictures, a request; progress on the way, the result last.

The tensors tell the kind of request:
    abort + request_id       stop a request: at once where it waits, after its step where it runs
    prompt (+ the others)    make a video; with num_images: pictures

The pipeline runs in a child process, one generation at a time; the others wait in a bounded queue and are told their
position. `details` come as soon as the request is accepted and again with the result, which alone has
`inference_time_s`. A response is sent at least every few seconds: so a dead stub differs from a slow model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np

from bireme.engines.video.client import VideoClient
from bireme.errors import BiremeError, RequestError, ResourceExhaustedError
from bireme.request import read_tensors
from bireme.specs import VIDEO_DIFFUSION, ModelSpec
from bireme.stages.engine_stage import EngineStage
from bireme.stages.requests import request_id_of
from bireme.types import Array, Cancelled, Response, Send, StageContext, TensorResponse, Tensors
from bireme.video import rules, wire

_REPEAT_S = 5.0  # at most, from one sign of life to the next
_NO_ETA = -1.0  # not known yet


class VideoDiffusion(EngineStage[VideoClient]):
    spec: ClassVar[ModelSpec] = VIDEO_DIFFUSION

    def __init__(self, engine: VideoClient | None = None) -> None:
        super().__init__(VideoClient, engine)

    async def start(self, context: StageContext) -> None:
        self._config, self._metrics = context.recipe.video, context.metrics
        self._repeat_s = min(_REPEAT_S, context.recipe.pipeline.stall_timeout_s / 4)
        await super().start(context)

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        values = read_tensors(inputs, self.spec)
        if values.get("abort"):
            self._engine.abort(self._names.find(request_id_of(values)))
            return
        work = rules.resolve(ask_of(values), self._engine.facts, self._config)
        try:
            await self._generate(work, request_id_of(values), send, cancelled)
        except BiremeError as error:
            self._metrics.add("bireme_requests_total", 1, error.code)
            raise
        self._metrics.add("bireme_requests_total", 1, "stop")

    async def _generate(self, work: wire.DiffusionRequest, request_id: str, send: Send, cancelled: Cancelled) -> None:
        self._names.reserve(request_id)
        try:
            run = _Run(work, send)
            number = self._engine.submit(work, run)
            self._names.bind(request_id, number)
            send(TensorResponse({"details": _bytes([msgspec.json.encode(wire.details_of(work))])}))
            await self._follow(run, number, cancelled)
        finally:
            self._names.forget(request_id)
        assert run.result is not None
        send(_result(work, run.result, self._config.max_inline_bytes))

    async def _follow(self, run: _Run, number: int, cancelled: Cancelled) -> None:
        """Return when the work is done. Raises its error."""
        engine, loop = self._engine, asyncio.get_running_loop()
        assert engine is not None
        cancelled.on_set(lambda: engine.abort(number))
        limit_s = self._config.max_queue_time_s
        timer = loop.call_later(limit_s, engine.expire, number) if limit_s else None
        try:
            while not run.ended.is_set():
                try:
                    async with asyncio.timeout(self._repeat_s):
                        await run.ended.wait()
                except TimeoutError:
                    run.repeat()
        except asyncio.CancelledError:
            engine.abort(number)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if run.error is not None:
            raise run.error


class _Run:
    """One request in the engine; WorkSink, from any thread."""

    def __init__(self, work: wire.DiffusionRequest, send: Send) -> None:
        self._send, self._loop = send, asyncio.get_running_loop()
        self._latest = VideoProgressResponse(0, 0, work.total_steps)
        self.ended = asyncio.Event()
        self.result: wire.Made | None = None
        self.error: BiremeError | None = None

    def queued(self, position: int) -> None:
        self._say(VideoProgressResponse(position, 0, self._latest.total))

    def stepped(self, event: wire.Stepped) -> None:
        self._say(VideoProgressResponse(0, event.step, event.total, _NO_ETA if event.eta_s is None else event.eta_s))

    def made(self, event: wire.Made) -> None:
        self.result = event
        self._end()

    def failed(self, error: BiremeError) -> None:
        self.error = error
        self._end()

    def repeat(self) -> None:
        """Repeat the last response, to show that this stub is alive."""
        self._send(self._latest)

    def _say(self, progress: VideoProgressResponse) -> None:
        self._latest = progress
        self._send(progress)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self.ended.set)


class VideoProgressResponse:
    """A progress response; of several unsent ones only the last is sent."""

    num_bytes = 128

    def __init__(self, position: int, step: int, total: int, eta_s: float = _NO_ETA) -> None:
        self.position, self.step, self.total, self.eta_s = position, step, total, eta_s

    def merge(self, later: Response) -> Response | None:
        return later if isinstance(later, VideoProgressResponse) else None

    def tensors(self) -> Tensors:
        return {
            "queue_position": np.array([self.position], np.int32),
            "progress": np.array([self.step / self.total], np.float32),
            "step": np.array([self.step], np.int32),
            "total_steps": np.array([self.total], np.int32),
            "eta_s": np.array([self.eta_s], np.float32),
        }


class VideoResultResponse(TensorResponse):
    """The last response."""

    is_last = True
    # Not its real size: one result a request, within video.max_inline_bytes, is no sign of a slow reader.
    num_bytes = 128


def _result(work: wire.DiffusionRequest, made: wire.Made, max_bytes: int) -> VideoResultResponse:
    """Raises ResourceExhaustedError for a result that is too large for a response."""
    size = sum(len(part) for part in made.parts)
    if size > max_bytes:
        raise ResourceExhaustedError(
            f"the result has {size} bytes; video.max_inline_bytes is {max_bytes}: ask for fewer or smaller frames,"
            " or for mp4"
        )
    outputs: dict[str, Array] = {
        "progress": np.ones(1, np.float32),
        "step": np.array([work.total_steps], np.int32),
        "total_steps": np.array([work.total_steps], np.int32),
        "details": _bytes([msgspec.json.encode(wire.details_of(work))]),
        "inference_time_s": np.array([made.seconds], np.float32),
    }
    if made.shape is not None:
        outputs["frames"] = np.frombuffer(made.parts[0], np.uint8).reshape(made.shape)
    else:
        outputs["images" if work.num_images else "video"] = _bytes(made.parts)
    return VideoResultResponse(outputs)


def _bytes(items: list[bytes]) -> Array:
    array = np.empty(len(items), np.object_)
    array[:] = items
    return array


_ASKED = frozenset(rules.RequestedVideo.__struct_fields__)


def ask_of(values: Mapping[str, Any]) -> rules.RequestedVideo:
    """Return what the tensors ask for. Raises RequestError."""
    if "prompt" not in values:
        raise RequestError("prompt: missing; say what is to be seen")
    return rules.RequestedVideo(**{name: value for name, value in values.items() if name in _ASKED})
