"""A GPU that refuses its process for good, as after an illegal memory access or an uncorrectable memory error.

Every later call fails, quickly, which looks like work to those who watch the process: it ends itself.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

logger = logging.getLogger("bireme.engine")

EXIT_BROKEN = 70  # EX_SOFTWARE of sysexits.h
_SEND_S = 0.2  # for the ends of the requests that have failed


def leave_if_lost(worker: str, die: Callable[[int], object] = os._exit) -> None:
    """Call it when a pass has failed."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # only an engine that has it imports it
    if cuda is None or not cuda.is_available():
        return
    try:
        cuda.synchronize()
    except RuntimeError as error:
        logger.critical("device_lost worker=%s error=%s", worker, str(error).partition("\n")[0])
        threading.Timer(_SEND_S, die, (EXIT_BROKEN,)).start()
