"""Which generation serves a new request, where several do side by side.

One rule: from the newest to the oldest each takes its weight's share of what the newer ones have left, and the oldest
takes the rest. So the newest one's weight is its share of all new requests, and moves all of them by itself.

A generation's weight is the mean of what its workers carry that take requests. A session's requests go to one
generation while the weights stay as they are. When the newest one's weight grows, sessions only move to it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping

import xxhash

from bireme.discovery.records import WorkerRecord

_DIGITS = 53  # of a float


def weights_of(records: Iterable[WorkerRecord]) -> dict[int, float]:
    """Return weights by generation of those that take requests."""
    told: dict[int, list[float]] = {}
    for record in records:
        if not record.is_draining:
            told.setdefault(record.generation, []).append(record.weight)
    return {generation: sum(weights) / len(weights) for generation, weights in told.items()}


def shares_of(weights: Mapping[int, float]) -> dict[int, float]:
    """Return each generation's share of new requests, the newest first."""
    shares: dict[int, float] = {}
    left, oldest = 1.0, min(weights, default=0)
    for generation in sorted(weights, reverse=True):
        shares[generation] = left if generation == oldest else left * weights[generation]
        left -= shares[generation]
    return shares


def choose(weights: Mapping[int, float], session_id: str, draw: random.Random) -> int:
    """Return one of the generations (at least one), the same for a session wherever it is asked for."""
    *newer, oldest = sorted(weights, reverse=True)
    for generation in newer:
        point = _point(session_id, generation) if session_id else draw.random()
        if point < weights[generation]:
            return generation
    return oldest


def _point(session_id: str, generation: int) -> float:
    """Return where in [0, 1) a session lies for a generation: each generation's own, so weights move nobody else."""
    return math.ldexp(xxhash.xxh3_64_intdigest(f"{session_id}\0{generation}".encode()) >> 64 - _DIGITS, -_DIGITS)
