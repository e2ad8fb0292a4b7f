"""Whether errors of requests are the engine's.

After a CUDA or NCCL fault TensorRT-LLM's process stays alive, calls itself healthy (up to late 1.3), and answers every
request with an error in the form of a request's fault. A wrong request's error looks the same, and its text is partly
the client's. So a suspicion only sends a request of our own: if that fails, the engine is at fault.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

logger = logging.getLogger("bireme.engines.trtllm")

FAILURES_IN_A_ROW = 3  # without a success in between
_OF_THE_DEVICE = re.compile(r"CUDA|NCCL|illegal memory access|device-side assert|unspecified launch failure", re.I)


class FaultWatch:
    """Used on the event loop's thread. `probe` generates a token; `fail` ends the process."""

    def __init__(
        self, probe: Callable[[], Awaitable[None]], loop: asyncio.AbstractEventLoop, fail: Callable[[str], None]
    ) -> None:
        self._probe = probe
        self._loop = loop
        self._fail = fail
        self._num_failures = 0  # in a row
        self._probing: asyncio.Task[None] | None = None

    def request_answered(self) -> None:
        self._num_failures = 0

    def request_failed(self, text: str) -> None:
        """Note an error that ended a request, the canary's included."""
        self._num_failures += 1
        is_suspect = self._num_failures >= FAILURES_IN_A_ROW or _OF_THE_DEVICE.search(text)
        if is_suspect and self._probing is None:
            self._probing = self._loop.create_task(self._look(text))

    async def _look(self, text: str) -> None:
        try:
            await self._probe()
        except Exception as error:
            self._fail(f"requests fail ({text[:200]}), and so does one of the engine's own: {error}")
        else:
            logger.warning("requests_fail count=%d engine=answers last_error=%.200s", self._num_failures, text)
            self._num_failures = 0
        finally:
            self._probing = None
