"""Can this frontend answer now? It asks the tritonservers behind it, at most once a second."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bireme.openai.served_model import Models, ServedModel
from bireme.workers.base import WorkerClient
from bireme.workers.remote import RemoteWorkers

_KEPT_S = 1.0
_TIMEOUT_S = 3.0


class Readiness:
    """Ready: for every model at least one decode worker answers."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._report: tuple[bool, dict[str, Any]] = (False, {"status": "starting"})
        self._asked_at = -_KEPT_S
        self._lock = asyncio.Lock()
        self.is_draining = False

    async def report(self) -> tuple[bool, dict[str, Any]]:
        """Return whether it is ready, and the details by model."""
        if self.is_draining:
            return False, {"status": "stopping"}
        async with self._lock:
            if time.monotonic() - self._asked_at > _KEPT_S:
                self._report = await self._ask()
                self._asked_at = time.monotonic()
        return self._report

    async def _ask(self) -> tuple[bool, dict[str, Any]]:
        models = list(self._models)
        states = await asyncio.gather(*(_workers(model) for model in models))
        is_ready = all(any(workers.values()) for workers in states)
        details = {model.name: workers for model, workers in zip(models, states, strict=True)}
        return is_ready, {"status": "ready" if is_ready else "not_ready", "models": details}


async def _workers(model: ServedModel) -> dict[str, bool]:
    names = [*model.recipe.replicas("decode"), *model.recipe.replicas("prefill")]
    answers = await asyncio.gather(*(_is_ready(model.workers, name) for name in names))
    return dict(zip(names, answers, strict=True))


async def _is_ready(workers: WorkerClient, name: str) -> bool:
    if not isinstance(workers, RemoteWorkers):
        return True
    try:
        return await asyncio.wait_for(workers.is_ready(name), _TIMEOUT_S)
    except asyncio.TimeoutError:
        return False
