"""One request inside the mocker."""

from __future__ import annotations

import enum
import time
from dataclasses import InitVar, dataclass, field

import numpy as np

from bireme.disagg import DisaggregatedParams
from bireme.engines.base import AdmittedRequest, RequestKey
from bireme.engines.mocker.blocks import BlockContent, Holding
from bireme.engines.mocker.rows import MockKvRows
from bireme.engines.mocker.tokens import Ids, prompt_digest, tokens_at
from bireme.kv.transfer.base import KvFetch, Lease
from bireme.messages import EngineRequest, EngineSpan, TokenLogprob, TokenLogprobs, Usage
from bireme.request_trace import EngineSpans, PromptWork

_AHEAD = 128  # tokens computed at once


class MockSequenceStatus(enum.Enum):
    WAITING = "waiting"
    FETCHING = "fetching"  # its KV is on the way from prefill
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class MockSequence:
    key: RequestKey
    admitted: InitVar[AdmittedRequest]
    ids: Ids  # what tokens are chosen from
    order: int
    request: EngineRequest = field(init=False)
    params: DisaggregatedParams | None = field(init=False)
    prompt_ids: Ids = field(init=False)  # with resumed tokens
    state: MockSequenceStatus = MockSequenceStatus.WAITING
    holding: Holding | None = None
    content: BlockContent | None = None  # of the prompt's blocks
    lease: Lease | None = None
    fetch: KvFetch | None = None
    rows: MockKvRows | None = None  # what the fetch writes to
    first_row: int = 0  # of those that it writes
    is_aborted: bool = False
    num_cached: int = 0
    prefill_left: int = 0  # prompt tokens still to compute
    arrived_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    decode_at: float = 0.0
    first_token_at: float = 0.0
    stepped_at: float = 0.0  # end of its last step, of a best-effort one
    num_generated: int = 0  # delivered, resumed ones included
    digest: int = 0
    is_best_effort: bool = False
    is_canary: bool = False
    num_prompt: int = 0  # with resumed tokens
    max_tokens: int = 0  # resumed ones among them
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    spans: EngineSpans | None = None  # of a request that is traced
    plain_until: int = 0  # of the generated tokens after the first and before this one only the ids are wanted
    _ahead: list[int] = field(default_factory=list)
    _ahead_at: int = 0

    def __post_init__(self, admitted: AdmittedRequest) -> None:
        self.request, self.params, self.prompt_ids = admitted.request, admitted.params, admitted.ids
        sampling = self.request.sampling
        self.is_best_effort, self.is_canary = self.request.is_best_effort, admitted.is_canary
        if self.request.traceparent:
            self.spans = EngineSpans()
        self.num_prompt = len(admitted.ids)
        self.num_generated = self.request.num_resumed
        self.digest = prompt_digest(self.request.prompt[: 4 * admitted.num_prompt])
        self.max_tokens = admitted.max_tokens
        self.min_tokens = sampling.min_tokens or 0
        stops = set(sampling.stop_token_ids)
        if sampling.end_id is not None and not sampling.ignore_eos:
            stops.add(sampling.end_id)
        self.stop_ids = frozenset(stops)
        if not stops and sampling.logprobs is None and self.request.request_type != "context_only":
            self.plain_until = self.max_tokens - 1

    @property
    def rank(self) -> tuple[float, int]:
        return -self.request.options.priority, self.order

    @property
    def deadline(self) -> float:
        return self.arrived_at + self.request.timeout_ms / 1e3 if self.request.timeout_ms else float("inf")

    @property
    def num_to_compute(self) -> int:
        """Of a transferred request none; those in the prefix cache count."""
        return 0 if self.params is not None else self.num_prompt

    def computed_tokens(self) -> bytes:
        """Int32 little endian; the last token has not been computed."""
        first = self.request.num_resumed
        answer = tokens_at(self.digest, first, max(0, self.num_generated - first - 1), self.ids)
        return self.request.prompt + np.array(answer, "<i4").tobytes()

    @property
    def num_total(self) -> int:
        if self.request.request_type == "context_only":
            return self.num_prompt
        return self.num_prompt - self.request.num_resumed + self.max_tokens

    def next_token(self) -> int:
        """The caller counts it when it is delivered."""
        at = self.num_generated - self._ahead_at
        if not 0 <= at < len(self._ahead):
            count = min(_AHEAD, max(1, self.max_tokens - self.num_generated))
            self._ahead = tokens_at(self.digest, self.num_generated, count, self.ids)
            self._ahead_at, at = self.num_generated, 0
        return self._ahead[at]

    def plain_token(self) -> int | None:
        """When only its id is wanted; None otherwise."""
        count = self.num_generated
        if not self.request.num_resumed < count < self.plain_until:
            return None
        at = count - self._ahead_at
        token = self._ahead[at] if 0 <= at < len(self._ahead) else self.next_token()
        self.num_generated = count + 1
        return token

    def logprobs(self, tokens: list[int]) -> list[TokenLogprobs] | None:
        """The chosen token -0.1, its k - 1 neighbors -3, -4, ..."""
        k = self.request.sampling.logprobs
        return None if k is None else [self._entry(token, k) for token in tokens]

    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        k = self.request.sampling.prompt_logprobs
        return None if k is None else [self._entry(token, k) for token in self.prompt_ids[1:].tolist()]

    def _entry(self, token: int, k: int) -> TokenLogprobs:
        chosen = TokenLogprob(token, -0.1, 1)
        others = [TokenLogprob(int(self.ids[(token + i) % len(self.ids)]), -2.0 - i, 1 + i) for i in range(1, k)]
        return [chosen, *([chosen] if k else []), *others]

    def usage(self, worker: str) -> Usage:
        now, params = time.monotonic(), self.params
        admitted = self.admitted_at or now
        decode_at = self.decode_at or now
        waited_ms, worked_ms = (admitted - self.arrived_at) * 1e3, (decode_at - admitted) * 1e3
        result = Usage(
            prompt_tokens=self.num_prompt - self.request.num_resumed,
            cached_tokens=self.num_cached,
            completion_tokens=self.num_generated,
            queue_ms=waited_ms,
            decode_ms=(now - decode_at) * 1e3,
        )
        if params is not None:
            result.cached_tokens, result.prefill_ms = params.cached_tokens, params.prefill_ms
            result.queue_ms += params.queue_ms
            result.transfer_ms = worked_ms
            result.prefill_worker, result.decode_worker = params.worker, worker
        else:
            result.prefill_ms = worked_ms
            result.prefill_worker = worker
            result.decode_worker = "" if self.request.request_type == "context_only" else worker
        return result

    def told(self, spans: EngineSpans, work: PromptWork) -> list[EngineSpan]:
        """Return all spans of a request that ends now; those of its chunks have been noted."""
        now = time.monotonic()
        admitted_at, decode_at = self.admitted_at, self.decode_at
        spans.add("queue", self.arrived_at, admitted_at or now)
        if self.fetch is not None:
            spans.add("transfer", admitted_at, decode_at or now, bytes=self.fetch.num_bytes, way=self.fetch.way)
        if decode_at and self.request.request_type != "context_only":
            spans.add_generation(decode_at, now, self.num_generated - self.request.num_resumed, work)
        return spans.spans
