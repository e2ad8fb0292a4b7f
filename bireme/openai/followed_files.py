"""Files that are read again when they change: keys, certificates. Where that fails the former content stays in use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from bireme.errors import ConfigError

_LOOK_S = 1.0
_T = TypeVar("_T")
_State = tuple[tuple[int, int, int] | None, ...]
logger = logging.getLogger("bireme.openai")


class FollowedFiles:
    """`run` on the loop that serves, until it is cancelled."""

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], _T], use: Callable[[_T], object]) -> None:
        """Call before the files are read first. `name`: for the log. `read` may block, and raises ConfigError; `use`
        is called on the loop with what it has returned.
        """
        self._name, self._paths, self._read, self._use = name, paths, read, use
        self._state = self._look()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.turn()

    async def turn(self) -> None:
        """Look once; read what has changed since the last look."""
        state = await asyncio.to_thread(self._look)
        if state == self._state:
            return
        self._state = state
        try:
            self._use(await asyncio.to_thread(self._read))
        except ConfigError as error:
            logger.error("%s_not_reloaded error=%s", self._name, error)
        except Exception:  # the next change must be read
            logger.exception("%s_not_reloaded", self._name)
        else:
            logger.info("%s_reloaded", self._name)

    def _look(self) -> _State:
        return tuple(map(_identity, self._paths))


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Return what differs once a file was written or replaced; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
