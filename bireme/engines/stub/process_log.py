"""The log of the processes that a stub starts: stderr, which is tritonserver's, with their name on each line."""

from __future__ import annotations

import logging
import os
import sys


def start_log(name: str) -> None:
    """`name`: the worker's, and what the process is to it."""
    handler = logging.StreamHandler(sys.stderr)
    text = f"%(asctime)s.%(msecs)03d %(levelname).1s {name}[{os.getpid()}] %(message)s"
    handler.setFormatter(logging.Formatter(text, "%m%d %H:%M:%S"))
    root = logging.getLogger("bireme")
    root.handlers[:] = [handler]
    root.setLevel(os.environ.get("BIREME_LOG_LEVEL", "INFO").upper())
    root.propagate = False
