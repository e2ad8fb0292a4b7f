"""The run directory: what the processes of one deployment on one host share.

BIREME_RUN_DIR, which serve.py sets; otherwise $XDG_RUNTIME_DIR or /tmp, `bireme-<uid>/<pid of tritonserver>`
(all stubs of a server have it as parent). Mode 0700. Holds the HMAC key, sockets and one JSON a worker.
Each file has one writer and is replaced atomically.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from bireme.errors import NotFoundError

KEY_BYTES = 32


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A ready engine process, as others find it. Written by the engine process, removed by its supervisor."""

    worker: str  # the Triton model's name
    life: int
    pid: int
    transfer_endpoint: str = ""  # ZeroMQ address of the KV transfer's control socket; empty: none
    tokens_per_block: int = 0


def run_dir() -> Path:
    """Return the run directory, made if missing."""
    named = os.environ.get("BIREME_RUN_DIR")
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
    path = Path(named) if named else base / f"bireme-{os.getuid()}" / str(os.getppid())
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def deployment_key(folder: Path) -> bytes:
    """Return the deployment's HMAC key; the first process makes it. BIREME_KEY (hex) wins."""
    if text := os.environ.get("BIREME_KEY"):
        return bytes.fromhex(text)
    path = folder / "key"
    draft = folder / f".key-{os.getpid()}-{secrets.token_hex(4)}"
    draft.touch(mode=0o600)
    draft.write_bytes(secrets.token_bytes(KEY_BYTES))
    try:
        os.link(draft, path)  # fails when another process was first: then its key counts
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return path.read_bytes()


def publish(folder: Path, record: WorkerRecord) -> None:
    draft = folder / f".{record.worker}-{os.getpid()}.json"
    draft.write_bytes(msgspec.json.encode(record))
    draft.replace(folder / f"{record.worker}.json")


def withdraw(folder: Path, worker: str) -> None:
    (folder / f"{worker}.json").unlink(missing_ok=True)


def find(folder: Path, worker: str) -> WorkerRecord:
    """Return the record of a ready worker. Raises NotFoundError."""
    try:
        return msgspec.json.decode((folder / f"{worker}.json").read_bytes(), type=WorkerRecord)
    except FileNotFoundError:
        raise NotFoundError(f"worker {worker} is not running in this deployment") from None
