"""The common part of stages over an engine in a child process: start, stop, readiness."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np

from bireme.config import Recipe
from bireme.errors import UnavailableError
from bireme.metrics import Registry
from bireme.stages.requests import RequestNames
from bireme.types import Send, StageContext, TensorResponse


class ChildEngine(Protocol):
    """This process' side of an engine; `start` and `stop` may take as long as loading does."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def state(self) -> str:
        """Return `ready`, or why it is not."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


E = TypeVar("E", bound=ChildEngine)
Connect = Callable[[Recipe, str, Registry, logging.Logger], E]  # the client class of the engine


class EngineStage(Generic[E]):
    def __init__(self, connect: Connect[E], engine: E | None = None) -> None:
        """`engine`: given by tests; else made at start."""
        self._connect, self._given = connect, engine

    async def start(self, context: StageContext) -> None:
        self._context = context
        self._names = RequestNames()
        if self._given is None:
            self._given = self._connect(context.recipe, context.model_name, context.metrics, context.logger)
        await asyncio.to_thread(self._given.start)

    async def stop(self) -> None:
        if self._given is not None:
            await asyncio.to_thread(self._given.stop)

    def is_ready(self) -> bool:
        return self._given is not None and self._given.is_ready

    @property
    def _engine(self) -> E:
        assert self._given is not None, "start first"
        return self._given

    def _answer_ping(self, request_id: str, send: Send) -> None:
        """Answer that the stub lives and its engine takes requests, with an id that it has the request.

        Raises UnavailableError and, as one that died may have been replaced, NotFoundError.
        """
        self._check_ready()
        if request_id:
            self._names.find(request_id)
        send(TensorResponse({"state": np.array([b"ready"], np.object_)}))

    def _check_ready(self) -> None:
        """Raises UnavailableError."""
        if not self._engine.is_ready:
            raise UnavailableError(f"{self._engine.state}; try again")
