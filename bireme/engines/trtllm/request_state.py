"""One request in TensorRT-LLM: its arguments, its progress, its account.

Results are read through cursors. TensorRT-LLM returns the same growing object again and again, its own `*_diff` become
stale, and at the end it takes stop tokens off: a cursor never moves back.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bireme.disagg import DisaggregatedParams
from bireme.engines.base import RequestKey, StepOutput
from bireme.engines.trtllm.logprobs import prompt_logprobs, token_logprobs
from bireme.kv.blocks.hashing import MediaSpan
from bireme.messages import EngineRequest, EngineSpan, FinishReason, TokenLogprobs, Usage
from bireme.request_trace import EngineSpans

if TYPE_CHECKING:
    from bireme.engines.torch.step import SequencePictures


@dataclass(slots=True)
class GenerateArguments:
    prompt: list[int]
    sampling: Any
    streaming: bool = True
    inputs: Any = None  # instead of the prompt's ids: a text whose pictures come as handles
    more: dict[str, Any] = field(default_factory=dict)
    shared: list[Any] = field(default_factory=list)  # tensors that TensorRT-LLM's worker opens: alive until it has


class Cursor:
    __slots__ = ("_num_early", "num_read")

    def __init__(self) -> None:
        self.num_read = 0
        self._num_early: int | None = None  # tokens at the head that came without log probabilities

    def read(self, output: Any) -> tuple[list[int], list[Any] | None]:
        """Return the new tokens and their log probabilities (None: there are none).

        The first token of a transferred request may come without: then there are fewer entries than tokens.
        """
        tokens = list(output.token_ids[self.num_read :])
        first, self.num_read = self.num_read, max(self.num_read, len(output.token_ids))
        if not output.logprobs:
            return tokens, None
        if self._num_early is None:
            self._num_early = max(0, len(output.token_ids) - len(output.logprobs))
        entries: list[Any] = [None] * max(0, self._num_early - first)
        entries += output.logprobs[max(0, first - self._num_early) :]
        return tokens, entries[: len(tokens)]


class Cursors:
    """One for each output of a request: with n > 1 a response changes one of them and leaves the others stale."""

    def __init__(self) -> None:
        self._of: dict[int, Cursor] = {}

    def read(self, output: Any) -> tuple[list[int], list[Any] | None]:
        return self._of.setdefault(output.index, Cursor()).read(output)


@dataclass(slots=True, eq=False)
class RequestState:
    """Owned by the event loop's thread once it is started."""

    key: RequestKey
    request: EngineRequest
    call: GenerateArguments
    stop_ids: tuple[int, ...]
    params: DisaggregatedParams | None = None  # generation_only
    pictures: SequencePictures | None = None
    kind: str = "context_and_generation"  # what TensorRT-LLM is told; a prefill of one token needs no transfer
    arrived_at: float = field(default_factory=time.monotonic)
    result: Any = None
    cursors: Cursors = field(default_factory=Cursors)
    num_output: int = 0  # delivered, without resumed tokens
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    gap_s: float = 0.0  # between the last two deliveries; 0: there was one
    has_answered: bool = False
    num_prompt_logprobs: int | None = None  # of the likeliest tokens; None: not asked for, or delivered
    is_canary: bool = False  # no load
    ending: tuple[FinishReason, str] | None = None  # why it is being aborted
    timers: list[Any] = field(default_factory=list)
    trace: EngineSpans | None = field(init=False, default=None)  # of a request that is traced

    def __post_init__(self) -> None:
        if self.request.traceparent:
            self.trace = EngineSpans()

    @property
    def num_to_compute(self) -> int:
        """Those that are found in the cache among them; of a transferred request none."""
        return 0 if self.kind == "generation_only" else len(self.call.prompt)

    @property
    def spans(self) -> tuple[MediaSpan, ...]:
        """Where TensorRT-LLM's blocks are known by a picture's hash: decode is not told of it."""
        return self.pictures.spans if self.pictures is not None and self.kind != "generation_only" else ()

    @property
    def num_prompt(self) -> int:
        return len(self.call.prompt) - self.request.num_resumed

    @property
    def must_defer_abort(self) -> bool:
        """Until the transferred KV is there: an abort before that loses blocks or wedges the engine."""
        return self.kind == "generation_only" and not self.has_answered

    def read(self, output: Any, now: float) -> StepOutput:
        """Return the delta of a changed output; the token that ended it is not in it."""
        tokens, entries = self.cursors.read(output)
        if output.finish_reason == "stop" and tokens and self._has_ended_with(tokens[-1], output.stop_reason):
            tokens.pop()
        delta = StepOutput(self.key, tokens)
        if tokens:
            self.gap_s = now - self.last_token_at if self.first_token_at else 0.0
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
            self.num_output += len(tokens)
        if self.request.sampling.logprobs is not None:
            delta.logprobs = self._logprobs(tokens, entries)
        if self.num_prompt_logprobs is not None and output.prompt_logprobs:
            count, self.num_prompt_logprobs = self.num_prompt_logprobs, None
            delta.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, self.call.prompt, count)
        return delta

    def _has_ended_with(self, token: int, stop_reason: Any) -> bool:
        """An end id is left in place and has no stop reason; a stop id is its own reason, and has been taken off."""
        return token == stop_reason if isinstance(stop_reason, int) else token in self.stop_ids

    def _logprobs(self, tokens: list[int], entries: list[Any] | None) -> list[TokenLogprobs]:
        count = self.request.sampling.logprobs
        padded = (entries or []) + [None] * (len(tokens) - len(entries or ()))
        return [
            self.carried(token) if entry is None else token_logprobs(entry, token, count)
            for token, entry in zip(tokens, padded, strict=False)
        ]

    def carried(self, token: int) -> TokenLogprobs:
        """A release may not pass it on to decode."""
        first = self.params.first_gen_log_probs if self.params is not None else None
        if first and first[0] and first[0][0][0] == token:
            return first[0][: 1 + (self.request.sampling.logprobs or 0)]
        return token_logprobs({}, token)

    def stop_token(self, output: Any) -> int | None:
        if isinstance(output.stop_reason, int):
            return output.stop_reason
        if output.token_ids and output.token_ids[-1] in self.stop_ids:
            return int(output.token_ids[-1])
        return self.stop_ids[0] if self.stop_ids else None

    def told(self, spans: EngineSpans, usage: Usage, transfer_bytes: int, now: float) -> list[EngineSpan]:
        """Return what is known of a request that ends now; without return_perf_metrics nothing of queue and bytes."""
        arrived_at, first_at = self.arrived_at, self.first_token_at or now
        own_queue_ms = usage.queue_ms - (self.params.queue_ms if self.params is not None else 0.0)
        begun_at = min(first_at, arrived_at + own_queue_ms / 1e3)
        spans.add("queue", arrived_at, begun_at)
        if self.kind == "generation_only":
            arrives_at = min(now, begun_at + usage.transfer_ms / 1e3)
            spans.add("transfer", begun_at, arrives_at, bytes=transfer_bytes, way="trtllm")
        else:
            num_tokens = len(self.call.prompt) - usage.cached_tokens
            spans.add("prefill_chunk", begun_at, first_at, tokens=num_tokens)
        if self.first_token_at and self.request.request_type != "context_only":
            spans.add("generate", first_at, now, tokens=self.num_output, steps=self.num_output - 1)
        return spans.spans
