"""The interface between a pipeline and the models that it calls.

Decode's tokens come over the token bus to a `Sink`, called on the loop's thread once a step and request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bireme.errors import BiremeError, UnavailableError
from bireme.messages import (
    Capacity,
    EmbedRequest,
    EncodeRequest,
    EngineRequest,
    EngineSpan,
    Sink,
    TokenLogprobs,
    Usage,
)
from bireme.multimodal.wire import EncodeAnswer
from bireme.types import Floats

__all__ = ["Generation", "PrefillResult", "Sink", "UnreachableError", "WorkerClient"]


class UnreachableError(UnavailableError):
    """No server answers at the address."""


class Generation(Protocol):
    """A running request in a decode worker."""

    @property
    def was_sent(self) -> bool:
        """False: a refusal or failure has lost nothing."""

    @property
    def failure(self) -> BiremeError | None:
        """Why this side ended it; None: the engine made the finish."""

    def abort(self) -> None:
        """Stop it; the sink still gets its finish. Harmless after the end."""


@dataclass(frozen=True, slots=True)
class PrefillResult:
    disaggregated_params: bytes
    output_ids: tuple[int, ...]
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: list[TokenLogprobs] | None = None  # entry i belongs to prompt token i + 1; None: not asked for
    spans: list[EngineSpan] | None = None  # of a request with a traceparent


class WorkerClient(Protocol):
    """All workers of one deployment, by worker id. Errors: errors.py."""

    on_silence: Callable[[str, bool], None]  # called with a server, and whether its host has gone silent

    def set_workers(self, workers: Mapping[str, int]) -> None:
        """Take worker -> its engine's life (0: unknown).

        What runs on one that is missing goes on while it answers.
        """

    async def tokenize(self, text: str) -> list[int]: ...

    async def prefill(self, worker: str, request: EngineRequest, request_id: str) -> PrefillResult: ...

    async def abort_prefill(self, worker: str, request_id: str) -> None:
        """Stop a prefill, or free its lease. Raises NotFoundError."""

    async def encode(self, worker: str, request: EncodeRequest, request_id: str) -> EncodeAnswer:
        """By the worker with the vision tower."""

    async def abort_encode(self, worker: str, request_id: str) -> None:
        """Harmless after its end."""

    async def embed(self, worker: str, request: EmbedRequest, request_id: str) -> Floats:
        """Return the embeddings, a row a text."""

    async def abort_embed(self, worker: str, request_id: str) -> None:
        """Harmless after its end."""

    async def release(self, worker: str, handles: tuple[str, ...]) -> None:
        """Free embeddings that nobody will fetch."""

    def decode(self, worker: str, request: EngineRequest, sink: Sink) -> Generation:
        """Start generating. Errors come as the sink's finish."""

    def capacity(self, worker: str) -> Capacity | None:
        """None: not known yet."""

    async def check(self, worker: str) -> None:
        """Return when the worker takes requests. Raises UnavailableError."""

    async def close(self) -> None: ...
