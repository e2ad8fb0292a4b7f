"""Starts an engine process, watches it, and starts it again: one permanent thread.

    starting -> ready -> (the child ends, hangs or stalls) -> restarting -> ready ...
                                                           -> slow restarts, or down, after too many
                      -> (it is to sleep, and has drained) -> asleep -> starting ...

The thread forks every child, reads its frames, pings it, and calls the owner back. A first start that fails is not
tried again: the caller of `start` gets the reason.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from bireme.child_process import Backoff, has_waiting_thread, is_stopped
from bireme.config import Recipe, SupervisorConfig
from bireme.discovery import run_folder
from bireme.engines.stub.environment import engine_environment, find_python
from bireme.engines.stub.heartbeat import STALL_KEY, Heartbeat, Verdict
from bireme.engines.stub.life import Life, Standby
from bireme.errors import (
    BiremeError,
    ConfigError,
    EngineLostError,
    EngineStalledError,
    UnavailableError,
    from_message,
    to_message,
)
from bireme.messages import (
    CONTROL,
    STUB,
    VERSION,
    Command,
    Commands,
    Drain,
    Finish,
    Hello,
    Ping,
    Pong,
    Step,
    Usage,
    decode_control,
    encode,
    frame,
    split,
)
from bireme.metrics import Registry
from bireme.own_work import Culprit, culprit_of

_FRAMES_A_TURN = 256  # so that an engine without pauses can't keep this thread from its pings
_STACKS_S = 0.2  # for the child to write its threads' stacks before it is killed
_MAX_BACKOFF_S = 10.0
_STOP_S = 5.0  # from SIGTERM to SIGKILL
_CRASHES = {f"signal {name}" for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")}  # of its own making
_SLEEP_LOOK_S = 0.1
_SLEEP_DRAIN_S = 30.0  # for what runs when the engine is to sleep; then it is moved by those who asked


class Owner(Protocol):
    """Called on the supervisor's thread."""

    def on_ready(self, life: Life, hello: Hello) -> None: ...

    def on_frame(self, consumer: int, data: bytes) -> None:
        """Take a step frame, whole."""

    def on_pong(self, pong: Pong) -> None: ...

    def on_end(self, life: Life, error: EngineLostError) -> None:
        """This life is over: fail its open requests. Called once a life, also before it was ready."""

    def on_down(self, reason: str) -> None:
        """There will be no other life: too many restarts."""


