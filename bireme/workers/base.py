"""The interface between a pipeline and the models that it calls.

Unary calls (`tokenize`, `prefill`, `encode`) are coroutines. Decode's tokens come over the token bus to a
`Sink`, called on the loop's thread once a step and request: no task switch a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bireme.messages import EngineRequest
from bireme.messages import Sink as Sink  # engines/client.py, which is below this package, takes sinks as well


class Generation(Protocol):
    """A request under way in a decode worker."""

    def abort(self) -> None:
        """Stop it; the sink still gets its finish. Harmless after the end."""


@dataclass(frozen=True, slots=True)
class PrefillResult:
    disaggregated_params: bytes
    output_ids: tuple[int, ...]


class WorkerClient(Protocol):
    """All workers of one deployment, by name. Errors are those of errors.py."""

    async def tokenize(self, text: str) -> list[int]: ...

    async def prefill(self, worker: str, request: EngineRequest, request_id: str) -> PrefillResult: ...

    async def abort_prefill(self, worker: str, request_id: str) -> None: ...

    def decode(self, worker: str, request: EngineRequest, sink: Sink) -> Generation:
        """Start generating; raises nothing: what goes wrong comes as the sink's finish."""

    async def close(self) -> None: ...
