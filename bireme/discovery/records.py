"""A worker's record. In a shared store with the proof that this deployment wrote it, as JSON:

    {"mac":"<hex HMAC-SHA256 of the rest, by the deployment's key>", <the record's own fields>}

The proof covers the bytes, so its reader needs to know none of the fields.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from bireme.config import stage_of, worker_id
from bireme.errors import ConfigError
from bireme.messages import VERSION, Capacity

_PURPOSE = b"bireme worker record:"
_START, _END = b'{"mac":"', b'",'
_DIGITS = 64
_WEIGHTS = "0 to 1, the share of new requests that its generation gets"
GENERATION_VARIABLE, WEIGHT_VARIABLE = "BIREME_GENERATION", "BIREME_WEIGHT"
MAX_GENERATION = (1 << 31) - 1

WorkerState = Literal["ready", "draining"]


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An engine process, as others find it. It writes the record, its supervisor removes it.

    Life 0: known from the recipe alone.
    """

    worker: str  # the Triton model's name
    life: int = 0
    pid: int = 0
    server: str = ""  # host:port of its tritonserver's gRPC endpoint; "": the reader's own server
    launch: str = ""  # names the launch: tells a restarted worker from another one at its address
    host: str = ""  # of the shared memory and process ids that it sees; see `host_id`
    served_model_name: str = ""
    model: str = ""  # last part of the model's folder or hub id: one name is served by one model
    revision: str = ""  # of the model's content; "": not known, which is like any
    text_revision: str = ""  # of what its launch's entries tokenize and render with; "": not known, which is like any
    generation: int = 0  # of its launch: the newest of those that serve side by side has the highest
    weight: float = 1.0  # its generation's share of new requests; see kv/routing/generations.py
    wire: int = 0  # messages.VERSION of its process; 0: of one that does not tell, whose key_id tells it
    key_id: str = ""  # of the deployment key: params that another key has signed would be refused
    state: WorkerState = "ready"  # draining: it gets no new requests
    tokens_per_block: int = 0
    capacity: Capacity | None = None
    moves_own_kv: bool = False  # its engine moves KV between hosts; else shared memory does, within one
    transfer_endpoint: str = ""  # ZeroMQ address of the KV transfer's control socket; "": none
    load_endpoint: str = ""  # ZeroMQ PUB address of its load; "": none
    event_endpoint: str = ""  # ZeroMQ PUB address of its KV events; "": none
    replay_endpoint: str = ""  # ZeroMQ ROUTER address that answers with missed events; "": none
    step_endpoint: str = ""  # ZeroMQ PUB address of its step records; "": none

    @property
    def id(self) -> str:
        return worker_id(self.worker, self.server)

    @property
    def stage(self) -> str:
        return stage_of(self.worker)

    @property
    def is_draining(self) -> bool:
        return self.state == "draining"


def can_transfer(source: WorkerRecord, target: WorkerRecord) -> bool:
    """Return whether KV can go between them; true where a host is unknown."""
    if not is_like(source.revision, target.revision):
        return False
    return source.moves_own_kv or not source.host or not target.host or source.host == target.host


def is_like(revision: str, other: str) -> bool:
    """Return whether one worker may go on with another's tokens and KV."""
    return not revision or not other or revision == other


def key_id(key: bytes) -> str:
    """Return a name for key and scheme that tells nothing about the key."""
    return hashlib.blake2b(b"bireme deployment 3", key=key, digest_size=8).hexdigest()


def launch_id(folder: Path) -> str:
    """Return the launch's name, unique among all hosts."""
    return f"{socket.gethostname()}:{folder.resolve()}"


def host_id() -> str:
    """Return a name for what shared memory reaches: one /dev/shm, one space of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    seen = f"{boot} {os.stat('/dev/shm').st_dev} {os.readlink('/proc/self/ns/pid')}"
    return hashlib.blake2b(seen.encode(), digest_size=8).hexdigest()


def own_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return host:port by which other servers reach this one's gRPC: BIREME_ADVERTISE, else BIREME_GRPC."""
    return environment.get("BIREME_ADVERTISE") or environment.get("BIREME_GRPC") or ""


class LaunchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator has said of a launch at its start."""

    generation: int = 0
    weight: float = 1.0

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> LaunchFacts:
        """Raises ConfigError."""
        generation, weight = environment.get(GENERATION_VARIABLE) or "0", environment.get(WEIGHT_VARIABLE) or "1"
        if not generation.isdecimal() or int(generation) > MAX_GENERATION:
            raise ConfigError(f"{GENERATION_VARIABLE}: {generation[:40]}; 0 to {MAX_GENERATION}, a newer one is higher")
        try:
            return cls(generation=int(generation), weight=check_weight(float(weight)))
        except ValueError as error:
            raise ConfigError(f"{WEIGHT_VARIABLE}: {weight[:40]}; {_WEIGHTS}") from error

    def environment(self) -> dict[str, str]:
        return {GENERATION_VARIABLE: str(self.generation), WEIGHT_VARIABLE: repr(self.weight)}


def check_weight(weight: float) -> float:
    """Raises ValueError."""
    if not 0 <= weight <= 1:
        raise ValueError(f"{weight:g}; {_WEIGHTS}")
    return weight


def seal_record(record: WorkerRecord, key: bytes) -> bytes:
    body = msgspec.json.encode(record)
    return _START + _mac(body, key) + _END + body[1:]


def open_record(blob: bytes, key: bytes) -> tuple[WorkerRecord, str]:
    """Return the record, and why not to trust it ("": proven). Raises ValueError.

    Of one that another wire version has written in another form just the name is taken.
    """
    try:
        record = msgspec.json.decode(blob, type=WorkerRecord)
    except (msgspec.MsgspecError, RecursionError) as error:
        if (name := _named(blob)) is not None and (reason := other_wire(name)):
            return name, reason
        raise ValueError(str(error)) from error
    start = len(_START) + _DIGITS
    if not blob.startswith(_START) or blob[start : start + len(_END)] != _END:
        return (
            record,
            "its record is not signed; its server runs an older version, or nobody of this deployment wrote it",
        )
    if not hmac.compare_digest(blob[len(_START) : start], _mac(b"{" + blob[start + len(_END) :], key)):
        return record, "its record is signed with another deployment key; give all servers and frontends one BIREME_KEY"
    return record, ""


def other_wire(record: WorkerRecord) -> str:
    """Return why a worker can't be spoken to; "": it can."""
    if record.wire in (0, VERSION):
        return ""
    return (
        f"it speaks wire version {record.wire}, this process {VERSION}; send to it by a frontend of its own version, or"
        " bring both to one"
    )


class _Name(msgspec.Struct):
    worker: str
    wire: int
    server: str = ""
    served_model_name: str = ""


def _named(blob: bytes) -> WorkerRecord | None:
    try:
        name = msgspec.json.decode(blob, type=_Name)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return WorkerRecord(**msgspec.structs.asdict(name))


def _mac(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + body, "sha256").hex().encode()
