"""The request log: a line for each request that had a prompt, in the form `dynamo.request.trace.v1`.

Lengths, times, workers, outcome and hashes of the prompt's blocks; nothing of prompt or answer. Dynamo's tools read it,
and tools/simulate.py replays it. What Dynamo has no field for stands under `bireme`.

    log = RequestLog.of(recipe, metrics, key)
    traces.subscribe(log.note, wants_all=True, wants_details=False, close=log.close)

The loop copies a prompt and goes on. A thread hashes and writes; what it can't take is lost and counted.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from bireme.config import Recipe, RequestLogConfig
from bireme.messages import Usage
from bireme.metrics import Registry
from bireme.observability.rotated_files import RotatedFiles
from bireme.request_trace import RequestTrace, Span, TracedSequence

SCHEMA = "dynamo.request.trace.v1"
MAX_QUEUED_BYTES = 16 << 20  # of prompts that wait for the thread
_MAX_QUEUED = 8192  # requests
_RECORD_BYTES = 2048  # what a record counts beside its prompt
_BATCH_BYTES = 1 << 20  # written at once
_TURN_BYTES = 64 << 10  # of prompts and records, half a millisecond of hashing
_PAUSE_S = 0.1  # in which records come together
_CLOSE_S = 5.0
_SAY_EVERY_S = 30.0
_TOKEN_BYTES = 4
_HASH_BYTES = 8
_FINISH_REASONS = frozenset({"stop", "length", "tool_calls"})  # OpenAI's, which Dynamo takes
_encode = msgspec.json.Encoder().encode
logger = logging.getLogger("bireme.observability")


class _Replay(msgspec.Struct, omit_defaults=True, gc=False):
    trace_block_size: int
    input_length: int
    input_sequence_hashes: list[int]  # the form wants it also where there is none


class _Request(msgspec.Struct, omit_defaults=True, gc=False):
    request_id: str
    input_tokens: int
    output_tokens: int
    request_received_ms: int
    total_time_ms: float
    replay: _Replay
    model: str = ""
    x_request_id: str = ""
    cached_tokens: int | None = None
    kv_hit_rate: float | None = None
    prefill_wait_time_ms: float | None = None
    prefill_time_ms: float | None = None
    kv_transfer_estimated_latency_ms: float = 0.0
    ttft_ms: float | None = None
    avg_itl_ms: float | None = None
    finish_reason_metadata: dict[str, str] | None = None


class _Own(msgspec.Struct, omit_defaults=True, gc=False):
    """What Dynamo has no field for."""

    outcome: str
    entry: str
    trace_id: str
    attempts: int
    key: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    decode_ms: float | None = None


class _Line(msgspec.Struct, omit_defaults=True, gc=False):
    schema: str
    event_type: str
    event_time_unix_ms: int
    request: _Request
    bireme: _Own
    agent_context: dict[str, str] | None = None


class _Noted(NamedTuple):
    """A request that has ended."""

    line: _Line  # without its hashes
    prompt: bytes  # tokens, 4 bytes each
    salt: str
    lora_name: str

    @property
    def num_bytes(self) -> int:
        return len(self.prompt) + _RECORD_BYTES


class RequestLog:
    """`note` on the loop's thread, `close` once."""

    def __init__(self, files: RotatedFiles, tokens_per_block: int, key: bytes, model: str, metrics: Registry) -> None:
        self._files, self._size, self._key = files, tokens_per_block, key
        self._model, self._metrics = model, metrics
        self._noted: deque[_Noted] = deque()
        self._num_bytes = 0  # of what waits; each side changes it under the lock
        self._lock = threading.Lock()
        self._wake, self._closes = threading.Event(), threading.Event()
        self._said_at = -_SAY_EVERY_S
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, recipe: Recipe, metrics: Registry, key: bytes) -> RequestLog:
        """Return the log of a process that asks `metrics` for its name; `key` is the deployment's.

        Raises ConfigError for a path that can't be written.
        """
        config = recipe.observability.request_log
        files = RotatedFiles(path_of(config, recipe.folder), metrics.worker, config.max_bytes, config.max_files)
        return cls(files, config.trace_block_size, key, recipe.served_name, metrics)

    def note(self, trace: RequestTrace) -> None:
        """Take a request that has ended. Never waits."""
        if any(span.name == "pictures" for span in trace.spans):  # no hash of tokens tells its prompt
            self._metrics.add("bireme_request_log_records_total", len(trace.sequences), "left_out")
            return
        for number, sequence in enumerate(trace.sequences):
            noted = _Noted(
                self._line(trace, number, sequence),
                sequence.prompt.tobytes(),
                sequence.options.cache_salt,
                sequence.options.lora_name,
            )
            if not self._queue(noted):
                self._metrics.add("bireme_request_log_records_total", 1, "lost")
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Write what waits, as far as the disk takes it soon."""
        self._closes.set()
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _queue(self, noted: _Noted) -> bool:
        with self._lock:
            if len(self._noted) >= _MAX_QUEUED or self._num_bytes + noted.num_bytes > MAX_QUEUED_BYTES:
                return False
            self._num_bytes += noted.num_bytes
        self._noted.append(noted)
        return True

    def _line(self, trace: RequestTrace, number: int, sequence: TracedSequence) -> _Line:
        attempts, root = _attempts(trace, sequence), trace.root
        ended_us = attempts[-1].end_us if attempts else root.end_us
        own = _Own(
            outcome=sequence.finish_reason or root.error.partition(":")[0] or "unknown",
            entry=root.name,
            trace_id=trace.trace_id,
            attempts=len(attempts),
            key=trace.tenant,
        )
        request = _Request(
            request_id=f"{trace.trace_id}-{root.span_id:016x}-{number}",
            input_tokens=len(sequence.prompt),
            output_tokens=sequence.num_tokens,
            request_received_ms=root.start_us // 1000,
            total_time_ms=(ended_us - root.start_us) / 1000,
            replay=_Replay(self._size, len(sequence.prompt), []),
            model=root.attributes.get("gen_ai.request.model", self._model),  # a frontend has several
            x_request_id=trace.request_id,
        )
        if (first_us := sequence.first_token_us) != 0:
            request.ttft_ms = (first_us - root.start_us) / 1000
            if sequence.num_tokens > 1:
                request.avg_itl_ms = round((ended_us - first_us) / 1000 / (sequence.num_tokens - 1), 3)
        if sequence.finish_reason in _FINISH_REASONS:
            request.finish_reason_metadata = {"finish_reason": sequence.finish_reason}
        if (usage := sequence.usage) is not None:
            _add_account(request, own, usage)
        session = sequence.options.session_id
        return _Line(
            SCHEMA, "request_end", ended_us // 1000, request, own, {"session_id": session} if session else None
        )

    def _run(self) -> None:
        while True:
            is_last = self._closes.is_set()
            while self._noted:
                if lines := [*self._encoded()]:
                    self._write(lines)
            if is_last:
                break
            if not self._files.pack_on():
                self._wake.wait()
                self._closes.wait(_PAUSE_S)
                self._wake.clear()
        self._files.close()

    def _encoded(self) -> Iterator[bytes]:
        """Take records off the queue, until they make a batch."""
        num_bytes = held = 0
        enough = min(_BATCH_BYTES, self._files.max_bytes // 2)
        while self._noted and num_bytes < enough:
            noted = self._noted.popleft()
            with self._lock:
                self._num_bytes -= noted.num_bytes
            try:
                line = self._encode(noted)
            except Exception:
                self._metrics.add("bireme_request_log_records_total", 1, "lost")
                logger.exception("request_not_logged")
                continue
            num_bytes += len(line)
            yield line
            held += noted.num_bytes
            if held > _TURN_BYTES:  # the loop's thread may have the interpreter
                held = 0
                time.sleep(0)

    def _encode(self, noted: _Noted) -> bytes:
        key = hash_key(self._key, noted.salt, noted.lora_name)
        noted.line.request.replay.input_sequence_hashes = block_hashes(noted.prompt, self._size, key)
        return _encode(noted.line) + b"\n"

    def _write(self, lines: list[bytes]) -> None:
        try:
            self._files.write(b"".join(lines))
        except OSError as error:
            self._metrics.add("bireme_request_log_records_total", len(lines), "lost")
            if time.monotonic() - self._said_at > _SAY_EVERY_S:
                self._said_at = time.monotonic()
                logger.warning("request_log_not_written lost=%d reason=%s", len(lines), error)
        else:
            self._metrics.add("bireme_request_log_records_total", len(lines), "written")


def path_of(config: RequestLogConfig, folder: str) -> Path:
    """Return the beginning of the files' names."""
    return Path(folder, Path(os.path.expandvars(config.path)).expanduser())


