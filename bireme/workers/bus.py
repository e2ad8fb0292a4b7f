"""The consumer's side of the token bus: one subscription a decode worker, whatever the number of requests.

A `Session` is one gRPC stream with one subscription, which lasts for one life of the worker's engine.
Commands that pile up while a write is under way go out together; whole engine steps come in and each
request's sink is called on the loop's thread. A `Bus` keeps the current session of one worker, opens it
with the first request and closes it a second after the last (Triton does not exit while a stream is open).
Triton 2.51 keeps about a kilobyte of every response until the request that it answers has ended, and a
subscription is such a request: after RENEW_AFTER responses new requests go to a new session, and the old
one closes with its last.

What can end a session, and what its requests get:
    refused, never opened      UNAVAILABLE, as never sent: the caller may try again at no cost (so do those that the
                               stub can't hand to its engine: their finish says so)
    server not reachable       UnreachableError, naming BIREME_GRPC
    Step(lost), stream broken  EngineLostError for all that were sent
    subscription unknown       (the stub closed it) silent requests go to a new session once, others are lost
    no news for stall_timeout  EngineLostError; the stub answers keepalives, so silence means that it is dead
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from bireme.errors import (
    BiremeError,
    EngineLostError,
    NotFoundError,
    UnavailableError,
    drop_frames,
    to_message,
)
from bireme.messages import (
    VERSION,
    Abort,
    Capacity,
    Commands,
    Drain,
    Drop,
    EngineRequest,
    Finish,
    Ping,
    Sink,
    Step,
    Submit,
    Usage,
    Welcome,
    encode,
    unpack_bus,
)
from bireme.metrics import Registry
from bireme.workers.channel import infer_request, leave, parse_error, rpc_error, stream_method

logger = logging.getLogger("bireme.bus")
IDLE_S = 1.0  # without requests for so long, a session closes
KEEPALIVE_S = 3.0  # the stub hears from us at least so often
OPEN_TIMEOUT_S = 10.0  # from the first byte to Welcome
LEAVE_S = 1.0  # for each step of an orderly end
RENEW_AFTER = 1000  # responses of one subscription: a megabyte in the server, 5 s at 5 ms a step
_MAX_BATCH_BYTES = 4 << 20  # prompts in one message, one prompt at least


class BusRequest:
    """One request on a bus; workers.base.Generation."""

    __slots__ = ("failure", "heard_at", "is_replaced", "number", "request", "session", "sink", "was_sent")

    def __init__(self, request: EngineRequest, sink: Sink) -> None:
        self.request, self.sink = request, sink
        self.number = 0
        self.session: Session | None = None  # None: it has ended
        self.was_sent = False
        self.is_replaced = False  # it was passed on to a second session
        self.heard_at = 0.0  # its last tokens came; 0: none yet, so that it can be sent again unseen
        self.failure: BiremeError | None = None

    def abort(self) -> None:
        if self.session is not None:
            self.session.abort(self)

    def fail(self, error: BiremeError) -> None:
        """End it from this side."""
        self.session, self.failure = None, error
        self.sink.finish(Finish("error", Usage(), error=to_message(error)))


class Bus:
    """The way to one decode worker."""

    def __init__(
        self, worker: str, address: str, channel: Callable[[], Any], stall_timeout_s: float, metrics: Registry | None
    ) -> None:
        self.worker, self.address, self.stall_timeout_s = worker, address, stall_timeout_s
        self._metrics = metrics
        self.channel = channel
        self.capacity: Capacity | None = None  # of the last life that was seen
        self._session: Session | None = None
        self._closing: set[Session] = set()

    def submit(self, request: EngineRequest, sink: Sink) -> BusRequest:
        ticket = BusRequest(request, sink)
        self.place(ticket)
        return ticket

    def place(self, ticket: BusRequest) -> None:
        if self._session is None:
            self._session = Session(self)
        self._session.submit(ticket)

    async def check(self) -> None:
        """Return when the worker takes requests. Raises what a request would be told, UNAVAILABLE as a rule."""
        if self._session is None:
            self._session = Session(self)
        if (error := await asyncio.shield(self._session.opened)) is not None:
            raise error

    def note_gap(self, seconds: float, num_streams: int = 1) -> None:
        """Count the time between two deliveries, of all streams at once for which it was the same."""
        if self._metrics is not None:
            self._metrics.observe("bireme_inter_token_latency_seconds", seconds, times=num_streams)

    def retire(self, session: Session) -> None:
        """The session takes no more requests."""
        if self._session is session:
            self._session = None
        self._closing.add(session)

    def renew(self, session: Session) -> None:
        """New requests go to a new session, opened now; this one goes on with those that it has."""
        if self._session is session:
            self._session = Session(self)
            self._closing.add(session)

    def ended(self, session: Session) -> None:
        self._closing.discard(session)

    async def close(self) -> None:
        """End all requests with UNAVAILABLE and close the subscription."""
        for session in filter(None, (self._session, *self._closing)):
            session.shut()
        sessions = list(self._closing)
        if sessions:
            await asyncio.wait([session.task for session in sessions], timeout=3.0)


class Session:
    """One subscription, from its opening to its end."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._tickets: dict[int, BusRequest] = {}
        self._numbers = 0
        self._outbox: list[Submit | Abort | Drop | Ping | Drain] = []
        self._wake = asyncio.Event()
        self._welcome: Welcome | None = None
        self._call: Any = None
        self._is_open = True  # takes commands
        self.opened: asyncio.Future[BiremeError | None] = asyncio.get_running_loop().create_future()
        self._num_responses = 0
        self._tick_s = min(IDLE_S / 2, bus.stall_timeout_s / 4)
        self._said_at = self._heard_at = self._heard_before = self._busy_at = time.monotonic()
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"bus-{bus.worker}")

    # Called by requests

    def submit(self, ticket: BusRequest) -> None:
        self._numbers += 1
        ticket.number, ticket.session = self._numbers, self
        self._tickets[ticket.number] = ticket
        self._outbox.append(Submit(ticket.number, ticket.request))
        self._wake.set()

    def abort(self, ticket: BusRequest) -> None:
        if not ticket.was_sent:
            self._tickets.pop(ticket.number, None)
            self._outbox = [command for command in self._outbox if getattr(command, "number", 0) != ticket.number]
            ticket.session = None
            ticket.sink.finish(Finish("cancelled", Usage()))
            return
        self._outbox.append(Abort(ticket.number))
        self._wake.set()

    def shut(self) -> None:
        """Fail everything and close; for the end of the process."""
        self._end(UnavailableError(f"{self._bus.worker}: this process is shutting down; try again"))
        self._wake.set()

    # The session's life

    async def _run(self) -> None:
        error: BiremeError = EngineLostError(f"{self._bus.worker}: the token bus was closed")
        try:
            error = await self._serve()
        except asyncio.CancelledError:
            raise
        except Exception as wrong:
            logger.exception("bus_failed worker=%s", self._bus.worker)
            error = BiremeError(f"token bus of {self._bus.worker}: {type(wrong).__name__}: {wrong}")
        finally:
            self._end(error)
            drop_frames(error)
            if self._call is not None:
                self._call.cancel()  # does nothing to a stream that has been left in good order
            self._bus.ended(self)

    async def _serve(self) -> BiremeError:
        """Open, work, close. Returns what the remaining requests are told."""
        import grpc

        try:
            self._call = stream_method(self._bus.channel())()
            await asyncio.wait_for(self._subscribe(), OPEN_TIMEOUT_S)
        except asyncio.TimeoutError:
            return UnavailableError(f"{self._bus.worker}: no answer in {OPEN_TIMEOUT_S:g} s; its stub stands still")
        except grpc.aio.AioRpcError as error:
            drop_frames(error)
            return rpc_error(error, self._bus.address)
        except BiremeError as error:
            self._end(error)
            await leave(self._call, LEAVE_S)
            return error
        reader = asyncio.ensure_future(self._read())
        writer = asyncio.ensure_future(self._write())
        try:
            done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            reason = self._outcome(done)
            self._end(reason)
            await self._unsubscribe(reader, writer)
            return reason
        finally:  # a read or write that is still under way takes the stream along
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _subscribe(self) -> None:
        await self._call.write(infer_request(self._bus.worker, {"subscribe": b"open"}))
        while self._welcome is None:
            if not await self._receive():
                raise UnavailableError(f"{self._bus.worker}: the stream ended before the subscription; try again")

    async def _read(self) -> BiremeError:
        while await self._receive():
            pass
        return EngineLostError(f"{self._bus.worker}: the token bus was closed by the server")

    async def _receive(self) -> bool:
        """Take one response off the stream; false at its end. Raises the error that it carries."""
        import grpc

        response = await self._call.read()
        if response is grpc.aio.EOF:
            return False
        if response.error_message:
            raise parse_error(response.error_message)
        self._heard_before, self._heard_at = self._heard_at, time.monotonic()
        for item in unpack_bus(response.infer_response.raw_output_contents[0]):
            if isinstance(item, Step):
                self._take(item)
            else:
                self._greet(item)
        self._num_responses += 1
        if self._num_responses == RENEW_AFTER:
            self._bus.renew(self)
        return True

    def _greet(self, welcome: Welcome) -> None:
        if welcome.version != VERSION:
            raise UnavailableError(
                f"{self._bus.worker}: speaks version {welcome.version} of the token bus, this process {VERSION};"
                " run the same build on both sides"
            )
        self._welcome, self._bus.capacity = welcome, welcome.capacity
        if not self.opened.done():
            self.opened.set_result(None)

    async def _write(self) -> None:
        """Send what piled up; return when there has been nothing to do for IDLE_S."""
        ticked_at = time.monotonic()
        while self._is_open:
            if time.monotonic() - ticked_at > self._tick_s:
                ticked_at = time.monotonic()
                await self._tick()
            elif self._outbox:
                await self._send_commands(self._batch())
            else:
                self._wake.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._tick_s)

    def _batch(self) -> list[Submit | Abort | Drop | Ping | Drain]:
        """Take what is to go out next; big prompts are spread over several messages."""
        num_bytes = 0
        for at, command in enumerate(self._outbox):
            num_bytes += len(command.request.prompt) if isinstance(command, Submit) else 0
            if num_bytes > _MAX_BATCH_BYTES and at:
                commands, self._outbox = self._outbox[:at], self._outbox[at:]
                return commands
        commands, self._outbox = self._outbox, []
        return commands

    async def _send_commands(self, commands: list[Submit | Abort | Drop | Ping | Drain]) -> None:
        import numpy as np

        assert self._welcome is not None
        for command in commands:
            if isinstance(command, Submit) and (ticket := self._tickets.get(command.number)) is not None:
                ticket.was_sent = True
        payload = np.frombuffer(encode(Commands(self._welcome.life, commands)), np.uint8)
        consumer = self._welcome.consumer.encode()
        self._said_at = self._busy_at = time.monotonic()
        await self._call.write(infer_request(self._bus.worker, {"consumer": consumer, "commands": payload}))

    async def _tick(self) -> None:
        """Go when idle, give up when the stub is silent, say that we are here."""
        now = time.monotonic()
        if self._tickets:
            self._busy_at = now
            if now - self._heard_at > self._bus.stall_timeout_s:
                raise EngineLostError(
                    f"{self._bus.worker}: no news for {now - self._heard_at:.1f} s;"
                    f" pipeline.stall_timeout_s is {self._bus.stall_timeout_s:g}"
                )
            if now - self._said_at >= min(KEEPALIVE_S, self._bus.stall_timeout_s / 4):
                self._said_at = now
                await self._say(b"keep")
        elif now - self._busy_at >= IDLE_S:
            self._is_open = False
            self._bus.retire(self)

    async def _say(self, verb: bytes) -> None:
        assert self._welcome is not None
        consumer = self._welcome.consumer.encode()
        await self._call.write(infer_request(self._bus.worker, {"subscribe": verb, "consumer": consumer}))

    async def _unsubscribe(self, reader: asyncio.Future[BiremeError], writer: asyncio.Future[None]) -> None:
        """Close the subscription in good order, if the stub still answers: the server then ends the stream."""
        import grpc

        self._wake.set()  # the writer sees that it is over
        await asyncio.wait({writer}, timeout=LEAVE_S)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.TimeoutError):
            await asyncio.wait_for(self._say(b"close"), LEAVE_S)
            await self._call.done_writing()
            await asyncio.wait({reader}, timeout=LEAVE_S)
            if reader.done():
                await leave(self._call, LEAVE_S)

    def _outcome(self, done: Iterable[asyncio.Future[Any]]) -> BiremeError:
        """Return the reason for the end as the remaining requests are to see it."""
        import grpc

        for future in done:
            error = future.exception()
            if isinstance(error, (EngineLostError, NotFoundError)):
                return error
            if isinstance(error, BiremeError):
                return EngineLostError(f"{self._bus.worker}: {error}")
            if isinstance(error, (grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                return EngineLostError(f"{self._bus.worker}: the connection to {self._bus.address} broke")
            if error is not None:
                raise error
        return EngineLostError(f"{self._bus.worker}: the token bus was closed")

    def _end(self, error: BiremeError) -> None:
        """Take no more requests; tell those that remain, or pass them on to a new session."""
        self._is_open = False
        self._bus.retire(self)
        if not self.opened.done():
            self.opened.set_result(error)
        tickets, self._tickets = self._tickets, {}
        for ticket in tickets.values():
            if isinstance(error, NotFoundError) and not (ticket.heard_at or ticket.is_replaced):
                ticket.is_replaced = True  # once is enough
                ticket.was_sent = False
                self._bus.place(ticket)
            else:
                ticket.fail(_told(error, ticket))

    # Steps

    def _take(self, step: Step) -> None:
        tickets = self._tickets
        if step.counts is None and step.logprobs is None and step.prompt_logprobs is None:
            self._take_plain(step)
        else:
            self._take_rich(step)
        for number, finish in step.finished.items():
            if (ticket := tickets.pop(number, None)) is not None:
                ticket.session = None
                ticket.sink.finish(finish)
        if step.lost:
            raise EngineLostError(f"{self._bus.worker}: its engine died or was restarted with the request in flight")

    def _take_plain(self, step: Step) -> None:
        """One token a request: the path that has to be quick."""
        find, now, before, same = self._tickets.get, self._heard_at, self._heard_before, 0
        for number, token in zip(step.requests, step.tokens, strict=True):
            ticket = find(number)
            if ticket is not None:
                if ticket.heard_at == before:
                    same += 1
                elif ticket.heard_at != now:
                    self._note_gap(ticket)
                ticket.heard_at = now
                try:
                    ticket.sink.push((token,))
                except Exception as error:
                    self._break(ticket, error)
        if same:
            self._bus.note_gap(now - before, same)

    def _note_gap(self, ticket: BusRequest) -> None:
        """Tokens have come that were not in the delivery before this one."""
        if ticket.heard_at and ticket.heard_at != self._heard_at:
            self._bus.note_gap(self._heard_at - ticket.heard_at)

    def _take_rich(self, step: Step) -> None:
        logprobs, prompts = step.logprobs or {}, dict(step.prompt_logprobs or {})
        for number, tokens in step.deltas():
            if (ticket := self._tickets.get(number)) is not None:
                self._note_gap(ticket)
                ticket.heard_at = self._heard_at
                self._push(ticket, tokens, logprobs.get(number), prompts.pop(number, None))
        for number, entries in prompts.items():
            if (ticket := self._tickets.get(number)) is not None:
                self._push(ticket, (), None, entries)

    def _push(self, ticket: BusRequest, *news: Any) -> None:
        try:
            ticket.sink.push(*news)
        except Exception as error:
            self._break(ticket, error)

    def _break(self, ticket: BusRequest, error: Exception) -> None:
        """One broken consumer must not take the others along."""
        logger.exception("sink_failed worker=%s", self._bus.worker)
        self._tickets.pop(ticket.number, None)
        self._outbox.append(Abort(ticket.number))
        self._wake.set()
        ticket.fail(BiremeError(f"{type(error).__name__}: {error}"))


def _told(error: BiremeError, ticket: BusRequest) -> BiremeError:
    """A request that was never sent has lost nothing."""
    if isinstance(error, EngineLostError) and not ticket.was_sent:
        return UnavailableError(str(error))
    if isinstance(error, NotFoundError):
        return EngineLostError(str(error))
    return error
