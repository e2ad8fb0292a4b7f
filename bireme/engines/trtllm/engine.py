"""The TensorRT-LLM engine: an LLM object, and the event loop on which its requests live.

Requests are touched only on the loop's thread; `submit` plans a request on the caller's thread and posts it. A request
that TensorRT-LLM refuses ends alone. Any other error, and errors of requests that one of our own shares (faults.py),
mean that the engine is dying. The process ends at once, without teardown (which may block on a dead rank), and its
supervisor fails the open requests and starts another.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from bireme.engines.base import AdmittedRequest, Emit, EngineContext, EngineProgress, RequestKey
from bireme.engines.child.validate import check_open
from bireme.engines.torch.images.encode_side import EncodeSide
from bireme.engines.trtllm import lifecycle, processes
from bireme.engines.trtllm.loading import Loaded, load, measured
from bireme.engines.trtllm.requests import Requests
from bireme.errors import UnavailableError
from bireme.kv.blocks.events import KvEvent
from bireme.messages import Capacity

logger = logging.getLogger("bireme.engines.trtllm")

WARM_UP_S = 300.0
_FIRST_STATISTICS_S = 2.0  # the first generation has just ended
_DRAIN_S = 0.5  # for the ends of aborted requests to come in
_EXIT_AFTER_S = 0.1  # the last frames reach the socket


class TrtllmEngine(EncodeSide):
    def __init__(self, context: EngineContext, die: Callable[[int], Any] = os._exit) -> None:
        self._context = context
        self._die = die
        self._loaded: Loaded | None = None
        self._requests: Requests | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="trtllm-loop", daemon=True)
        self._health: lifecycle.LlmMonitor | None = None
        self._lock = threading.Lock()

    def start(self, emit: Emit) -> Capacity:
        self._loaded = loaded = load(self._context, self._loop.call_soon_threadsafe)
        self._requests = Requests(self._context, loaded, self._loop, emit, self.fail)
        requests = self._requests
        loaded.iterations.is_idle = lambda: not requests.num_open
        self._thread.start()
        self._warm_up(requests)
        loaded.iterations.start()
        loaded.capacity = measured(loaded, _FIRST_STATISTICS_S)
        if loaded.pictures is not None and loaded.pictures.tower is not None:
            from bireme.engines.torch.images.encode_jobs import EncodeJobs

            self._jobs = EncodeJobs(self._context, loaded.pictures.tower.encoder, emit)
        self._health = lifecycle.LlmMonitor(loaded.llm, self.fail)
        self._health.start()
        return loaded.capacity

    def submit(self, key: RequestKey, admitted: AdmittedRequest) -> None:
        loaded, requests = self._loaded, self._requests
        assert loaded is not None and requests is not None, "start first"
        limit = self._context.config.scheduler_config.max_queue_size
        is_draining = self._is_draining or self._is_stopping
        check_open(self._context.worker, is_draining, requests.num_open - loaded.num_places, limit)
        state = loaded.planner.plan(key, admitted)
        requests.num_submitted += 1
        requests.num_submitted_tokens += state.num_to_compute
        self._loop.call_soon_threadsafe(requests.begin, state)

    def abort(self, key: RequestKey) -> None:
        assert self._requests is not None, "start first"
        if self._jobs is not None:
            self._jobs.service.abort(key)
        self._loop.call_soon_threadsafe(self._requests.abort, key)

    def drain(self) -> None:
        self._is_draining = True

    def progress(self) -> EngineProgress:
        requests, loaded = self._requests, self._loaded
        if requests is None or loaded is None:
            return EngineProgress(0, 0.0, 0, 0)
        # An iteration counts as well: a prompt of many iterations has no output until its last.
        step = requests.num_steps + loaded.iterations.num_seen
        num_waiting = min(max(0, requests.num_open - loaded.num_places), requests.num_unanswered)
        num_running = requests.num_open - num_waiting
        if self._jobs is not None:
            step += self._jobs.service.num_steps
            num_waiting += self._jobs.service.num_pending
        return EngineProgress(
            step,
            0.0,
            num_waiting,
            num_running,
            requests.num_unanswered_tokens,
            loaded.iterations.num_blocks_used,
            loaded.iterations.num_blocks,
        )

    def kv_events(self) -> list[KvEvent]:
        return self._loaded.iterations.take_kv_events() if self._loaded is not None else []

    def stop(self) -> None:
        with self._lock:
            if self._is_stopping:
                return
            self._is_stopping = True
        if self._health is not None:
            self._health.stop()
        if self._jobs is not None:
            self._jobs.service.stop()
        if self._requests is not None and self._thread.is_alive():
            self._end_requests(self._requests)
        if self._loaded is not None:
            self._loaded.iterations.stop()
            if not lifecycle.shut_down(self._loaded.llms):
                # Every request has ended and nothing is kept: with a large model this is the ordinary end.
                logger.info("llm_shutdown_cut_short limit_s=%g next=its processes are killed", lifecycle.SHUTDOWN_S)
                self._kill_workers()
                self._die(0)  # the interpreter's own shutdown would wait for it
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end_loop)
            self._thread.join(1)

    def fail(self, reason: str) -> None:
        """End the process, from any thread: its supervisor fails the open requests and starts another."""
        with self._lock:
            if self._is_stopping:
                return
            self._is_stopping = True
        logger.critical("engine_broken reason=%s", reason)
        self._kill_workers()
        time.sleep(_EXIT_AFTER_S)
        self._die(lifecycle.EXIT_BROKEN)

    def _kill_workers(self) -> None:
        if self._health is not None and (count := processes.kill(self._health.members)):
            logger.info("workers_killed count=%d", count)

    def _warm_up(self, requests: Requests) -> None:
        warm_up = asyncio.run_coroutine_threadsafe(requests.warm_up(), self._loop)
        try:
            warm_up.result(WARM_UP_S)
        except (TimeoutError, concurrent.futures.TimeoutError) as error:
            raise UnavailableError(f"TensorRT-LLM made no token in {WARM_UP_S:g} s after its load") from error

    def _end_requests(self, requests: Requests) -> None:
        try:
            asyncio.run_coroutine_threadsafe(requests.end_all(_DRAIN_S), self._loop).result(2 * _DRAIN_S)
        except (TimeoutError, concurrent.futures.TimeoutError):  # one class only from 3.11 on
            logger.warning("requests_left count=%d", requests.num_open)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._on_loop_error)
        self._loop.run_forever()

    def _end_loop(self) -> None:
        """On the loop. A task that is pending when it is collected would be an error in the log."""
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, details: dict[str, Any]) -> None:
        logger.error("loop_error message=%s", details.get("message"), exc_info=details.get("exception"))
