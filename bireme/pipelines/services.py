"""What every text pipeline works with: workers, router, limits, metrics; and the count of running requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from bireme.config import Recipe
from bireme.errors import BiremeError, ResourceExhaustedError, drop_frames
from bireme.kv.router import WorkerRouter
from bireme.messages import Capacity
from bireme.metrics import Registry
from bireme.workers.base import WorkerClient

logger = logging.getLogger("bireme.pipeline")


@dataclass(slots=True)
class Services:
    """Shared by all requests of one pipeline; used on one loop."""

    recipe: Recipe
    workers: WorkerClient
    router: WorkerRouter
    metrics: Registry
    num_active: int = 0
    _background: set[asyncio.Task[None]] = field(default_factory=set)

    def capacity(self) -> Capacity | None:
        """Return what the first decode worker takes, once it is known."""
        found = (self.workers.capacity(worker) for worker in self.recipe.replicas("decode"))
        return next((capacity for capacity in found if capacity is not None), None)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a running request. Raises ResourceExhaustedError when there are too many."""
        limit = self.recipe.limits.max_concurrent_requests
        if self.num_active >= limit:
            raise ResourceExhaustedError(
                f"{self.num_active} requests under way; limits.max_concurrent_requests is {limit}, try again later"
            )
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background, such as freeing a lease; its errors are logged."""
        task = asyncio.get_running_loop().create_task(_quietly(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        if self._background:
            await asyncio.wait(list(self._background), timeout=1.0)
        self.router.close()
        await self.workers.close()


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except BiremeError as error:
        logger.info("background_task_failed error=%s", error)
        drop_frames(error)
