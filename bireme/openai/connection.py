"""uvicorn's connection, which tells all of its requests that the client has left.

uvicorn itself tells the last one alone; of two that a client has sent one after the other without waiting,
the first would go on generating for nobody.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


class Connection(HttpToolsProtocol):
    """One client's connection."""

    _open: tuple[RequestResponseCycle, ...] = ()  # requests not answered yet, the oldest first

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._open = (*(cycle for cycle in self._open if not cycle.response_complete), self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._open[:-1]:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._open = ()
        super().connection_lost(exc)
