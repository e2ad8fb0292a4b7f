"""SQLite databases of a frontend: they outlive it, and its processes share them; and which of these processes live.

Every method may block on the disk; all are thread-safe.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bireme import private_files
from bireme.errors import UnavailableError

_WAIT_S = 10  # for another process's write
_OPEN_WAIT_S = 2
_DAMAGE = ("malformed", "not a database")  # in what SQLite says of a damaged file
_ABANDONED_S = 3600.0
_S = TypeVar("_S", bound=msgspec.Struct)
logger = logging.getLogger("bireme.openai")


class DatabaseError(UnavailableError):
    """A database can't be opened, read or written now."""


class Database:
    """One file; `close` at the end. Reads don't wait for writes."""

    def __init__(self, path: Path, schema: str, what: str, beside: Sequence[Path] = ()) -> None:
        """`what` it holds. `beside`: what goes with a damaged file when that is put aside. Raises DatabaseError."""
        self._path, self._what, self._beside = path, what, beside
        self._lock, self._read_lock = threading.Lock(), threading.Lock()
        self._connections: list[sqlite3.Connection] = []
        try:
            private_files.make_folder(path.parent)
            try:
                self._connect(schema)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                _put_aside(path, beside)
                self._disconnect()
                self._connect(schema)
        except (OSError, sqlite3.Error) as error:
            self._disconnect()
            reason = error.strerror if isinstance(error, OSError) else error
            raise DatabaseError(f"the database of {what} can't be opened ({reason})") from error

    def _connect(self, schema: str) -> None:
        private_files.make_database(self._path)
        for timeout_s in (_OPEN_WAIT_S, _WAIT_S):
            connection = sqlite3.connect(self._path, timeout_s, check_same_thread=False, isolation_level=None)
            connection.row_factory = sqlite3.Row
            self._connections.append(connection)
        self._writer, self._reader = self._connections
        self._writer.execute("PRAGMA auto_vacuum=INCREMENTAL")  # takes effect in a new file
        self._writer.execute("PRAGMA journal_mode=WAL")
        self._writer.execute("PRAGMA synchronous=NORMAL")
        self._writer.executescript(schema)
        self._writer.execute(f"PRAGMA busy_timeout={_WAIT_S * 1000}")
        self._reader.execute("PRAGMA query_only=ON")
        self._file = self._path.stat()

    def _disconnect(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []

    def lives(self) -> Lives:
        """Return the processes that use its folder, this one among them. Raises DatabaseError; it is closed then."""
        try:
            return Lives(self._path.parent)
        except OSError as error:
            self.close()
            raise DatabaseError(f"the database of {self._what} can't be opened ({error.strerror})") from error

    @property
    def is_current(self) -> bool:
        """Whether it is still what its path names: another process may have put it aside, or removed it."""
        try:
            return os.path.samestat(self._path.stat(), self._file)
        except OSError:
            return False

    def check(self) -> None:
        self.write("PRAGMA user_version=0")

    def read(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._read_lock:
            try:
                return self._reader.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise self._failure("read", error) from error

    def select(self, kind: type[_S], where: str, *values: Any) -> list[_S]:
        """Return rows as structs of their columns; `where`: the query from its table on. Raises DatabaseError."""
        return structs(kind, self.read(f"SELECT {columns_of(kind)} FROM {where}", *values))

    def write(self, query: str, *values: Any) -> int:
        """Return how many rows have changed. Raises DatabaseError."""
        with self._writing() as connection:
            return connection.execute(query, values).rowcount

    def change(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Write all or nothing, and return what the query says of the changed rows. Raises DatabaseError."""
        with self._writing() as connection:
            return connection.execute(query, values).fetchall()

    def write_together(self, *statements: tuple[Any, ...]) -> list[int]:
        """Write all of these or none: each a query and its values; return how many rows each has changed.

        Raises DatabaseError.
        """
        with self._writing() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            return [connection.execute(query, values).rowcount for query, *values in statements]

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._writer
            except sqlite3.Error as error:
                raise self._failure("written", error) from error

    def _failure(self, what_for: str, error: sqlite3.Error) -> UnavailableError:
        message = f"the database of {self._what} can't be {what_for} ({error})"
        if isinstance(error, sqlite3.IntegrityError):
            return UnavailableError(message)  # of these values: the database is well
        if _is_damage(error):
            with contextlib.suppress(OSError):  # the disk can't be written
                _put_aside(self._path, self._beside)
        return DatabaseError(message)

    def close(self) -> None:
        with self._lock, self._read_lock:
            self._disconnect()


def columns_of(kind: type[msgspec.Struct]) -> str:
    return ", ".join(kind.__struct_fields__)


def structs(kind: type[_S], rows: Iterable[sqlite3.Row]) -> list[_S]:
    return [kind(*(row[name] for name in kind.__struct_fields__)) for row in rows]


def _is_damage(error: sqlite3.Error) -> bool:
    return any(text in str(error) for text in _DAMAGE)


def _put_aside(path: Path, beside: Sequence[Path]) -> None:
    """Rename a damaged database, what SQLite has with it, and `beside`; nothing is deleted. Raises OSError.

    One that is sound by now stays: another process has put the damaged one aside.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if _is_sound(path):
            return
        mark = f".damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
        for suffix in ("-wal", "-shm", ""):  # the file last: whoever makes a new one finds none of the others
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + suffix).rename(path.with_name(path.name + mark + suffix))
        for other in beside:
            with contextlib.suppress(FileNotFoundError):
                other.rename(other.with_name(other.name + mark))
    finally:
        os.close(folder)
    logger.error("database_put_aside path=%s as=%s", path, path.name + mark)


def _is_sound(path: Path) -> bool:
    """Whether it is no damaged database, as far as can be told."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", _OPEN_WAIT_S, uri=True)) as own:
            found: str = own.execute("PRAGMA integrity_check(1)").fetchone()[0]
            return found == "ok"
    except sqlite3.Error as error:
        return not _is_damage(error)


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

    def sweep(self) -> None:
        """Remove what dead processes have left."""
        limit = time.time() - _ABANDONED_S
        with contextlib.suppress(OSError):
            for path in list(self._folder.iterdir()):
                if path.suffix != ".new" or path.stat().st_mtime < limit:  # a new one may not be locked yet
                    self.has(path.name)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            (self._folder / self.own).unlink(missing_ok=True)


class SharedStore:
    def __init__(self, path: Path, schema: str, what: str) -> None:
        """Raises DatabaseError when the folder can't be used."""
        self.database = Database(path, schema, what)
        self.databases: tuple[Database, ...] = (self.database,)
        self._lives = self.database.lives()
        self.process = self._lives.own

    def check(self) -> None:
        self.database.check()

    def close(self) -> None:
        """Harmless when called again."""
        self.database.close()
        self._lives.close()

    def gone(self, table: str) -> list[str]:
        """Return the processes of its rows that live no more."""
        rows = self.database.read(f"SELECT DISTINCT process FROM {table} WHERE process IS NOT NULL")
        return [row["process"] for row in rows if not self._lives.has(row["process"])]
