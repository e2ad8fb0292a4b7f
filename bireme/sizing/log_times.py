"""What an engine's steps take, told by a request log alone: a table where nobody has recorded steps.

A log has each request's times, not its steps. So a request's mean gap stands for a decode step with as many rows as
were under way beside it, and the time of a prompt that no other one overlapped for one step with all of its tokens.
Medians of alike ones are the points. The rule through them is that of `step_times`.

    found = log_times(read_log([Path("requests.frontend.jsonl")]))
    found.times, found.hop_ms     # what the way to a worker and back takes beside its work
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from bireme.errors import ConfigError
from bireme.sizing.simulator.trace import REQUEST_LOG_SCHEMA, trace_rows
from bireme.sizing.step_times import NO_TRANSFER, StepPoint, StepTimes, TransferTimes, least_squares, table_of_points

_FEW = 20  # requests of a kind without which nothing is fitted
_LEAST_TOKENS = 4  # of an answer whose mean gap says something
_PROMPTS_SHARE = 0.1  # of a request's decoding, that others' prompts may take at most
_UNIT_BYTES = 1000  # that stand for a token in TransferTimes, which has bytes


class _LoggedTimes(msgspec.Struct, gc=False):
    input_tokens: int
    output_tokens: int
    request_received_ms: float
    total_time_ms: float
    cached_tokens: int | None = None
    prefill_wait_time_ms: float | None = None
    prefill_time_ms: float | None = None
    kv_transfer_estimated_latency_ms: float = 0.0
    ttft_ms: float | None = None


class _LoggedWorkers(msgspec.Struct, gc=False):
    prefill_worker: str = ""
    decode_worker: str = ""
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """Times are milliseconds; `from_ms` and those after it are of one clock."""

    decode_worker: str
    prompt_worker: str  # who computed the prompt
    num_prompt: int
    num_computed: int  # of the prompt's tokens
    num_output: int
    from_ms: float  # its prompt is being computed
    computed_ms: float  # until then
    first_ms: float  # its first token
    end_ms: float
    hop_ms: float  # of its TTFT, what neither queue nor prompt nor transfer is
    transfer_ms: float


@dataclass(frozen=True, slots=True)
class LogTimes:
    times: StepTimes
    hop_ms: float
    num_gaps: int  # requests whose gaps counted
    num_prompts: int


def read_log(paths: Sequence[Path]) -> list[LoggedRequest]:
    """Return requests that engines have told of; retried ones are left out. Raises ValueError."""
    found = []
    for where, row in trace_rows(paths):
        record = row.get("event", row)
        if record.get("schema") != REQUEST_LOG_SCHEMA or record.get("event_type") != "request_end":
            continue
        try:
            request = msgspec.convert(record["request"], _LoggedTimes, strict=False)
            workers = msgspec.convert(record.get("bireme", {}), _LoggedWorkers)
        except (KeyError, msgspec.ValidationError) as error:
            raise ValueError(f"{where}: {error}; a record of {REQUEST_LOG_SCHEMA} has these fields") from error
        if (one := _logged(request, workers)) is not None:
            found.append(one)
    return found


def log_times(requests: Sequence[LoggedRequest], machine: str = "where the log was written") -> LogTimes:
    """Raises ConfigError for a log that says too little."""
    decoding = _by_worker(requests, "decode_worker", "first_ms", "end_ms")
    prompting = _by_worker(requests, "prompt_worker", "from_ms", "computed_ms")
    gaps = [point for one in requests if (point := _gap(one, decoding, prompting)) is not None]
    prompts = [point for one in requests if (point := _prompt(one, decoding, prompting)) is not None]
    for kind, points, remedy in (
        ("answers that no prompt disturbed", gaps, "a log of quieter hours"),
        ("prompts that were computed alone", prompts, "a log of quieter hours"),
    ):
        if len(points) < _FEW:
            raise ConfigError(
                f"the request log: {len(points)} {kind}, {_FEW} are needed for step times; take {remedy}, or --times"
                " with a table (tools/record_steps.py makes one)"
            )
    table = table_of_points([*gaps, *prompts], "of the request log", machine, "times of requests in their log")
    transfer = _transfer([one for one in requests if one.transfer_ms > 0])
    times = StepTimes.of(msgspec.structs.replace(table, transfer=transfer))
    return LogTimes(times, max(statistics.median(one.hop_ms for one in requests), 0.0), len(gaps), len(prompts))


def _logged(request: _LoggedTimes, workers: _LoggedWorkers) -> LoggedRequest | None:
    """None: its engines have told nothing, or it was tried again, and its times are of several."""
    wait_ms, prompt_ms, ttft_ms = request.prefill_wait_time_ms, request.prefill_time_ms, request.ttft_ms
    if wait_ms is None or not prompt_ms or ttft_ms is None or workers.attempts > 1 or request.output_tokens < 1:
        return None
    first_ms = request.request_received_ms + ttft_ms
    hop_ms = ttft_ms - wait_ms - prompt_ms - request.kv_transfer_estimated_latency_ms
    computed_ms = first_ms - max(hop_ms, 0.0) / 2 - request.kv_transfer_estimated_latency_ms
    return LoggedRequest(
        workers.decode_worker, workers.prefill_worker or workers.decode_worker, request.input_tokens,
        max(request.input_tokens - (request.cached_tokens or 0), 1), request.output_tokens, computed_ms - prompt_ms,
        computed_ms, first_ms, request.request_received_ms + request.total_time_ms, hop_ms,
        request.kv_transfer_estimated_latency_ms,
    )  # fmt: skip


class _Spans:
    """Of one worker: who was at work when, for sums over a stretch of time."""

    def __init__(self, spans: Iterable[tuple[float, float, float]]) -> None:
        """`spans`: from, to, weight."""
        changes = defaultdict[float, list[float]](lambda: [0.0, 0.0])
        for begin, end, weight in spans:
            if end > begin:
                for at, sign in ((begin, 1.0), (end, -1.0)):
                    changes[at][0] += sign
                    changes[at][1] += sign * weight
        self._at = sorted(changes)
        self._areas = [(0.0, 0.0)]  # count and weight, times ms, before each change
        self._levels = list[tuple[float, float]]()  # after each change
        count = weight = 0.0
        for number, at in enumerate(self._at):
            if number:
                passed = at - self._at[number - 1]
                area = self._areas[-1]
                self._areas.append((area[0] + count * passed, area[1] + weight * passed))
            count, weight = count + changes[at][0], weight + changes[at][1]
            self._levels.append((count, weight))

    def _until(self, at: float) -> tuple[float, float]:
        number = bisect.bisect_right(self._at, at) - 1
        if number < 0:
            return 0.0, 0.0
        passed, area, level = at - self._at[number], self._areas[number], self._levels[number]
        return area[0] + level[0] * passed, area[1] + level[1] * passed

    def mean(self, begin: float, end: float) -> tuple[float, float]:
        """Return how many there were, and the sum of their weights, in the mean of that time."""
        if end <= begin:
            return 0.0, 0.0
        before, after = self._until(begin), self._until(end)
        return (after[0] - before[0]) / (end - begin), (after[1] - before[1]) / (end - begin)


def _by_worker(requests: Sequence[LoggedRequest], worker: str, begin: str, end: str) -> dict[str, _Spans]:
    """Weights are the tokens of a request in its middle."""
    found = defaultdict[str, list[tuple[float, float, float]]](list)
    for one in requests:
        weight = one.num_prompt + one.num_output / 2
        found[getattr(one, worker)].append((getattr(one, begin), getattr(one, end), weight))
    return {name: _Spans(spans) for name, spans in found.items()}


def _gap(one: LoggedRequest, decoding: dict[str, _Spans], prompting: dict[str, _Spans]) -> StepPoint | None:
    """None: too short, or prompts were computed beside it."""
    if one.num_output < _LEAST_TOKENS or one.end_ms <= one.first_ms:
        return None
    prompts = prompting.get(one.decode_worker)
    if prompts is not None and prompts.mean(one.first_ms, one.end_ms)[0] > _PROMPTS_SHARE:
        return None
    rows, context = decoding[one.decode_worker].mean(one.first_ms, one.end_ms)
    ms = (one.end_ms - one.first_ms) / (one.num_output - 1)
    return StepPoint(
        decode_rows=max(round(rows), 1), prefill_tokens=0, context_tokens=round(context), prefill_context_tokens=0,
        ms=ms,
    )  # fmt: skip


def _prompt(one: LoggedRequest, decoding: dict[str, _Spans], prompting: dict[str, _Spans]) -> StepPoint | None:
    """None: another prompt was computed at the same time."""
    if prompting[one.prompt_worker].mean(one.from_ms, one.computed_ms)[0] > 1 + _PROMPTS_SHARE:
        return None
    beside = decoding.get(one.prompt_worker)
    rows, context = beside.mean(one.from_ms, one.computed_ms) if beside is not None else (0.0, 0.0)
    cached = one.num_prompt - one.num_computed
    return StepPoint(
        decode_rows=round(rows), prefill_tokens=one.num_computed, context_tokens=round(context) + cached,
        prefill_context_tokens=cached, prompts=1, ms=one.computed_ms - one.from_ms,
    )  # fmt: skip


def _transfer(requests: Sequence[LoggedRequest]) -> TransferTimes:
    if len(requests) < _FEW:
        return NO_TRANSFER
    tokens = np.array([one.num_prompt for one in requests], float)
    design = np.column_stack([np.ones(len(tokens)), tokens])
    start_ms, token_ms = least_squares(design, np.array([one.transfer_ms for one in requests])).tolist()
    if not token_ms:
        return TransferTimes(start_ms=start_ms)
    return TransferTimes(start_ms=start_ms, bytes_per_token=_UNIT_BYTES, bytes_per_s=_UNIT_BYTES * 1e3 / token_ms)
