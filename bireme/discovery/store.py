"""Where several servers keep their workers' records: the interface, its key, its address.

A record stays while its writer holds it: heartbeats in files (directory.py) or leases (etcd.py).
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord
from bireme.errors import ConfigError, UnavailableError
from bireme.settings import DiscoveryConfig

FOLDER_REMEDY = "name another in discovery.folder"
Refused = tuple[WorkerRecord, str]  # a record that nothing may be taken from but its name, and why


class StoreError(UnavailableError):
    """The store can't be reached, or refuses."""


class NameTakenError(StoreError):
    """A living worker of another launch has this id."""


def taken(mine: WorkerRecord, theirs: WorkerRecord) -> NameTakenError:
    return NameTakenError(
        f"{mine.id} is registered by another launch already ({theirs.launch}, process {theirs.pid}); give one of the"
        " servers another --grpc-port or --advertise"
    )


class RecordReader(Protocol):
    """Of one thread but for `close`. All raise StoreError."""

    problem: str  # why the last read may lack somebody, although it went well

    def read(self) -> dict[str, WorkerRecord]:
        """Return by id the workers whose leases last. What can't be read is logged once."""

    def wait(self, timeout_s: float) -> None:
        """Return when something may have changed, or after `timeout_s`."""

    def close(self) -> None:
        """End a running `wait`; from any thread."""


class RecordStore(RecordReader, Protocol):
    refused: dict[str, Refused]  # by id: whom the last read has left out because nothing proves their records

    def hold(self, record: WorkerRecord) -> None:
        """Put the record or renew its lease, every lease_s / 3. Raises NameTakenError."""

    def withdraw(self) -> None:
        """Remove all that this one holds, where it can be reached."""


def shared_key(config: DiscoveryConfig) -> bytes:
    """Return BIREME_KEY, else the folder's key, made if missing. Raises ConfigError."""
    key = run_folder.named_key()
    if config.backend == "directory":
        return _folder_key(Path(config.folder), key)
    if key is None:
        raise ConfigError(
            f"BIREME_KEY: not set; servers and frontends that share discovery through {config.backend} must have one"
            " key: `openssl rand -hex 32` makes one, give it to all of them"
        )
    return key


def _folder_key(folder: Path, named: bytes | None) -> bytes:
    try:
        if named is None:
            run_folder.make_private(folder, FOLDER_REMEDY)
            return run_folder.deployment_key(folder)
        with suppress(FileNotFoundError):  # a server makes it
            run_folder.check_private(folder, FOLDER_REMEDY)
        return named
    except OSError as error:
        raise ConfigError(f"discovery.folder: {folder} can't be used: {error}") from error


def parse_address(text: str) -> dict[str, Any]:
    """Return the `discovery` block for a folder, etcd://host:2379,host2[/prefix] or kubernetes://SERVICE[.NAMESPACE].

    Raises ConfigError.
    """
    scheme, separator, location = text.partition("://")
    if not separator:
        if not text.startswith("/"):
            raise ConfigError(f"--discovery: {text}; give an absolute folder, or etcd://host:2379")
        return {"backend": "directory", "folder": text}
    if scheme == "kubernetes" and location:
        return {"backend": "kubernetes", "service": location}
    if scheme not in ("etcd", "etcds"):
        raise ConfigError(
            f"--discovery: {text}; give an absolute folder, etcd://host:2379, etcds://host:2379 or kubernetes://SERVICE"
        )
    return _etcd_block(text, scheme, location)


def _etcd_block(text: str, scheme: str, location: str) -> dict[str, Any]:
    hosts, _, prefix = location.partition("/")
    protocol = "https" if scheme == "etcds" else "http"
    endpoints = [f"{protocol}://{host if ':' in host else f'{host}:2379'}" for host in hosts.split(",") if host]
    if not endpoints:
        raise ConfigError(f"--discovery: {text}; no host in it, write etcd://host:2379")
    return {"backend": "etcd", "endpoints": endpoints} | ({"prefix": prefix} if prefix else {})


def with_discovery(override: str, address: str | None) -> str:
    """Return a recipe's override (JSON) with --discovery in it. Raises ConfigError."""
    if not address:
        return override
    try:
        tree = json.loads(override or "{}")
    except json.JSONDecodeError:
        return override  # who reads it refuses it by name
    return json.dumps(tree | {"discovery": parse_address(address)}) if isinstance(tree, dict) else override
