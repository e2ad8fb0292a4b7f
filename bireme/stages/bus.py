"""The stub's side of the token bus: subscriptions of whole engine steps, passed on unread.

A subscription is opened by `subscribe` = "open" and lasts for one life of the engine. Its consumer id is random and
made here: only its holder, by Welcome, may command it, keep it alive or close it. Steps that wait while a response is
being sent are appended to the next one; a consumer with more than limits.max_bus_buffer_bytes unsent is dropped and its
requests are aborted.

A subscription ends when its client is gone, closes it, falls behind, says nothing for SILENCE_S, or when the engine's
life is over. Each time the engine aborts that consumer's requests.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from bireme.errors import (
    BiremeError,
    NotFoundError,
    RequestError,
    ResourceExhaustedError,
    UnavailableError,
    to_message,
)
from bireme.messages import (
    MALFORMED,
    U32,
    VERSION,
    Encode,
    Finish,
    Step,
    Submit,
    Usage,
    Welcome,
    decode_commands,
    encode,
    pack_welcome,
)
from bireme.types import Array, Cancelled, Response, Send, Tensors

if TYPE_CHECKING:
    from bireme.engines.stub.client import EngineClient
    from bireme.metrics import Registry

# No keys: part of the bus's protocol, which its clients are written for.
SILENCE_S = 30.0  # clients with open requests send `keep` every 3 s
MAX_COMMAND_BYTES = 256 << 20  # the bus client's batches end at 4 MiB, or at one prompt


class Backlog:
    """Bytes handed to the sender and not taken yet. Thread-safe."""

    __slots__ = ("_lock", "num_bytes")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_bytes = 0

    def add(self, num_bytes: int) -> int:
        with self._lock:
            self.num_bytes += num_bytes
            return self.num_bytes


class StepsResponse:
    """Bus items on their way; later ones are appended."""

    __slots__ = ("_backlog", "_items", "_num_bytes")
    is_urgent = True  # many requests' tokens
    num_bytes = 0  # bounded here, by max_bus_buffer_bytes, not by the adapter's limit for one stream

    def __init__(self, items: list[bytes], backlog: Backlog) -> None:
        self._items, self._backlog = items, backlog
        self._num_bytes = sum(map(len, items))

    def merge(self, later: Response) -> Response | None:
        if not isinstance(later, StepsResponse):
            return None
        self._items.extend(later._items)
        self._num_bytes += later._num_bytes
        return self

    def tensors(self) -> Tensors:
        self._backlog.add(-self._num_bytes)
        return {"steps": np.frombuffer(b"".join(self._items), np.uint8)}


class Subscription:
    """One consumer. `push` is called on the engine client's thread, the rest on the loop's."""

    def __init__(self, send: Send, max_bytes: int) -> None:
        self.name = secrets.token_hex(16)
        self.life = 0
        self.number = 0  # the engine's name of this consumer
        self.last_seen_at = time.monotonic()
        self._send, self._max_bytes, self._backlog = send, max_bytes, Backlog()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._is_over = False

    def push(self, payload: bytes | memoryview) -> None:
        """Queue a step for sending; drop the subscription when too many bytes are behind."""
        if not self._is_over:
            self._enqueue([U32.pack(len(payload)), bytes(payload)])

    def welcome(self, welcome: Welcome) -> None:
        self._enqueue([pack_welcome(welcome)])

    async def wait(self) -> None:
        """Return when closed by its client. Raises the error that ended it otherwise."""
        await self._ended

    def end(self, error: BiremeError | None = None) -> None:
        """Thread-safe; the first call counts."""
        if not self._is_over:
            self._is_over = True
            self._loop.call_soon_threadsafe(self._settle, error)

    def _enqueue(self, items: list[bytes]) -> None:
        behind = self._backlog.add(sum(map(len, items)))
        if behind > self._max_bytes:
            self.end(
                ResourceExhaustedError(
                    f"token bus: {behind} bytes unsent; limits.max_bus_buffer_bytes is {self._max_bytes},"
                    " read faster or open more subscriptions"
                )
            )
            return
        self._send(StepsResponse(items, self._backlog))

    def _settle(self, error: BiremeError | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


class TokenBus:
    """All subscriptions of one decode worker."""

    def __init__(self, worker: str, engine: EngineClient, max_bytes: int, metrics: Registry) -> None:
        self._worker, self._engine, self._max_bytes, self._metrics = worker, engine, max_bytes, metrics
        metrics.start("bireme_bus_dropped_total")
        self._open: dict[str, Subscription] = {}  # by name
        self._sweeper: asyncio.Task[None] | None = None

    async def subscribe(self, send: Send, cancelled: Cancelled) -> None:
        """Serve one subscription to its end. Raises UnavailableError when the engine is not ready."""
        subscription = Subscription(send, self._max_bytes)
        subscription.number = self._engine.open_bus(subscription.push)
        self._open[subscription.name] = subscription
        self._count()
        try:
            subscription.life = self._engine.life
            subscription.welcome(Welcome(VERSION, subscription.name, subscription.life, self._engine.capacity))
            cancelled.on_set(subscription.end)
            await subscription.wait()
        except ResourceExhaustedError:
            self._metrics.add("bireme_bus_dropped_total")
            raise
        finally:
            self._open.pop(subscription.name, None)
            self._engine.close_bus(subscription.number)
            self._count()

    def command(self, consumer: bytes, payload: Array) -> None:
        """Pass a command batch on, unread. Raises NotFoundError, RequestError, UnavailableError.

        Requests that can't be handed to the engine (it is about to end) are refused one by one: they have lost nothing,
        while those that it has are lost with it.
        """
        subscription = self._find(consumer)
        if payload.size == 0:
            raise RequestError("commands: empty; send a msgpack command batch")
        if payload.size > MAX_COMMAND_BYTES:
            raise RequestError(
                f"commands: {payload.size} bytes; the limit is {MAX_COMMAND_BYTES}, send smaller batches"
            )
        try:
            self._engine.send_commands(subscription.number, payload.data)
        except UnavailableError as error:
            finish = Finish("error", Usage(), to_message(UnavailableError(str(error))))
            refused = dict.fromkeys(_submitted(payload), finish)
            if not refused:
                raise
            subscription.push(encode(Step(subscription.life, 0, finished=refused)))

    def keep(self, consumer: bytes) -> None:
        """Answer a keepalive with an empty step, so that the consumer knows that this stub lives."""
        subscription = self._find(consumer)
        subscription.push(encode(Step(subscription.life, 0)))

    def close(self, consumer: bytes) -> None:
        self._find(consumer).end()

    def start(self) -> None:
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="bus-sweeper")

    def stop(self) -> None:
        """End all subscriptions: tritonserver does not exit while one is open."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for subscription in list(self._open.values()):
            subscription.end(UnavailableError(f"{self._worker}: shutting down; try another worker"))

    def _find(self, consumer: bytes) -> Subscription:
        subscription = self._open.get(consumer.decode("ascii", "replace"))
        if subscription is None:
            raise NotFoundError("consumer: no such subscription (any more); subscribe again")
        subscription.last_seen_at = time.monotonic()
        return subscription

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            life = self._engine.life if self._engine.is_ready else 0
            for subscription in list(self._open.values()):
                if subscription.life != life:
                    subscription.end(UnavailableError(f"{self._worker}: its engine has ended; subscribe again"))
                elif now - subscription.last_seen_at > SILENCE_S:
                    subscription.end(
                        UnavailableError(f"consumer: nothing heard for {SILENCE_S:g} s; send `subscribe` = keep")
                    )

    def _count(self) -> None:
        self._metrics.set("bireme_bus_subscriptions", len(self._open))


def _submitted(payload: Array) -> list[int]:
    """Return the numbers of a batch's requests; none of a malformed one, which the engine would have skipped, too."""
    try:
        batch = decode_commands(payload.tobytes())
    except MALFORMED:
        return []
    return [command.number for command in batch.commands if isinstance(command, (Submit, Encode))]
