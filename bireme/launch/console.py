"""The log of a launch: its own events and tritonserver's lines, each with its source, as text or JSON.

Logging never waits for the log's reader: one thread writes a queue, and what does not fit is counted. So are
tritonserver's lines that come by the hundred a second and differ only in digits.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import select
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Literal, TextIO

from bireme.launch.guarded_thread import GuardedThread

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")

_TRITON_LINE = re.compile(r"^([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (.*)$")
_TRITON_LEVELS: Mapping[str, Level] = {"I": "debug", "W": "warning", "E": "error", "F": "error"}
# A model's or engine's own line: 2026-01-31 12:00:00,000 INFO decode bireme.stages event key=value
_MODEL_LINE = re.compile(r"^\d{4}-\d\d-\d\d [\d:,.]+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S+) (.*)$")
# An engine process': 0131 12:00:00.000 I decode engine[123] event key=value
_ENGINE_LINE = re.compile(r"^\d{4} [\d:.]+ ([DIWEC]) (\S+) (.*)$")
_MODEL_LEVELS: Mapping[str, Level] = {
    "D": "debug",
    "I": "info",
    "W": "warning",
    "E": "error",
    "C": "error",
}
_BOILERPLATE = re.compile(r"^([+|]|\s*$|Signal \(\d+\) received)")  # tables at the start, its words at the end
# Logged on every machine without a GPU; nothing is wrong.
_CPU_NOISE = ("CudaDriverHelper", "unable to create stream", "initialize NVML", "DCGM unable", "pinned memory")
_MAX_QUEUED_CHARS = 4 << 20  # not taken yet by the reader of the log
_TICK_S = 1.0  # in which equal lines are counted
_MAX_ALIKE = 100  # in a tick; one in the tick after
_SHOWN_CHARS = 200
_DIGITS = str.maketrans("", "", "0123456789")


class Repeats:
    """Lines that differ only in digits, counted for a tick."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._floods: set[str] = set()  # of the tick before
        self._began_at = time.monotonic()

    def is_one_too_many(self, line: str) -> bool:
        kind = line.translate(_DIGITS)
        self._counts[kind] += 1
        return self._counts[kind] > (1 if kind in self._floods else _MAX_ALIKE)

    def take(self) -> dict[str, int]:
        """Return, once a tick, line (less digits) -> count not passed on."""
        if time.monotonic() - self._began_at < _TICK_S:
            return {}
        counts, self._counts, self._began_at = self._counts, Counter(), time.monotonic()
        held = {kind: count - (1 if kind in self._floods else _MAX_ALIKE) for kind, count in counts.items()}
        self._floods = {kind for kind, count in counts.items() if count > _MAX_ALIKE}
        return {kind: count for kind, count in held.items() if count > 0}


