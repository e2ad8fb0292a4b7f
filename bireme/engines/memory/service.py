"""The memory service: `python -m bireme.engines.memory.service --run-dir FOLDER --parent PID`.

It keeps descriptors, of a sealed memfd or of GPU memory, and nothing else: no torch, no CUDA context, and it never
maps what it keeps. The kernel frees memory with its last descriptor and mapping, so weights outlive the engine that
read them, and mapped ones outlive the service.

The first engine that asks for weights fills them, others wait until it has; if it ends before, the next one fills. A
worker that comes with other weights than before (its checkpoint was replaced) makes the service forget the former ones,
unless another worker used them, too. It forgets those of a worker that sleeps and is to have them freed
(`run_folder.must_free_weights`) likewise.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path

from bireme.discovery import run_folder
from bireme.engines.memory.wire import (
    NONCE_BYTES,
    NUM_DESCRIPTORS,
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
from bireme.engines.stub.process_log import start_log
from bireme.errors import BiremeError, UnavailableError
from bireme.own_process import die_with_parent, end_process
from bireme.stop_signals import on_stop_signal

logger = logging.getLogger("bireme.memory")
MAX_CONNECTIONS = 256
_HANDSHAKE_S = 5.0
_LOOK_S = 0.5


@dataclass(slots=True, eq=False)
class _Weights:
    descriptors: tuple[int, ...] = ()  # none yet: `filler` is at it
    num_bytes: int = 0
    load_s: float = 0.0
    filler: socket.socket | None = None
    workers: set[str] = field(default_factory=set)  # that have used them
    links: dict[socket.socket, str] = field(default_factory=dict)  # of engines that have them mapped -> worker


class MemoryService:
    """`start`, then `stop`; a thread accepts, and one a connection serves it."""

    def __init__(self, path: Path, key: bytes) -> None:
        self._path, self._key = path, key
        self._kept: dict[str, _Weights] = {}
        self._changed = threading.Condition()  # guards all of it
        self._links: set[socket.socket] = set()
        self._stopping = threading.Event()
        self._listener = self._bind()
        self._thread = threading.Thread(target=self._accept, name="memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait for connections
        self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        with self._changed:
            for link in self._links:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
            for weights in self._kept.values():
                close_all(weights.descriptors)
            self._kept.clear()

    def _bind(self) -> socket.socket:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        listener = new_socket()
        listener.bind(str(self._path))
        listener.listen(MAX_CONNECTIONS)
        return listener

    def _accept(self) -> None:
        while not self._stopping.is_set():
            if not self._path.exists():  # a cleaner of temporary files was here
                with contextlib.suppress(OSError):
                    listener, self._listener = self._listener, self._bind()
                    listener.close()
            self._forget_sleepers()
            if not select.select([self._listener], [], [], _LOOK_S)[0]:
                continue
            try:
                link, _ = self._listener.accept()
            except OSError as error:  # no descriptor left, or `stop`
                if self._stopping.is_set():
                    return
                logger.warning("accept_failed error=%s", error)
                self._stopping.wait(_LOOK_S)
                continue
            try:
                threading.Thread(target=self._serve, args=(link,), name="memory-link", daemon=True).start()
            except RuntimeError as error:  # no thread left
                link.close()
                logger.warning("accept_failed error=%s", error)
                self._stopping.wait(_LOOK_S)

    def _serve(self, link: socket.socket) -> None:
        with link:
            try:
                with self._changed:
                    self._links.add(link)
                    is_full = len(self._links) > MAX_CONNECTIONS
                if is_full:
                    raise UnavailableError(f"{MAX_CONNECTIONS} connections are open")
                asked = self._shake_hands(link)
                if isinstance(asked, Forget):
                    send(link, Done(self._forget(asked.worker)))
                else:
                    self._hold(link, asked)
            except (BiremeError, OSError) as error:
                logger.warning("link_ended error=%s", error)
                with contextlib.suppress(OSError):
                    send(link, Refused(str(error)), waits=False)
            finally:
                with self._changed:
                    self._links.discard(link)

    def _shake_hands(self, link: socket.socket) -> HoldWeights | Forget:
        """Raises UnavailableError, OSError."""
        link.settimeout(_HANDSHAKE_S)
        nonce = secrets.token_bytes(NONCE_BYTES)
        send(link, Challenge(nonce))
        asked = self._receive(link)
        link.settimeout(None)
        if not isinstance(asked, HoldWeights | Forget):
            raise UnavailableError(f"{type(asked).__name__} came where HoldWeights was due")
        if not hmac.compare_digest(asked.proof, prove(self._key, "engine", nonce)):
            raise UnavailableError("it has another deployment key than this launch")
        return asked

    def _hold(self, link: socket.socket, attach: HoldWeights) -> None:
        self._forget(attach.worker, but=attach.weights)
        name, proof = attach.weights[:12], prove(self._key, "service", attach.nonce)
        weights = self._wait_turn(link, attach, proof)
        try:
            if weights.filler is link:
                send(link, Granted("fill", proof))
                self._take(link, attach, weights)
            logger.info("attached worker=%s weights=%s engines=%d", attach.worker, name, len(weights.links))
            with contextlib.suppress(OSError, UnavailableError):
                self._receive(link)  # nothing more is said: it ends
        finally:
            with self._changed:
                if weights.filler is link:
                    weights.filler = None
                weights.links.pop(link, None)
                self._tell(weights)
                self._free_unused()
                self._changed.notify_all()
            logger.info("detached worker=%s weights=%s engines=%d", attach.worker, name, len(weights.links))

    def _wait_turn(self, link: socket.socket, attach: HoldWeights, proof: bytes) -> _Weights:
        """Return the weights once they are there, which the engine is told, or it is its turn to fill them."""
        has_said = False
        while True:
            with self._changed:
                weights = self._kept.setdefault(attach.weights, _Weights())
                weights.workers.add(attach.worker)
                if weights.descriptors:  # an engine may end at any time: its successor hears of that behind the answer
                    granted = Granted("map", proof, weights.num_bytes, weights.load_s)
                    send(link, granted, weights.descriptors, waits=False)
                    weights.links[link] = attach.worker
                    self._tell(weights)
                    return weights
                if weights.filler is None:
                    weights.filler = link
                    return weights
            if not has_said:
                has_said = True
                send(link, Granted("wait", proof))
            if select.select([link], [], [], 0)[0]:
                raise UnavailableError(f"{attach.worker} has ended while it waited")
            with self._changed:
                if weights.filler is not None and not weights.descriptors:
                    self._changed.wait(_LOOK_S)

    def _take(self, link: socket.socket, attach: HoldWeights, weights: _Weights) -> None:
        packet, descriptors = receive(link)
        if not isinstance(packet, Publish) or len(descriptors) != NUM_DESCRIPTORS:
            close_all(descriptors)
            raise UnavailableError(f"{type(packet).__name__} with {len(descriptors)} descriptors in place of weights")
        with self._changed:
            weights.descriptors, weights.num_bytes, weights.load_s = descriptors, packet.num_bytes, packet.load_s
            weights.filler = None
            weights.links[link] = attach.worker
            self._tell(weights)
            self._changed.notify_all()
        logger.info("weights_kept worker=%s bytes=%d load_s=%.1f", attach.worker, packet.num_bytes, packet.load_s)

    def _tell(self, weights: _Weights) -> None:
        for link in weights.links:
            with contextlib.suppress(OSError):  # it is ending
                send(link, Holders(len(weights.links)), waits=False)

    def _forget(self, worker: str, but: str = "") -> int:
        """But for the weights named; return how many bytes."""
        with self._changed:
            for name, weights in self._kept.items():
                if name != but:
                    weights.workers.discard(worker)
            freed = self._free_unused()
        if freed:
            logger.info("weights_freed worker=%s bytes=%d", worker, freed)
        return freed

    def _forget_sleepers(self) -> None:
        """Of those whose engines have ended, and which are to have their weights freed."""
        with self._changed:
            whole = [weights for weights in self._kept.values() if weights.filler is None]
            workers = {worker for weights in whole for worker in weights.workers}
            workers -= {worker for weights in self._kept.values() for worker in weights.links.values()}
        for worker in workers:
            if run_folder.must_free_weights(self._path.parent, worker):
                self._forget(worker)

    def _free_unused(self) -> int:
        """Return how many bytes."""
        unused = [
            name
            for name, weights in self._kept.items()
            if not weights.workers and not weights.links and weights.filler is None
        ]
        freed = [self._kept.pop(name) for name in unused]
        for weights in freed:
            close_all(weights.descriptors)
        return sum(weights.num_bytes for weights in freed)

    def _receive(self, link: socket.socket) -> Packet:
        packet, descriptors = receive(link)
        close_all(descriptors)
        return packet


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bireme.engines.memory.service", description="Keeps weights for engines.")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--parent", type=int, default=0, help="process id to live and die with; 0: none")
    options = parser.parse_args(arguments)
    if options.parent:
        die_with_parent(options.parent)
    start_log("memory service")
    service = MemoryService(socket_path(options.run_dir), run_folder.deployment_key(options.run_dir))
    ended = threading.Event()
    with on_stop_signal(lambda number: ended.set()):
        service.start()
        logger.info("memory_service_ready pid=%d", os.getpid())
        ended.wait()
    service.stop()
    return 0


if __name__ == "__main__":
    end_process(main())
