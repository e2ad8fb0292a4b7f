"""One request inside the engine: its tokens, how many are computed, its blocks, its times.

Owned by the engine's thread. `tokens` is the prompt, then everything generated, resumed tokens first; `computed` of
them have their KV in the pool. The last token is always still to be computed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from bireme.disagg import DisaggregatedParams
from bireme.engines.base import RequestKey
from bireme.engines.torch.pictures import SequencePictures
from bireme.kv.block_manager import BlockTable
from bireme.kv.transfer.base import Fetch, Lease
from bireme.logits.guided.guidance import Guidance
from bireme.messages import EngineRequest, FinishReason, SamplingParams, TokenLogprobs


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()  # in the queue; holds no blocks
    RUNNING = enum.auto()  # in the batch: prefill or decode
    IMPORTING = enum.auto()  # holds blocks that a transfer, or copies from a lower tier, are filling
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    key: RequestKey
    request: EngineRequest
    tokens: list[int]
    num_prompt: int  # without resumed tokens
    max_tokens: int  # resolved; counts resumed tokens
    stop_ids: frozenset[int]
    arrived_at: float  # time.monotonic(), as all times here
    table: BlockTable
    deadline: float = 0.0  # 0: none
    params: DisaggregatedParams | None = None  # generation_only
    pictures: SequencePictures | None = None
    lease: Lease | None = None  # context_only
    state: SequenceStatus = SequenceStatus.WAITING
    number: int = 0  # order of arrival
    computed: int = 0
    slot: int = -1  # row of the batch's block tables
    mirrored: list[int] = field(default_factory=list)  # per group, blocks copied to that row
    resident: list[int] = field(default_factory=list)  # per group, blocks that ResidentDecode has; empty: not there
    is_sampling: bool = False  # the sampler knows it
    guidance: Guidance | None = None  # set before it joins the queue, if the request has a guide
    wants_prompt_logprobs: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    fetch: Fetch | None = None
    imported_from: list[int] = field(default_factory=list)  # per group, the first row that was fetched
    ending: tuple[FinishReason, str] | None = None  # how it ends when its import has stopped
    num_cached: int = -1  # tokens found in the pool at first admission; -1: not admitted yet
    num_matched: dict[int, int] = field(default_factory=dict)  # of these, tokens by tier
    scheduled_at: float = 0.0
    imported_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    is_canary: bool = False  # of two tokens, and no load
    is_best_effort: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_best_effort = self.request.is_best_effort

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        """Generated tokens, resumed ones included."""
        return len(self.tokens) - self.num_prompt

    @property
    def worst_length(self) -> int:
        """Most KV rows it may need: the last token is never computed."""
        if self.request.request_type == "context_only":
            return len(self.tokens)
        return max(len(self.tokens), self.num_prompt + self.max_tokens - 1)

    @property
    def rank(self) -> tuple[float, int]:
        """Smaller runs first: higher priority, then earlier arrival."""
        return (-self.request.priority, self.number)
