"""SQLite databases of a frontend: they outlive it, and its processes share them; and which of these processes live.

Every method may block on the disk; all are thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from bireme import private_files
from bireme.errors import ConfigError, UnavailableError

_WAIT_S = 10  # for another process's write


class Closable(Protocol):
    def close(self) -> None: ...


_S = TypeVar("_S", bound=Closable)
_T = TypeVar("_T")


class StoreThread(Generic[_S]):
    """A store on a thread of its own: SQLite has one writer anyway. It is opened by the first call."""

    def __init__(self, folder: Path | None, open_store: Callable[[Path], _S], name: str) -> None:
        """`folder`: None: one that goes with this process."""
        self._folder, self._open, self._name = folder, open_store, name
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None
        self._thread = ThreadPoolExecutor(1, name)
        self._opened: _S | None = None

    async def do(self, method: Callable[..., _T], *values: Any) -> _T:
        """Call `method(store, *values)` there. Raises ConfigError when the folder can't be used."""

        def run() -> _T:
            return method(self._store(), *values)

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    async def close(self) -> None:
        """Nothing else may be called any more. Harmless when called again."""
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)
        self._thread.shutdown()
        if self._own_folder is not None:
            self._own_folder.cleanup()

    def _store(self) -> _S:
        if self._opened is None:
            if self._folder is None:
                self._own_folder = tempfile.TemporaryDirectory(prefix=f"bireme-{self._name}-")
                self._folder = Path(self._own_folder.name)
            self._opened = self._open(self._folder)
        return self._opened


class Database:
    """One file; `close` at the end."""

    def __init__(self, path: Path, schema: str, key: str, what: str) -> None:
        """`key`: of the recipe, which names the folder; `what` it holds. Raises ConfigError."""
        self._what, self._lock = what, threading.Lock()
        try:
            private_files.make_folder(path.parent)
            private_files.make_database(path)
            self._connection = sqlite3.connect(path, timeout=_WAIT_S, check_same_thread=False, isolation_level=None)
            self._connection.row_factory = sqlite3.Row
            self._connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # takes effect in a new file
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.executescript(schema)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{key}: {path.parent}: no database of {what} can be kept there ({error})") from error

    def read(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Raises UnavailableError."""
        with self._lock:
            try:
                return self._connection.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise UnavailableError(f"the database of {self._what} can't be read ({error}); try again") from error

    def write(self, query: str, *values: Any) -> int:
        """Return how many rows have changed. Raises UnavailableError."""
        with self._writing() as connection:
            return connection.execute(query, values).rowcount

    def change(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Write all or nothing, and return what the query says of the changed rows. Raises UnavailableError."""
        with self._writing() as connection:
            return connection.execute(query, values).fetchall()

    def write_all(self, query: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Write once for each of `rows`, all or none of them. Raises UnavailableError."""
        with self._writing() as connection, connection:  # commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(query, rows)

    def write_together(self, *statements: tuple[Any, ...]) -> None:
        """Write all of these or none: each a query and its values. Raises UnavailableError."""
        with self._writing() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            for query, *values in statements:
                connection.execute(query, values)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._connection
            except sqlite3.Error as error:
                raise UnavailableError(f"the database of {self._what} can't be written ({error}); try again") from error

    def close(self) -> None:
        with self._lock:
            self._connection.close()


class Lives:
    """The processes that use a folder: each holds a lock file for as long as it lives."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._folder = folder / "processes"
        private_files.make_folder(self._folder)
        self.own = secrets.token_hex(8)
        new = self._folder / f"{self.own}.new"
        self._descriptor = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(self._folder / self.own)  # so that it is never seen unlocked

    def has(self, process: str) -> bool:
        """Whether it lives, or that can't be known now. The kernel frees a lock with its process, whatever ended it."""
        if process == self.own:
            return True
        try:
            descriptor = os.open(self._folder / process, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # no descriptor is free: nobody has died of that
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # it is held, or no lock is to be had
            return True
        finally:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            (self._folder / process).unlink()
        return False

    def close(self) -> None:
        """Harmless when called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            (self._folder / self.own).unlink(missing_ok=True)
