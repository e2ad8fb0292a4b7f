"""A reader's links to publishers over NATS: one connection a process, see nats_plane.py.

With JetStream what is missed is fetched from the stream; what that no longer has, and snapshots, the engine sends.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from bireme.config import KvEventsConfig
from bireme.kv.wire.event_wire import END, LOAD_TOPIC, SNAPSHOT, encode_seq, event_topic
from bireme.kv.wire.nats_connection import ENDPOINT, NatsConnection, stream_name

_MAX_MESSAGES = 10_000  # that wait to be read; more are dropped, which shows as a gap
_FETCH = 256
_FETCH_TIMEOUT_S = 1.0


class NatsReader:
    """The connection that all links of a process share. Raises ConfigError."""

    def __init__(self, config: KvEventsConfig, deployment_key: bytes, wake: Callable[[], object]) -> None:
        self.config, self.wake = config, wake
        self.links: set[NatsLink] = set()
        self.connection = NatsConnection(config, deployment_key, "router", self._on_connect)
        self.connection.start()

    @property
    def problem(self) -> str:
        return self.connection.problem

    def open_link(self, endpoint: str, num_ranks: int) -> NatsLink:
        link = NatsLink(self, endpoint.removeprefix(ENDPOINT), num_ranks)
        self.links.add(link)
        self.connection.submit(link.subscribe)
        return link

    def close(self) -> None:
        self.connection.close()

    async def _on_connect(self, client: Any) -> None:
        for link in list(self.links):
            await link.subscribe(client)


class NatsLink:
    """One publisher's subjects. Deques carry messages from the connection's thread to the feed's."""

    def __init__(self, reader: NatsReader, base: str, num_ranks: int) -> None:
        self._reader, self._base, self._num_ranks = reader, base, num_ranks
        self._has_stream = reader.config.plane == "jetstream"
        self.first_seq: int | None = 0 if self._has_stream else None
        self._messages: collections.deque[list[bytes]] = collections.deque(maxlen=_MAX_MESSAGES)
        self._answers: list[collections.deque[list[bytes]]] = [collections.deque() for _ in range(num_ranks)]
        self._asked = [0] * num_ranks  # number of the last question
        self._subscribed: Any = None  # the client that it has subscribed to
        self._subscriptions: list[Any] = []

    def take(self) -> Iterator[list[bytes]]:
        for _ in range(len(self._messages)):
            yield self._messages.popleft()

    def take_answers(self, rank: int) -> Iterator[list[bytes]]:
        answers = self._answers[rank]
        for _ in range(len(answers)):
            yield answers.popleft()

    def ask(self, rank: int, start: int) -> None:
        self._asked[rank] += 1
        number = self._asked[rank]
        answers = self._answers[rank] = collections.deque()
        self._reader.connection.submit(lambda client: self._ask(client, rank, start, number, answers))

    def hang_up(self, rank: int) -> None:
        self._asked[rank] += 1

    def close(self) -> None:
        self._reader.links.discard(self)
        self._reader.connection.submit(self._unsubscribe)

    async def subscribe(self, client: Any) -> None:
        if self._subscribed is client:
            return
        self._subscribed = client
        topics = {f"{self._base}.events.{rank}": event_topic(rank) for rank in range(self._num_ranks)}
        for subject, topic in (topics | {f"{self._base}.load": LOAD_TOPIC}).items():
            self._subscriptions.append(await client.subscribe(subject, cb=self._taker(topic)))

    async def _unsubscribe(self, client: Any) -> None:
        for subscription in self._subscriptions:
            with contextlib.suppress(Exception):
                await subscription.unsubscribe()

    def _taker(self, topic: bytes) -> Any:
        async def take(message: Any) -> None:
            seq = self._reader.connection.seq_of(message)
            # What is not signed is told as what can't be read: it is counted, and nothing of it is believed.
            self._messages.append([topic, encode_seq(seq), message.data] if seq is not None else [b"unsigned"])
            self._reader.wake()

        return take

    async def _ask(
        self, client: Any, rank: int, start: int, number: int, answers: collections.deque[list[bytes]]
    ) -> None:
        if self._has_stream and start != SNAPSHOT and await self._fetch(client, rank, start, answers):
            self._reader.wake()
            return
        inbox = client.new_inbox()
        done = asyncio.Event()

        async def take(message: Any) -> None:
            seq = self._reader.connection.seq_of(message)
            if seq is None or number != self._asked[rank]:
                return
            answers.append([encode_seq(seq), message.data])
            self._reader.wake()
            if seq == END:
                done.set()

        subscription = await client.subscribe(inbox, cb=take)
        subject, data = f"{self._base}.replay", encode_seq(start) + event_topic(rank)
        headers = self._reader.connection.headers(f"{subject}\0{inbox}", number, data)
        await client.publish(subject, data, reply=inbox, headers=headers)
        try:
            while number == self._asked[rank] and not done.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    async with asyncio.timeout(_FETCH_TIMEOUT_S):
                        await done.wait()
        finally:
            with contextlib.suppress(Exception):
                await subscription.unsubscribe()

    async def _fetch(self, client: Any, rank: int, start: int, answers: collections.deque[list[bytes]]) -> bool:
        """Read the batches from `start` on from the stream. False: it does not have them all."""
        from nats.js import api

        subject, found = f"{self._base}.events.{rank}", []
        config = api.ConsumerConfig(
            ack_policy=api.AckPolicy.NONE, inactive_threshold=5 * _FETCH_TIMEOUT_S, filter_subject=subject
        )
        try:
            js = client.jetstream()
            puller = await js.pull_subscribe(
                subject, stream=stream_name(self._reader.config.nats_prefix), config=config
            )
            left = (await puller.consumer_info()).num_pending
            while left > 0:
                messages = await puller.fetch(min(left, _FETCH), timeout=_FETCH_TIMEOUT_S)
                left -= len(messages)
                for message in messages:
                    seq = self._reader.connection.seq_of(message)
                    if seq is not None and seq >= start:
                        found.append((seq, message.data))
            await puller.unsubscribe()
        except Exception:  # of the stream, or of the connection: the engine has what is needed
            return False
        if not found or [seq for seq, _ in found] != list(range(start, start + len(found))):
            return False
        answers.extend([encode_seq(seq), data] for seq, data in found)
        answers.append([encode_seq(END), b""])
        return True
