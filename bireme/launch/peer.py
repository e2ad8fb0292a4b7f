"""Who is at the other end of a TCP connection to this host: no secret goes to a process of another user.

While a port's process starts again, any user may listen there.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import time
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_MAPPED = bytes(10) + b"\xff\xff"
_LOOK_S = 0.005


class NotOursError(Exception):
    """The text says whose it is."""


def check_ours(link: socket.socket, timeout_s: float) -> None:
    """Return once this user's process has accepted. Raises NotOursError, TimeoutError (nobody has), OSError."""
    here, there = link.getsockname(), link.getpeername()
    rows = [f" {far} {near} " for far, near in zip(_names(*there[:2]), _names(*here[:2]), strict=True)]
    deadline = time.monotonic() + timeout_s
    while (user := _owner(rows)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError("nobody accepts the connection")
        time.sleep(_LOOK_S)
    if user != os.geteuid():
        raise NotOursError(f"a process of user {user} listens at port {there[1]} in the place of this launch's own")


def _owner(rows: list[str]) -> int | None:
    """None: not accepted yet."""
    for table in _TABLES:
        try:
            text = table.read_text()
        except FileNotFoundError:
            if table is _TABLES[0]:
                raise NotOursError(
                    f"nobody can tell whose process listens: {table} is missing, mount /proc whole"
                ) from None
            continue  # a kernel without IPv6
        for row in rows:
            if (at := text.find(row)) >= 0:
                _, _, _, _, _, _, user, _, inode, *_ = text[at:].split(maxsplit=9)
                return int(user) if inode != "0" else None
    return None


def _names(host: str, port: int) -> list[str]:
    """Return how the kernel's tables write an end: words in its byte order, IPv4 also as IPv6."""
    packed = ipaddress.ip_address(host.partition("%")[0]).packed
    forms = [packed, _MAPPED + packed] if len(packed) == 4 else [packed, packed]
    return [f"{_words(form)}:{port:04X}" for form in forms]


def _words(packed: bytes) -> str:
    groups = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(group, sys.byteorder):08X}" for group in groups)
