"""The consumer's side of the token bus: one subscription a decode worker, whatever the number of requests.

A `Session` is one gRPC stream with one subscription, for one life of the worker's engine. A `Bus` keeps a worker's
current session, from the first request to a second after the last (Triton does not exit while a stream is open). Triton
2.51 keeps a kilobyte of every response until its request ends; so after RENEW_AFTER responses new requests get a new
session.

What can end a session, and what its requests get (`cancelled` where they were aborted before):
    refused, never opened      UNAVAILABLE, as never sent: the caller may try again at no cost
    server not reachable       UnreachableError, naming BIREME_GRPC
    Step(lost), stream broken  EngineLostError for all that were sent, EngineStalledError where the step says so
    subscription unknown       (the stub closed it) silent requests go to a new session once, others are lost
    silent for stall_timeout   EngineLostError; the stub answers keepalives
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from bireme.canary_mark import is_canary
from bireme.errors import (
    BiremeError,
    EngineLostError,
    EngineStalledError,
    NotFoundError,
    UnavailableError,
    drop_frames,
    parse_error,
    to_message,
)
from bireme.messages import (
    VERSION,
    Abort,
    Capacity,
    Command,
    Commands,
    Encode,
    EncodeRequest,
    EngineRequest,
    Finish,
    Release,
    Sink,
    Step,
    Submit,
    Usage,
    Welcome,
    deliver,
    encode,
    start_command,
    unpack_bus,
)
from bireme.metrics import Registry
from bireme.types import Array
from bireme.workers.grpc import GrpcChannel, infer_request, leave, rpc_error

logger = logging.getLogger("bireme.bus")
IDLE_S = 1.0  # without requests for so long, a session closes
NEWS_S = 0.5  # without a sign of the worker for so long, it is asked whether its host still answers
KEEPALIVE_S = 3.0  # the longest silence of this side
LOST_STALL_S = 5.0  # pipeline.stall_timeout_s of a worker that discovery has lost
OPEN_TIMEOUT_S = 10.0  # from the first byte to Welcome
LEAVE_S = 1.0  # for each step of an orderly end
RENEW_AFTER = 1000  # responses of one subscription: a megabyte in the server, 5 s at 5 ms a step
_MAX_BATCH_BYTES = 4 << 20  # prompts in one message, one prompt at least


class BusRequest:
    """workers.base.Generation."""

    __slots__ = (
        "failure",
        "tokens_at",
        "is_aborted",
        "is_replaced",
        "number",
        "request",
        "session",
        "sink",
        "was_sent",
    )

    session: Session

    def __init__(self, request: EngineRequest | EncodeRequest, sink: Sink) -> None:
        self.request, self.sink = request, sink
        self.number = 0
        self.was_sent = False
        self.is_aborted = False  # its Abort is on its way
        self.is_replaced = False  # it was passed on to a second session
        self.tokens_at = 0.0  # 0: no tokens have come, so that it can be sent again unseen
        self.failure: BiremeError | None = None

    def abort(self) -> None:
        self.session.abort(self)

    def fail(self, error: BiremeError) -> None:
        self.failure = error
        self.sink.finish(Finish("error", Usage(), error=to_message(error)))


class Bus:
    """The connection to one decode worker."""

    def __init__(
        self, worker: str, channel: GrpcChannel, stall_timeout_s: float, metrics: Registry | None, model: str = ""
    ) -> None:
        """`model`: on the worker's server, if it has another name."""
        self.worker, self.channel, self.metrics, self.model = worker, channel, metrics, model or worker
        self.capacity: Capacity | None = None  # of the last life that was seen
        self.is_lost = False  # discovery no longer has it: its server is gone, or can't reach discovery
        self._stall_timeout_s = stall_timeout_s
        self._session: Session | None = None  # takes new requests
        self._closing: set[Session] = set()

    @property
    def stall_timeout_s(self) -> float:
        """How long a stub may be silent; a lost one's host may be gone."""
        return min(LOST_STALL_S, self._stall_timeout_s) if self.is_lost else self._stall_timeout_s

    @property
    def is_idle(self) -> bool:
        return self._session is None and not self._closing

    def submit(self, request: EngineRequest | EncodeRequest, sink: Sink) -> BusRequest:
        submitted = BusRequest(request, sink)
        self.session().submit(submitted)
        return submitted

    def release(self, handles: tuple[str, ...]) -> None:
        self.session().send_later(Release(handles))

    def session(self) -> Session:
        """Return the session for new requests, opened if there is none."""
        if self._session is None:
            self._session = Session(self)
        return self._session

    async def check(self) -> None:
        """Return when the worker takes requests. Raises what a request would get."""
        if (error := await asyncio.shield(self.session().opened)) is not None:
            raise error

    @property
    def awaits_news(self) -> bool:
        """Whether requests wait, and the worker has been silent for NEWS_S."""
        return any(session.awaits_news for session in self._sessions())

    def lose_waiting(self, error: EngineLostError) -> None:
        """Fail the requests without a token; streams may go on."""
        for session in self._sessions():
            session.lose_waiting(error)

    def lose(self, error: EngineLostError) -> None:
        for session in self._sessions():
            session.lose(error)

    def _sessions(self) -> list[Session]:
        return [*filter(None, (self._session,)), *self._closing]

    def retire(self, session: Session) -> None:
        """The session takes no new requests."""
        if self._session is session:
            self._session = None
        self._closing.add(session)

    def ended(self, session: Session) -> None:
        self._closing.discard(session)

    async def close(self) -> None:
        """End all requests with UNAVAILABLE."""
        for session in self._sessions():
            session.shut()
        sessions = list(self._closing)
        if sessions:
            await asyncio.wait([session.task for session in sessions], timeout=3.0)


