"""Whether this frontend can answer now. It asks the workers, at most once a second: Triton calls dead ones ready.

A worker that is down while others serve, discovery, or a plane of KV events, that can't be reached, or a database that
can't be used, takes nothing down: the report says `degraded` and why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from bireme.config import stage_of
from bireme.errors import BiremeError, drop_frames
from bireme.openai.store_thread import StoreThread
from bireme.openai.text.served_model import FollowedModel
from bireme.openai.video.served_video import VideoModels
from bireme.workers.base import UnreachableError, WorkerClient

READY, DRAINING = "ready", "draining"
_KEPT_S = 1.0
_TIMEOUT_S = 3.0


class Readiness:
    """Ready: for every model at least one worker takes requests of each stage that it can't do without."""

    def __init__(
        self,
        models: Iterable[FollowedModel],
        videos: VideoModels | None = None,
        stores: Sequence[StoreThread[Any]] = (),
    ) -> None:
        self._models, self._videos, self._stores = models, videos or VideoModels(), stores
        self._report: tuple[bool, dict[str, Any]] = (False, {"status": "starting"})
        self._asked_at = -_KEPT_S
        self._lock = asyncio.Lock()
        self.is_draining = False

    async def report(self) -> tuple[bool, dict[str, Any]]:
        """Return whether it can answer, and status (ready, degraded, not_ready, stopping) and details by model."""
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
        is_ready = all(_can_answer(model, workers) for model, workers in zip(models, states, strict=True))
        details = {model.name: workers for model, workers in zip(models, states, strict=True)}
        for video in self._videos:
            is_there = await _in_time(video.is_ready())
            details[video.name] = {"video_diffusion": READY if is_there else "not ready"}
            is_ready = is_ready and is_there
        followed = {model.name: told for model in models if (told := model.discovery_report())}
        stale = {model.name: problem for model in models if (problem := model.services.router.problem)}
        is_well = not stale and all(told["current"] and not told["refused"] for told in followed.values())
        unusable = {store.name: store.problem for store in self._stores if store.problem}
        is_well = (
            is_well
            and not unusable
            and all(state in (READY, DRAINING) for workers in states for state in workers.values())
        )
        status = "not_ready" if not is_ready else "ready" if is_well else "degraded"
        report: dict[str, Any] = {"status": status, "models": details}
        if followed:
            report["discovery"] = followed
        if stale:
            report["routing"] = stale
        if unusable:
            report["stores"] = unusable
        return is_ready, report


def _can_answer(model: FollowedModel, workers: dict[str, str]) -> bool:
    return model.needed_stages <= {stage_of(worker) for worker, state in workers.items() if state == READY}


async def _workers(model: FollowedModel) -> dict[str, str]:
    """Return worker -> ready, or its error."""
    members = model.services.members
    names = [name for stage in model.stages for name, one in members.items() if one.stage == stage]
    answers = await asyncio.gather(
        *(_told_draining() if members[name].is_draining else _state(model.workers, name) for name in names)
    )
    return dict(zip(names, answers, strict=True))


async def _told_draining() -> str:
    return DRAINING


async def _state(workers: WorkerClient, name: str) -> str:
    try:
        await asyncio.wait_for(workers.check(name), _TIMEOUT_S)
    except TimeoutError:
        return f"{name}: no answer in {_TIMEOUT_S:g} s"
    except BiremeError as error:
        drop_frames(error)
        is_private = isinstance(error, UnreachableError)  # its address must not be shown
        return "the model's server can't be reached" if is_private else str(error)
    return READY


async def _in_time(question: Awaitable[bool]) -> bool:
    try:
        return await asyncio.wait_for(question, _TIMEOUT_S)
    except TimeoutError:
        return False
