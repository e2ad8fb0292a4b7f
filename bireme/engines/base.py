"""The interface of every engine, inside the engine process (`bireme.engines.worker`).

An engine speaks tokens only. It is driven from the worker's IO thread (`submit`, `abort`, `take_*`, `progress`: quick
and thread-safe) and works on a thread of its own; its output goes through `emit`, one call an engine step, which never
blocks.

1. `start` loads and warms up; returns what it can take: no longer a sequence than its KV pool holds
   (`Capacity.within_pool`). Raises ConfigError with the remedy.
2. `submit` takes a request that the gate has admitted; every one ends with exactly one Finish.
3. `abort` takes effect between steps and also yields a Finish (reason cancelled); unknown keys are ignored.
4. `drain` refuses new requests; running ones are finished.
5. `stop` ends the thread and frees everything; also after a failed start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from bireme.config import EngineConfig, Limits, MediaLimits
from bireme.disagg import DisaggregatedParams
from bireme.kv.blocks.events import KvEvent
from bireme.kv.transfer.base import KvTransfer
from bireme.kv.wire.step_records import StepRing
from bireme.messages import Capacity, EncodeRequest, EngineRequest, Finish, TokenLogprobs
from bireme.metrics import Registry
from bireme.multimodal.wire import OpenedItem
from bireme.own_work import OwnWork

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bireme.engines.memory.client import WeightsHold
    from bireme.kv.wire.event_wire import WorkerPrices
    from bireme.multimodal.embedding_share import EmbeddingShare
    from bireme.multimodal.encoding import EncodeOutcome

RequestKey = tuple[int, int]  # consumer, the consumer's number


class AdmittedRequest(msgspec.Struct, frozen=True, eq=False):
    """A request that has passed the gate (child/validate.py): an engine checks only what it alone can tell."""

    request: EngineRequest  # its sampling's max_tokens and min_tokens are resolved
    ids: npt.NDArray[np.int32]  # CPU 1D: prompt and resumed tokens, of the vocabulary
    params: DisaggregatedParams | None = None  # opened; generation_only has them, and they belong to this prompt
    pictures: tuple[OpenedItem, ...] = ()  # opened, in the order of positions
    digest: str = ""  # binds disaggregated_params to their prompt; context_and_generation has none
    is_canary: bool = False  # counted apart

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt, without resumed ones."""
        return len(self.ids) - self.request.num_resumed

    @property
    def max_tokens(self) -> int:
        """Tokens to generate at the most, resumed ones among them."""
        assert self.request.sampling.max_tokens is not None, "the gate resolves it"
        return self.request.sampling.max_tokens


class AdmittedTexts(msgspec.Struct, frozen=True, eq=False):
    """Texts for an embedding model that have passed the gate."""

    texts: tuple[npt.NDArray[np.int32], ...]  # CPU 1D each: ids of the vocabulary, at least one, at most max_seq_len
    dimensions: int  # 1 to Capacity.embedding_size
    timeout_ms: int = 0
    is_canary: bool = False  # counted apart

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass(slots=True)
class StepOutput:
    """One request's output of one step."""

    key: RequestKey
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # one entry a token
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None
    exported: DisaggregatedParams | None = None  # context_only, with its finish; the worker adds the digest, signs it
    encoded: EncodeOutcome | None = None  # of an encode, with its finish; the worker signs its handles
    embedded: bytes | None = None  # of an embed, with its finish: Finish.encoded

    @property
    def is_plain(self) -> bool:
        """Return whether it says one token's id and nothing else."""
        has_logprobs = self.logprobs is not None or self.prompt_logprobs is not None
        return len(self.tokens) == 1 and not has_logprobs and self.finish is None


@dataclass(slots=True)
class PlainTokens:
    """One token each for outputs that are only a token id, in columns: a third of the cost of StepOutputs."""

    keys: list[RequestKey]
    tokens: list[int]


class Emit(Protocol):
    """Takes the output of one engine step; thread-safe, never blocks. If a request is in both, `plain` came first."""

    def __call__(self, step: int, deltas: list[StepOutput], plain: PlainTokens | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """Whether the engine advances. Read from another thread at any time."""

    step: int  # steps done
    step_began_at: float  # time.monotonic() of the step under way; 0: none is
    num_waiting: int
    num_running: int
    num_waiting_tokens: int = 0  # prompt tokens that are still to be computed, of waiting and running requests
    num_blocks_used: int = 0
    num_blocks: int = 0
    prices: Callable[[], WorkerPrices | None] | None = None  # what it takes, as measured; None: it does not measure


class Engine(Protocol):
    def start(self, emit: Emit) -> Capacity: ...

    def submit(self, key: RequestKey, admitted: AdmittedRequest) -> None:
        """Queue it. Raises ResourceExhaustedError when the queue is full, RequestError when it can never run."""

    def abort(self, key: RequestKey) -> None: ...

    def drain(self) -> None: ...

    def progress(self) -> EngineProgress: ...

    def kv_events(self) -> list[KvEvent]:
        """Return and forget the KV events since the last call, oldest first; thread-safe.

        Of full blocks alone, and of the widest attention window alone. Without kv_cache_config.event_buffer_max_size
        there are none.
        """

    def stop(self) -> None: ...


class PictureEngine(Engine, Protocol):
    """An engine that has the vision tower, and says so in its capacity."""

    def encode(self, key: RequestKey, request: EncodeRequest) -> None:
        """Queue it. Raises ResourceExhaustedError when the queue is full, RequestError for what it can't encode."""

    def release(self, handles: tuple[str, ...]) -> None: ...


class EmbeddingEngine(Engine, Protocol):
    """An engine of an embedding model, which makes no tokens."""

    def embed(self, key: RequestKey, admitted: AdmittedTexts) -> None:
        """Queue it. Raises ResourceExhaustedError when the queue is full."""


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What the worker gives an engine."""

    worker: str  # the Triton model's name
    stage: str  # prefill, decode, ...
    model_path: str
    config: EngineConfig
    metrics: Registry
    transfer: KvTransfer | None = None  # None: no cache_transceiver_config.backend, so no disaggregation
    takes_kv: bool = False  # there are workers that compute prompts for this one
    num_threads: int = 1
    life: int = 0
    share: EmbeddingShare | None = None  # embeddings of pictures; None: a model of text alone
    hosts_encoder: bool = False  # this engine has the vision tower: it is a PictureEngine
    media: MediaLimits = MediaLimits()
    max_n: int = Limits().max_n  # handles of a picture: its request may have so many sequences
    own_work: OwnWork = OwnWork()  # where a thread says in whose it is
    max_processor_ms: float = Limits().max_processor_ms  # CPU time of a request's logits processors for one token
    hold_weights: Callable[[str], WeightsHold] | None = None  # of the memory service; None: each engine has its own
    hold_wait_s: float = 0.0  # for another engine that reads the same weights
    findings_path: Path | None = None  # of what a start finds out and the next need not; None: nothing is kept
    steps: StepRing | None = None  # for a record of each step; None: nobody asks for them
    traces_endpoint: str = ""  # of the collector that entries send spans to, by gRPC; "": none
    gpu_neighbors: tuple[float, ...] = ()  # free_gpu_memory_fraction of the recipe's other engines on this GPU
