"""The interface between a pipeline and the models that it calls.

Unary calls (`tokenize`, `prefill`, `encode`) are coroutines. Decode's tokens come over the token bus to a
`Sink`, called on the loop's thread once a step and request: no task switch a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bireme.messages import EngineRequest, Finish, TokenLogprobs


class Sink(Protocol):
    """Takes what an engine makes for one request. Must be quick and must not raise."""

    def push(
        self,
        tokens: Sequence[int],
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
    ) -> None: ...

    def finish(self, finish: Finish) -> None:
        """Called exactly once, after the last push; an engine's death comes as reason `error`, UNAVAILABLE."""


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
