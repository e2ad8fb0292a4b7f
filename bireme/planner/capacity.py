"""What a number of workers can serve, by the engine's table of step times."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bireme.sizing.step_times import StepTimes

LATE_SHARE = 0.001  # of requests that may wait longer than the target
_DEVIATIONS = 3.0  # above the mean, of requests under way: more are there a thousandth of the time
_LEAST_MS = 1e-6  # of a step, by a table that says 0
_FULL = 0.95  # a stage above this share of its time has a queue that grows


@dataclass(frozen=True, slots=True)
class Load:
    requests_per_s: float
    prompt_tokens: float  # that no cache has
    output_tokens: float
    cached_tokens: float = 0.0  # of a prompt
    # The variance over the mean, which is 1 where requests come at random: of an interval's arrivals, and of those that
    # decode has under way
    dispersion: float = 1.0
    busy_dispersion: float = 1.0


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """A stage's engine, as its capacity is told."""

    times: StepTimes
    max_num_tokens: int = 8192  # of a step
    max_batch_size: int = 256
    kv_tokens: int = 1 << 23  # that a worker can hold

    def __post_init__(self) -> None:
        """Raises ValueError for an engine that could compute nothing."""
        if min(self.max_num_tokens, self.max_batch_size, self.kv_tokens) < 1:
            raise ValueError(
                f"an engine of {self.max_num_tokens} tokens a step, {self.max_batch_size} requests and"
                f" {self.kv_tokens} tokens of KV computes nothing"
            )

    def prompt_ms(self, num_tokens: float) -> float:
        """Return what one prompt takes that is computed alone."""
        left, context, ms = max(round(num_tokens), 1), 0, 0.0
        while left > 0:
            chunk = min(left, self.max_num_tokens)
            ms += self.times.step_ms(0, chunk, prompts=0 if context else 1, tokens_times_context=chunk * context)
            left, context = left - chunk, context + chunk
        return max(ms, _LEAST_MS)

    def packed_prompt_ms(self, num_tokens: float) -> float:
        """Return a prompt's share of steps that are full."""
        size = max(round(num_tokens), 1)
        together = max(self.max_num_tokens // size, 1)
        if together == 1:
            return self.prompt_ms(size)
        return self.times.step_ms(0, together * size, prompts=together) / together

    def decode_ms(self, rows: float, context: float) -> float:
        return max(self.times.step_ms(max(math.ceil(rows), 1), context=round(max(rows, 1) * context)), _LEAST_MS)

    def most_rows(self, context: float) -> int:
        return max(min(self.max_batch_size, int(self.kv_tokens / max(context, 1))), 1)


def context_of(load: Load) -> float:
    """Return the tokens whose KV a request's steps read, in the mean."""
    return load.prompt_tokens + load.cached_tokens + load.output_tokens / 2


def most_rows(engine: PlannedEngine, load: Load) -> int:
    """Return the requests that a worker has place for. What caches have is taken to be shared by those under way."""
    return engine.most_rows(load.prompt_tokens + load.output_tokens / 2)


def shared_dispersion(load: Load) -> float:
    """Return the dispersion of arrivals of which prefill workers can share out the work.

    A burst whose prompts have their beginnings in a cache is computed there, however many workers there are.
    """
    return 1 + (load.dispersion - 1) * _computed_share(load)


def _computed_share(load: Load) -> float:
    return load.prompt_tokens / (load.prompt_tokens + load.cached_tokens)


def prefill_use(engine: PlannedEngine, load: Load, count: int, packed: bool = False) -> float:
    """Return the share of their time that prompts take."""
    prompt_ms = engine.packed_prompt_ms(load.prompt_tokens) if packed else engine.prompt_ms(load.prompt_tokens)
    return load.requests_per_s * prompt_ms / 1e3 / max(count, 1)


def waiting_share(offered: float, count: int) -> float:
    """Return the share of prompts that find all workers at work, by Erlang's C: the router sends to a free one."""
    blocked = 1.0
    for number in range(1, count + 1):
        blocked = offered * blocked / (number + offered * blocked)
    use = offered / count
    return blocked / (1 - use * (1 - blocked))


def expected_ttft_ms(engine: PlannedEngine, load: Load, count: int) -> float:
    """Return the mean, of prompts of many lengths that come at random (M/M/c); infinite in overload."""
    service_ms, offered = engine.prompt_ms(load.prompt_tokens), prefill_use(engine, load, 1)
    if offered >= count:
        return math.inf
    return service_ms * (1 + waiting_share(offered, count) / (count - offered))


def late_share(engine: PlannedEngine, load: Load, count: int, ttft_ms: float, correction: float) -> float:
    """Return the share of prompts that wait longer than the target, by the tail of such a queue.

    It is longer for arrivals in bursts that can be shared out: by the mean of both dispersions, as in Allen and
    Cunneen's approximation (Probability, Statistics and Queueing Theory, 1990). That of prompts, whose lengths are
    many, is taken as 1.
    """
    service_ms = engine.prompt_ms(load.prompt_tokens) * correction
    offered = prefill_use(engine, load, 1) * correction
    slack_ms = ttft_ms - service_ms
    if offered >= count or slack_ms < 0:
        return 1.0
    longer = (shared_dispersion(load) + 1) / 2
    return waiting_share(offered, count) * math.exp(-(count - offered) * slack_ms / service_ms / longer)


def decode_rows(engine: PlannedEngine, load: Load, count: int) -> float:
    """Return the requests under way on each worker; infinite where it can't keep up."""
    per_s, context = load.requests_per_s / max(count, 1), context_of(load)
    most, rows = most_rows(engine, load), 0.0
    for _ in range(64):  # rows make steps longer, and those make rows more
        found = per_s * load.output_tokens * engine.decode_ms(rows, context) / 1e3
        if found > most:
            return math.inf
        if abs(found - rows) < 0.01:
            break
        rows = found
    return rows


def expected_itl_ms(engine: PlannedEngine, load: Load, count: int) -> float:
    rows = decode_rows(engine, load, count)
    return engine.decode_ms(rows, context_of(load)) if rows < math.inf else math.inf


def busy_rows(rows: float, load: Load, count: int) -> float:
    """Return the requests under way at a busy moment, on each of so many workers that have `rows` in the mean.

    Requests of a burst are shared out at random, but for those that have their beginning in one worker's cache.
    """
    together = 1 - _computed_share(load) * (1 - 1 / max(count, 1))
    return rows + _DEVIATIONS * math.sqrt((1 + (load.busy_dispersion - 1) * together) * rows)


def prefill_fits(engine: PlannedEngine, load: Load, count: int, ttft_ms: float, correction: float) -> bool:
    return late_share(engine, load, count, ttft_ms, correction) <= LATE_SHARE


def decode_fits(engine: PlannedEngine, load: Load, count: int, itl_ms: float, correction: float) -> bool:
    """Whether a request's mean gap keeps the target, and those under way have their place, at a busy moment."""
    busy = busy_rows(decode_rows(engine, load, count), load, count)
    return busy <= most_rows(engine, load) and engine.decode_ms(busy, context_of(load)) * correction <= itl_ms


def prefill_carries(engine: PlannedEngine, load: Load, count: int, share: float = _FULL) -> bool:
    """Whether prompts are computed as fast as they come, whatever they wait."""
    return prefill_use(engine, load, count, packed=True) <= share


def decode_carries(engine: PlannedEngine, load: Load, count: int, share: float = _FULL) -> bool:
    return decode_rows(engine, load, count) <= share * most_rows(engine, load)
