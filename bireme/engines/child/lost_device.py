"""A GPU that refuses its process for good, as after an illegal memory access or an uncorrectable memory error.

Every later call fails, quickly, which looks like work to those who watch the process: it ends itself.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

from bireme.errors import UnavailableError, one_line

logger = logging.getLogger("bireme.engine")

EXIT_BROKEN = 70  # EX_SOFTWARE of sysexits.h
_SEND_S = 0.2  # for the ends of the requests that have failed
# CUDA's words (cudaGetErrorString), which torch and Triton quote, for errors of which its manual says that "the process
# must be terminated and relaunched".
_FOR_GOOD = (
    "device-side assert triggered",
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "hardware stack error",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
)


def raise_if_lost(error: Exception, what: str) -> None:
    """Call it where an error is to be lived with, before that. `what` was computed.

    Raises UnavailableError where the error has lost the GPU: whatever comes next would fail as well.
    """
    if isinstance(error, UnavailableError):  # of a pass within this one, told already
        raise error
    text = one_line(error)
    if isinstance(error, RuntimeError) and any(words in text for words in _FOR_GOOD):
        logger.critical("device_lost in=%s error=%s", what, text)
        raise UnavailableError(
            f"the GPU was lost in {what}: {text}; this process can't use it any more and has to start again; where"
            " every start ends so, CUDA_LAUNCH_BLOCKING=1 has the log name the kernel: report that"
        ) from error


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
