"""The stage of a model that is loaded but not in the recipe: it answers with the reason.

All models load, so that one command serves every recipe; missing ones answer UNAVAILABLE.
"""

from __future__ import annotations

from typing import ClassVar, cast

from bireme.errors import UnavailableError
from bireme.specs import ModelSpec
from bireme.types import Cancelled, Send, Stage, StageContext, Tensors


class AbsentStage:
    """Answers every request with UNAVAILABLE and the reason."""

    spec: ClassVar[ModelSpec]

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def start(self, context: StageContext) -> None:
        return None

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        raise UnavailableError(self._reason)

    async def stop(self) -> None:
        return None

    def is_ready(self) -> bool:
        return True  # it answers; a model that is not ready would make the whole server so


def absent_stage(spec: ModelSpec, reason: str) -> Stage:
    """Return the stage of a worker that the recipe leaves out."""
    kind = type("AbsentStage", (AbsentStage,), {"spec": spec})
    return cast(Stage, kind(reason))
