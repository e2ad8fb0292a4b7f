"""What a launch says: its own events and tritonserver's lines, each with its source, as text or JSON."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Mapping
from typing import Literal, TextIO

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
_BOILERPLATE = re.compile(r"^([+|]|\s*$|Signal \(\d+\) received)")  # tables at the start, its word at the end
# Said on every machine without a GPU; nothing is wrong.
_CPU_NOISE = ("CudaDriverHelper", "unable to create stream", "initialize NVML", "DCGM unable", "pinned memory")


class Console:
    """Thread-safe writer of log lines."""

    def __init__(
        self,
        level: Level = "info",
        as_json: bool = False,
        stream: TextIO | None = None,
        models_level: Level = "debug",
    ) -> None:
        """`models_level` is a higher threshold for the lines of models and engines."""
        self._threshold = LEVELS.index(level)
        self._models_threshold = max(self._threshold, LEVELS.index(models_level))
        self._as_json = as_json
        self._stream = stream
        self._lock = threading.Lock()

    def event(self, name: str, level: Level = "info", **fields: object) -> None:
        """Say something of the launcher's own: `name key=value ...`."""
        self._write(level, "serve", name, fields)

    def triton_line(self, line: str) -> None:
        """Pass on a line of tritonserver or of one of its models."""
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
        line = self._json(level, source, text, fields) if self._as_json else _text(level, source, text, fields)
        with self._lock:
            try:
                print(line, file=self._stream or sys.stderr, flush=True)
            except (OSError, ValueError):  # the reader of our output has gone: serving goes on
                pass

    def _json(self, level: Level, source: str, text: str, fields: Mapping[str, object]) -> str:
        return json.dumps(
            {"time": round(time.time(), 3), "level": level, "source": source, "message": text, **fields}, default=str
        )


def _text(level: Level, source: str, text: str, fields: Mapping[str, object]) -> str:
    mark = "" if level in ("debug", "info") else f"{level}: "
    values = "".join(f" {key}={_value(value)}" for key, value in fields.items())
    return f"{time.strftime('%H:%M:%S')} {source:6} | {mark}{text}{values}"


def _value(value: object) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return json.dumps(text) if re.search(r"[\s\"]", text) or not text else text
