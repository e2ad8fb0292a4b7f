"""The token buses of one process: one a decode worker, over one gRPC channel."""

from __future__ import annotations

import asyncio
from typing import Any

from bireme.messages import Capacity, EngineRequest, Sink
from bireme.metrics import Registry
from bireme.workers.bus import Bus, BusRequest
from bireme.workers.channel import open_channel, server_address


class Buses:
    """Opened with the first request; used from one loop."""

    def __init__(self, stall_timeout_s: float, address: str | None = None, metrics: Registry | None = None) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._metrics = metrics
        self._address = address
        self._channel: Any = None
        self._buses: dict[str, Bus] = {}

    @property
    def address(self) -> str:
        return self._address or server_address()

    def channel(self) -> Any:
        if self._channel is None:
            self._channel = open_channel(self.address)
        return self._channel

    def decode(self, worker: str, request: EngineRequest, sink: Sink) -> BusRequest:
        return self._bus(worker).submit(request, sink)

    async def check(self, worker: str) -> None:
        """Return when the worker takes requests. Raises what a request would be told."""
        await self._bus(worker).check()

    def _bus(self, worker: str) -> Bus:
        bus = self._buses.get(worker)
        if bus is None:
            bus = self._buses[worker] = Bus(worker, self.address, self.channel, self._stall_timeout_s, self._metrics)
        return bus

    def capacity(self, worker: str) -> Capacity | None:
        """Return what the worker's engine takes, if it has been heard of."""
        bus = self._buses.get(worker)
        return bus.capacity if bus else None

    async def close(self) -> None:
        await asyncio.gather(*(bus.close() for bus in self._buses.values()))
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
