"""The life of a video engine process: IO thread first, then load and warm-up, hello, one piece of work at a time.

The engine runs on the main thread, as CUDA contexts prefer. SIGTERM ends the current work at its next step, and then
the process.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import time
from collections.abc import Callable

from bireme.config import stage_of
from bireme.engines.child.process import EXIT_CONFIG
from bireme.engines.stub.environment import given_recipe, num_threads
from bireme.engines.stub.process_log import start_log
from bireme.engines.video.base import AbortedError, Frames, VideoContext, VideoEngine
from bireme.engines.video.link import EngineLink
from bireme.errors import BiremeError, ConfigError, RequestCancelledError, UnavailableError, to_message
from bireme.metrics import Registry, use_buckets
from bireme.own_process import freeze_gc
from bireme.stop_signals import on_stop_signal
from bireme.video import wire
from bireme.video.encoding import encode_image, encode_video

logger = logging.getLogger("bireme.engine")


class VideoProcess:
    """Run once, on the main thread."""

    def __init__(
        self, worker: str, endpoint: str, life: int, create_engine: Callable[[str, VideoContext], VideoEngine]
    ) -> None:
        self._worker, self._life = worker, life
        self._create_engine = create_engine
        self._metrics = Registry(worker)
        self._link = EngineLink(endpoint, life, self._metrics)
        self._engine: VideoEngine | None = None
        self._is_stopping = False

    def run(self) -> int:
        start_log(f"{self._worker} engine")
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # the supervisor asks for stacks before it kills
        self._link.start()
        began = time.monotonic()
        try:
            self._engine = self._make_engine()
            facts = self._engine.start()
        except Exception as error:
            return self._give_up(error)
        on_stop_signal(lambda number: self._request_stop())
        freeze_gc()
        self._link.ready(facts)
        took = time.monotonic() - began
        logger.info("engine_ready life=%d pipeline=%s load_s=%.2f", self._life, facts.pipeline, took)
        while not self._is_stopping and (command := self._link.next()) is not None:
            self._work(command.number, command.generation)
        self._engine.stop()
        self._link.close()
        logger.info("engine_stopped life=%d", self._life)
        return 0

    def _make_engine(self) -> VideoEngine:
        recipe, entry = given_recipe(self._worker)
        use_buckets(recipe.metrics.buckets)
        model_path = recipe.worker_model_path(stage_of(self._worker)) if entry.kind.needs_model else ""
        context = VideoContext(self._worker, model_path, entry.engine_config, num_threads(recipe, entry))
        return self._create_engine(entry.engine, context)

    def _give_up(self, error: Exception) -> int:
        is_expected = isinstance(error, ConfigError)
        logger.error("engine_failed life=%d error=%s", self._life, to_message(error), exc_info=not is_expected)
        self._link.fail(to_message(error))
        self._link.close()
        return EXIT_CONFIG if is_expected else 1

    def _request_stop(self) -> None:
        self._is_stopping = True
        self._link.interrupt()

    def _work(self, number: int, work: wire.DiffusionRequest) -> None:
        self._link.began()
        try:
            event: wire.Event = self._generate(number, work)
        except AbortedError:
            error: BiremeError = RequestCancelledError("the request was aborted")
            if self._is_stopping:
                error = UnavailableError(f"{self._worker} is stopping; try again")
            event = wire.Failed(number, to_message(error))
        except Exception as failure:
            if not isinstance(failure, BiremeError):
                logger.exception("generation_failed number=%d", number)
            event = wire.Failed(number, to_message(failure))
        self._link.ended()
        self._link.send(event)

    def _generate(self, number: int, work: wire.DiffusionRequest) -> wire.Event:
        assert self._engine is not None
        progress = _Progress(self, number, work.total_steps)
        began = time.monotonic()
        progress.check()
        self._link.send(wire.Stepped(number, 0, work.total_steps))
        frames = self._engine.generate(work, progress)
        progress.check()
        self._link.began()  # encoding has a time limit of its own
        parts, shape = _encode(frames[: work.num_images or work.num_frames], work)
        seconds = time.monotonic() - began
        self._metrics.observe("bireme_video_generation_seconds", seconds)
        self._metrics.add("bireme_video_frames_total", work.num_images or work.num_frames)
        return wire.Made(number, parts, shape, seconds)

    def check(self, number: int) -> None:
        """Raises AbortedError when the work was cancelled."""
        if self._is_stopping or self._link.is_aborted(number):
            raise AbortedError

    def step_done(self, event: wire.Stepped, seconds: float) -> None:
        self._link.stepped()
        self._metrics.add("bireme_video_steps_total")
        self._metrics.observe("bireme_engine_step_seconds", seconds)
        self._link.send(event)


class _Progress:
    """An OnStep for one work."""

    def __init__(self, process: VideoProcess, number: int, total: int) -> None:
        self._process, self._number, self._total = process, number, total
        self._first_at = self._last_at = time.monotonic()

    def __call__(self, step: int) -> None:
        now = time.monotonic()
        seconds, self._last_at = now - self._last_at, now
        eta_s = None
        if step == 1:
            self._first_at = now  # the first step waits for the text encoder
        else:
            eta_s = (now - self._first_at) / (step - 1) * (self._total - step)
        self._process.step_done(wire.Stepped(self._number, step, self._total, eta_s), seconds)
        self.check()

    def check(self) -> None:
        self._process.check(self._number)


def _encode(frames: Frames, work: wire.DiffusionRequest) -> tuple[list[bytes], tuple[int, int, int, int] | None]:
    if work.num_images:
        return [encode_image(frame, work.output_format) for frame in frames], None
    if work.output_format == "frames":
        count, height, width, channels = frames.shape
        return [frames.tobytes()], (count, height, width, channels)
    return [encode_video(frames, work.fps, work.output_format)], None
