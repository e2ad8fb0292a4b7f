"""Ends this process when the one that started it is gone: nobody else would."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

_CHECK_S = 0.5


def end_with_parent(parent: int, wait: Callable[[], None] = lambda: None) -> None:
    """Watch the parent from a thread of its own; when another has become it `wait`, then SIGTERM for this process."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_CHECK_S)
        try:
            wait()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()
