"""An engine process that has its libraries loaded and waits for its life: `supervisor.standby`.

It ends with its supervisor, and when that closes the pipe.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable

from bireme.config import EngineConfig
from bireme.engines.stub.environment import given_recipe
from bireme.engines.stub.process_log import start_log
from bireme.errors import ConfigError
from bireme.own_process import ENGINE_NAME, freeze_gc, load_with_little_gc

_PR_SET_NAME = 15
_MAX_LINE = 4096
logger = logging.getLogger("bireme.engine")


def stand_by(worker: str, descriptor: int, prepare: Callable[[str, str, EngineConfig], None]) -> tuple[str, int] | None:
    """Load libraries by `prepare`; return the life's endpoint and number, None: there is none to begin."""
    start_log(f"{worker} standby")
    recipe, entry = given_recipe(worker)
    try:
        prepare(entry.engine, recipe.model_path if entry.kind.needs_model else "", entry.engine_config)
    except (ConfigError, ImportError) as error:  # the life that begins will tell it again
        logger.warning("not_prepared error=%s", error)
    freeze_gc()  # here, so that the collection before the life's first request has little to look at
    logger.info("standby_ready")
    line = os.read(descriptor, _MAX_LINE).decode()
    os.close(descriptor)
    if not line:
        return None
    load_with_little_gc()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ENGINE_NAME.encode())  # launch/processes.py tells it from those that wait
    endpoint, _, life = line.rpartition(" ")
    return endpoint, int(life)
