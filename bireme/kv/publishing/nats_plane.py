"""The event plane over NATS: the same payloads under subjects of the engine's own, each message signed.

    BASE.events.RANK    events, with seq and signature as headers     BASE: <prefix>.kv.<worker>-<life>-<random>
    BASE.load           load
    BASE.steps          step records
    BASE.replay         a reader's question: first seq (8 bytes) and topic; answered at its reply subject

With JetStream a stream keeps what was published, and readers fetch what they missed from there; a snapshot, and what
the stream no longer has, comes from the engine as with NATS alone. Where the stream is gone, as with a server that
came back without what it had kept, messages are sent as with NATS alone until it is made again. While the server is
gone nothing is sent, and nobody waits for it: afterwards readers see the gap.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import secrets
import threading
from typing import Any

from bireme.config import KvEventsConfig
from bireme.errors import one_line
from bireme.inbox import Inbox
from bireme.kv.publishing.publisher import ReplayRequest
from bireme.kv.wire.event_wire import LOAD_TOPIC, decode_seq, rank_of
from bireme.kv.wire.nats_connection import ENDPOINT, NatsConnection, stream_name
from bireme.kv.wire.step_records import STEP_TOPIC

_MAX_QUEUED = 5_000  # messages on their way to the server
_MAX_ANSWERS_QUEUED = 64
_MAX_REQUESTS = 1_000
_STREAM_AGE_S = 3600.0
_STREAM_BYTES = 256 << 20
_ACK_TIMEOUT_S = 2.0
_STREAM_RETRY_S = 2.0
logger = logging.getLogger("bireme.kv")


class NatsPlane:
    """Connects by itself. Raises ConfigError."""

    def __init__(
        self,
        config: KvEventsConfig,
        worker: str,
        life: int,
        deployment_key: bytes,
        *,
        has_events: bool = True,
        has_steps: bool = False,
    ) -> None:
        self._config = config
        self._base = f"{config.nats_prefix}.kv.{worker}-{life}-{secrets.token_hex(4)}"
        self.load_endpoint = ENDPOINT + self._base
        self.event_endpoint = self.replay_endpoint = self.load_endpoint if has_events else ""
        self.step_endpoint = self.load_endpoint if has_steps else ""
        self._wakeup = threading.Event()
        self._requests: collections.deque[ReplayRequest] = collections.deque(maxlen=_MAX_REQUESTS)
        self._queue = Inbox[tuple[str, int, bytes, bool]](lambda: self._connection.submit(self._pump))
        self._turns = asyncio.Lock()  # of what sends from the queue
        self._has_stream = False
        self._regaining: asyncio.Task[None] | None = None
        self._connection = NatsConnection(config, deployment_key, worker, self._on_connect)
        self._connection.start()

    @property
    def problem(self) -> str:
        return self._connection.problem

    def wait(self, timeout_s: float) -> None:
        if timeout_s > 0:
            self._wakeup.wait(timeout_s)
        self._wakeup.clear()

    def wake(self) -> None:
        self._wakeup.set()

    def publish(self, topic: bytes, seq: int, payload: bytes) -> None:
        if topic == LOAD_TOPIC:
            self._send(f"{self._base}.load", seq, payload, _MAX_QUEUED)
        elif topic == STEP_TOPIC:
            self._send(f"{self._base}.steps", seq, payload, _MAX_QUEUED)
        else:
            is_kept = self._config.plane == "jetstream"
            self._send(f"{self._base}.events.{rank_of(topic)}", seq, payload, _MAX_QUEUED, is_kept=is_kept)

    def requests(self) -> list[ReplayRequest]:
        found = []
        while self._requests:
            found.append(self._requests.popleft())
        return found

    def answer(self, client: Any, seq: int, payload: bytes) -> bool:
        if len(self._queue) >= _MAX_ANSWERS_QUEUED:
            return False
        self._send(client, seq, payload, _MAX_QUEUED)
        return True

    def tick(self) -> None:
        pass

    def close(self) -> None:
        self._connection.close()

    def _send(self, subject: str, seq: int, payload: bytes, limit: int, *, is_kept: bool = False) -> None:
        if problem := self._connection.problem:
            raise OSError(problem)
        if len(self._queue) >= limit:
            raise OSError(f"NATS: {len(self._queue)} messages wait for the server")
        self._queue.put((subject, seq, payload, is_kept))

    async def _pump(self, client: Any) -> None:
        """Send what is queued, in order."""
        async with self._turns:
            for subject, seq, payload, is_kept in self._queue.drain():
                headers = self._connection.headers(subject, seq, payload)
                if is_kept and self._has_stream:
                    try:
                        await client.jetstream().publish(subject, payload, timeout=_ACK_TIMEOUT_S, headers=headers)
                    except Exception as error:  # its subscribers have it nevertheless
                        self._lose_stream(client, error)
                else:
                    await client.publish(subject, payload, headers=headers)

    async def _on_connect(self, client: Any) -> None:
        for _ in self._queue.drain():  # what was not sent is old by now
            pass
        self._turns = asyncio.Lock()  # who sends to the connection before may still wait for it
        await client.subscribe(f"{self._base}.replay", cb=self._on_request)
        if self._config.plane == "jetstream":
            await self._make_stream(client)

    def _lose_stream(self, client: Any, error: Exception) -> None:
        if self._has_stream:
            logger.warning("nats_stream_lost name=%s error=%s", self._base, one_line(error))
        self._has_stream = False
        if self._regaining is None or self._regaining.done():
            self._regaining = asyncio.get_running_loop().create_task(self._regain_stream(client))

    async def _regain_stream(self, client: Any) -> None:
        while not (self._has_stream or client.is_closed):
            await asyncio.sleep(_STREAM_RETRY_S)
            try:
                await self._make_stream(client)
            except Exception as error:
                logger.debug("nats_stream_not_made name=%s error=%s", self._base, one_line(error))

    async def _make_stream(self, client: Any) -> None:
        """Make the stream, or find it. Raises where the server has no JetStream: the connection is tried again."""
        from nats.js import api, errors

        name = stream_name(self._config.nats_prefix)
        try:
            await client.jetstream().stream_info(name)
        except errors.NotFoundError:
            await client.jetstream().add_stream(
                api.StreamConfig(
                    name=name,
                    subjects=[f"{self._config.nats_prefix}.kv.*.events.*"],
                    max_msgs_per_subject=self._config.replay_batches,
                    max_age=_STREAM_AGE_S,
                    max_bytes=_STREAM_BYTES,
                    discard=api.DiscardPolicy.OLD,
                )
            )
        self._has_stream = True

    async def _on_request(self, message: Any) -> None:
        """The reply subject is signed with the question: nobody can turn answers elsewhere."""
        if not message.reply or self._connection.seq_of(message, f"{message.subject}\0{message.reply}") is None:
            return
        rank = rank_of(message.data[8:])
        try:
            start = decode_seq(message.data[:8])
        except ValueError:
            return
        if rank is not None and start >= -1:
            self._requests.append(ReplayRequest(message.reply, rank, start))
            self._wakeup.set()
