"""A connection to NATS on a thread with a loop of its own; it comes back by itself, as often as it takes.

What it carries is signed with the deployment's key: who can reach the server could otherwise tell routers anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from bireme.config import KvEventsConfig
from bireme.errors import ConfigError, one_line
from bireme.kv.wire.event_wire import encode_seq

logger = logging.getLogger("bireme.kv")

ENDPOINT = "nats:"  # of a record; the subjects' common beginning follows
SEQ_HEADER, MAC_HEADER = "Bireme-Seq", "Bireme-Mac"
_RETRY_S = 0.5
_CONNECT_TIMEOUT_S = 2
_PING_S = 1  # a server that is silent for three of them is gone
_PENDING_BYTES = 8 << 20  # on their way to the server


def stream_name(prefix: str) -> str:
    """Return the JetStream stream that keeps a deployment's events."""
    return re.sub(r"\W", "_", f"{prefix}_kv").upper()


class NatsConnection:
    """`start`, then `submit` from any thread; `close`. `on_connect` subscribes, on the loop, to each new connection."""

    def __init__(
        self, config: KvEventsConfig, deployment_key: bytes, name: str, on_connect: Callable[[Any], Awaitable[None]]
    ) -> None:
        """Raises ConfigError."""
        try:
            import nats.aio.client  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigError(f"kv_events.plane: {config.plane} needs {error.name}; pip install -e .[nats]") from None
        self._config, self._name, self._on_connect = config, name, on_connect
        self._key = hashlib.blake2b(deployment_key, digest_size=32, person=b"bireme nats").digest()
        self._loop = asyncio.new_event_loop()
        self._client: Any = None
        self._closed: asyncio.Event | None = None
        self._problem, self._down_since = "not connected yet", time.monotonic()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-nats", daemon=True)

    @property
    def problem(self) -> str:
        """Why nothing gets through, and for how long; "": all is well. From any thread."""
        if not self._problem:
            return ""
        return f"NATS: {self._problem} (for {time.monotonic() - self._down_since:.0f} s)"

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Run `work(client)` on the loop; dropped while there is no connection. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._begin, work)

    def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)
        if self._thread.ident is not None:
            self._thread.join(3)

    def mac(self, subject: str, seq: int, payload: bytes) -> str:
        """Return the signature of a message: 32 hexadecimal digits."""
        digest = hashlib.blake2b(subject.encode() + b"\0" + encode_seq(seq), digest_size=16, key=self._key)
        digest.update(payload)
        return digest.hexdigest()

    def headers(self, subject: str, seq: int, payload: bytes) -> dict[str, str]:
        return {SEQ_HEADER: str(seq), MAC_HEADER: self.mac(subject, seq, payload)}

    def seq_of(self, message: Any, subject: str = "") -> int | None:
        """Return a message's seq; None: it does not carry the deployment's signature. `subject`: if not its own."""
        headers = message.headers or {}
        try:
            seq = int(headers[SEQ_HEADER])
            expected = self.mac(subject or message.subject, seq, message.data)
            return seq if hmac.compare_digest(expected, headers[MAC_HEADER]) else None
        except (KeyError, ValueError, OverflowError, TypeError):
            return None

    def _begin(self, work: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        if self._client is not None:
            self._loop.create_task(self._guard(work))

    async def _guard(self, work: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        try:
            await work(self._client)
        except Exception as error:  # of the connection: readers see a gap, askers ask again
            logger.debug("nats_failed name=%s error=%s", self._name, one_line(error))

    def _end(self) -> None:
        if self._closed is not None:
            self._closed.set()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        while not self._is_closing:
            self._closed = asyncio.Event()
            connecting = asyncio.ensure_future(self._connect(self._closed))
            await self._closed.wait()
            connecting.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await connecting
            client, self._client = self._client, None
            if client is not None:
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(1):
                        await client.close()
            if not self._is_closing:
                await asyncio.sleep(_RETRY_S)
        for task in asyncio.all_tasks(self._loop) - {asyncio.current_task()}:
            task.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await task

    async def _connect(self, closed: asyncio.Event) -> None:
        from nats.aio.client import Client

        async def down(error: Exception | None = None) -> None:
            self._note_down(one_line(error) if error else "the connection is lost")

        async def up() -> None:
            self._note_up()

        async def over() -> None:
            closed.set()

        client = Client()
        try:
            await client.connect(
                [os.path.expandvars(self._config.nats_url)],
                name=self._name,
                max_reconnect_attempts=-1,
                reconnect_time_wait=_RETRY_S,
                connect_timeout=_CONNECT_TIMEOUT_S,
                ping_interval=_PING_S,
                max_outstanding_pings=2,
                pending_size=_PENDING_BYTES,
                error_cb=down,
                disconnected_cb=down,
                reconnected_cb=up,
                closed_cb=over,
                user_credentials=os.path.expandvars(self._config.nats_credentials) or None,
            )
            self._client = client
            await self._on_connect(client)
            self._note_up()
        except Exception as error:
            self._note_down(one_line(error))
            closed.set()

    def _note_down(self, problem: str) -> None:
        if not self._problem:
            self._down_since = time.monotonic()
            logger.warning("nats_down name=%s error=%s", self._name, problem)
        self._problem = problem

    def _note_up(self) -> None:
        logger.info("nats_up name=%s after_s=%.1f", self._name, time.monotonic() - self._down_since)
        self._problem = ""
