"""The interface between a pipeline and the models that it calls.

Unary calls (`tokenize`, `prefill`, `abort_prefill`) are coroutines. Decode's tokens come over the token bus to a
`Sink`, called on the loop's thread once a step and request: no task switch a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bireme.errors import BiremeError, UnavailableError
from bireme.messages import Capacity, EmbedRequest, EncodeRequest, EngineRequest, Sink, TokenLogprobs, Usage
from bireme.multimodal.wire import EncodeAnswer
from bireme.types import Floats

__all__ = ["Generation", "PrefillResult", "Sink", "UnreachableError", "WorkerClient"]


class UnreachableError(UnavailableError):
    """No server answers at the address; waiting for an engine would not help."""


class Generation(Protocol):
    """A running request in a decode worker."""

    @property
    def was_sent(self) -> bool:
        """Whether the worker was given it. False: a refusal or failure has lost nothing."""

    @property
    def failure(self) -> BiremeError | None:
        """Why this side ended it (its engine lost, no worker there); None: the engine made the finish."""

    def abort(self) -> None:
        """Stop it; the sink still gets its finish. Harmless after the end."""


@dataclass(frozen=True, slots=True)
class PrefillResult:
    disaggregated_params: bytes
    output_ids: tuple[int, ...]
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: list[TokenLogprobs] | None = None  # entry i belongs to prompt token i + 1; None: not asked for


class WorkerClient(Protocol):
    """All workers of one deployment, by worker id. Errors are those of errors.py."""

    on_silence: Callable[[str, bool], None]  # called with a server, and whether its host has gone silent

    def set_workers(self, workers: Mapping[str, int]) -> None:
        """Take which workers there are now, and their engines' lives (0: not known).

        What runs on one that is missing goes on while it answers.
        """

    async def tokenize(self, text: str) -> list[int]: ...

    async def prefill(self, worker: str, request: EngineRequest, request_id: str) -> PrefillResult: ...

    async def abort_prefill(self, worker: str, request_id: str) -> None:
        """Stop a prefill, or free the lease of one that has ended. Raises NotFoundError when neither is there."""

    async def encode(self, worker: str, request: EncodeRequest, request_id: str) -> EncodeAnswer:
        """Have pictures encoded by the worker that has the vision tower: an encoder, prefill or decode."""

    async def abort_encode(self, worker: str, request_id: str) -> None:
        """Stop an encode; harmless when it has ended."""

    async def embed(self, worker: str, request: EmbedRequest, request_id: str) -> Floats:
        """Return the embeddings, a row a text."""

    async def abort_embed(self, worker: str, request_id: str) -> None:
        """Stop an embed; harmless when it has ended."""

    async def release(self, worker: str, handles: tuple[str, ...]) -> None:
        """Free embeddings that nobody will fetch; harmless for those that are gone."""

    def decode(self, worker: str, request: EngineRequest, sink: Sink) -> Generation:
        """Start generating. Raises nothing: errors come as the sink's finish."""

    def capacity(self, worker: str) -> Capacity | None:
        """Return what a decode worker's engine takes, once it is known."""

    async def check(self, worker: str) -> None:
        """Return when the worker takes requests: Triton has the model, its stub answers and its engine is up.

        Raises UnavailableError with the server's or the worker's reason; waits as long as a dead stub is silent.
        """

    async def close(self) -> None: ...
