"""ZeroMQ sockets that other hosts can reach speak CURVE: both sides' keys are made from the deployment's key.

Only its processes get in, and no reader takes another process for an engine.
"""

from __future__ import annotations

import hashlib
import ipaddress
from typing import Any, Literal

import zmq
from zmq.utils import z85


def curve_keys(deployment_key: bytes, side: Literal["engine", "reader"]) -> tuple[bytes, bytes]:
    """Return the side's public and secret key in Z85: the same wherever the deployment's key is known."""
    secret = z85.encode(hashlib.blake2b(deployment_key, digest_size=32, person=f"bireme {side}".encode()).digest())
    return zmq.curve_public(secret), secret


def needs_curve(endpoint: str) -> bool:
    """Return whether an address can be reached from other hosts."""
    if not endpoint.startswith("tcp://"):
        return False
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def is_ipv6(endpoint: str) -> bool:
    """Return whether a host or an endpoint has an IPv6 address, in brackets: to sockets of ZeroMQ this must be said."""
    return "[" in endpoint


def let_in_readers(context: Any, deployment_key: bytes) -> Any:
    """Refuse everybody else on the context's servers; return what must be stopped before the context ends."""
    from zmq.auth.thread import ThreadAuthenticator  # imports asyncio: an eighth of the CPU of an engine's start

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", _Readers(curve_keys(deployment_key, "reader")[0]))
    return authenticator


class _Readers:
    """Lets in who has the readers' key."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = z85.decode(public_key)

    def callback(self, domain: str, key: bytes) -> bool:
        return z85.decode(key) == self._public_key
