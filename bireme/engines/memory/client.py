"""An engine's hold on weights that the memory service keeps.

If the service dies, what is mapped stays; the hold offers it to the next service, which lost everything.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bireme.engines.memory.wire import (
    NONCE_BYTES,
    Challenge,
    Done,
    Forget,
    Granted,
    Holders,
    HoldWeights,
    Packet,
    Publish,
    Refused,
    close_all,
    new_socket,
    prove,
    receive,
    send,
    socket_path,
)
from bireme.errors import UnavailableError

logger = logging.getLogger("bireme.memory")
_ANSWER_S = 5.0
_RETRY_S = 1.0
P = TypeVar("P", bound=Packet)


class WeightsHold:
    """`attach`, then `publish` where it says so, then `keep`; `close` ends it at any time."""

    def __init__(self, run_dir: Path, key: bytes, worker: str, weights: str) -> None:
        self._run_dir, self._key, self._worker, self._weights = run_dir, key, worker, weights
        self._link: socket.socket | None = None
        self._descriptors: tuple[int, ...] = ()
        self._published = Publish(0, 0.0)
        self._is_closed = threading.Event()

    def attach(self, wait_s: float) -> tuple[Granted, tuple[int, ...]]:
        """Return whether to map (with descriptors, which the hold keeps) or to fill. Waits while another engine fills.

        Raises UnavailableError with the reason why neither can be.
        """
        try:
            granted, self._descriptors = self._attach(time.monotonic() + wait_s)
        except OSError as error:
            self.close()
            raise UnavailableError(f"the memory service does not answer: {error}") from error
        except UnavailableError:
            self.close()
            raise
        self._published = Publish(granted.num_bytes, granted.load_s)
        return granted, self._descriptors

    def publish(self, descriptors: tuple[int, ...], num_bytes: int, load_s: float) -> None:
        """Both are the hold's from now on. Raises UnavailableError."""
        self._descriptors, self._published = descriptors, Publish(num_bytes, load_s)
        assert self._link is not None, "attach first"
        try:
            send(self._link, self._published, descriptors)
        except OSError as error:
            raise UnavailableError(f"the memory service has ended: {error}") from error

    def keep(self, on_count: Callable[[int], None]) -> None:
        """`on_count`: how many engines have the weights, of this service or the next."""
        threading.Thread(target=self._keep, args=(on_count,), name="memory-hold", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
            self._link.close()
        close_all(self._descriptors)
        self._descriptors = ()

    def _attach(self, deadline: float) -> tuple[Granted, tuple[int, ...]]:
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._link = link = connect(self._run_dir)
        challenge, _ = _expect(link, Challenge)
        proof = prove(self._key, "engine", challenge.nonce)
        send(link, HoldWeights(self._weights, self._worker, nonce, proof))
        while True:
            granted, descriptors = _expect(link, Granted)
            if not hmac.compare_digest(granted.proof, prove(self._key, "service", nonce)):
                close_all(descriptors)
                raise UnavailableError("the memory service of this run folder has another deployment key")
            if granted.role != "wait":
                link.settimeout(None)
                return granted, descriptors
            link.settimeout(max(0.01, deadline - time.monotonic()))  # nothing else is said until it is filled

    def _keep(self, on_count: Callable[[int], None]) -> None:
        on_count(1)
        while not self._is_closed.is_set():
            try:
                assert self._link is not None
                packet, descriptors = receive(self._link)
                close_all(descriptors)
                if isinstance(packet, Holders):
                    on_count(packet.num_engines)
            except (OSError, UnavailableError):
                if not self._is_closed.wait(_RETRY_S):
                    self._offer()

    def _offer(self) -> None:
        """With this engine's copy if that service has none."""
        with contextlib.suppress(OSError, UnavailableError):  # not yet there: the next turn tries again
            assert self._link is not None
            self._link.close()
            granted, descriptors = self._attach(time.monotonic() + _ANSWER_S)
            close_all(descriptors)
            if granted.role == "fill":
                send(self._link, self._published, self._descriptors)
            logger.info("memory_service_again worker=%s role=%s", self._worker, granted.role)


def forget(run_dir: Path, key: bytes, worker: str) -> int:
    """Return the bytes freed. Raises UnavailableError."""
    try:
        with connect(run_dir) as link:
            challenge, _ = _expect(link, Challenge)
            send(link, Forget(worker, b"", prove(key, "engine", challenge.nonce)))
            return _expect(link, Done)[0].num_bytes
    except OSError as error:
        raise UnavailableError(f"the memory service does not answer: {error}") from error


def connect(run_dir: Path) -> socket.socket:
    """Raises UnavailableError where no service was started, OSError where it does not answer."""
    path = socket_path(run_dir)
    if not os.path.exists(path):
        raise UnavailableError("this launch has no memory service; serve with tools/serve.py")
    link = new_socket()
    try:
        link.settimeout(_ANSWER_S)
        link.connect(str(path))
    except OSError:
        link.close()
        raise
    return link


def _expect(link: socket.socket, kind: type[P]) -> tuple[P, tuple[int, ...]]:
    packet, descriptors = receive(link)
    if isinstance(packet, kind):
        return packet, descriptors
    close_all(descriptors)
    reason = packet.error if isinstance(packet, Refused) else f"{type(packet).__name__} came"
    raise UnavailableError(f"the memory service refuses: {reason}")
