"""What a router is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from bireme.discovery.records import WorkerRecord
from bireme.kv.blocks.hashing import MediaSpan
from bireme.kv.kernels.arrays import Floats, Hashes
from bireme.kv.routing.active import SentRequest
from bireme.kv.routing.targets import Target
from bireme.kv.wire.event_wire import WorkerLoad
from bireme.serving_options import NO_OPTIONS, ServingOptions

ANYBODY: tuple[str, int | None] = ("", None)


class RoutingRequest(msgspec.Struct, frozen=True):
    prompt: npt.NDArray[np.int32]  # CPU 1D
    options: ServingOptions = NO_OPTIONS
    media: tuple[MediaSpan, ...] = ()
    is_resumed: bool = False  # tokens were delivered: it is not refused, and decode computes its context itself
    revision: str = ""  # of the model that made the tokens which were delivered; "": any will do
    generation: int | None = None  # that made them, or has its pictures: it goes on there where it can; None: by weight
    has_transfer: bool = True  # False: KV of an earlier attempt did not arrive, so decode computes the prompt

    def wanted(self, stage: str) -> tuple[str, int | None]:
        """Return the worker and the rank that it names; after its first token it is bound to none."""
        chosen = self.options.routing
        if self.is_resumed:
            return ANYBODY
        if stage == "prefill":
            return chosen.prefill_worker, chosen.prefill_dp_rank
        return chosen.decode_worker, chosen.decode_dp_rank


@dataclass(frozen=True, slots=True)
class Placement:
    prefill: str | None  # None: decode computes the prompt
    decode: str
    prefill_dp_rank: int | None = None  # None: its engine has one rank, or chooses
    decode_dp_rank: int | None = None
    reason: str = field(default="", compare=False)  # how decode was chosen: a mode, only, direct or session
    is_short: bool = field(default=False, compare=False)  # prefill was left out: the prompt isn't worth its transfer
    generation: int | None = field(default=None, compare=False)  # decode's; None: there is only one
    # Of the prompt, that the worker that computes it should find; None: nobody knows what workers hold.
    cached_tokens: int | None = field(default=None, compare=False)
    sent: tuple[tuple[Target, SentRequest], ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as a decision saw it."""

    worker: str
    dp_rank: int | None
    cost: float  # in KV blocks
    cached_tokens: int  # of the prompt
    waiting_tokens: float  # prompt tokens to be computed there
    num_blocks: float  # in use
    num_requests: float


@dataclass(slots=True)
class Flow:
    """What a router has sent one way."""

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, that the worker was expected to hold


@dataclass(frozen=True, slots=True)
class WorkerWork:
    """A worker's work as a router knows it."""

    report: WorkerLoad | None  # its own, of the last seconds; None: it has sent none, or nobody follows it
    num_sent: int  # requests of this router that are there
    waiting_tokens: int  # of their prompts, not known to be computed
    skip_s: float  # it is skipped for so long, because a request was lost there; inf: its server is silent


class Holdings(Protocol):
    """What workers hold. Thread-safe."""

    def match(self, hashes: Hashes, targets: Sequence[tuple[str, int]]) -> Floats:
        """Return the blocks that each (worker, rank) holds from a prompt's start, [3, targets]: on its device, on
        device or in host memory, anywhere.
        """
        ...

    def predict(self, target: tuple[str, int], hashes: Hashes) -> None:
        """Count blocks that are being computed there as held for a while. The array is kept."""


class WorkerFollower(Protocol):
    """Knows something of workers, and must be told which there are."""

    def follow(self, workers: Mapping[str, WorkerRecord]) -> None:
        """Take the whole present view; those that are missing are forgotten."""

    @property
    def problem(self) -> str:
        """Why it can learn nothing new now; "": it can."""

    def close(self) -> None: ...


HashPrompt = Callable[[RoutingRequest, int], Hashes]  # request, tokens per block -> public hashes of full blocks