class Supervisor:
    """`start` once, `stop` once."""

    def __init__(
        self,
        recipe: Recipe,
        worker: str,
        run_dir: Path,
        owner: Owner,
        metrics: Registry,
        logger: logging.Logger,
        stall_key: str = STALL_KEY,
    ) -> None:
        """`stall_key`: the recipe's key that the stall limit comes from."""
        self._stall_key = stall_key
        self._recipe = recipe
        self._worker = worker
        self._run_dir = run_dir
        self._owner, self._metrics, self._logger = owner, metrics, logger
        self._config = recipe.supervisor
        self._backoff = restart_backoff(self._config)
        self._number = 0
        self._has_drained = False  # this life ends because the engine is to sleep
        self._standby: Standby | None = None
        self._stopping = threading.Event()
        self._has_started = threading.Event()  # ready for the first time, or failed
        self._failure: BiremeError | None = None
        self._state = f"{worker} has not been started"
        self._thread = threading.Thread(target=self._run, name=f"engine-{worker}", daemon=True)

    @property
    def state(self) -> str:
        """Why no life is ready, for the text of a refusal."""
        return self._state

    def start(self) -> None:
        """Start the child and wait until it is ready. Raises ConfigError or UnavailableError with its reason."""
        self._metrics.set("bireme_engine_up", 0)
        self._thread.start()
        self._has_started.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the child, politely first; harmless after a failed start or when called again."""
        self._stopping.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S + 5)

    def _run(self) -> None:
        """Run one life after the other, until `stop`, a failed first start, or too many."""
        try:
            while not self._stopping.is_set():
                if self._sleep():
                    continue
                self._state = f"{self._worker} is starting" + (" again" if self._number else "")
                error, cause = self._run_life()
                if cause == "sleep":
                    continue
                if self._stopping.is_set() or not self._has_started.is_set():
                    self._fail_start(error)
                    return
                if not self._stopping.wait(self._plan_restart(str(error))):
                    self._metrics.add("bireme_engine_restarts_total", 1, cause)
        except Exception as error:
            self._logger.exception("supervisor_failed worker=%s", self._worker)
            self._give_up(f"its supervisor failed: {error}")
            self._fail_start(UnavailableError(f"{self._worker}: {to_message(error)}"))
        finally:
            if self._standby is not None:
                self._standby.end()

    def _sleep(self) -> bool:
        """Wait while somebody wants the engine to sleep; return whether anybody did."""
        if not run_folder.must_sleep(self._run_dir, self._worker):
            return False
        began = time.monotonic()
        self._state = f"{self._worker} is asleep; `python tools/sleep.py {self._worker} --wake` wakes it"
        self._logger.info("engine_asleep worker=%s", self._worker)
        self._metrics.set("bireme_engine_asleep", 1)
        self._has_started.set()
        while run_folder.must_sleep(self._run_dir, self._worker) and not self._stopping.wait(_SLEEP_LOOK_S):
            pass
        self._metrics.set("bireme_engine_asleep", 0)
        self._logger.info("engine_woken worker=%s slept_s=%.0f", self._worker, time.monotonic() - began)
        return True

    def _run_life(self) -> tuple[BiremeError, str]:
        """Run one life from its sockets to their removal; return its error and the cause, which the owner knows by
        then.
        """
        # Lives are numbered by the clock (ms), so that a restarted stub never repeats a number.
        self._number = max(self._number + 1, int(time.time() * 1000))
        try:
            life = Life(self._worker, self._number, self._run_dir)
        except (OSError, zmq.ZMQError) as failure:
            return UnavailableError(f"{self._worker}: no sockets for its engine process: {failure}"), "exit"
        self._has_drained = False
        error: BiremeError | None = None
        verdict: Verdict | None = None
        try:
            verdict = self._serve(life)
        except BiremeError as refusal:
            error = refusal
        except Exception as failure:
            self._logger.exception("life_failed worker=%s life=%d", self._worker, life.number)
            error = UnavailableError(f"{self._worker}: its supervisor failed: {to_message(failure)}")
        work = b"" if is_stopped(life.pid) else life.work.read()  # a stopped one would have gone on with its work
        how = life.end()
        culprit = self._culprit(work, verdict, how)
        if self._stopping.is_set():
            error = UnavailableError(f"{self._worker} is stopping")
        elif self._has_drained:
            error = EngineLostError(f"{self._worker} was put to sleep")
        elif verdict is not None:
            is_unclear = culprit is None and verdict.still_s > self._config.stall_timeout_s
            kind = EngineStalledError if is_unclear else UnavailableError
            error = kind(f"the engine process of {self._worker} was killed: {verdict.text}")
        elif error is None and self._has_started.is_set():
            error = EngineLostError(f"the engine process of {self._worker} has ended ({how})")
        elif error is None:
            error = UnavailableError(
                f"the engine process of {self._worker} ended before it was ready ({how}); its messages stand in the"
                " log above; BIREME_ENGINE_PYTHON names the python it runs on"
            )
        cause = "sleep" if self._has_drained else verdict.cause if verdict else "exit"
        self._state = str(error)
        self._metrics.set("bireme_engine_up", 0)
        if culprit is not None:
            self._end_culprit(life, culprit, str(error))
        self._owner.on_end(life, error if isinstance(error, EngineLostError) else EngineLostError(str(error)))
        if not self._stopping.is_set() and cause != "sleep":
            self._logger.error(
                "engine_lost worker=%s life=%d cause=%s how=%s reason=%s", self._worker, life.number, cause, how, error
            )
        return error, cause

    def _culprit(self, work: bytes, verdict: Verdict | None, how: str) -> Culprit | None:
        """Return the request for whose sake the life has ended, if that can be told."""
        if verdict is not None:
            return culprit_of(work, verdict.still_s)
        return culprit_of(work, 0.0) if how in _CRASHES else None

    def _end_culprit(self, life: Life, culprit: Culprit, reason: str) -> None:
        """Answer the request at fault as the engine would have, before the others learn of the life's end."""
        self._logger.error("request_ended_engine worker=%s life=%d %s", self._worker, life.number, culprit)
        finish = Finish("error", Usage(), to_message(culprit.error(reason)))
        step = Step(life.number, 0, finished={culprit.number: finish})
        self._owner.on_frame(culprit.consumer, frame(culprit.consumer, encode(step)))

    def _serve(self, life: Life) -> Verdict | None:
        """Start the child and read its frames until it ends; from its hello on, ping it.

        Return None when it has exited, also because of `stop` or to sleep, or why it must be killed. Raises its
        hello's error, and UnavailableError when that takes too long.
        """
        entry = self._recipe.entry(self._worker)
        assert entry is not None
        transceiver = entry.engine_config.cache_transceiver_config
        transfer_timeout_s = transceiver.kv_transfer_timeout_ms / 1e3 if transceiver.backend else 0.0
        environment = engine_environment(self._recipe, self._worker, self._run_dir)
        standby, self._standby = self._standby, None
        child = life.spawn(find_python(environment), environment, standby)
        self._logger.info("engine_started worker=%s life=%d pid=%d", self._worker, life.number, child.pid)
        limit_s, interval_s = self._config.start_timeout_s, self._config.ping_interval_s
        heartbeat: Heartbeat | None = None
        pinged_at, count = 0.0, 0
        drained_by, drain_end = 0, 0.0  # the ping with which it was told to drain, to sleep afterwards
        while True:
            has_exited = child.has_exited  # before reading: its last message is read after its end
            for data in life.frames() if has_exited else life.frames(_FRAMES_A_TURN):
                if heartbeat is not None:
                    self._take(data, heartbeat)
                elif self._take_hello(life, data):
                    self._prepare_next(environment)
                    waits = partial(_waits_for_machine, child.pid)
                    heartbeat = Heartbeat(self._config, transfer_timeout_s, waits, self._stall_key)
            if has_exited:
                return None
            if self._stopping.is_set():
                break
            now = time.monotonic()
            if heartbeat is None:
                if run_folder.must_sleep(self._run_dir, self._worker):
                    self._has_drained = True
                    break
                if now - life.began_at > limit_s:
                    raise UnavailableError(
                        f"{self._worker} was not ready in supervisor.start_timeout_s = {limit_s:g} s"
                    )
                life.wait(interval_s)
                continue
            if now - pinged_at >= interval_s:
                pinged_at, count = now, count + 1
                self._look_after_standby()
                commands: list[Command] = [Ping(count)]
                if not drained_by and run_folder.must_sleep(self._run_dir, self._worker):
                    drained_by, drain_end = count, now + _SLEEP_DRAIN_S
                    commands.insert(0, Drain())
                    self._logger.info("engine_drains worker=%s life=%d", self._worker, life.number)
                with contextlib.suppress(UnavailableError):  # its socket is gone: its end, or its silence, comes next
                    life.send(frame(STUB, encode(Commands(life.number, commands))))
                if drained_by and (heartbeat.idle_ping > drained_by or now >= drain_end):
                    self._has_drained = True
                    break
                if (verdict := heartbeat.check()) is not None:
                    if verdict.cause == "stall":
                        child.signal(signal.SIGUSR1)  # it writes where
                        time.sleep(_STACKS_S)
                    return verdict
            life.wait(pinged_at + interval_s - time.monotonic())
        child.signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while not child.has_exited and time.monotonic() < deadline:
            life.wait(0.05)
            for data in life.frames():
                if heartbeat is not None:
                    self._take(data, heartbeat)
        return None

    def _prepare_next(self, environment: dict[str, str]) -> None:
        if not self._config.standby:
            return
        try:
            self._standby = Standby(self._worker, find_python(environment), environment)
        except OSError as error:  # the next life starts as the first one did
            self._logger.warning("no_standby worker=%s error=%s", self._worker, error)

    def _look_after_standby(self) -> None:
        if (standby := self._standby) is not None and standby.process.has_exited:
            self._standby = None
            self._logger.warning("standby_lost worker=%s pid=%d", self._worker, standby.process.pid)
            standby.end()

    def _take_hello(self, life: Life, data: bytes) -> bool:
        """Return whether the frame makes the life ready. Raises the child's error."""
        consumer, payload = split(data)
        try:
            message = decode_control(payload) if consumer == CONTROL else None
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigError(f"the engine process speaks another protocol: {error}") from error
        if not isinstance(message, Hello):
            return False
        if message.error:
            raise from_message(message.error)
        if message.version != VERSION or not (message.capacity or message.facts):
            raise ConfigError(
                f"the engine process speaks version {message.version}, this stub {VERSION};"
                " BIREME_ENGINE_PYTHON has another bireme installed"
            )
        load_s = time.monotonic() - life.began_at
        self._metrics.set("bireme_engine_up", 1)
        self._metrics.set("bireme_engine_load_seconds", load_s)
        self._owner.on_ready(life, message)
        self._logger.info("engine_ready worker=%s life=%d load_s=%.2f", self._worker, life.number, load_s)
        self._has_started.set()
        return True

    def _take(self, data: bytes, heartbeat: Heartbeat) -> None:
        heartbeat.on_frame()
        consumer, payload = split(data)
        try:
            if consumer != CONTROL:
                self._owner.on_frame(consumer, data)
                return
            message = decode_control(payload)
            if isinstance(message, Pong):
                heartbeat.on_pong(message)
                self._owner.on_pong(message)
        except Exception:
            self._logger.exception("frame_failed worker=%s consumer=%d bytes=%d", self._worker, consumer, len(data))

    def _plan_restart(self, reason: str) -> float | None:
        """Return the seconds until the next life; None: there is none."""
        config = self._config
        delay_s = self._backoff.next_s()
        if delay_s < math.inf:
            self._state = f"{self._worker} starts again in {delay_s:.1f} s ({reason})"
            return delay_s
        used = f"it was started again {config.max_restarts} times in {config.restart_window_s:g} s (last: {reason})"
        if not config.max_restarts or not config.slow_restart_s:
            self._give_up(used)
            return None
        self._state = f"{self._worker} starts again in {config.slow_restart_s:g} s (supervisor.slow_restart_s): {used}"
        self._logger.error(
            "engine_restarts_slowly worker=%s in_s=%g reason=%s", self._worker, config.slow_restart_s, used
        )
        return config.slow_restart_s

    def _give_up(self, reason: str) -> None:
        self._state = (
            f"{self._worker} stays down: {reason}; find the cause in the log,"
            f" then reload the model {self._worker} or restart the server"
        )
        self._logger.error("engine_down worker=%s reason=%s", self._worker, reason)
        self._owner.on_down(self._state)

    def _fail_start(self, error: BiremeError) -> None:
        if not self._has_started.is_set():
            is_told = isinstance(error, (ConfigError, UnavailableError))
            self._failure = error if is_told else UnavailableError(f"{self._worker}: {to_message(error)}")
            self._has_started.set()


def _waits_for_machine(engine: int) -> bool:
    """Return whether a thread of the engine or another one of this process, whose sockets carry pings, is held up."""
    try:
        return has_waiting_thread(engine) or has_waiting_thread(os.getpid(), but=threading.get_native_id())
    except OSError:  # no descriptor left, which says nothing of the engine
        return False


def restart_backoff(config: SupervisorConfig) -> Backoff:
    return Backoff(
        config.restart_backoff_s, _MAX_BACKOFF_S, limit=config.max_restarts, window_s=config.restart_window_s
    )
