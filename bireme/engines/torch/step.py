"""What the parts of the engine hand each other: sequences, a step's plan, its batch and views of the pools."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bireme.disagg import DisaggregatedParams
from bireme.engines.base import RequestKey
from bireme.kv.blocks.block_manager import BlockTable
from bireme.kv.blocks.block_tiers import BlockCopy
from bireme.kv.blocks.hashing import MediaSpan
from bireme.kv.transfer.base import Fetch, KvFetch, Lease
from bireme.logits.guided.guidance import Guidance
from bireme.logits.rows import Row
from bireme.messages import EngineRequest, FinishReason, SamplingParams, TokenLogprobs
from bireme.multimodal.mrope import Positions
from bireme.multimodal.wire import OpenedItem
from bireme.request_trace import EngineSpans

TokenIds = npt.NDArray[np.int32]
Post = Callable[[Callable[[], None]], None]  # run it on the engine's thread, between steps


@dataclass(slots=True, eq=False)
class SequencePictures:
    """Where a sequence's pictures stand, their embeddings, their rotary positions."""

    items: tuple[OpenedItem, ...]  # in the order of positions
    rope: Positions | None = None  # (3, prompt tokens); None: positions have one dimension
    rows: list[Tensor | None] = field(default_factory=list)  # (num_tokens, hidden) each, in the model's dtype
    fetches: list[Fetch] = field(default_factory=list)
    num_missing: int = 0
    held_bytes: int = 0

    @property
    def spans(self) -> tuple[MediaSpan, ...]:
        return tuple(
            MediaSpan(item.position, item.position + item.num_tokens, bytes.fromhex(item.hash)) for item in self.items
        )

    @property
    def is_to_be_computed(self) -> bool:
        return any(item.handle is not None for item in self.items)

    def rows_in(self, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (token, rows from there) of all embeddings for tokens [first, last)."""
        for item, rows in zip(self.items, self.rows, strict=False):
            begin, end = max(first, item.position), min(last, item.position + item.num_tokens)
            if begin < end:
                assert rows is not None, "a picture's embeddings have been let go of"
                yield begin, rows[begin - item.position : end - item.position]

    def positions(self, first: int, last: int) -> Positions:
        """Return the rotary positions of tokens [first, last), generated ones too: (3, last - first)."""
        assert self.rope is not None
        known = self.rope[:, first : min(last, self.rope.shape[1])]
        after = np.arange(max(first, self.rope.shape[1]), last) + self.delta
        return np.concatenate([known, np.broadcast_to(after, (3, len(after)))], axis=1)

    @property
    def delta(self) -> int:
        """Return how far positions run behind tokens after the prompt; zero or less."""
        assert self.rope is not None
        return int(self.rope[:, -1].max()) + 1 - self.rope.shape[1]


class DraftOffer(NamedTuple):
    """A draft, before or after it is there."""

    num_tokens: int
    kind: int = 0


class DrawnDraft(Tokens[int]):
    """Tokens that a GPU draws: how many is known, and where a step finds them there; who asks which they are waits."""

    __slots__ = ("_read", "places")

    def __init__(self, read: Callable[[], list[int]], places: range) -> None:
        """`read`: returns those of all drafts that are drawn together; `places`: of these among them."""
        self._read, self.places = read, places

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[int]:
        return iter(self._read()[self.places.start : self.places.stop : self.places.step])

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> DrawnDraft: ...
    def __getitem__(self, at: int | slice) -> int | DrawnDraft:
        found = self.places[at]
        return DrawnDraft(self._read, found) if isinstance(found, range) else self._read()[found]


@dataclass(slots=True)
class Draft:
    """Tokens that may come next in a sequence."""

    tokens: Tokens[int]
    kind: int = 0  # of evidence, below the drafter's `num_kinds`: acceptance is measured for each apart
    num_right: int | None = None  # tokens that count as right, whatever is drawn; None: those that are drawn


@dataclass(slots=True)
class DraftedSequence:
    """A sequence as a draft model has it, whose keys and values lie in pools of its own under the same block ids.

    `own.tokens` are those that were verified, then those that it drafted; `own.computed` of them are in its pools.
    """

    own: Sequence
    row: Row  # what its tokens are drawn by
    num_verified: int = 0  # when it drafted last; of a head, places whose rows are in its pools
    base: int = 0  # tokens before the first that a head sees
    hidden: Tensor | None = None  # (1, h), what a head makes of the last place
    logits: Tensor | None = None  # (1, vocabulary)
    # Of places behind these, which a head has not seen: what the model made of them, and which rows of that.
    unseen: list[tuple[list[Tensor], slice]] = field(default_factory=list)
    num_unseen: int = 0  # places

    def add(self, parts: list[Tensor], rows: slice) -> None:
        self.unseen.append((parts, rows))
        self.num_unseen += rows.stop - rows.start

    @property
    def drafted(self) -> list[int]:
        return self.own.tokens[self.num_verified :]

    @property
    def num_drafted(self) -> int:
        return len(self.own.tokens) - self.num_verified


@dataclass(slots=True)
class Drafting:
    """What speculation keeps of one sequence; it goes with it, and a preemption changes nothing of it."""

    num_drafted: int = 0  # tokens that steps have verified
    num_accepted: int = 0  # of these, delivered
    kind: int = 0  # of the last draft that was verified
    num_right: int | None = None  # of that draft
    credit: float = 0.0  # tokens that drafts may lose (`budget.py`)
    num_lent_for: int = -1  # tokens, which it has been lent for; -1: it has not begun
    found: float = 1.0  # share of the last looks for a draft that found one
    trials: dict[int, tuple[float, float]] = field(default_factory=dict)  # kind -> accepted and tried, the last most
    # As `learn` returns them, with room for more.
    known: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    num_known: int = 0
    num_predicted: int = 0  # of these
    follower: DraftedSequence | None = None  # from its first draft on, until it is preempted
    num_seen: int = 0  # tokens, of whose places the rows of a head came by transfer; until then, too

    @classmethod
    def with_prediction(cls, prediction: bytes) -> Drafting:
        """`prediction`: EngineRequest's."""
        ids = np.frombuffer(prediction, "<i4").astype(np.int32)
        return cls(known=ids, num_known=len(ids), num_predicted=len(ids))

    def looked(self, has_found: bool) -> None:
        self.found += (has_found - self.found) / 8

    def learn(self, tokens: list[int]) -> TokenIds:
        """Take over what is new of the sequence's tokens, which only grow; return prediction and tokens, (both,)."""
        count, first = self.num_predicted + len(tokens), self.num_known - self.num_predicted
        if count > len(self.known):
            grown = np.empty(max(256, 2 * count), dtype=np.int32)
            grown[: self.num_known] = self.known[: self.num_known]
            self.known = grown
        self.known[self.num_known : count] = tokens[first:]
        self.num_known = count
        return self.known[:count]


class Trial(NamedTuple):
    """What a step made of a draft."""

    sequence: Sequence
    kind: int
    num_tried: int
    num_accepted: int
    is_cut: bool  # the request ended within it


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()  # in the queue; holds no blocks
    RUNNING = enum.auto()  # in the batch: prefill or decode
    IMPORTING = enum.auto()  # holds blocks that a transfer, or copies from a lower tier, are filling
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine. Owned by the engine's thread.

    `tokens` is the prompt, then everything generated, resumed tokens first; `computed` of them have their KV in the
    pool. The last token is always still to be computed.
    """

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
    resident: list[int] = field(default_factory=list)  # per group, blocks that ResidentTables has told; empty: none
    is_sampling: bool = False  # the sampler knows it
    guidance: Guidance | None = None  # set before it joins the queue, if the request has a guide
    wants_prompt_logprobs: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    fetch: Fetch | None = None
    imported_from: list[int] = field(default_factory=list)  # per group, the first row that was fetched
    head_from: int | None = None  # of those of a head; None: none was
    ending: tuple[FinishReason, str] | None = None  # how it ends when its import has stopped
    num_cached: int = -1  # tokens found in the pool at first admission; -1: not admitted yet
    num_matched: dict[int, int] = field(default_factory=dict)  # of these, tokens by tier
    scheduled_at: float = 0.0
    imported_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    is_canary: bool = False  # of two tokens, and no load
    spans: EngineSpans | None = None  # of a request that is traced
    kv_fetch: KvFetch | None = None  # of such a one
    preempted_at: float = 0.0  # 0: it is not out of the batch
    drafting: Drafting | None = None  # where it has had a draft, or one was looked for
    is_best_effort: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_best_effort = self.request.is_best_effort
        if self.request.traceparent:
            self.spans = EngineSpans()

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
        return (-self.request.options.priority, self.number)


@dataclass(slots=True)
class SchedulerOutput:
    decodes: list[Sequence] = field(default_factory=list)  # one token each
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # so many tokens of each
    imports: list[Sequence] = field(default_factory=list)  # admitted; their KV is to be fetched
    onboards: list[tuple[Sequence, list[BlockCopy]]] = field(default_factory=list)  # admitted; copies to be made first
    under_way: list[tuple[Sequence, int]] | None = None  # chunks of the step before, where that has not ended
    ahead: dict[Sequence, int] = field(default_factory=dict)  # tokens in those that own chunks stand behind; until then
    budget: int = 0
    # Of decodes: tokens that may follow the last one; each is a row of the step's too, behind those of all decodes.
    drafts: dict[Sequence, Tokens[int]] = field(default_factory=dict)
    drafting_s: float = 0.0  # that a draft model's passes took before it

    @property
    def has_tokens(self) -> bool:
        return bool(self.decodes or self.chunks)

    @property
    def has_prompt(self) -> bool:
        """Whether it works on a prompt: a first token is still to come."""
        return bool(self.chunks) or not all(sequence.first_token_at for sequence in self.decodes)

    @property
    def has_best_effort(self) -> bool:
        """Of a step that only decodes."""
        return any(sequence.is_best_effort for sequence in self.decodes)

    @property
    def sequences(self) -> list[Sequence]:
        """In the order of the step's rows."""
        return [*self.decodes, *(sequence for sequence, _ in self.chunks)]

    @property
    def num_decode_rows(self) -> int:
        """Those of drafts among them."""
        return len(self.decodes) + sum(map(len, self.drafts.values()))

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + sum(count for _, count in self.chunks)

    @property
    def sampled(self) -> list[Sequence]:
        """Return those whose next token comes of the step that is planned."""
        ends = (one for one, count in self.chunks if self.begin_of(one) + count == len(one.tokens))
        return [*self.decodes, *ends]

    def begin_of(self, sequence: Sequence) -> int:
        """Return where its chunk begins."""
        return sequence.computed + self.ahead.get(sequence, 0) if self.ahead else sequence.computed

    @property
    def largest(self) -> Sequence:
        """The request whose part of the step takes most memory: a chunk, the one that goes furthest."""
        chunk = max(self.chunks, key=lambda chunk: chunk[0].computed + chunk[1], default=None)
        return chunk[0] if chunk is not None else max(self.decodes, key=lambda sequence: sequence.computed)

    def keep_running(self) -> None:
        """Let go of those that have ended or were preempted."""
        self.decodes = [sequence for sequence in self.decodes if sequence.state is SequenceStatus.RUNNING]
        self.chunks = [(sequence, count) for sequence, count in self.chunks if sequence.state is SequenceStatus.RUNNING]
        if self.drafts:
            self.drafts = {one: ids for one, ids in self.drafts.items() if one.state is SequenceStatus.RUNNING}


@dataclass(slots=True)
class DecodeView:
    """KV of the step's decode rows: the same number of blocks each, padded with the null block."""

    blocks: Tensor  # (rows * num_blocks,) block ids
    num_rows: int
    num_blocks: int
    first: int  # when all rows see the same part [first, last) of their blocks ...
    last: int
    mask: Tensor | None  # ... this is None; otherwise (rows, 1, 1, num_blocks * block size), true: visible


@dataclass(slots=True)
class DecodeTable:
    """KV of the step's decode rows."""

    blocks: Tensor  # (rows, columns) int32
    lengths: Tensor  # (rows,) int32: tokens that each sees, its own included


@dataclass(slots=True)
class ChunkView:
    """KV of one prefill chunk."""

    begin: int  # its tokens are [begin, end) of the packed row
    end: int
    rows: Tensor | None  # (L,) pool rows that it sees; None: exactly its own tokens
    mask: Tensor | None  # (1, 1, tokens, L), true: visible; None: causal


@dataclass(slots=True)
class GroupStep:
    """One window's share of a step."""

    slots: Tensor  # (T,) pool row that each token's key and value go to
    decode: DecodeView | None  # what its attention reads
    chunks: list[ChunkView]


@dataclass(slots=True)
class TableStep:
    """One window's share of a step, for operations that find pool rows themselves."""

    tables: Tensor  # (batch rows, columns) int64 block ids
    rows: Tensor  # (1, T) int64: the batch row of each token
    num_decodes: int
    chunks: list[ChunkView]
    has_drafts: bool = False  # several decode rows are of one batch row, and see each other


@dataclass(slots=True)
class PackedChunks:
    """KV of prefill chunks that follow each other in the step; as many as may be gathered at once."""

    begin: int  # their tokens are [begin, end) of the packed row
    end: int
    rows: Tensor  # (L,) pool rows of what they see, chunk after chunk; of a window's layers no more than that
    query_begins: Tensor  # (chunks + 1,) int32, from 0
    key_begins: Tensor  # (chunks + 1,) int32
    longest_query: int
    longest_key: int
    is_fresh: bool  # they see nothing but their own tokens
    is_padded: bool = False  # more tokens may follow theirs, and fewer keys be seen than the longest: a graph's

    @property
    def is_single(self) -> bool:
        return len(self.query_begins) == 2


@dataclass(slots=True)
class KernelGroup:
    """One window's share of a step."""

    slots: Tensor  # (T,) pool row that each token's key and value go to
    decode: DecodeTable | None
    chunks: list[PackedChunks]
    window: int


@dataclass(slots=True)
class PromptRows:
    """Logits rows of a chunk whose next tokens are given by the prompt."""

    sequence: Sequence
    begin: int  # in the step's logits
    next_ids: list[int]


@dataclass(slots=True)
class Batch:
    ids: Tensor  # (1, T) int64
    positions: Tensor  # (1, T) int64; (3, 1, T) for a model with positions in three dimensions
    # int64: rows to sample first, then those of drafts, then those of prompt log probabilities; None: all
    logits_rows: Tensor | None
    groups: list[GroupStep] | list[TableStep] | list[KernelGroup]  # per group
    sampled: list[Sequence]  # in the order of the logits rows
    prompt_rows: list[PromptRows]
    embeddings: list[tuple[int, Tensor]] = field(default_factory=list)  # of pictures: place in the step, rows
    num_decodes: int = 0  # rows, of drafts too
    is_decode: bool = False  # nothing but decode rows: logits are wanted of all, in their order