class Session:
    """One subscription."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._requests: dict[int, BusRequest] = {}  # by number
        self._sinks: dict[int, Sink] = {}  # theirs
        self._numbers = 0
        self._outbox: list[Command] = []
        self._wake = asyncio.Event()
        self._welcome: Welcome | None = None
        self._call: Any = None
        self._is_open = True  # takes commands
        self.opened: asyncio.Future[BiremeError | None] = asyncio.get_running_loop().create_future()
        self._num_responses = 0
        self._interval_s = min(IDLE_S / 2, bus.stall_timeout_s / 4)
        self._sent_at = self._received_at = self._busy_at = self._tokens_at = time.monotonic()
        self._latest: list[int] = []  # requests of the last tokens, which came at _tokens_at
        self._latest_set: set[int] = set()
        self._canaries: set[int] = set()  # numbers of those under way, whose gaps are not counted
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"bus-{bus.worker}")

    def submit(self, request: BusRequest) -> None:
        self._numbers += 1
        request.number, request.session = self._numbers, self
        self._requests[request.number], self._sinks[request.number] = request, request.sink
        if isinstance(request.request, EngineRequest) and is_canary(request.request.options.cache_salt):
            self._canaries.add(request.number)
        self.send_later(start_command(request.number, request.request))

    def abort(self, request: BusRequest) -> None:
        """Harmless after its end."""
        if request.number not in self._sinks:
            return
        if request.was_sent:
            request.is_aborted = True
            self.send_later(Abort(request.number))
            return
        self._forget(request.number)
        self._outbox = [command for command in self._outbox if getattr(command, "number", 0) != request.number]
        request.sink.finish(Finish("cancelled", Usage()))

    def shut(self) -> None:
        """Fail everything; for the end of the process."""
        self._end(UnavailableError(f"{self._bus.worker}: this process is shutting down; try again"))

    @property
    def awaits_news(self) -> bool:
        return bool(self._requests) and time.monotonic() - self._received_at > NEWS_S

    def lose_waiting(self, error: EngineLostError) -> None:
        """What was sent is aborted, too."""
        for number, request in [(n, request) for n, request in self._requests.items() if not request.tokens_at]:
            self._forget(number)
            if request.was_sent:
                self.send_later(Abort(number))
            _lose(request, error)
        self._outbox = [command for command in self._outbox if not isinstance(command, Submit | Encode)]

    def lose(self, error: EngineLostError) -> None:
        self._end(error)
        if self._call is not None:
            self._call.cancel()

    def send_later(self, command: Command) -> None:
        self._outbox.append(command)
        self._wake.set()

    def _forget(self, number: int) -> BusRequest | None:
        self._sinks.pop(number, None)
        self._canaries.discard(number)
        return self._requests.pop(number, None)

    async def _run(self) -> None:
        """Remaining requests get the error that ended it."""
        error: BiremeError = EngineLostError(f"{self._bus.worker}: the token bus was closed")
        tasks: list[asyncio.Future[None]] = []
        try:
            if (refusal := await self._subscribe()) is not None:
                error = refusal
                return
            tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = self._reason(done)
            self._end(error)
            await self._unsubscribe(*tasks)
        except asyncio.CancelledError:
            raise
        except Exception as wrong:
            logger.exception("bus_failed worker=%s", self._bus.worker)
            error = BiremeError(f"token bus of {self._bus.worker}: {type(wrong).__name__}: {wrong}")
        finally:
            self._end(error)
            drop_frames(error)
            for task in tasks:  # a running read or write ends the stream as well
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._call is not None:
                self._call.cancel()  # does nothing to a stream that has been left in good order
            self._bus.ended(self)

    async def _subscribe(self) -> BiremeError | None:
        """Return the error if that fails."""
        import grpc

        async def subscribe() -> None:
            await self._send(subscribe=b"open")
            while self._welcome is None:
                if not await self._receive():
                    raise UnavailableError(f"{self._bus.worker}: the stream ended before the subscription; try again")

        try:
            self._call = self._bus.channel.stream()
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await subscribe()
        except TimeoutError:
            return UnavailableError(f"{self._bus.worker}: no answer in {OPEN_TIMEOUT_S:g} s; its stub stands still")
        except grpc.aio.AioRpcError as error:
            drop_frames(error)
            return rpc_error(error, self._bus.channel.address)
        except BiremeError as error:
            self._end(error)
            await leave(self._call, LEAVE_S)
            return error
        return None

    async def _unsubscribe(self, reader: asyncio.Future[None], writer: asyncio.Future[None]) -> None:
        """If the stub answers, the server then ends the stream."""
        import grpc

        await asyncio.wait({writer}, timeout=LEAVE_S)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._send(subscribe=b"close")
            await self._call.done_writing()
            await asyncio.wait({reader}, timeout=LEAVE_S)
            if reader.done():
                await leave(self._call, LEAVE_S)

    def _reason(self, done: Iterable[asyncio.Future[None]]) -> BiremeError:
        import grpc

        for future in done:
            error = None if future.cancelled() else future.exception()
            if isinstance(error, (EngineLostError, NotFoundError)):
                return error
            if isinstance(error, BiremeError):
                return EngineLostError(f"{self._bus.worker}: {error}")
            if isinstance(error, (grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                return EngineLostError(f"{self._bus.worker}: the connection to {self._bus.channel.address} broke")
            if error is not None:
                raise error
        return EngineLostError(f"{self._bus.worker}: the token bus was closed")

    def _end(self, error: BiremeError) -> None:
        """Fail the remaining requests, or pass them to a new session."""
        self._is_open = False
        self._wake.set()  # so that the writer ends
        self._bus.retire(self)
        if not self.opened.done():
            self.opened.set_result(error)
        requests, self._requests, self._sinks = self._requests, {}, {}
        for request in requests.values():
            if request.is_aborted:  # no engine will say any more that it has ended
                request.sink.finish(Finish("cancelled", Usage()))
            elif isinstance(error, NotFoundError) and not (request.tokens_at or request.is_replaced):
                request.is_replaced = True  # once is enough
                request.was_sent = False
                self._bus.session().submit(request)
            elif isinstance(error, EngineLostError):
                _lose(request, error)
            else:
                request.fail(EngineLostError(str(error)) if isinstance(error, NotFoundError) else error)

    async def _write(self) -> None:
        """Send what waits; return after IDLE_S without any."""
        checked_at = time.monotonic()
        while self._is_open:
            if time.monotonic() - checked_at > self._interval_s:
                checked_at = time.monotonic()
                await self._check_signs()
            elif self._outbox:
                commands = self._next_batch()
                for command in commands:
                    if isinstance(command, (Submit, Encode)) and command.number in self._requests:
                        self._requests[command.number].was_sent = True
                assert self._welcome is not None
                self._sent_at = self._busy_at = time.monotonic()
                await self._send(commands=np.frombuffer(encode(Commands(self._welcome.life, commands)), np.uint8))
            else:
                self._wake.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._wake.wait()

    def _next_batch(self) -> list[Command]:
        """Big prompts go in several messages."""
        num_bytes = 0
        for at, command in enumerate(self._outbox):
            num_bytes += len(command.request.prompt) if isinstance(command, Submit) else 0
            if num_bytes > _MAX_BATCH_BYTES and at:
                commands, self._outbox = self._outbox[:at], self._outbox[at:]
                return commands
        commands, self._outbox = self._outbox, []
        return commands

    async def _check_signs(self) -> None:
        """Close when idle, give up a silent stub, send `keep`."""
        now = time.monotonic()
        if self._requests:
            self._busy_at = now
            if now - self._received_at > self._bus.stall_timeout_s:
                limit = "discovery has lost it" if self._bus.is_lost else "that is more than pipeline.stall_timeout_s"
                raise EngineLostError(f"{self._bus.worker}: no news for {now - self._received_at:.1f} s; {limit}")
            if now - self._sent_at >= min(KEEPALIVE_S, self._bus.stall_timeout_s / 4):
                self._sent_at = now
                await self._send(subscribe=b"keep")
        elif now - self._busy_at >= IDLE_S:
            self._is_open = False
            self._bus.retire(self)

    async def _send(self, **tensors: bytes | Array) -> None:
        if self._welcome is not None:
            tensors["consumer"] = self._welcome.consumer.encode()
        await self._call.write(infer_request(self._bus.model, tensors))

    async def _read(self) -> None:
        while await self._receive():
            pass

    async def _receive(self) -> bool:
        """Take one response; false at the stream's end. Raises the error in it."""
        import grpc

        response = await self._call.read()
        if response is grpc.aio.EOF:
            return False
        if response.error_message:
            raise parse_error(response.error_message)
        self._received_at = time.monotonic()
        steps: list[Step] = []
        for item in unpack_bus(response.infer_response.raw_output_contents[0]):
            if isinstance(item, Step):
                steps.append(item)
            else:
                self._on_welcome(item)
        self._on_steps(steps)
        self._num_responses += 1
        if self._num_responses == RENEW_AFTER and self._is_open:
            self._bus.retire(self)  # it goes on with the requests that it has
            self._bus.session()
        return True

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.version != VERSION:
            raise UnavailableError(
                f"{self._bus.worker}: speaks version {welcome.version} of the token bus, this process {VERSION};"
                " run the same build on both sides"
            )
        self._welcome, self._bus.capacity = welcome, welcome.capacity
        if not self.opened.done():
            self.opened.set_result(None)

    def _on_steps(self, steps: list[Step]) -> None:
        self._note_gaps(steps)
        for step in steps:
            deliver(step, self._sinks, self._sink_failed)
            for number in step.finished:
                self._forget(number)
            if step.lost:
                kind = EngineStalledError if step.has_stalled else EngineLostError
                raise kind(f"{self._bus.worker}: its engine died or was restarted with the request in flight")

    def _note_gaps(self, steps: list[Step]) -> None:
        """Streams of one delivery share the time since their last tokens."""
        now, before = self._received_at, self._tokens_at
        latest = steps[0].requests if len(steps) == 1 else [number for step in steps for number in step.requests]
        if self._canaries:
            latest = [number for number in latest if number not in self._canaries]
        if not latest:
            return
        num_same = len(self._latest_set) if latest == self._latest else self._note_change(latest)
        self._tokens_at = now
        if num_same:
            self._observe_gap(now - before, num_same)

    def _note_change(self, latest: list[int]) -> int:
        """Return how many streams were in the last delivery, too."""
        now, before = set(latest), self._latest_set
        for number in now ^ before:
            if (request := self._requests.get(number)) is None:
                continue
            if number in before:
                request.tokens_at = self._tokens_at
                continue
            if request.tokens_at:
                self._observe_gap(self._received_at - request.tokens_at)
            request.tokens_at = self._received_at
        self._latest, self._latest_set = latest, now
        return len(now & before)

    def _observe_gap(self, seconds: float, num_streams: int = 1) -> None:
        if self._bus.metrics is not None:
            self._bus.metrics.observe("bireme_inter_token_latency_seconds", seconds, times=num_streams)

    def _sink_failed(self, number: int, error: Exception) -> None:
        """A failing consumer must not end the others."""
        logger.error("sink_failed worker=%s", self._bus.worker, exc_info=error)
        if (request := self._forget(number)) is not None:
            self.send_later(Abort(number))
            request.fail(BiremeError(f"{type(error).__name__}: {error}"))


def _lose(request: BusRequest, error: EngineLostError) -> None:
    """One that was not sent has lost nothing."""
    request.fail(error if request.was_sent else UnavailableError(str(error)))
