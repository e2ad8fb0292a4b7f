"""Workers' records as files of a folder that all servers share, on one host or in the network.

One JSON file a worker, touched as its heartbeat. A reader notes by its own clock when each file changed, so hosts'
clocks need not agree; one that it sees for the first time counts as changed now.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bireme import private_files
from bireme.discovery.records import WorkerRecord, open_record, seal_record
from bireme.discovery.run_folder import check_private, make_private
from bireme.discovery.store import FOLDER_REMEDY, Refused, StoreError, taken
from bireme.errors import ConfigError
from bireme.settings import DiscoveryConfig

LOOK_S = 0.5
_REMOVED_AFTER = 10  # leases without a heartbeat
_SUFFIX = ".json"
_MAX_BYTES = 1 << 20  # a record has about a kilobyte
_OWN_TROUBLE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # says nothing about the file
logger = logging.getLogger("bireme.discovery")
_Stamp = tuple[int, int, int]  # inode, modification time (ns), bytes


@dataclass(slots=True)
class _Sighting:
    """A file as of its last change."""

    stamp: _Stamp
    changed_at: float
    record: WorkerRecord | None  # None: it holds none
    doubt: str = ""  # why the record must not be trusted
    problem: str = ""  # why it can't be read now


class DirectoryStore:
    """RecordStore."""

    problem = ""

    def __init__(self, config: DiscoveryConfig, key: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        """`key`: the deployment's."""
        self._folder, self._lease_s, self._key, self._clock = Path(config.folder), config.lease_s, key, clock
        self.refused: dict[str, Refused] = {}
        self._sightings: dict[str, _Sighting] = {}  # by id
        self._held: dict[str, WorkerRecord] = {}
        self._closing = threading.Event()

    def read(self) -> dict[str, WorkerRecord]:
        try:
            check_private(self._folder, FOLDER_REMEDY)
            files = fnmatch.filter(os.listdir(self._folder), f"[!.]*{_SUFFIX}")
        except (OSError, ConfigError) as error:
            raise StoreError(f"discovery.folder: {self._folder} can't be read: {error}") from error
        ids = [file.removesuffix(_SUFFIX) for file in files]
        seen = self._sightings = {name: sighting for name in ids if (sighting := self._look(name)) is not None}
        problems = [sighting.problem for sighting in seen.values() if sighting.problem and sighting.record]
        if problems and all(map(_is_lost, seen.values())):
            raise StoreError(f"discovery.folder: no record in {self._folder} can be read any more: {problems[0]}")
        return self._alive(seen)

    def _alive(self, seen: Mapping[str, _Sighting]) -> dict[str, WorkerRecord]:
        """Return whose leases last, less `refused`; remove what is long dead."""
        now, found, refused = self._clock(), {}, {}
        for name, sighting in seen.items():
            silent_s = now - sighting.changed_at
            if silent_s > _REMOVED_AFTER * self._lease_s:
                self._remove(name)
            elif silent_s <= self._lease_s and sighting.record is not None:
                if sighting.doubt:
                    refused[name] = sighting.record, sighting.doubt
                else:
                    found[name] = sighting.record
        self.refused = refused
        return found

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):  # the next reader may be allowed to
            self._path(name).unlink(missing_ok=True)

    def wait(self, timeout_s: float) -> None:
        self._closing.wait(min(timeout_s, LOOK_S))

    def hold(self, record: WorkerRecord) -> None:
        path, name = self._path(record.id), record.id
        self._refuse_rival(record)
        try:
            if self._held.get(name) == record and path.exists():
                os.utime(path)
                return
            make_private(self._folder, FOLDER_REMEDY)
            draft = self._folder / f".{name}-{os.getpid()}"
            draft.write_bytes(seal_record(record, self._key))
            draft.replace(path)
        except (OSError, ConfigError) as error:
            raise StoreError(f"discovery.folder: {self._folder} can't be written: {error}") from error
        self._held[name] = record

    def withdraw(self) -> None:
        for name, record in self._held.items():
            now = self._look(name)
            if now is not None and now.record is not None and now.record.launch == record.launch:
                self._remove(name)
        self._held.clear()

    def close(self) -> None:
        self._closing.set()

    def _refuse_rival(self, record: WorkerRecord) -> None:
        """Raise NameTakenError while the file is another launch's and may be alive."""
        now = self._look(record.id)
        if now is None or now.record is None or now.doubt or now.record.launch == record.launch:
            return
        self._held.pop(record.id, None)
        self._sightings[record.id] = now
        if self._clock() - now.changed_at <= self._lease_s:
            raise taken(record, now.record)

    def _look(self, name: str) -> _Sighting | None:
        """Return what a file is now; None: gone. Raises StoreError."""
        before = self._sightings.get(name)
        try:
            # Opening asks a network file system for the present state.
            with private_files.open_regular(self._path(name)) as file:
                status = os.fstat(file.fileno())
                stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
                if before is not None and before.stamp == stamp:
                    before.problem = ""
                    return before
                content = file.read(_MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._unread(name, before, error)
        return self._judged(name, before, stamp, content)

    def _unread(self, name: str, before: _Sighting | None, error: OSError) -> _Sighting:
        if error.errno in _OWN_TROUBLE:
            raise StoreError(f"discovery.folder: {self._path(name)} can't be read: {error}") from error
        sighting = before or _Sighting((0, 0, 0), self._clock(), None)
        if sighting.problem != (problem := error.strerror or str(error)):
            logger.warning("record_unreadable path=%s error=%s", self._path(name), problem)
        sighting.problem = problem
        return sighting

    def _judged(self, name: str, before: _Sighting | None, stamp: _Stamp, content: bytes) -> _Sighting:
        try:
            record, doubt = open_record(content, self._key)
        except ValueError as error:
            if before is None or before.record is not None:
                logger.warning("record_unreadable path=%s error=%s", self._path(name), error)
            return _Sighting(stamp, self._clock(), None)
        if doubt and (before is None or before.doubt != doubt):
            logger.error("record_refused path=%s reason=%s", self._path(name), doubt)
        return _Sighting(stamp, self._clock(), record, doubt)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"


def _is_lost(sighting: _Sighting) -> bool:
    return sighting.record is None or bool(sighting.problem)