class Console:
    """Thread-safe. At the process's end the queue gets a moment."""

    def __init__(
        self,
        level: Level = "info",
        as_json: bool = False,
        stream: TextIO | None = None,
        models_level: Level = "debug",
    ) -> None:
        """`models_level`: a higher one for lines of models and engines. `stream` (None: stderr) is written at once."""
        self._own_level, self._least_models_threshold = level, LEVELS.index(models_level)
        self.set_level(None)
        self._as_json = as_json
        self._stream = stream
        self._lock = threading.RLock()
        self._queue: deque[str] = deque()
        self._num_chars = self._num_dropped = 0
        self._is_writing = self._is_registered = False
        self._has_lines = threading.Event()
        self._repeats = Repeats()
        self._writer = GuardedThread("console", self._write_queued, self)

    def set_level(self, level: Level | None) -> None:
        """None: as it was made with."""
        self._threshold = LEVELS.index(level or self._own_level)
        self._models_threshold = max(self._threshold, self._least_models_threshold)

    def event(self, name: str, level: Level = "info", **fields: object) -> None:
        """Log an event of the launcher's: `name key=value ...`."""
        self._write(level, "serve", name, fields)

    def triton_line(self, line: str) -> None:
        """Pass on a line of tritonserver or a model."""
        with self._lock:
            self._log_repeats()
            if self._repeats.is_one_too_many(line):
                return
        if match := _MODEL_LINE.match(line) or _ENGINE_LINE.match(line):
            level = _MODEL_LEVELS[match.group(1)[0]]
            self._write(level, match.group(2), match.group(3), {})
        elif match := _TRITON_LINE.match(line):
            text = match.group(2)
            level = _TRITON_LEVELS[match.group(1)]
            self._write("debug" if any(noise in text for noise in _CPU_NOISE) else level, "triton", text, {})
        elif _BOILERPLATE.match(line) or any(noise in line for noise in _CPU_NOISE):
            self._write("debug", "triton", line, {})
        else:
            self._write("info", "model", line, {})

    def _write(self, level: Level, source: str, text: str, fields: Mapping[str, object]) -> None:
        threshold = self._threshold if source in ("serve", "triton") else self._models_threshold
        if LEVELS.index(level) < threshold:
            return
        line = self._line(level, source, text, fields)
        with self._lock:
            if self._stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    print(line, file=self._stream, flush=True)
                return
            if self._num_chars > _MAX_QUEUED_CHARS:
                self._num_dropped += 1
                return
            self._queue.append(line)
            self._num_chars += len(line) + 1
            self._has_lines.set()
            if self._writer.problem:
                self._start_writer()

    def flush(self, timeout_s: float = 2.0) -> None:
        """Wait until the queue is written, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._has_lines.set()
        while self._is_behind() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _is_behind(self) -> bool:
        with self._lock:  # without it, lines that are just being taken are neither in the queue nor being written
            return bool(self._queue) or self._is_writing

    def _start_writer(self) -> None:
        if not self._is_registered:
            self._is_registered = True
            atexit.register(self.flush)
        with contextlib.suppress(RuntimeError):  # the system has no thread left: the next line tries again
            self._writer.revive()

    def _write_queued(self) -> None:
        self._has_lines.wait(_TICK_S)
        with self._lock:
            self._has_lines.clear()
            self._log_repeats()
            lines, num_dropped = list(self._queue), self._num_dropped
            self._queue.clear()
            self._num_chars = self._num_dropped = 0
            self._is_writing = bool(lines)
        if num_dropped:
            lines.append(self._line("warning", "serve", f"... {num_dropped} lines were dropped: nobody read them", {}))
        try:
            if lines:
                _write_all("".join(f"{line}\n" for line in lines).encode(errors="replace"))
        finally:
            self._is_writing = False

    def _log_repeats(self) -> None:
        for kind, count in self._repeats.take().items():
            self.event("lines_alike", "warning", not_shown=count, line=kind[:_SHOWN_CHARS])

    def _line(self, level: Level, source: str, text: str, fields: Mapping[str, object]) -> str:
        return (self._json if self._as_json else _text)(level, source, text, fields)

    def _json(self, level: Level, source: str, text: str, fields: Mapping[str, object]) -> str:
        return json.dumps(
            {"time": round(time.time(), 3), "level": level, "source": source, "message": text, **fields}, default=str
        )


def _write_all(data: bytes) -> None:
    """Below Python's stream, whose lock would hold up the exit."""
    unwritten = memoryview(data)
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # none, closed, or one of a program that keeps it in memory
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.write(data.decode())
        return
    while unwritten:
        try:
            unwritten = unwritten[os.write(descriptor, unwritten) :]
        except BlockingIOError:  # another process has made it non-blocking
            select.select([], [descriptor], [], 1.0)
        except OSError:  # the reader has gone: serving goes on
            return


def _text(level: Level, source: str, text: str, fields: Mapping[str, object]) -> str:
    mark = "" if level in ("debug", "info") else f"{level}: "
    values = "".join(f" {key}={_value(value)}" for key, value in fields.items())
    return f"{time.strftime('%H:%M:%S')} {source:6} | {mark}{text}{values}"


def _value(value: object) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return json.dumps(text) if re.search(r"[\s\"]", text) or not text else text
