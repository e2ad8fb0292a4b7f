"""The class that Triton loads: it owns a stage, its event loop and the threads around it.

execute() answers nothing itself, also for unary models: it hands the requests to the loop and returns, so one instance
works on any number of them. Each request is a task, and its stream always sends one final flag. No method blocks on a
client.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from bireme import private_files
from bireme.coalescing import BURST, BURST_PAUSE_S
from bireme.config import WORKER_STAGES, Recipe, instance_name, missing_worker, stage_of
from bireme.discovery import live_settings
from bireme.discovery.pulse import BEAT_S, SHM, Pulse, own_pulse
from bireme.errors import BiremeError, ConfigError, RequestCancelledError, UnavailableError, drop_frames
from bireme.metric_aliases import aliases_of_worker
from bireme.metrics import Registry, use_buckets
from bireme.own_process import freeze_gc, reuse_memory, watch_parent
from bireme.recipe_files import load_recipe
from bireme.specs import ModelSpec
from bireme.stages.absent import absent_stage
from bireme.triton import logs
from bireme.triton.autocomplete import complete_config
from bireme.triton.bls import BlsClient
from bireme.triton.cancels import CancelPoller
from bireme.triton.event_loop import EventLoop
from bireme.triton.inputs import read_request
from bireme.triton.metrics_publisher import MetricsPublisher
from bireme.triton.outputs import TritonOutlet
from bireme.triton.senders import Senders
from bireme.triton.streams import Stream
from bireme.types import Inputs, Stage, StageContext

STOP_LIMIT_S = 5.0  # for stage.stop(); finalize() as a whole takes at most 9 s
JOIN_LIMIT_S = 1.0  # for each of our own threads
CANCEL_GRACE_S = 10.0  # a stage that does not react to `cancelled` has its task cancelled after this
logger = logging.getLogger("bireme.triton")


class Adapter:
    """Triton's model interface over a Stage."""

    stage_class: Callable[[], Stage]
    spec: ModelSpec
    _is_stopping = False
    _pulse: Pulse | None = None

    @classmethod
    def auto_complete_config(cls, config: Any) -> Any:
        return complete_config(config, cls.spec)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the recipe and start the stage. An error becomes the load's error."""
        self._model_name = args["model_name"]
        self._name = instance_name(self._model_name, args["model_instance_name"]) or self._model_name
        logs.configure(self._name)
        # A crashed tritonserver leaves its stubs waiting in shared memory for ever, deaf to SIGTERM.
        watch_parent(functools.partial(os._exit, 1))
        try:
            _shut_region()
            recipe = load_recipe()
            use_buckets(recipe.metrics.buckets)
            self._build(recipe)
            self._loop.run(self._start(recipe))
            self._pulse = own_pulse()
            if self._pulse is not None:
                self._loop.every(BEAT_S, self._beat)
        except Exception as error:
            logger.error("load_failed model=%s error=%r", self._model_name, error)
            self.finalize()
            raise pb_utils.TritonModelException(_load_error(error)) from error
        freeze_gc(collect_less=True)
        reuse_memory()
        logger.info("ready model=%s recipe=%s", self._model_name, recipe.name)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._accept(request)
        self._wake()

    def is_ready(self) -> bool:
        """Asked by Triton 26.03 and later."""
        can_serve = self._loop.is_running and not self._bls.is_exhausted
        return not self._is_stopping and can_serve and self._stage.is_ready()

    def finalize(self) -> None:
        """Stop everything in order; never hangs, also after a failed initialize."""
        if self._is_stopping or not hasattr(self, "_loop"):
            return
        self._is_stopping = True
        self._stop_stage()
        self._abort_streams()
        if not self._senders.stop(JOIN_LIMIT_S):
            logger.warning("senders_stuck model=%s open_streams=%d", self._model_name, len(self._streams))
        self._poller.stop(JOIN_LIMIT_S)
        self._loop.stop(JOIN_LIMIT_S)
        self._bls.close()
        self._publisher.stop(JOIN_LIMIT_S)
        if self._pulse is not None:
            self._pulse.remove()
        logger.info("stopped model=%s", self._model_name)

    def _build(self, recipe: Recipe) -> None:
        self._max_buffer_bytes = recipe.limits.max_stream_buffer_bytes
        self._all_outputs = frozenset(tensor.name for tensor in self.spec.outputs)
        self._arrivals: deque[tuple[Inputs, Stream]] = deque()
        self._is_woken = False
        self._wake_lock = threading.Lock()
        self._streams: set[Stream] = set()  # their final flag is not out yet
        self._tasks: dict[asyncio.Task[None], Stream] = {}
        self._run_folder = Path(named) if (named := os.environ.get("BIREME_RUN_DIR")) else None
        self._num_responses = 0
        self._counts_lock = threading.Lock()
        self._bls = BlsClient()
        self._stage = self._make_stage(recipe)
        self._metrics = Registry(self._name)
        self._senders = Senders()
        self._poller = CancelPoller()
        self._publisher = MetricsPublisher(self._metrics, self._collect_metrics, aliases_of_worker(recipe, self._name))
        self._loop = EventLoop(self._model_name)

    def _make_stage(self, recipe: Recipe) -> Stage:
        stage = stage_of(self._model_name)
        if missing := missing_worker(stage, recipe):
            return absent_stage(self.spec, f"{missing} is not in recipe {recipe.name}")
        return self.stage_class()

    async def _start(self, recipe: Recipe) -> None:
        await self._stage.start(
            StageContext(
                model_name=self._model_name,
                recipe=recipe,
                entry=recipe.entry(self._model_name),
                metrics=self._metrics,
                call_async=self._bls.call_async,
            )
        )

    def _accept(self, request: Any) -> None:
        try:
            outlet = TritonOutlet(request.get_response_sender(), self.spec)
        except Exception:  # this request can't be answered any more
            logger.exception("no_response_sender")
            return
        stream = Stream(
            outlet,
            self._senders.assign(),
            is_decoupled=self.spec.decoupled,
            max_buffer_bytes=self._max_buffer_bytes,
            on_close=self._forget,
        )
        self._streams.add(stream)
        try:
            if self._is_stopping:
                raise UnavailableError(f"{self._model_name} is shutting down")
            inputs = read_request(request, self._all_outputs)
            outlet.want(inputs.info.outputs)
            self._arrivals.append((inputs, stream))
        except Exception as error:
            stream.finish(error)
            return
        self._poller.watch(stream)

    def _wake(self) -> None:
        """Have the loop look at the arrivals; one wake-up for all that wait."""
        with self._wake_lock:
            if self._is_woken or not self._arrivals:
                return
            self._is_woken = True
        try:
            self._loop.post(self._begin_arrivals)
        except RuntimeError:  # the loop is gone
            self._refuse_arrivals()

    def _refuse_arrivals(self) -> None:
        while (arrival := self._next_arrival()) is not None:
            arrival[1].finish(UnavailableError(f"{self._model_name} is shutting down"))

    def _next_arrival(self) -> tuple[Inputs, Stream] | None:
        try:
            return self._arrivals.popleft()
        except IndexError:
            return None

    def _begin_arrivals(self) -> None:
        """Start what has arrived. In a burst this thread and Triton's take turns instead of competing for the GIL."""
        if len(self._arrivals) >= BURST:
            self._senders.burst(2 * BURST_PAUSE_S)
            asyncio.get_running_loop().call_later(BURST_PAUSE_S, self._begin_arrivals)
        else:
            with self._wake_lock:
                self._is_woken = False
        while (arrival := self._next_arrival()) is not None:
            inputs, stream = arrival
            task = asyncio.get_running_loop().create_task(self._serve(inputs, stream))
            self._tasks[task] = stream
            task.add_done_callback(self._end_task)
            stream.cancelled.on_set(functools.partial(_limit, task))

    async def _serve(self, inputs: Inputs, stream: Stream) -> None:
        try:
            await self._stage.handle(inputs, stream.send, stream.cancelled)
        except BiremeError as error:
            drop_frames(error)
            stream.finish(error)
        except asyncio.CancelledError:
            stream.finish(self._cancellation())
        except BaseException as error:  # SystemExit in a stage must not end the loop
            logger.exception("stage_failed model=%s", self._model_name)
            stream.finish(error)
        else:
            stream.finish()

    def _end_task(self, task: asyncio.Task[None]) -> None:
        stream = self._tasks.pop(task)
        if task.cancelled():  # before its first step: _serve never ran
            stream.finish(self._cancellation())

    def _cancellation(self) -> BiremeError:
        if self._is_stopping:
            return UnavailableError(f"{self._model_name} is shutting down")
        return RequestCancelledError("the request was cancelled")

    def _beat(self) -> None:
        assert self._pulse is not None
        self._pulse.beat(len(self._streams), self._bls.is_short)

    def _forget(self, stream: Stream) -> None:
        self._streams.discard(stream)
        with self._counts_lock:
            self._num_responses += stream.num_sent

    def _collect_metrics(self) -> None:
        with self._counts_lock:
            responses, self._num_responses = self._num_responses, 0
        cancelled = self._poller.take_num_cancelled()
        self._metrics.set("bireme_streams", len(self._streams))
        if (folder := self._run_folder) is not None:
            live_settings.look(folder)
        if responses:
            self._metrics.add("bireme_responses_total", responses)
        self._bls.look()
        self._metrics.set("bireme_bls_threads_lost", self._bls.num_lost)
        if cancelled and stage_of(self._model_name) not in WORKER_STAGES:  # a worker's engine counts its own
            self._metrics.add("bireme_cancellations_total", cancelled)

    def _stop_stage(self) -> None:
        try:
            self._loop.run(self._stage.stop(), STOP_LIMIT_S)
        except Exception:
            logger.exception("stop_failed model=%s", self._model_name)

    def _abort_streams(self) -> None:
        """End running requests with UNAVAILABLE; their tasks end with the loop."""
        self._refuse_arrivals()
        for stream in list(self._streams):
            stream.finish(UnavailableError(f"{self._model_name} is shutting down"))
            stream.cancelled.set()


def _shut_region() -> None:
    """Take this stub's shared memory, through which its requests and answers go, from the other users of the host.

    The Python backend makes it readable by everybody, whatever the umask, and names it in the stub's arguments.
    """
    for argument in Path("/proc/self/cmdline").read_bytes().split(b"\0"):
        if argument and b"/" not in argument:
            private_files.shut_file(SHM / os.fsdecode(argument))


def _limit(task: asyncio.Task[None]) -> None:
    """Cancel the task of a cancelled request after a grace time, if its stage did not react. Any thread."""
    if not task.done():
        loop = task.get_loop()
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the task
            loop.call_soon_threadsafe(lambda: loop.call_later(CANCEL_GRACE_S, task.cancel))


def _load_error(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, BiremeError):
        return f"{error.code}: {error}"
    return f"{type(error).__name__}: {error}"