@functools.lru_cache(1024)
def hash_key(deployment_key: bytes, salt: str, lora_name: str) -> bytes:
    """Return the key of a prompt's hashes. Without the deployment's nobody can try prompts that he guesses.

    Different salts, and adapters, have nothing in common.
    """
    digest = hashlib.blake2b(key=deployment_key[:64], digest_size=32, person=b"request log")
    for part in (salt, lora_name):
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def block_hashes(prompt: bytes, tokens_per_block: int, key: bytes) -> list[int]:
    """Return a hash for each block of a prompt with all that is before it, also for a last one that is not full."""
    state, view, size = (
        hashlib.blake2b(key=key, digest_size=_HASH_BYTES),
        memoryview(prompt),
        _TOKEN_BYTES * tokens_per_block,
    )
    digests = []
    for at in range(0, len(prompt), size):
        state.update(view[at : at + size])
        digests.append(state.copy().digest())
    found: list[int] = np.frombuffer(b"".join(digests), "<u8").tolist()
    return found


def _attempts(trace: RequestTrace, sequence: TracedSequence) -> list[Span]:
    return [span for span in trace.spans if span.name == "attempt" and span.attributes["sequence"] == sequence.index]


def _add_account(request: _Request, own: _Own, usage: Usage) -> None:
    """Add what the engines tell of their part."""
    request.cached_tokens = usage.cached_tokens
    request.kv_hit_rate = round(usage.cached_tokens / max(request.input_tokens, 1), 4)
    request.prefill_wait_time_ms, request.prefill_time_ms = round(usage.queue_ms, 3), round(usage.prefill_ms, 3)
    request.kv_transfer_estimated_latency_ms = round(usage.transfer_ms, 3)
    own.prefill_worker, own.decode_worker = usage.prefill_worker, usage.decode_worker
    own.decode_ms = round(usage.decode_ms, 3)
