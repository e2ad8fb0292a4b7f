"""Log lines of a stub: `event key=value` on stderr, which is the server's log."""

from __future__ import annotations

import logging
import os
import sys


def configure(model_name: str) -> None:
    """Give the `bireme` loggers a handler that names the model; BIREME_LOG_LEVEL sets the level (INFO)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {model_name} %(name)s %(message)s"))
    root = logging.getLogger("bireme")
    root.handlers[:] = [handler]
    root.propagate = False
    level = os.environ.get("BIREME_LOG_LEVEL", "INFO").upper()
    root.setLevel(level if isinstance(logging.getLevelName(level), int) else "INFO")
