"""Ends this process when the one that started it is gone: nobody else would."""

from __future__ import annotations

import os
import signal
import threading
import time

_CHECK_S = 1.0


def end_with_parent(parent: int) -> None:
    """Watch the parent from a thread of its own; SIGTERM for this process when another has become it."""
    threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK_S)
    os.kill(os.getpid(), signal.SIGTERM)
