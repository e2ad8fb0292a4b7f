"""The ports of one tritonserver, and how to find free ones."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass

# Below the kernel's ephemeral range (32768 and up), so that no outgoing connection takes one meanwhile; above the
# ports that the project's own tests name (23100 to 24799).
_CANDIDATES = range(25000, 32000)


@dataclass(frozen=True, slots=True)
class Ports:
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


def free_ports(candidates: Iterable[int] = _CANDIDATES) -> Ports:
    """Return three ports among `candidates` that nobody listens on now. Raises OSError."""
    order = list(candidates)
    random.shuffle(order)
    found = list(itertools.islice((port for port in order if is_free(port)), 3))
    if len(found) < 3:
        raise OSError(f"{len(found)} free ports among {len(order)} candidates; three are needed")
    return Ports(*found)


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
