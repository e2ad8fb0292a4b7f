"""The engine process's side of the socket: one IO thread between a supervisor and an engine.

The thread owns both sockets (`io_thread`) and the ledger. It answers pings at once, also during load and steps, checks
every command, and encodes the engine's output. No frame, however malformed, ends the process. Metrics of requests that
the engine takes are the engine's; refused ones are counted here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec

from bireme.engines.base import (
    EmbeddingEngine,
    Engine,
    EngineProgress,
    PictureEngine,
    PlainTokens,
    RequestKey,
    StepOutput,
)
from bireme.engines.child.columns import StepEncoder
from bireme.engines.child.io_thread import IoThread
from bireme.engines.child.ledger import Ledger
from bireme.engines.child.trials import Trials
from bireme.engines.child.validate import Gate
from bireme.errors import (
    BiremeError,
    DeadlineExceededError,
    RequestCancelledError,
    RequestError,
    UnavailableError,
    to_message,
)
from bireme.inbox import Inbox
from bireme.messages import (
    MALFORMED,
    STUB,
    VERSION,
    Abort,
    Command,
    Commands,
    Drop,
    Embed,
    Encode,
    Finish,
    Hello,
    Ping,
    Pong,
    Release,
    Submit,
    Usage,
    decode_commands,
    split,
)
from bireme.metrics import Registry, encode_delta
from bireme.own_work import OwnWork, Work

logger = logging.getLogger("bireme.engine")
MAX_NUMBER = (1 << 63) - 1
_IDLE = EngineProgress(0, 0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Service:
    """The parts that exist once the engine is ready."""

    engine: Engine
    gate: Gate

    @property
    def encoder(self) -> PictureEngine:
        """The engine, once the gate has found that it has the vision tower."""
        return cast(PictureEngine, self.engine)

    @property
    def embedder(self) -> EmbeddingEngine:
        """The engine, once the gate has found that it makes embeddings."""
        return cast(EmbeddingEngine, self.engine)


class EngineServer:
    """Start it first: pings are answered during the load. Then `open` or `fail`, then `close`."""

    def __init__(self, endpoint: str, life: int, metrics: Registry, own_work: OwnWork | None = None) -> None:
        self._own_work = own_work or OwnWork()
        self._trials = Trials(self._own_work)
        self._life = life
        self._metrics = metrics
        self._ledger = Ledger()
        self._encoder = StepEncoder(life, self._ledger, b"")
        self._service: _Service | None = None
        self.on_change: Callable[[], None] | None = None  # after a step or a submit; thread-safe, never blocks
        self._io = IoThread(endpoint, life, self._apply)
        self._outputs = Inbox[tuple[int, list[StepOutput], PlainTokens | None]](lambda: self._io.post(self._frames))

    def start(self) -> None:
        self._io.start()

    def emit(self, step: int, deltas: list[StepOutput], plain: PlainTokens | None = None) -> None:
        """Thread-safe, never blocks."""
        self._outputs.put((step, deltas, plain))
        if self.on_change is not None:
            self.on_change()

    def open(self, engine: Engine, gate: Gate) -> None:
        """Say hello: from now on submits reach the engine."""
        self._encoder = StepEncoder(self._life, self._ledger, gate.key, gate.worker)
        self._service = _Service(engine, gate)
        self._io.send(Hello(VERSION, self._life, gate.capacity))

    def fail(self, error: str) -> None:
        self._io.send(Hello(VERSION, self._life, error=error))

    def close(self) -> None:
        self._io.close()

    def _frames(self) -> Sequence[bytes]:
        """On the IO thread."""
        for number, deltas, plain in self._outputs.drain():
            if self._trials.tried is not None:
                self._trials.see(deltas, plain)
            try:
                self._encoder.add(number, deltas, plain)
            except Exception:
                logger.exception("step_not_encoded step=%d", number)
        try:
            return self._encoder.take()
        except Exception:
            logger.exception("steps_not_encoded")
            return ()

    def _apply(self, data: bytes) -> None:
        if len(data) < 4:
            logger.warning("command_malformed bytes=%d reason=%s", len(data), "shorter than a consumer number")
            return
        consumer, payload = split(data)
        try:
            batch = decode_commands(payload)
        except MALFORMED as error:
            logger.warning("command_malformed consumer=%d bytes=%d reason=%s", consumer, len(data), error)
            batch = self._salvage(consumer, payload)
        for command in batch.commands:
            self._handle(consumer, batch.life, command)

    def _salvage(self, consumer: int, payload: memoryview) -> Commands:
        """Refuse those whose number can be read."""
        try:
            life, items = msgspec.msgpack.decode(payload)
            batch = Commands(msgspec.convert(life, int), [])
            for item in msgspec.convert(items, list[Any]):
                if (command := self._salvage_one(consumer, item)) is not None:
                    batch.commands.append(command)
            return batch
        except (TypeError, *MALFORMED):
            return Commands(self._life, [])

    def _salvage_one(self, consumer: int, item: Any) -> Command | None:
        try:
            command: Command = msgspec.convert(item, Command)
            return command
        except msgspec.ValidationError as error:
            match item:
                case ["s" | "e" | "b", int(number), *_]:
                    self._refuse((consumer, number), RequestError(f"malformed submit: {error}"))
            return None

    def _handle(self, consumer: int, life: int, command: Command) -> None:
        if isinstance(command, Submit) and command.request.sampling.logits_processors:
            with self._own_work.mark((consumer, command.number), Work.PROCESSORS):  # it makes them
                self._submit(consumer, life, command)
        elif isinstance(command, (Submit, Encode, Embed)):
            self._submit(consumer, life, command)
        elif isinstance(command, Ping):
            if consumer == STUB:
                self._pong(command.number)
        elif self._service and life == self._life:  # another life's requests are gone already
            self._control(self._service, consumer, command)

    def _control(self, service: _Service, consumer: int, command: Command) -> None:
        if isinstance(command, Abort):  # also after the end: an exported lease is freed this way
            self._abort(service, (consumer, command.number))
        elif isinstance(command, Release):
            self._release(service, command)
        elif isinstance(command, Drop):
            self._drop(consumer)
        elif consumer == STUB:
            service.engine.drain()

    def _submit(self, consumer: int, life: int, command: Submit | Encode | Embed) -> None:
        key, digest, is_canary = (consumer, command.number), "", False
        try:
            service = self._check_service(life)
            self._check_number(key)
            if isinstance(command, Encode):
                service.gate.check_encode(command.request.timeout_ms)
                start = partial(service.encoder.encode, key, command.request)
            elif isinstance(command, Embed):
                start = partial(service.embedder.embed, key, service.gate.admit_texts(command.request))
            else:
                admitted = service.gate.admit(command.request)
                start, digest = partial(service.engine.submit, key, admitted), admitted.digest
                is_canary = admitted.is_canary
        except BiremeError as error:
            self._refuse(key, error)
            return
        self._ledger.enter(key, digest)
        if isinstance(command, Submit) and command.request.was_in_stall:
            self._trials.add(key, partial(self._start, key, start))
        else:
            self._start(key, start, is_canary)

    def _start(self, key: RequestKey, start: Callable[[], None], is_canary: bool = False) -> bool:
        """Return whether the engine has taken it; else it is refused."""
        try:
            start()
        except Exception as error:
            if not isinstance(error, BiremeError):
                logger.exception("submit_failed consumer=%d number=%d", *key)
            self._ledger.leave(key)
            self._refuse(key, error, is_canary)
        if self.on_change is not None:
            self.on_change()
        return self._ledger.get(key) is not None

    def _abort(self, service: _Service, key: RequestKey) -> None:
        if not self._trials.remove(key):
            service.engine.abort(key)
            return
        record = self._ledger.get(key)
        self._ledger.leave(key)
        if record is not None and not record.is_discarded:
            self._refuse(key, RequestCancelledError("the request was aborted"))

    def _release(self, service: _Service, command: Release) -> None:
        try:
            service.gate.check_encode()
        except RequestError as error:
            logger.warning("release_refused error=%s", error)
        else:
            service.encoder.release(command.handles)

    def _check_service(self, life: int) -> _Service:
        if self._service is None:
            raise UnavailableError("the engine is still loading; try again")
        if life != self._life:
            raise UnavailableError(f"engine life {life} has ended, this is life {self._life}; submit again")
        return self._service

    def _check_number(self, key: RequestKey) -> None:
        """A number that is used twice ends both requests: output of one must never reach the other's reader."""
        if not 0 < key[1] <= MAX_NUMBER:
            raise RequestError(f"number: {key[1]}; 1 to {MAX_NUMBER}")
        record = self._ledger.get(key)
        if record is None:
            return
        record.is_discarded = True
        assert self._service is not None
        self._abort(self._service, key)
        logger.warning("number_reused consumer=%d number=%d", *key)
        raise RequestError(f"number: {key[1]} is in flight; both requests end, use each number once")

    def _refuse(self, key: RequestKey, error: BaseException, is_canary: bool = False) -> None:
        finish = Finish(reason_of(error), Usage(), to_message(error))
        self._metrics.count_end(finish.error.partition(":")[0], is_canary=is_canary)
        self._io.post(self._encoder.refusal(*key, finish))

    def _drop(self, consumer: int) -> None:
        keys = self._ledger.of_consumer(consumer)
        for key in keys:
            record = self._ledger.get(key)
            if record is not None and self._service is not None:
                record.is_discarded = True
                self._abort(self._service, key)
        if keys:  # else an ordinary close
            logger.info("consumer_dropped consumer=%d requests=%d", consumer, len(keys))

    def _pong(self, number: int) -> None:
        progress = self._service.engine.progress() if self._service else _IDLE
        began = progress.step_began_at
        self._metrics.set("bireme_requests_waiting", progress.num_waiting)
        self._metrics.set("bireme_requests_running", progress.num_running)
        self._io.send(
            Pong(
                number,
                self._life,
                progress.step,
                max(0.0, time.monotonic() - began) * 1e3 if began else 0.0,
                progress.num_waiting,
                progress.num_running,
                encode_delta(self._metrics.take_delta()),
            )
        )


def reason_of(error: BaseException) -> Any:
    if isinstance(error, DeadlineExceededError):
        return "timeout"
    return "cancelled" if isinstance(error, RequestCancelledError) else "error"
