"""Every step's time, for benchmarks: the histogram on /metrics is too coarse for a p99 of a step.

Off unless BIREME_STEP_LOG names a file; then a 32-bit float of seconds is appended for each step. A step that follows
another at once is measured from that one's end, so that the time between them counts, too.
"""

from __future__ import annotations

import os
import struct

VARIABLE = "BIREME_STEP_LOG"
_FLOAT = struct.Struct("<f")


class StepLog:
    """Used from the engine's thread alone."""

    def __init__(self) -> None:
        path = os.environ.get(VARIABLE)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600) if path else -1
        self._ended_at = 0.0

    def add(self, began_at: float, ended_at: float, is_first: bool) -> None:
        """`is_first`: the engine was idle before it."""
        if self._file < 0:
            return
        since = began_at if is_first or not self._ended_at else self._ended_at
        self._ended_at = ended_at
        os.write(self._file, _FLOAT.pack(ended_at - since))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
