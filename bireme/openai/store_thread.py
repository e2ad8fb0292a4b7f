"""A store that the frontend can do without, on threads of its own: one writes, one reads beside it.

It is opened by the first call. When it can't be opened or written (a damaged file, a full or read-only disk, another
program's lock), `problem` says why, writes are refused at once, and it is tried again, with pauses that double. Reads
are tried while it is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from bireme.child_process import Backoff
from bireme.errors import UnavailableError, drop_frames
from bireme.openai.database import Database, DatabaseError

_LOOK_S, _SWEEP_S = 1.0, 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
logger = logging.getLogger("bireme.openai")


class KeptStore(Protocol):
    @property
    def databases(self) -> Sequence[Database]: ...

    def check(self) -> None:
        """Write something of no consequence. Raises UnavailableError."""

    def close(self) -> None: ...


_S = TypeVar("_S", bound=KeptStore)
_T = TypeVar("_T")


class StoreThread(Generic[_S]):
    """Used on one loop."""

    def __init__(self, folder: Path | None, open_store: Callable[[Path], _S], name: str) -> None:
        """`folder`: None: one that goes with this process. `open_store` raises DatabaseError."""
        self._folder, self._open, self.name = folder, open_store, name
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None
        self._writer, self._reader = ThreadPoolExecutor(1, name), ThreadPoolExecutor(1, f"{name}-reader")
        self._opening = threading.Lock()
        self._opened: _S | None = None
        self._recovery: asyncio.Task[None] | None = None
        self.problem = ""  # why nothing can be kept now

    async def do(self, method: Callable[..., _T], *values: Any) -> _T:
        """Call `method(store, *values)` after the calls before it. Raises UnavailableError."""
        self.require()
        return await self._run(self._writer, method, values)

    def require(self) -> None:
        """Raises UnavailableError while nothing can be kept."""
        if self.problem:
            raise UnavailableError(f"{self.problem}; try again")

    async def read(self, method: Callable[..., _T], *values: Any) -> _T:
        """Call a method that only reads, beside those that write. Raises UnavailableError."""
        if self.problem and self._opened is None:
            raise UnavailableError(f"{self.problem}; try again")
        return await self._run(self._reader, method, values)

    async def close(self) -> None:
        """Nothing else may be called any more. Harmless when called again."""
        if self._recovery is not None:
            self._recovery.cancel()
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)
        for thread in (self._writer, self._reader):
            await asyncio.to_thread(thread.shutdown)
        if self._own_folder is not None:
            self._own_folder.cleanup()

    async def _run(self, thread: ThreadPoolExecutor, method: Callable[..., _T], values: tuple[Any, ...]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, lambda: method(self._store(), *values))
        except DatabaseError as error:
            self._note(str(error))
            raise

    def _note(self, problem: str) -> None:
        self.problem = problem
        if self._recovery is None:
            logger.error("store_down name=%s folder=%s problem=%s", self.name, self._folder, problem)
            self._recovery = asyncio.get_running_loop().create_task(self._recover())

    async def _recover(self) -> None:
        """Try again until something can be written."""
        began_at, pauses = time.monotonic(), Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while self.problem:
            await asyncio.sleep(pauses.next_s())
            try:
                await asyncio.get_running_loop().run_in_executor(self._writer, self._check)
                self.problem = ""
            except UnavailableError as error:
                self.problem = str(error)
                drop_frames(error)
            except Exception:  # such as no thread left: whatever it is, it must not be the last try
                logger.exception("store_not_tried name=%s", self.name)
        logger.info("store_up name=%s after_s=%.1f", self.name, time.monotonic() - began_at)
        self._recovery = None

    def _check(self) -> None:
        self._store().check()

    def _store(self) -> _S:
        """Return it, opened again if its file is another one by now. Raises DatabaseError."""
        with self._opening:
            if self._opened is not None and not all(database.is_current for database in self._opened.databases):
                stale, self._opened = self._opened, None
                with contextlib.suppress(OSError):
                    stale.close()
            if self._opened is None:
                self._opened = self._open(self._made_folder())
            return self._opened

    def _made_folder(self) -> Path:
        if self._folder is None:
            try:
                self._own_folder = tempfile.TemporaryDirectory(prefix=f"bireme-{self.name}-")
            except OSError as error:
                raise DatabaseError(f"{self.name}: no folder can be made ({error.strerror})") from error
            self._folder = Path(self._own_folder.name)
        return self._folder


async def watch(turn: Callable[[], Awaitable[None]], sweep: Callable[[], Awaitable[object]], failed: str) -> None:
    """Look after a store's rows for ever: `turn` each second, `sweep` each minute. `failed`: the log's event."""
    swept_at = -_SWEEP_S  # at once: what is too old may have been left long ago
    while True:
        try:
            await turn()
            if time.monotonic() - swept_at > _SWEEP_S:
                swept_at = time.monotonic()
                await sweep()
        except UnavailableError as error:  # the store has told why
            drop_frames(error)
        except Exception:  # of one row: it must not keep the others from being looked at
            logger.exception(failed)
        await asyncio.sleep(_LOOK_S)
