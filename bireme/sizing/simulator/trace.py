"""Requests to simulate, read from a trace.

A prompt is told by the hashes of its full blocks, which stand for all before them. Two forms of traces are read:

* Mooncake's (github.com/kvcache-ai/Mooncake, FAST25-release/traces), blocks of 512 tokens:
  {"timestamp": ms, "input_length", "output_length", "hash_ids"}
* `dynamo.request.trace.v1`, the request log's and Dynamo's: each file says the size of its blocks
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bireme.kv.kernels.arrays import Hashes

TOKENS_PER_BLOCK = 512  # of Mooncake's traces, and of those that are made here
REQUEST_LOG_SCHEMA = "dynamo.request.trace.v1"
_FORMS = f"a line has timestamp, input_length, output_length, hash_ids, or is a record of {REQUEST_LOG_SCHEMA}"


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRequest:
    arrival_s: float
    num_prompt: int
    num_output: int
    blocks: Hashes  # of the prompt's full blocks
    priority: float = 0.5  # as in serving options: higher first
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    requests: list[SimulatedRequest]  # by arrival, which begins at 0
    tokens_per_block: int = TOKENS_PER_BLOCK


def read_traces(paths: Sequence[Path]) -> Trace:
    """Read files that belong together, .gz as well. Raises ValueError with file or line."""
    found, sizes, ids = list[SimulatedRequest](), dict[int, str](), dict[str, str]()
    for where, row in trace_rows(paths):
        try:
            if "hash_ids" in row:
                request, size = _of_mooncake(row), TOKENS_PER_BLOCK
            elif (read := _of_request_log(row, ids, where)) is not None:
                request, size = read
            else:
                continue
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            told = f"no {error.args[0]}" if isinstance(error, KeyError) else repr(error)
            raise ValueError(f"{where}: {told}; {_FORMS}") from error
        found.append(request)
        sizes.setdefault(size, where)
        if len(sizes) > 1:
            (one, first), (other, second) = sizes.items()
            raise ValueError(f"{second}: blocks of {other} tokens, in {first} of {one}; replay them apart")
    begin_s = min((one.arrival_s for one in found), default=0.0)
    found = [replace(one, arrival_s=one.arrival_s - begin_s) for one in found]
    return Trace(sorted(found, key=lambda one: one.arrival_s), next(iter(sizes), TOKENS_PER_BLOCK))


def trace_rows(paths: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line that is not blank, with its place. Raises ValueError."""
    for path in paths:
        for number, line in _lines(path):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                said = f"no JSON ({error.msg} at character {error.pos + 1}); was the line cut short?"
                raise ValueError(f"{path}:{number}: {said} {_FORMS}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a JSON object is expected; {_FORMS}")
            yield f"{path}:{number}", row


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield lines that are not blank by their number. Raises ValueError."""
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, line
    except EOFError as error:
        raise ValueError(f"{path}:{number + 1}: the compressed file ends within it; it was cut short") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}:{number + 1}: no UTF-8 text ({error.reason}); {_FORMS}") from error
    except (OSError, zlib.error) as error:  # with .gz also what is not compressed, or damaged
        said = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: can't be read ({said}); name files of a request log or a trace") from error


def _of_mooncake(row: Mapping[str, Any]) -> SimulatedRequest:
    num_prompt = int(row["input_length"])
    ids = np.array(row["hash_ids"][: num_prompt // TOKENS_PER_BLOCK], np.uint64)
    return SimulatedRequest(row["timestamp"] / 1e3, num_prompt, max(int(row["output_length"]), 1), spread(ids))


def _of_request_log(row: Mapping[str, Any], ids: dict[str, str], where: str) -> tuple[SimulatedRequest, int] | None:
    """Return a request and its tokens a block; None: another event. Dynamo's files may wrap a record in `event`."""
    record = row.get("event", row)
    if record["schema"] != REQUEST_LOG_SCHEMA:
        raise ValueError(f"schema {record['schema']}")
    if record["event_type"] != "request_end":
        return None
    request, replay = record["request"], record["request"]["replay"]
    if (first := ids.setdefault(request["request_id"], where)) != where:
        raise ValueError(f"request_id {request['request_id']} is that of {first}")
    size, num_prompt, hashes = (
        int(replay["trace_block_size"]),
        int(replay["input_length"]),
        replay["input_sequence_hashes"],
    )
    if size < 1 or len(hashes) != -(-num_prompt // size):
        raise ValueError(f"{len(hashes)} hashes for {num_prompt} tokens in blocks of {size}")
    blocks = np.array(hashes[: num_prompt // size], np.uint64)
    arrival_s = int(request["request_received_ms"]) / 1e3
    session = (record.get("agent_context") or {}).get("session_id") or ""
    num_output = max(int(request["output_tokens"]), 1)
    return SimulatedRequest(arrival_s, num_prompt, num_output, blocks, session_id=str(session)), size


def spread(ids: Hashes) -> Hashes:
    """Turn small numbers into hashes, one to one."""
    mixed = (ids + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


def faster(requests: list[SimulatedRequest], speed: float) -> list[SimulatedRequest]:
    return [replace(one, arrival_s=one.arrival_s / speed) for one in requests]


def spread_out(requests: list[SimulatedRequest]) -> list[SimulatedRequest]:
    """Spread requests of one time evenly until the next time: Mooncake's timestamps are multiples of three seconds."""
    times = sorted({one.arrival_s for one in requests})
    gaps = dict(zip(times, np.diff([*times, 2 * times[-1] - times[-2] if len(times) > 1 else times[-1]]), strict=True))
    counts, seen = Counter(one.arrival_s for one in requests), Counter[float]()
    found = []
    for one in requests:
        at = one.arrival_s + float(gaps[one.arrival_s]) * seen[one.arrival_s] / counts[one.arrival_s]
        seen[one.arrival_s] += 1
        found.append(replace(one, arrival_s=at))
    return found


def endless_hits(requests: Sequence[SimulatedRequest], tokens_per_block: int = TOKENS_PER_BLOCK) -> list[int]:
    """Return the tokens of each prompt that a cache without end, shared by all, would have: see `cachable`."""
    seen: set[int] = set()
    found = []
    for one in requests:
        depth, most = 0, cachable(one, tokens_per_block)
        blocks = one.blocks.tolist()
        while depth < most and blocks[depth] in seen:
            depth += 1
        found.append(depth * tokens_per_block)
        seen.update(blocks)
    return found


def cachable(request: SimulatedRequest, tokens_per_block: int = TOKENS_PER_BLOCK) -> int:
    """Return how many blocks of a prompt a cache can save: an engine computes at least the last token."""
    return min(len(request.blocks), (request.num_prompt - 1) // tokens_per_block)
