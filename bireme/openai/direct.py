"""Chunks of a reply straight to uvicorn's transport: no coroutine, no task switch, no message a chunk.

One rule: only between the start of a reply and its end, both of which go through ASGI, and only while the
client keeps up. Under another server, or a uvicorn whose inside has changed, everything goes through ASGI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

DirectWrite = Callable[[bytes], bool]  # never of nothing; false: not written, send it through ASGI
_USED = ("chunked_encoding", "disconnected", "flow", "response_complete", "transport")


def direct_write(send: Any) -> DirectWrite | None:
    """Return what writes chunks of the reply that was begun with this ASGI `send`, where that is possible."""
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or not all(hasattr(cycle, name) for name in _USED):
        return None
    if not cycle.chunked_encoding:
        return None
    flow, transport = cycle.flow, cycle.transport

    def write(data: bytes) -> bool:
        if flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write
