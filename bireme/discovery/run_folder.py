"""The run folder: what the processes of one launch on one host share.

BIREME_RUN_DIR, else `bireme-<uid>/<pid of tritonserver>` in $XDG_RUNTIME_DIR or /tmp. Mode 0700. Holds key, sockets,
workers' records (JSON) and marks of those that drain or sleep. Each file has one writer, which replaces it atomically.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

import msgspec

from bireme import private_files
from bireme.discovery.records import WorkerRecord
from bireme.errors import ConfigError, NotFoundError
from bireme.messages import MALFORMED

KEY_BYTES = 32
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64  # more than these blake2b does not take
DRAIN = "drain"  # a launch's mark, or a worker's with its name before it
SLEEP = ".sleep"  # a worker's file, with its name before it
_FREES_WEIGHTS = b"weights"  # in it: the memory service is to free them, too


def locate() -> Path:
    """Return it, made if missing. Raises ConfigError when it is another user's."""
    named = os.environ.get("BIREME_RUN_DIR")
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
    if named:
        path = Path(named)
        make_private(path, "set BIREME_RUN_DIR to a folder of your own")
        return path
    own = base / f"bireme-{os.getuid()}"
    path = own / str(os.getppid())
    while True:
        with suppress(FileNotFoundError):  # a launch that ended has removed the folder of all, which was empty
            make_private(own, "set BIREME_RUN_DIR to a folder of your own")
            path.mkdir(exist_ok=True, mode=0o700)
            return path


def make_private(folder: Path, remedy: str) -> None:
    """Make or check it. Raises ConfigError, and FileNotFoundError where others remove it."""
    with suppress(FileExistsError):  # exist_ok raises where others remove it just then
        folder.mkdir(parents=True, mode=0o700)
    check_private(folder, remedy)


def check_private(folder: Path, remedy: str) -> None:
    """Take an own folder from all others. Raises ConfigError (another user's), FileNotFoundError."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to user {status.st_uid} or is no folder; remove it, or {remedy}")
    if status.st_mode & 0o077:
        folder.chmod(0o700)


def deployment_key(folder: Path) -> bytes:
    """Return BIREME_KEY (hex), else the folder's, made if missing. Raises ConfigError."""
    if (named := named_key()) is not None:
        return named
    path = folder / "key"
    with suppress(FileNotFoundError):
        return _long_enough(path.read_bytes(), str(path), "remove it, and the next start makes one")
    draft = folder / f".key-{os.getpid()}-{secrets.token_hex(4)}"
    draft.touch(mode=0o600)
    draft.write_bytes(secrets.token_bytes(KEY_BYTES))
    try:
        os.link(draft, path)  # fails when another process was first: its key counts
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return path.read_bytes()


def named_key() -> bytes | None:
    """Return BIREME_KEY; None: not set. Raises ConfigError."""
    if not (text := os.environ.get("BIREME_KEY")):
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise ConfigError("BIREME_KEY: not hexadecimal; make one with `openssl rand -hex 32`") from None
    return _long_enough(key, "BIREME_KEY", "`openssl rand -hex 32` makes one")


def _long_enough(key: bytes, where: str, remedy: str) -> bytes:
    if MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        return key
    raise ConfigError(f"{where}: {len(key)} bytes; {MIN_KEY_BYTES} to {MAX_KEY_BYTES}: {remedy}")


def is_draining(folder: Path, worker: str = "") -> bool:
    """Return whether a worker, or with "" the launch, is to take no new requests."""
    is_asked = (folder / (f"{worker}.{DRAIN}" if worker else DRAIN)).exists()
    return is_asked or bool(worker and must_sleep(folder, worker))


def ask_drain(folder: Path, worker: str = "", *, undo: bool = False) -> None:
    """Have a worker, or with "" the launch, take none; own pipelines go on."""
    marker = folder / (f"{worker}.{DRAIN}" if worker else DRAIN)
    marker.unlink(missing_ok=True) if undo else marker.touch(mode=0o600)


def must_sleep(folder: Path, worker: str) -> bool:
    """Return whether a worker's engine is to stay away until `wake`."""
    return (folder / f"{worker}{SLEEP}").exists()


def must_free_weights(folder: Path, worker: str) -> bool:
    """Return whether the memory service is to free its weights meanwhile."""
    try:
        return (folder / f"{worker}{SLEEP}").read_bytes() == _FREES_WEIGHTS
    except OSError:
        return False


def ask_sleep(folder: Path, worker: str, *, free_weights: bool = False) -> None:
    """Have a worker's engine end after its requests. `free_weights`: also of one that sleeps."""
    draft = folder / f".{worker}{SLEEP}"
    draft.write_bytes(_FREES_WEIGHTS if free_weights else b"")
    draft.replace(folder / f"{worker}{SLEEP}")


def wake(folder: Path, worker: str) -> bool:
    """Return whether it slept."""
    try:
        (folder / f"{worker}{SLEEP}").unlink()
    except FileNotFoundError:
        return False
    return True


def publish(folder: Path, record: WorkerRecord) -> None:
    draft = folder / f".{record.worker}-{os.getpid()}.json"
    draft.write_bytes(msgspec.json.encode(record))
    draft.replace(folder / f"{record.worker}.json")


def restore(folder: Path, record: WorkerRecord) -> bool:
    """Publish the record if it is gone; return whether it was. Raises OSError."""
    if (folder / f"{record.worker}.json").exists():
        return False
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    publish(folder, record)
    return True


def withdraw(folder: Path, worker: str) -> None:
    (folder / f"{worker}.json").unlink(missing_ok=True)


def find(folder: Path, worker: str) -> WorkerRecord:
    """Return the record of a ready worker. Raises NotFoundError."""
    try:
        with private_files.open_regular(folder / f"{worker}.json") as file:
            return msgspec.json.decode(file.read(), type=WorkerRecord)
    except FileNotFoundError:
        raise NotFoundError(f"worker {worker} is not running in this deployment") from None
    except (OSError, *MALFORMED) as error:
        raise NotFoundError(f"worker {worker}: its record in the run directory can't be read: {error}") from error
