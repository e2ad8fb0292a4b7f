"""The ports of one tritonserver, and how to find free ones."""

from __future__ import annotations

import random
import socket
import threading
from dataclasses import dataclass

# Below the kernel's ephemeral range (32768 and up), so that no outgoing connection takes one meanwhile.
_FIRST, _END = 25000, 32000
_BLOCK = 50


@dataclass(frozen=True, slots=True)
class Ports:
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


def free_ports() -> Ports:
    """Return three of `free_port`. Raises OSError."""
    return Ports(free_port(), free_port(), free_port())


def free_port() -> int:
    """Return a port that nobody listens on now, and that is returned once: also to no other process while this one
    lives, as it may be long until somebody listens. Raises OSError when no more are left.
    """
    with _lock:
        while True:
            while _unused:
                if is_free(port := _unused.pop()):
                    return port
            _take_block()


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether `host:port` can be bound now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


_lock = threading.Lock()
_unused: list[int] = []
# A block is taken by a socket's abstract name, which is known where the ports are (in one network namespace), to all
# users, and is free again when the process has ended, however it did.
_taken: list[socket.socket] = []


def _take_block() -> None:
    blocks = list(range(_FIRST, _END, _BLOCK))
    random.shuffle(blocks)
    for first in blocks:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0bireme-ports-{first}")
        except OSError:
            claim.close()
            continue
        _taken.append(claim)
        _unused.extend(range(first, first + _BLOCK))
        return
    raise OSError(f"no free ports: all of {_FIRST} to {_END - 1} were given to processes that still run")
