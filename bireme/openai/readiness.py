"""Whether this frontend can answer now. It asks the workers, at most once a second: Triton calls dead ones ready.

A worker that is down while others serve, discovery, or a plane of KV events, that can't be reached, or a database that
can't be used, takes nothing down: the report says `degraded` and why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bireme.config import stage_of
from bireme.discovery import run_folder
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
        run_dir: Path | None = None,
    ) -> None:
        """`run_dir`: of the launch, whose operator may have it drain; None: out of reach."""
        self._models, self._videos, self._stores = models, videos or VideoModels(), stores
        self._report: tuple[bool, dict[str, Any]] = (False, {"status": "starting"})
        self._asked_at = -_KEPT_S
        self._run_dir = run_dir
        self._lock = asyncio.Lock()
        self.is_draining = False

    @property
    def is_asked_to_drain(self) -> bool:
        """By the launch's operator; this process goes on meanwhile."""
        return self._run_dir is not None and run_folder.is_draining(self._run_dir)

    async def report(self) -> tuple[bool, dict[str, Any]]:
        """Return whether it answers; status (ready, degraded, not_ready, draining, stopping) and details by model."""
        if self.is_draining:
            return False, {"status": "stopping"}
        if self.is_asked_to_drain:
            return False, {"status": DRAINING}
        async with self._lock:
            if time.monotonic() - self._asked_at > _KEPT_S:
                self._report = await self._ask()
                self._asked_at = time.monotonic()
        return self._report

    async def _ask(self) -> tuple[bool, dict[str, Any]]:
        models = list(self._models)
        states = await asyncio.gather(*map(_workers, models))
        can_answer = list(map(_can_answer, models, states))
        details = {model.name: workers for model, workers in zip(models, states, strict=True)}
        for video in self._videos:
            can_answer.append(await _in_time(video.is_ready()))
            details[video.name] = {"video_diffusion": READY if can_answer[-1] else "not ready"}
        told: dict[str, dict[str, Any]] = {
            "discovery": {model.name: model.discovery_report() for model in models},
            "routing": {model.name: model.services.router.problem for model in models},
            "stores": {store.name: store.problem for store in self._stores},
        }
        told = {part: shown for part, by_name in told.items() if (shown := _without_empty(by_name))}
        is_ready = all(can_answer)
        return is_ready, {"status": _status(is_ready, details, told), "models": details, **told}


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def _status(is_ready: bool, details: dict[str, dict[str, str]], told: dict[str, dict[str, Any]]) -> str:
    if not is_ready:
        return "not_ready"
    is_followed = all(report["current"] and not report["refused"] for report in told.get("discovery", {}).values())
    is_well = all(state in (READY, DRAINING) for workers in details.values() for state in workers.values())
    return "ready" if is_followed and is_well and not told.keys() & {"routing", "stores"} else "degraded"


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
        async with asyncio.timeout(_TIMEOUT_S):
            await workers.check(name)
    except TimeoutError:
        return f"{name}: no answer in {_TIMEOUT_S:g} s"
    except BiremeError as error:
        drop_frames(error)
        is_private = isinstance(error, UnreachableError)  # its address must not be shown
        return "the model's server can't be reached" if is_private else str(error)
    return READY


async def _in_time(question: Awaitable[bool]) -> bool:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await question
    except TimeoutError:
        return False
