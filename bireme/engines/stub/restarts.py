"""When an engine process may be started again: with back-off, and not for ever."""

from __future__ import annotations

import time
from collections import deque

from bireme.config import SupervisorConfig

MAX_BACKOFF_S = 10.0


class RestartPolicy:
    """Counts the restarts in the window."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._restarts: deque[float] = deque()

    def next_delay_s(self) -> float | None:
        """Note one more restart and return how long to wait before it; None: too many, stay down."""
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > self._config.restart_window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._config.max_restarts:
            return None
        delay_s = min(MAX_BACKOFF_S, self._config.restart_backoff_s * 2.0 ** len(self._restarts))
        self._restarts.append(now)
        return delay_s
