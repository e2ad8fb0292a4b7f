"""Ends the stub when its tritonserver is gone.

A crashed tritonserver leaves its stubs waiting in shared memory for ever, deaf to SIGTERM (seen for over
20 minutes). PDEATHSIG does not help: it follows the server's thread that forked, not the process.
"""

from __future__ import annotations

import os
import threading
import time

PERIOD_S = 0.5


def watch_parent() -> None:
    """Exit this process, without clean-up, soon after its parent has changed."""
    threading.Thread(target=_run, args=(os.getppid(),), name="lifeline", daemon=True).start()


def _run(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PERIOD_S)
    os._exit(1)
