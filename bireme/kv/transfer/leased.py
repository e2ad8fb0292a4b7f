"""KV transfer between engine processes: leases, control socket and threads, whatever moves the bytes.

The control thread owns the sockets, the leases' timers and both roles' state, and never copies; the copier does, and
calls the engine back. The protocol: docs/kv_transfer.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from bireme.config import CacheTransceiverConfig
from bireme.disagg import DisaggregatedParams
from bireme.discovery import run_folder
from bireme.errors import ConfigError, EngineLostError
from bireme.kv.transfer.backend import Backend
from bireme.kv.transfer.base import Done, Find, KvFetch, KvLayout, Lease
from bireme.kv.transfer.buffer import TransferBuffer
from bireme.kv.transfer.chunks import CHUNK_BYTES
from bireme.kv.transfer.copier import Copier
from bireme.kv.transfer.costs import TransferCosts
from bireme.kv.transfer.exporter import Exporter, Outgoing
from bireme.kv.transfer.importer import Importer, RowFetch
from bireme.kv.transfer.lease import LeaseTable
from bireme.kv.transfer.memory import RowMemory, TokenRows
from bireme.kv.transfer.wire import MAX_MESSAGE_BYTES
from bireme.kv.wire.curve import curve_keys, is_ipv6, let_in_readers, needs_curve
from bireme.kv.wire.mailbox import Mailbox
from bireme.metrics import Registry

TICK_MS = 100  # how soon a dead peer or an expired lease is noticed
IDLE_TICK_MS = 1000
SOCKET_LOOK_S = 1.0
MAX_PATH_BYTES = 107  # sockaddr_un
CLOSE_TIMEOUT_S = 10.0
LINGER_MS = 200
CONNECT_TIMEOUT_MS = 1000
MESSAGES_A_TURN = 256
logger = logging.getLogger("bireme.kv.transfer")


class LeasedTransfer:
    """One per engine process, exporter and importer in one. Close it from any thread but its own."""

    def __init__(
        self,
        backend: Backend,
        *,
        run_dir: Path,
        worker: str,
        life: int,
        config: CacheTransceiverConfig,
        metrics: Registry,
        chunk_bytes: int = CHUNK_BYTES,
        find: Find | None = None,
        host: str = "",
        deployment_key: bytes = b"",
    ) -> None:
        """`host`: an address of this host for other hosts' engines, which then need the key; "": this host alone."""
        self._backend = backend
        self._host, self._deployment_key = host, deployment_key
        self._authenticator: Any = None
        self._run_dir = run_dir.resolve()
        self._find = find or partial(run_folder.find, self._run_dir)
        self._worker = worker
        self._life = life
        self._config = config
        self._metrics = metrics
        self._chunk_bytes = chunk_bytes
        self._socket_path = _socket_path(self._run_dir, worker, life)
        self._endpoint = f"ipc://{self._socket_path}"
        self._timeout_s = config.kv_transfer_timeout_ms / 1000
        self._mailbox = Mailbox()
        self._copier = Copier(f"kv-copy-{worker}")
        self._table = LeaseTable(self._timeout_s, self._copier.call)
        self._control = threading.Thread(target=self._serve, name=f"kv-control-{worker}", daemon=True)
        self._is_closing = False
        self._next_tick = self._next_look = 0.0
        self._poller: Any = zmq.Poller()
        self._costs = TransferCosts()
        self._dealers: set[Any] = set()

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def reaches_other_hosts(self) -> bool:
        return self._endpoint.startswith("tcp://")

    @property
    def line_ms(self) -> tuple[float, float] | None:
        return self._costs.line_ms

    def start(self, layout: KvLayout, memory: RowMemory | None = None) -> None:
        buffer: TransferBuffer[Outgoing] = TransferBuffer(self._config.max_tokens_in_buffer, layout.bytes_per_token)
        self._backend.start(layout, memory, buffer.limit_bytes)
        self._context = zmq.Context()
        self._router = self._bind()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._mailbox.descriptor, zmq.POLLIN)
        self._exporter = self._make_exporter(layout, buffer)
        self._importer = self._make_importer(layout)
        self._copier.start()
        self._control.start()

    def reserve(self, release: Callable[[], None]) -> Lease:
        return self._table.reserve(release)

    def fetch(self, params: DisaggregatedParams, firsts: Sequence[int], rows: TokenRows, done: Done) -> KvFetch:
        fetch = RowFetch(params, tuple(firsts), rows, done, self._wake_cancelled, self._backend.name)
        if not self._mailbox.post(lambda: self._importer.begin(fetch)):
            self._copier.call(partial(fetch.finish, EngineLostError("the decode engine is stopping")))
        return fetch

    def close(self) -> None:
        """Abort all leases and fetches, end the threads, remove files and socket. May be called twice."""
        self._mailbox.post(self._begin_close)
        if self._control.ident is None:
            self._table.close()
            self._copier.close(CLOSE_TIMEOUT_S)
            self._mailbox.close()
        else:
            self._control.join(2 * CLOSE_TIMEOUT_S)

    def _begin_close(self) -> None:
        self._is_closing = True

    def _wake_cancelled(self, fetch: RowFetch) -> None:
        self._mailbox.post(lambda: self._importer.on_cancelled(fetch))

    def _serve(self) -> None:
        """The control thread."""
        try:
            while not self._is_closing:
                _guard(self._turn)
        finally:
            self._shut_down()

    def _turn(self) -> None:
        is_idle = self._exporter.is_idle and self._importer.is_idle
        ready = dict(self._poller.poll(IDLE_TICK_MS if is_idle else TICK_MS))
        self._read_mail()
        if self._router in ready:
            self._read_router()
        for dealer in [dealer for dealer in ready if dealer in self._dealers]:
            self._read_dealer(dealer)
        self._tick()
        self._exporter.publish()

    def _tick(self) -> None:
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_MS / 1000
            self._exporter.tick()
            self._importer.tick()
            self._backend.tidy()
        if now >= self._next_look:
            self._next_look = now + SOCKET_LOOK_S
            if not self.reaches_other_hosts and not self._socket_path.exists():
                self._bind_again()

    def _read_mail(self) -> None:
        for letter in self._mailbox.take():
            _guard(letter)

    def _read_router(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(MESSAGES_A_TURN):
                identity, *parts = self._router.recv_multipart(zmq.NOBLOCK)
                _guard(partial(self._exporter.on_message, identity, b"".join(parts)))

    def _read_dealer(self, dealer: Any) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(MESSAGES_A_TURN):
                payload = b"".join(dealer.recv_multipart(zmq.NOBLOCK))
                _guard(partial(self._importer.on_message, dealer, payload))

    def _shut_down(self) -> None:
        _guard(self._exporter.close)
        _guard(self._importer.close)
        if not self._copier.close(CLOSE_TIMEOUT_S):
            logger.error("transfer event=callback_hangs worker=%s", self._worker)
        self._read_mail()  # results of the last copies: acknowledgements, files to unlink
        self._mailbox.close()
        self._exporter.discard_all()
        self._exporter.publish()
        for socket in (*self._dealers, self._router):
            socket.close(linger=LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        _guard(self._backend.close)
        self._socket_path.unlink(missing_ok=True)

    def _bind(self) -> Any:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        router.setsockopt(zmq.SNDHWM, 10_000)
        try:
            if self._host:
                self._bind_tcp(router)
            else:
                router.bind(self.endpoint)
                self._socket_path.chmod(0o600)
        except (zmq.ZMQError, OSError) as error:
            router.close(linger=0)
            raise ConfigError(
                f"KV transfer: {self._socket_path} can't be made: {error}; check BIREME_RUN_DIR {self._run_dir}"
            ) from error
        return router

    def _bind_tcp(self, router: Any) -> None:
        """Bind a free port of every address: routes between hosts are the network's affair."""
        address = "*" if needs_curve(f"tcp://{self._host}:0") else self._host
        if address == "*":
            self._authenticator = let_in_readers(self._context, self._deployment_key)
            router.curve_publickey, router.curve_secretkey = curve_keys(self._deployment_key, "engine")
            router.curve_server = True
        router.setsockopt(zmq.IPV6, is_ipv6(self._host))  # then "*" is both kinds of addresses
        port = router.bind_to_random_port(f"tcp://{address}")
        self._endpoint = f"tcp://{self._host}:{port}"

    def _bind_again(self) -> None:
        """Someone has deleted the socket: connected peers stay so, new ones need it.

        One name more: to unbind the former one would break the connections that came by it, and a claim or an offer on
        its way would be lost, for which both sides wait for kv_transfer_timeout_ms.
        """
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._router.bind(self.endpoint)
        self._socket_path.chmod(0o600)
        logger.warning("transfer event=socket_restored path=%s", self._socket_path)

    def _connect(self, endpoint: str) -> Any:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        dealer.setsockopt(zmq.SNDHWM, 10_000)
        if endpoint.startswith("tcp://"):
            dealer.setsockopt(zmq.IPV6, is_ipv6(endpoint))
            dealer.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)  # not the kernel's, which doubles its pauses
            if needs_curve(endpoint):
                dealer.curve_publickey, dealer.curve_secretkey = curve_keys(self._deployment_key, "reader")
                dealer.curve_serverkey = curve_keys(self._deployment_key, "engine")[0]
        dealer.connect(endpoint)
        self._dealers.add(dealer)
        self._poller.register(dealer, zmq.POLLIN)
        return dealer

    def _disconnect(self, dealer: Any) -> None:
        self._poller.unregister(dealer)
        self._dealers.discard(dealer)
        dealer.close(linger=0)

    def _reply(self, identity: bytes, message: bytes) -> bool:
        try:
            self._router.send_multipart((identity, message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.info("transfer event=reply_lost error=%s", error)
            return False
        return True

    def _make_exporter(self, layout: KvLayout, buffer: TransferBuffer[Outgoing]) -> Exporter:
        return Exporter(
            layout=layout,
            life=self._life,
            backend=self._backend,
            table=self._table,
            buffer=buffer,
            copier=self._copier,
            reply=self._reply,
            post=self._mailbox.post,
            metrics=self._metrics,
            chunk_bytes=self._chunk_bytes,
        )

    def _make_importer(self, layout: KvLayout) -> Importer:
        return Importer(
            layout=layout,
            find=self._find,
            timeout_s=self._timeout_s,
            backend=self._backend,
            copier=self._copier,
            connect=self._connect,
            disconnect=self._disconnect,
            post=self._mailbox.post,
            metrics=self._metrics,
            costs=self._costs,
        )


def _socket_path(run_dir: Path, worker: str, life: int) -> Path:
    path = run_dir / f"kv-{worker}-{life}.sock"
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise ConfigError(
            f"socket path {path} has {length} bytes; the limit is {MAX_PATH_BYTES}:"
            " set BIREME_RUN_DIR to a shorter path"
        )
    return path


def _guard(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception:
        # A failing message or timer must not end the thread that all transfers need.
        logger.exception("transfer event=control_failed")
