"""The ports of one tritonserver, how to find free ones, and where to listen."""

from __future__ import annotations

import errno
import random
import socket
import threading
from dataclasses import dataclass
from typing import Any

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
    """Return whether nobody has `host:port` now. Raises OSError when it can't be bound for another reason."""
    family, address = resolve(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the family and the socket address to listen on; a name's IPv4 address if it has one. Raises OSError."""
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:  # it can't be a name
        raise OSError(str(error)) from error
    family, _, _, _, (ip, _, *scope) = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, (ip, port, *scope)


def own_host(host: str) -> str:
    """Return by which host programs on this machine reach what listens on `host`; servers on :: may be IPv6 alone."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def listen_flags(host: str) -> tuple[str, ...]:
    """Return tritonserver's flags. Raises OSError.

    Its HTTP server takes a name for 255.255.255.255, and has a form of its own for IPv6.
    """
    family, (ip, *_) = resolve(host, 0)
    http, grpc = (f"ipv6:{ip}", f"[{ip}]") if family == socket.AF_INET6 else (ip, ip)
    return f"--http-address={http}", f"--grpc-address={grpc}", f"--metrics-address={http}"


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
