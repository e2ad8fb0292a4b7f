"""Workers that hold what a test says, and routers over them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from bireme.config import RouterConfig, RoutingMode
from bireme.discovery.records import WorkerRecord
from bireme.kv.blocks.events import DEVICE, DISK, HOST
from bireme.kv.blocks.hashing import event_seed, sequence_hashes
from bireme.kv.kernels.arrays import Floats, Hashes
from bireme.kv.routing.placement import Placement, RoutingRequest
from bireme.kv.routing.router import WorkerRouter
from bireme.kv.wire.event_wire import WorkerLoad, WorkerPrices
from bireme.messages import Capacity
from tests.request_options import with_options

BLOCK = 4


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class HeldBlocks:
    """An index of sets: what workers hold in each tier, and what was predicted."""

    def __init__(self) -> None:
        self.tiers: tuple[dict[tuple[str, int], set[int]], ...] = ({}, {}, {})
        self.predicted: list[tuple[tuple[str, int], int]] = []

    def give(
        self,
        worker: str,
        prompt: int,
        num_blocks: int,
        rank: int = 0,
        tier: int = DEVICE,
        tokens_per_block: int = BLOCK,
    ) -> None:
        hashes = hashes_of(request(prompt), tokens_per_block)[:num_blocks]
        self.tiers[tier].setdefault((worker, rank), set()).update(hashes.tolist())

    def match(self, hashes: Hashes, targets: Sequence[tuple[str, int]]) -> Floats:
        held = [
            [set[int]().union(*(tier.get(key, set()) for tier in self.tiers[: last + 1])) for key in targets]
            for last in (DEVICE, HOST, DISK)
        ]
        return np.array([[self._depth(hashes, of_worker) for of_worker in row] for row in held], float)

    def predict(self, target: tuple[str, int], hashes: Hashes) -> None:
        self.predicted.append((target, len(hashes)))
        self.tiers[DEVICE].setdefault(target, set()).update(hashes.tolist())

    @staticmethod
    def _depth(hashes: Hashes, held: set[int]) -> int:
        return next((at for at, item in enumerate(hashes.tolist()) if item not in held), len(hashes))


def hashes_of(request: RoutingRequest, tokens_per_block: int) -> Hashes:
    seed = event_seed(request.options.lora_name, request.options.cache_salt)
    return np.array(sequence_hashes(request.prompt.tolist(), tokens_per_block, seed), np.uint64)


def request(prompt: int | Sequence[int], **fields: Any) -> RoutingRequest:
    tokens = np.arange(prompt) if isinstance(prompt, int) else np.array(prompt)
    return RoutingRequest(tokens.astype(np.int32), **with_options(fields))


def record(worker: str, **fields: Any) -> WorkerRecord:
    return WorkerRecord(worker=worker, tokens_per_block=BLOCK, **fields)


def capacity(**fields: Any) -> Capacity:
    shown: dict[str, Any] = {"max_seq_len": 4096, "max_batch_size": 8, "max_num_tokens": 4096, "max_queue_size": 8}
    return Capacity(**shown | {"tokens_per_block": BLOCK, "num_blocks": 100, "vocab_size": 1000} | fields)


def load(
    running: int = 0,
    waiting: int = 0,
    tokens: int = 0,
    used: int = 0,
    blocks: int = 100,
    prices: WorkerPrices | None = None,
) -> WorkerLoad:
    return WorkerLoad(running, waiting, tokens, used, blocks, 0, prices)


class RouterBench:
    """A router over workers of these names, with everything that it asks in reach."""

    def __init__(self, *workers: str, mode: RoutingMode = "kv", enforce: bool = False, **config: Any) -> None:
        config = {"waiting_weight": 1.0, "decode_weight": 1.0, "turnover_weight": 0.0} | config  # costs in whole blocks
        self.held, self.clock = HeldBlocks(), Clock()
        self.loads: dict[str] = {}
        is_kv = mode == "kv"
        self.router = WorkerRouter(
            RouterConfig(**config),
            mode,
            enforce_disaggregation=enforce,
            holdings=self.held if is_kv else None,
            hash_prompt=hashes_of if is_kv else None,
            loads=self.loads if mode not in ("round_robin", "random", "direct") or config.get("busy") else None,
            clock=self.clock,
            draw=random.Random(0),
        )
        self.set_workers(*workers)

    def set_workers(self, *workers: str, **fields: Any) -> None:
        self.router.set_workers({name: record(name, **fields) for name in workers})

    def place(self, prompt: int | Sequence[int] = 40, **fields: Any) -> Placement:
        return self.router.place(request(prompt, **fields))

    def costs(self, prompt: int | Sequence[int] = 40, **fields: Any) -> dict[str, float]:
        return {one.worker: one.cost for one in self.router.preview(request(prompt, **fields))[1]}
