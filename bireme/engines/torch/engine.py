"""The torch engine: a core, the thread that drives it, and the inbox between that thread and all others.

Only the engine's thread touches the core. `submit` checks a request on the caller's thread, against what never changes,
and posts it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from bireme.engines.base import AdmittedRequest, Emit, EngineContext, EngineProgress, RequestKey
from bireme.engines.child.lost_device import EXIT_BROKEN
from bireme.engines.child.validate import check_open
from bireme.engines.torch.images.encode_side import EncodeSide
from bireme.engines.torch.loading import LoadedEngine
from bireme.engines.torch.scheduling.core import BrokenEngineError, EngineCore
from bireme.engines.torch.step import Sequence
from bireme.engines.torch.weights.lean_imports import import_transformers
from bireme.errors import EngineLostError
from bireme.kv.blocks.events import KvEvent
from bireme.messages import Capacity

logger = logging.getLogger("bireme.engines.torch")
import_transformers()

_QUIET_S = 0.5  # without a step: requests are not expected at once
_STOP_S = 10.0  # how long `stop` waits for the current step
_COPY_S = 2.0  # how long stopping waits for KV copies that were cancelled
Action = Callable[[], None]


class TorchEngine(EncodeSide):
    def __init__(self, context: EngineContext, die: Callable[[int], None] = os._exit) -> None:
        self._context = context
        self._die = die
        self._loaded: LoadedEngine | None = None
        self._emit: Emit | None = None
        self._thread: threading.Thread | None = None
        self._inbox: deque[Action] = deque()
        self._wake = threading.Condition()  # guards the inbox, the queue count and the two flags
        self._num_submitted = 0  # in the inbox, not yet taken
        self._num_submitted_tokens = 0
        self._step_began_at = 0.0
        self._ran_at = time.monotonic()  # when the last step was made, or it was ready

    def start(self, emit: Emit) -> Capacity:
        self._emit = emit
        self._loaded = LoadedEngine(self._context, self._post)
        if self._loaded.encoder is not None:
            from bireme.engines.torch.images.encode_jobs import EncodeJobs

            self._jobs = EncodeJobs(self._context, self._loaded.encoder, emit)
        has_begun = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._loaded.core, has_begun), name="engine", daemon=True
        )
        self._thread.start()
        has_begun.wait()
        return self._loaded.capacity

    def submit(self, key: RequestKey, admitted: AdmittedRequest) -> None:
        loaded = self._loaded
        assert loaded is not None, "start first"
        self._check_open(loaded)  # before the costly check
        sequence = loaded.admission.admit(key, admitted)
        with self._wake:
            self._check_open(loaded)
            self._num_submitted += 1
            self._num_submitted_tokens += len(sequence.tokens)
            self._inbox.append(partial(self._add, loaded.core, sequence))
            self._wake.notify()

    def abort(self, key: RequestKey) -> None:
        loaded = self._loaded
        assert loaded is not None, "start first"
        self._post(partial(loaded.core.requests.abort, key))
        if self._jobs is not None:
            self._jobs.service.abort(key)

    def drain(self) -> None:
        with self._wake:
            self._is_draining = True

    def progress(self) -> EngineProgress:
        if self._loaded is None:
            return EngineProgress(0, 0.0, 0, 0)
        core = self._loaded.core
        num_steps, num_waiting = core.num_steps, core.num_waiting + self._num_submitted
        if self._jobs is not None:
            num_steps += self._jobs.service.num_steps
            num_waiting += self._jobs.service.num_pending
        return EngineProgress(
            num_steps,
            self._step_began_at,
            num_waiting,
            core.num_running,
            core.num_waiting_tokens + self._num_submitted_tokens,
            core.num_blocks_used,
            self._loaded.num_blocks,
            self._loaded.prices,
        )

    def kv_events(self) -> list[KvEvent]:
        events = self._loaded.events if self._loaded is not None else None
        return events.drain() if events is not None else []

    def stop(self) -> None:
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)
        if self._loaded is not None:
            self._loaded.guides.close()
            self._loaded.step_times.close()
            if self._loaded.mover is not None:
                self._loaded.mover.close()
        if self._jobs is not None:
            self._jobs.service.stop()

    def _post(self, action: Action) -> None:
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    def _check_open(self, loaded: LoadedEngine) -> None:
        limits, waiting = loaded.limits, loaded.core.num_waiting + loaded.core.num_preparing + self._num_submitted
        num_places = limits.max_batch_size - loaded.core.num_running
        is_draining = self._is_draining or self._is_stopping
        check_open(self._context.worker, is_draining, waiting, limits.max_queue_size, num_places)

    def _run(self, core: EngineCore, has_begun: threading.Event) -> None:
        import torch

        torch.set_num_threads(self._context.num_threads)
        try:
            try:
                core.begin()
            finally:
                self._ran_at = time.monotonic()
                has_begun.set()
            while not self._is_stopping:
                self._turn(core)
        except BrokenEngineError as error:
            self._give_up(core, error)
        except Exception as error:  # a defect of the loop itself: no request is to blame
            self._give_up(core, error)
        else:
            self._wind_up(core)

    def _turn(self, core: EngineCore) -> None:
        """Take the inbox, run a step, emit its output; sleep when there is nothing to do."""
        self._await_arrivals(core)
        self._step_began_at = time.monotonic()
        try:
            core.wait()
            self._take_inbox()
            core.take_tokens()
            core.requests.expire(time.monotonic())  # not before tokens that have been made in time
            if core.is_told:
                self._publish(core)  # first tokens of joined requests, and ends: they need not wait for the step
            has_run = core.step()
            self._publish(core)  # before what the next tokens are chosen from is looked for: guides may take a while
            core.choose()
        finally:
            self._step_began_at = 0.0
        if has_run:
            self._ran_at = time.monotonic()
        else:
            self._idle(core)

    def _idle(self, core: EngineCore) -> None:
        """Sleep; after a while without a step prepare for later ones, a piece a turn: who comes waits for one."""
        prepares_at = self._ran_at + _QUIET_S
        if time.monotonic() < prepares_at:
            self._sleep(core, prepares_at)
        elif not core.prepare():
            self._sleep(core)

    def _await_arrivals(self, core: EngineCore) -> None:
        """Leave a step alone until the next one has to be started, or something comes."""
        if until := core.starts_next_at:
            with self._wake:
                if not self._inbox and not self._is_stopping and (left := until - time.monotonic()) > 0:
                    self._wake.wait(left)

    def _take_inbox(self) -> None:
        for action in self._take():
            try:
                action()
            except Exception:  # one request's defect must not end the others
                logger.exception("action_failed action=%r", action)

    def _take(self) -> list[Action]:
        with self._wake:
            actions = list(self._inbox)
            self._inbox.clear()
        return actions

    def _add(self, core: EngineCore, sequence: Sequence) -> None:
        try:
            core.requests.add(sequence)
        finally:
            with self._wake:
                self._num_submitted -= 1
                self._num_submitted_tokens -= len(sequence.tokens)

    def _sleep(self, core: EngineCore, until: float = math.inf) -> None:
        """Sleep until something comes, until a deadline of the core's, or this one."""
        wakes_at = min(until, math.inf if core.wakes_at is None else core.wakes_at)
        with self._wake:
            if not self._inbox and not self._is_stopping:
                self._wake.wait(None if wakes_at == math.inf else max(0.0, wakes_at - time.monotonic()))

    def _wind_up(self, core: EngineCore) -> None:
        """End all requests; those whose KV is being copied end when the copies have."""
        core.requests.fail_all(EngineLostError(f"{self._context.worker} has stopped"))
        last = time.monotonic() + _COPY_S
        while not core.is_empty and time.monotonic() < last:
            with self._wake:
                if not self._inbox:
                    self._wake.wait(last - time.monotonic())
            self._take_inbox()
        self._publish(core)

    def _publish(self, core: EngineCore) -> None:
        outputs, plain = core.take_outputs()
        if (outputs or plain.keys) and self._emit is not None:
            self._emit(core.num_steps, outputs, plain)

    def _give_up(self, core: EngineCore, error: Exception) -> None:
        """End all requests and the process: the supervisor starts a new one."""
        logger.critical("engine_broken error=%r", error, exc_info=error)
        self._is_draining = True
        try:
            core.requests.fail_all(EngineLostError(f"{self._context.worker} broke down and is being restarted"))
            self._publish(core)
            time.sleep(0.1)  # the IO thread sends the ends before the process exits
        except Exception:  # what is broken can't even be ended in order: its clients learn it from the process's end
            logger.exception("ends_not_sent")
        finally:
            self._die(EXIT_BROKEN)
