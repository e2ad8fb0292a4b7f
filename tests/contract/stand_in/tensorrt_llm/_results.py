"""Results as the LLM API hands them out: one object a request, changed by each response.

The traps are kept: iteration yields the same object, its lists are cumulative, `*_diff` is relative to the
last response of that sequence, and a stop token is taken off the end when the sequence is over.
"""

from __future__ import annotations

import asyncio
import collections
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm._values import EngineDeadError


@dataclass(slots=True)
class Response:
    """News of one sequence, from the executor's thread."""

    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    disaggregated_params: Any = None
    cached_tokens: int = 0
    perf: Any = None
    metrics: dict[str, Any] | None = None
    error: Exception | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: Any = None
    additional_generation_outputs: Any = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None
    _last_token_ids_len: int = field(default=0, init=False, repr=False)
    _last_logprobs_len: int = field(default=0, init=False, repr=False)
    _last_text_len: int = field(default=0, init=False, repr=False)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list[Any]:
        return self.logprobs[self._last_logprobs_len :]


class RequestOutput:
    """One request. Must be made inside a running event loop to be awaited."""

    def __init__(
        self, client_id: int, prompt: list[int], params: Any, abort: Callable[[int], None], disaggregated: Any = None
    ) -> None:
        self.request_id = self.id = client_id
        self.prompt = None
        self.prompt_token_ids = list(prompt)
        self.sampling_params = params
        self.outputs = [CompletionOutput(index) for index in range(params.best_of or params.n)]
        self.context_logits = None
        self.mm_embedding_handle = None
        self.disaggregated_params = disaggregated  # the request's own object, until its answer has another
        for output in self.outputs:
            output.disaggregated_params = disaggregated
        self.cached_tokens = 0
        self.decoding_iter = 0
        self.avg_decoded_tokens_per_iter = None
        self.metrics_dict: dict[str, Any] = {}
        self._abort = abort
        self._aborted = False
        self._death: EngineDeadError | None = None
        self._loop = asyncio.get_running_loop()  # as the real one: without a loop there is nothing to await
        self._queue: asyncio.Queue[Response] = asyncio.Queue()
        self._num_open = len(self.outputs)
        self.when_ended: Callable[[RequestOutput], None] = lambda result: None

    @property
    def finished(self) -> bool:
        return self._num_open == 0

    def put(self, response: Response) -> None:
        """Called on the executor's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, response)

    def abort(self) -> None:
        self._aborted = True
        self._abort(self.id)

    def aborted(self) -> bool:
        return self._aborted

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._death is not None:
            raise self._death
        if self.finished:
            raise StopAsyncIteration
        self._apply(await self._queue.get())
        return self

    async def aresult(self) -> RequestOutput:
        if self._death is not None:
            raise self._death
        while not self.finished:
            self._apply(await self._queue.get())
        return self

    def __await__(self) -> Any:
        return self.aresult().__await__()

    def _apply(self, response: Response) -> None:
        if response.error is not None:
            self._num_open = 0
            self._death = response.error if isinstance(response.error, EngineDeadError) else None
            raise response.error
        output = self.outputs[response.index]
        output._last_token_ids_len = len(output.token_ids)
        output._last_logprobs_len = len(output.logprobs)
        output.token_ids.extend(response.token_ids)
        output.logprobs.extend(response.logprobs)
        if self.sampling_params.logprobs and response.finish_reason != "cancelled":
            assert len(output.logprobs) == output.length, (
                f"logprobs length: {len(output.logprobs)} != output.length: {output.length}"
            )
        if response.prompt_logprobs is not None:
            output.prompt_logprobs = response.prompt_logprobs
        self.cached_tokens = response.cached_tokens
        self.decoding_iter += 1
        if response.disaggregated_params is not None:
            self.disaggregated_params = output.disaggregated_params = response.disaggregated_params
        if response.finish_reason is not None:
            self._finish(output, response)

    def _finish(self, output: CompletionOutput, response: Response) -> None:
        output.finish_reason, output.stop_reason = response.finish_reason, response.stop_reason
        output.request_perf_metrics = response.perf
        self.metrics_dict = response.metrics or {}
        self._num_open -= 1
        params = self.sampling_params
        if response.stop_reason is not None and not params.include_stop_str_in_output:
            output.token_ids = output.token_ids[:-1]
        if self.finished:
            self.when_ended(self)


class IterationResult:
    """A queue of JSON texts, one for all who ask: an item that is read is gone.

    With a timeout of 0 an empty queue raises asyncio.QueueEmpty, which nothing here catches. With a longer one the
    reading ends, and `_done` ends every later one at once, whatever has come in since.
    """

    def __init__(self) -> None:
        self._done = False
        self._timeout = 2.0
        self._queue: collections.deque[str] = collections.deque()

    def set_timeout(self, timeout: float) -> None:
        self._timeout = timeout

    def put(self, text: str) -> None:
        self._queue.append(text)

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._done:
            raise StopAsyncIteration
        if not self._queue and self._timeout <= 0:
            raise asyncio.QueueEmpty
        try:
            await asyncio.wait_for(self._arrival(), self._timeout or None)
        except TimeoutError:
            self._done = True
            raise StopAsyncIteration from None
        item: dict[str, Any] = json.loads(self._queue.popleft())
        return item

    def get_results(self) -> list[dict[str, Any]]:
        items = [json.loads(text) for text in self._queue]
        self._queue.clear()
        return items

    async def _arrival(self) -> None:
        while not self._queue:
            await asyncio.sleep(0.002)


class FetchedResult:
    """What 1.4 gives for statistics: fetched when it is iterated, and at its end when nothing is left."""

    def __init__(self, fetch: Callable[[], list[str]]) -> None:
        self._fetch = fetch
        self._items: list[str] | None = None

    def __aiter__(self) -> FetchedResult:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._items is None:
            await asyncio.sleep(0)
            self._items = self._fetch()
        if not self._items:
            raise StopAsyncIteration
        item: dict[str, Any] = json.loads(self._items.pop(0))
        return item
