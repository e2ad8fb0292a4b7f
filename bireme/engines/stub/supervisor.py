"""Starts an engine process, watches it, and starts it again: one permanent thread.

    idle -> starting -> ready -> (the child ends, hangs or stalls) -> idle -> starting again, slowly or not at all
                                                                              after too many
                              -> draining, when it is to sleep -> stopping -> idle -> asleep -> idle ...

The thread forks every child, reads its frames, pings it, and calls the owner back. A first start that fails is not
tried again: the caller of `start` gets the reason.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
import signal
import threading
import time
from dataclasses import dataclass
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
_LAST_WORD_S = 0.5  # for the reason of one that could not start
_MAX_BACKOFF_S = 10.0
_STOP_S = 5.0  # from SIGTERM to SIGKILL
_CRASHES = {f"signal {name}" for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")}  # of its own making
_SLEEP_LOOK_S = 0.1
_SLEEP_DRAIN_S = 30.0  # for what runs when the engine is to sleep; then it is moved by those who asked


class _Phase(enum.Enum):
    """What the engine is at; `_NEXT` says what may follow."""

    IDLE = "idle"  # no life: before the first and between two
    ASLEEP = "asleep"  # no life as long as somebody wants none
    STARTING = "starting"  # it has not said hello
    READY = "ready"  # it serves and is pinged
    DRAINING = "draining"  # it takes nothing new, and sleeps once nothing runs
    STOPPING = "stopping"  # it has SIGTERM and _STOP_S to end


_NEXT = {
    _Phase.IDLE: (_Phase.ASLEEP, _Phase.STARTING),
    _Phase.ASLEEP: (_Phase.IDLE,),
    _Phase.STARTING: (_Phase.READY, _Phase.STOPPING, _Phase.IDLE),
    _Phase.READY: (_Phase.DRAINING, _Phase.STOPPING, _Phase.IDLE),
    _Phase.DRAINING: (_Phase.STOPPING, _Phase.IDLE),
    _Phase.STOPPING: (_Phase.IDLE,),
}


@dataclass(slots=True)
class _Watch:
    """A life under watch, and why it must end."""

    life: Life
    heartbeat: Heartbeat
    due_at: float = 0.0  # when its phase has something to do, besides reading frames
    num_pings: int = 0
    drain_ping: int = 0  # with which it was told to drain
    drain_end: float = 0.0
    cause: str = "exit"  # exit, sleep, hang or stall
    verdict: Verdict | None = None
    refusal: BiremeError | None = None  # it never served, or this thread could not go on with it


class Owner(Protocol):
    """Called on the supervisor's thread."""

    def on_ready(self, life: Life, hello: Hello) -> None: ...

    def on_frame(self, consumer: int, data: bytes) -> None: ...

    def on_pong(self, pong: Pong) -> None: ...

    def on_end(self, life: Life, error: EngineLostError) -> None:
        """Fail its open requests. Called once a life, also before it was ready."""

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
        entry = recipe.entry(worker)
        assert entry is not None
        transceiver = entry.engine_config.cache_transceiver_config
        self._transfer_timeout_s = transceiver.kv_transfer_timeout_ms / 1e3 if transceiver.backend else 0.0
        self._number = 0
        self._phase = _Phase.IDLE
        self._standby: Standby | None = None
        self._stopping = threading.Event()
        self._has_started = threading.Event()  # ready for the first time, or failed
        self._failure: BiremeError | None = None
        self._state = f"{worker} has not been started"  # why no life is ready, for the text of a refusal
        self._thread = threading.Thread(target=self._run, name=f"engine-{worker}", daemon=True)

    @property
    def state(self) -> str:
        return self._state

    def start(self) -> None:
        """Wait until it is ready. Raises ConfigError or UnavailableError with its reason."""
        self._metrics.set("bireme_engine_up", 0)
        self._metrics.set("bireme_engine_asleep", 0)
        for cause in ("exit", "hang", "stall"):
            self._metrics.start("bireme_engine_restarts_total", labels=(cause,))
        self._thread.start()
        self._has_started.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Harmless after a failed start or when called again."""
        self._stopping.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S + 5)

    def _run(self) -> None:
        """Until `stop`, a failed first start, or too many."""
        try:
            while not self._stopping.is_set():
                if run_folder.must_sleep(self._run_dir, self._worker):
                    self._sleep()
                    continue
                error, cause = self._run_life()
                if cause == "sleep":
                    continue
                if self._stopping.is_set() or not self._has_started.is_set():
                    self._fail_start(error)
                    return
                if not self._stopping.wait(self._plan_restart(str(error))):
                    self._metrics.add("bireme_engine_restarts_total", 1, cause)
            self._fail_start(UnavailableError(f"{self._worker} is stopping"))  # where it was to sleep at first
        except Exception as error:
            self._logger.exception("supervisor_failed worker=%s", self._worker)
            self._give_up(f"its supervisor failed: {error}")
            self._fail_start(UnavailableError(f"{self._worker}: {to_message(error)}"))
        finally:
            if self._standby is not None:
                self._standby.end()

    def _move(self, to: _Phase) -> None:
        assert to in _NEXT[self._phase], f"from {self._phase.value} to {to.value}"
        self._phase = to

    def _sleep(self) -> None:
        began = time.monotonic()
        self._move(_Phase.ASLEEP)
        self._state = f"{self._worker} is asleep; `python tools/sleep.py {self._worker} --wake` wakes it"
        self._logger.info("engine_asleep worker=%s", self._worker)
        self._metrics.set("bireme_engine_asleep", 1)
        self._has_started.set()
        while run_folder.must_sleep(self._run_dir, self._worker) and not self._stopping.wait(_SLEEP_LOOK_S):
            pass
        self._move(_Phase.IDLE)
        self._metrics.set("bireme_engine_asleep", 0)
        self._logger.info("engine_woken worker=%s slept_s=%.0f", self._worker, time.monotonic() - began)

    def _run_life(self) -> tuple[BiremeError, str]:
        """From its sockets to their removal; return its error, which the owner knows then, and cause."""
        self._state = f"{self._worker} is starting" + (" again" if self._number else "")
        # Lives are numbered by the clock (ms), so that a restarted stub never repeats a number.
        self._number = max(self._number + 1, int(time.time() * 1000))
        try:
            life = Life(self._worker, self._number, self._run_dir)
        except (OSError, zmq.ZMQError) as failure:
            return UnavailableError(f"{self._worker}: no sockets for its engine process: {failure}"), "exit"
        waits = partial(_waits_for_machine, life)
        watch = _Watch(life, Heartbeat(self._config, self._transfer_timeout_s, waits, self._stall_key))
        self._move(_Phase.STARTING)
        try:
            self._serve(watch)
        except BiremeError as refusal:
            watch.refusal = refusal
        except Exception as failure:
            self._logger.exception("life_failed worker=%s life=%d", self._worker, life.number)
            watch.refusal = UnavailableError(f"{self._worker}: its supervisor failed: {to_message(failure)}")
        self._move(_Phase.IDLE)
        work = b"" if is_stopped(life.pid) else life.work.read()  # a stopped one would have gone on with its work
        how, verdict = life.end(), watch.verdict
        culprit = culprit_of(work, verdict.still_s if verdict else 0.0) if verdict or how in _CRASHES else None
        error = self._ended(watch, how, culprit)
        self._state = str(error)
        self._metrics.set("bireme_engine_up", 0)
        if culprit is not None:
            self._end_culprit(life, culprit, str(error))
        self._owner.on_end(life, error if isinstance(error, EngineLostError) else EngineLostError(str(error)))
        if not self._stopping.is_set() and watch.cause != "sleep":
            text = "engine_lost worker=%s life=%d cause=%s how=%s reason=%s"
            self._logger.error(text, self._worker, life.number, watch.cause, how, error)
        return error, watch.cause

    def _ended(self, watch: _Watch, how: str, culprit: Culprit | None) -> BiremeError:
        """`how`: its process has ended, for the text."""
        if self._stopping.is_set():
            return UnavailableError(f"{self._worker} is stopping")
        if watch.cause == "sleep":
            return EngineLostError(f"{self._worker} was put to sleep")
        if (verdict := watch.verdict) is not None:
            is_unclear = culprit is None and verdict.still_s > self._config.stall_timeout_s
            kind = EngineStalledError if is_unclear else UnavailableError
            return kind(f"the engine process of {self._worker} was killed: {verdict.text}")
        if watch.refusal is not None:
            return watch.refusal
        if self._has_started.is_set():
            return EngineLostError(f"the engine process of {self._worker} has ended ({how})")
        return UnavailableError(
            f"the engine process of {self._worker} ended before it was ready ({how}); its messages stand in the"
            " log above; BIREME_ENGINE_PYTHON names the python it runs on"
        )

    def _end_culprit(self, life: Life, culprit: Culprit, reason: str) -> None:
        """As the engine would have, before the others learn of the life's end."""
        self._logger.error("request_ended_engine worker=%s life=%d %s", self._worker, life.number, culprit)
        finish = Finish("error", Usage(), to_message(culprit.error(reason)))
        step = Step(life.number, 0, finished={culprit.number: finish})
        self._owner.on_frame(culprit.consumer, frame(culprit.consumer, encode(step)))

    def _serve(self, watch: _Watch) -> None:
        """Until the child ends or must be killed. Raises its hello's error."""
        life = watch.life
        environment = engine_environment(self._recipe, self._worker, self._run_dir)
        standby, self._standby = self._standby, None
        child = life.spawn(find_python(environment), environment, standby)
        self._logger.info("engine_started worker=%s life=%d pid=%d", self._worker, life.number, child.pid)
        while watch.verdict is None:
            life.wait(watch.due_at - time.monotonic())
            has_exited = child.has_exited  # before reading: its last message is read after its end
            last_s = _LAST_WORD_S if self._phase is _Phase.STARTING else 0.0
            for data in life.last_frames(last_s) if has_exited else life.frames(_FRAMES_A_TURN):
                self._take(watch, data)
            if has_exited:
                return
            is_due = time.monotonic() >= watch.due_at
            if is_due and self._phase is _Phase.STOPPING:
                return
            if is_due:
                self._look(watch)
            if self._phase is not _Phase.STOPPING and (self._stopping.is_set() or watch.cause == "sleep"):
                self._move(_Phase.STOPPING)
                life.signal(signal.SIGTERM)  # it has time to end by itself; `Life.end` kills it afterwards
                watch.due_at = time.monotonic() + _STOP_S

    def _look(self, watch: _Watch) -> None:
        """Ping it, if it is ready. See whether it must end: it takes too long to start, hangs, or is to sleep and has
        drained.
        """
        life, now = watch.life, time.monotonic()
        watch.due_at = now + self._config.ping_interval_s
        must_sleep = run_folder.must_sleep(self._run_dir, self._worker)
        if self._phase is _Phase.STARTING:
            if must_sleep:
                watch.cause = "sleep"
            elif now - life.began_at > (limit_s := self._config.start_timeout_s):
                raise UnavailableError(f"{self._worker} was not ready in supervisor.start_timeout_s = {limit_s:g} s")
            return
        if (standby := self._standby) is not None and standby.process.has_exited:
            self._standby = None
            self._logger.warning("standby_lost worker=%s pid=%d", self._worker, standby.process.pid)
            standby.end()
        watch.num_pings += 1
        commands: list[Command] = [Ping(watch.num_pings)]
        if self._phase is _Phase.READY and must_sleep:
            self._move(_Phase.DRAINING)
            watch.drain_ping, watch.drain_end = watch.num_pings, now + _SLEEP_DRAIN_S
            commands.insert(0, Drain())
            self._logger.info("engine_drains worker=%s life=%d", self._worker, life.number)
        with contextlib.suppress(UnavailableError):  # its socket is gone: its end, or its silence, comes next
            life.send(frame(STUB, encode(Commands(life.number, commands))))
        if self._phase is _Phase.DRAINING and (watch.heartbeat.idle_ping > watch.drain_ping or now >= watch.drain_end):
            watch.cause = "sleep"
        elif (verdict := watch.heartbeat.check()) is not None:
            if verdict.cause == "stall":
                life.signal(signal.SIGUSR1)  # it writes where
                time.sleep(_STACKS_S)
            watch.cause, watch.verdict = verdict.cause, verdict

    def _take_hello(self, watch: _Watch, data: bytes) -> None:
        """Serve, if the frame is its hello. Raises the child's error."""
        life = watch.life
        consumer, payload = split(data)
        try:
            message = decode_control(payload) if consumer == CONTROL else None
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigError(f"the engine process speaks another protocol: {error}") from error
        if not isinstance(message, Hello):
            return
        if message.error:
            raise from_message(message.error)
        if message.version != VERSION or not (message.capacity or message.facts):
            raise ConfigError(
                f"the engine process speaks version {message.version}, this stub {VERSION};"
                " BIREME_ENGINE_PYTHON has another bireme installed"
            )
        self._move(_Phase.READY)
        load_s = time.monotonic() - life.began_at
        self._metrics.set("bireme_engine_up", 1)
        self._metrics.set("bireme_engine_load_seconds", load_s)
        self._owner.on_ready(life, message)
        self._logger.info("engine_ready worker=%s life=%d load_s=%.2f", self._worker, life.number, load_s)
        self._has_started.set()
        if self._config.standby:
            environment = engine_environment(self._recipe, self._worker, self._run_dir)
            try:
                self._standby = Standby(self._worker, find_python(environment), environment)
            except OSError as error:  # the next life starts as the first one did
                self._logger.warning("no_standby worker=%s error=%s", self._worker, error)
        watch.heartbeat.begin()
        watch.due_at = 0.0

    def _take(self, watch: _Watch, data: bytes) -> None:
        if self._phase is _Phase.STARTING:
            self._take_hello(watch, data)
            return
        watch.heartbeat.on_frame()
        consumer, payload = split(data)
        try:
            if consumer != CONTROL:
                self._owner.on_frame(consumer, data)
                return
            message = decode_control(payload)
            if isinstance(message, Pong):
                watch.heartbeat.on_pong(message)
                self._owner.on_pong(message)
        except Exception:
            self._logger.exception("frame_failed worker=%s consumer=%d bytes=%d", self._worker, consumer, len(data))

    def _plan_restart(self, reason: str) -> float | None:
        """None: there is no next life."""
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


def _waits_for_machine(life: Life) -> bool:
    """Whether a thread of the engine, or another one of this process, is held up, and with it pings."""
    try:
        return has_waiting_thread(life.pid) or has_waiting_thread(os.getpid(), but=threading.get_native_id())
    except OSError:  # no descriptor left, which says nothing of the engine
        return False


def restart_backoff(config: SupervisorConfig) -> Backoff:
    return Backoff(
        config.restart_backoff_s, _MAX_BACKOFF_S, limit=config.max_restarts, window_s=config.restart_window_s
    )
