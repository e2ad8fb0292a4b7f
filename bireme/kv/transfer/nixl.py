"""Rows by NIXL over UCX, between engine processes of one host or several.

The importer makes room in memory that its agent has registered and names it in the claim; the exporter writes rows
there straight out of its registered pool. A GPU's rows it gathers in a ring of host memory first, where UCX can't move
them without the host (gpu_direct.py). The importer copies rows on to their blocks, which no late write can touch.
Prefill writes instead of decode reading: where the network has no remote reads (TCP) UCX imitates them, more
than ten times slower, and ends the exporter's process when a reader vanishes at the wrong moment.

UCX itself checks no peer: what may write here is who can reach UCX's ports. Between hosts give it a network of its own
(UCX_NET_DEVICES); within one host it is left the kernel's ways between processes of one user, and opens no port.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bireme.errors import BiremeError, ConfigError, RequestError, UnavailableError
from bireme.kv.transfer.backend import Backend, Inlet, PeerAddress, RowOutlet
from bireme.kv.transfer.base import KvLayout
from bireme.kv.transfer.chunks import CHUNK_BYTES, STAGED_FACTOR, Chunk, TransferPlan
from bireme.kv.transfer.gpu_direct import why_not_direct
from bireme.kv.transfer.memory import Bytes, MemoryKind, Pieces, RowCopy, RowMemory, TokenRows
from bireme.kv.transfer.row_copies import begin_store
from bireme.kv.transfer.staging import NUM_SLOTS, SendRing, Staging
from bireme.kv.transfer.wire import Claim, WriteTarget
from bireme.settings import StagingChoice

MODULES = ("nixl_cu12", "nixl_cu13", "nixl")  # one for each CUDA, and one that is for either
_POLL_S = 0.0002  # between looks at a write under way
_STAGED_POLL_S = 0.00005  # where one look is all that keeps many MiB going
_PROGRESS_US = 100_000  # the longest that the importer's progress thread sleeps; what arrives wakes it
_MAX_AHEAD = 2  # chunks that a transfer has in slots beside the one that it sends
_MAX_AGENTS = 64  # importers whose metadata is kept
# Of UCX within one host. TCP would listen on every interface, and what System V shares is the group's as well; without
# TCP another way must notice a peer's death.
_WITHIN_ONE_HOST = {"UCX_TLS": "^tcp,ib,sysv", "UCX_MM_ERROR_HANDLING": "y"}
logger = logging.getLogger("bireme.kv.transfer")


class NixlBackend(Backend):
    """Two agents, one a role: the importer's can be replaced without harm to what this process exports."""

    name = "nixl"
    reaches_other_hosts = True

    def __init__(self, worker: str, *, between_hosts: bool, staging: StagingChoice = "auto") -> None:
        self._worker = worker
        self._between_hosts = between_hosts
        self._choice = staging
        self._api: Any = None
        self._exporting: Any = None
        self._importing: Any = None
        self._registered: RowMemory | None = None
        self._staging: Any = None
        self._ring: SendRing | None = None  # made when it is first needed
        self._slot_bytes = 0
        self._owner: RowMemory | None = None  # of rows that the CPU can't address
        self._targets: dict[str, bytes] = {}  # metadata of the importers' agents that are loaded

    def start(self, layout: KvLayout, memory: RowMemory | None, limit_bytes: int) -> None:
        self._api = _load(self._between_hosts)
        with _as_config_error():
            self._exporting = self._make_agent("export")
            if memory is not None:
                self._owner = memory if memory.regions[0][0].kind is MemoryKind.VRAM else None
                self._open_pool(memory)
            self._slot_bytes = max([STAGED_FACTOR * CHUNK_BYTES, *(group.bytes_per_token for group in layout.groups)])
            self._staging = Staging(limit_bytes, self._owner)
            self._begin_importing()

    def register(self, memory: RowMemory) -> Any:
        """Let the exporting agent read a memory's rows; return what `unregister` takes."""
        regions = [region for group in memory.regions for region in group]
        table = [(region.address, region.num_bytes, region.device, "") for region in regions]
        return self._exporting.register_memory(table, regions[0].kind.value, ["UCX"])

    def unregister(self, registration: Any) -> None:
        self._exporting.deregister_memory(registration, ["UCX"])

    def can_read(self, memory: RowMemory) -> bool:
        return memory is self._registered

    def chunk_bytes(self, claim: Claim, usual: int) -> int:
        return usual * (STAGED_FACTOR if self._owner is not None and self._registered is None else 1)

    def open_outlet(self, plan: TransferPlan, claim: Claim) -> NixlOutlet:
        """Runs on the copier, as all that the exporting agent does."""
        target = claim.target
        if target is None or target.num_bytes < plan.num_bytes:
            raise RequestError(f"KV transfer: the claim names no room for {plan.num_bytes} bytes")
        with _as_unavailable():
            if self._targets.get(target.agent) != target.metadata:
                self.forget_target(target.agent)
                self._exporting.add_remote_agent(target.metadata)
            self._targets.pop(target.agent, None)
            self._targets[target.agent] = target.metadata  # the last used is last
            if len(self._targets) > _MAX_AGENTS:
                self.forget_target(next(iter(self._targets)))
        return NixlOutlet(self, self._exporting, target, plan)

    @property
    def ring(self) -> SendRing:
        """Raises UnavailableError. Runs on the copier."""
        if self._ring is None:
            ring = SendRing(self._slot_bytes, self._owner)
            with _as_unavailable():
                self._exporting.register_memory([(ring.address, ring.num_bytes, 0, "")], "DRAM", ["UCX"])
            self._ring = ring
        return self._ring

    def forget_target(self, agent: str) -> None:
        """Close the connection to an importer; the next write opens another."""
        if self._targets.pop(agent, None) is not None:
            with contextlib.suppress(Exception):  # it is gone already
                self._exporting.remove_remote_agent(agent)

    def open_inlet(self, plan: TransferPlan, peer: PeerAddress) -> NixlInlet | None:
        if self._importing is None:
            with _as_unavailable():
                self._begin_importing()
        room = self._staging.take(plan.num_bytes)
        if room is None:
            return None
        target = WriteTarget(self._importing.name, self._metadata, self._staging.address + room.start, plan.num_bytes)
        return NixlInlet(self._staging, room, target)

    def forget_writers(self) -> None:
        """End the importing agent: its connections close, and no write over them arrives.

        The next claim makes another, because an agent made while the network is down names no address of it.
        """
        self._importing = None

    def close(self) -> None:
        self._importing = self._exporting = None
        for area in (self._staging, self._ring):
            if area is not None:
                area.close()
        self._staging = self._ring = None

    def _open_pool(self, memory: RowMemory) -> None:
        kind, reason = memory.regions[0][0].kind, self._why_staged(memory)
        if not reason:
            try:
                self.register(memory)
                self._registered = memory
                return
            except Exception as error:  # of VRAM: UCX has no CUDA here, or can't reach this memory
                if kind is MemoryKind.DRAM or self._choice == "never":
                    raise ConfigError(
                        f"cache_transceiver_config.backend: NIXL can't register KV memory: {error}; set staging: auto"
                    ) from error
                reason = f"UCX can't read it: {error}"
        logger.info(
            "transfer event=staged kind=%s module=%s cuda=%s slots=%d slot_bytes=%d reason=%s",
            kind.value, self._api.__name__, _cuda(), NUM_SLOTS, STAGED_FACTOR * CHUNK_BYTES, reason,
        )  # fmt: skip

    def _why_staged(self, memory: RowMemory) -> str:
        """Return why rows go through the ring; an empty text: UCX reads them where they lie."""
        if self._choice != "auto":
            return "cache_transceiver_config.staging: always" if self._choice == "always" else ""
        if memory.regions[0][0].kind is MemoryKind.DRAM:
            return ""
        if not self._between_hosts:
            return "within one host UCX moves a GPU's rows in small pieces"
        return why_not_direct(memory.regions[0][0].device)

    def _begin_importing(self) -> None:
        agent = self._make_agent("import")
        agent.register_memory([(self._staging.address, self._staging.num_bytes, 0, "")], "DRAM", ["UCX"])
        self._metadata: bytes = agent.get_agent_metadata()
        self._importing = agent

    def _make_agent(self, role: str) -> Any:
        name = f"{self._worker}-{role}-{secrets.token_hex(8)}"  # no peer takes it for an earlier one
        agent = self._api.nixl_agent(name, self._api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        if "UCX" not in agent.plugin_list:
            raise ConfigError("cache_transceiver_config.backend: NIXL has no UCX plugin here; reinstall nixl-cu12")
        # Progress of what is written here is the peer's affair, and needs a thread. What is written from here goes on
        # with each look at its state; a thread beside that takes the lock of UCX's worker again and again.
        if role == "import":
            bindings = importlib.import_module(f"{self._api.__name__}._bindings")
            config = bindings.nixlAgentConfig()
            config.useProgThread, config.pthrDelay = True, _PROGRESS_US  # nixl_agent's own delay is 0: a core, always
            agent.agent = bindings.nixlAgent(name, config)
        agent.create_backend("UCX")
        return agent


@dataclass(slots=True)
class _Piece:
    """A chunk in a slot of the ring, or on its way there."""

    slot: Bytes
    copy: RowCopy


class NixlOutlet(RowOutlet):
    """Sends one chunk at a time; where they pass through the ring the next ones are copied there meanwhile."""

    def __init__(self, backend: NixlBackend, agent: Any, target: WriteTarget, plan: TransferPlan) -> None:
        self._backend, self._agent, self._target = backend, agent, target
        self._unread = deque(plan.chunks)  # not begun to be copied to the ring
        self._pieces: deque[_Piece] = deque()

    def show(self, rows: TokenRows) -> None:
        rows.memory.wait(rows.ready)  # UCX knows nothing of the engine's stream

    def store(self, rows: TokenRows, chunk: Chunk) -> Generator[None, None, None]:
        if self._backend.can_read(rows.memory):
            region = rows.memory.regions[chunk.group][0]
            pieces = rows.pieces(chunk.group, chunk.first, chunk.last)
            for _ in self._write(chunk, pieces, region.kind.value, region.device):
                yield
                time.sleep(_POLL_S)
        else:
            yield from self._store_staged(rows, chunk)

    def close(self) -> None:
        while self._pieces:
            self._give(self._pieces.popleft())

    def _store_staged(self, rows: TokenRows, chunk: Chunk) -> Generator[None, None, None]:
        while not (self._pieces or self._read_next(rows)):  # other transfers have the slots
            yield
            time.sleep(_STAGED_POLL_S)
        piece = self._pieces.popleft()
        try:
            self._read_ahead(rows, 1)  # what is written within one host is there at once
            while not piece.copy.is_done():
                yield
                time.sleep(_STAGED_POLL_S)
            whole = np.array([piece.slot.ctypes.data], np.uint64), np.array([chunk.end - chunk.begin], np.uint64)
            with contextlib.closing(self._write(chunk, Pieces(*whole), MemoryKind.DRAM.value, 0)) as looks:
                for _ in looks:
                    self._read_ahead(rows, _MAX_AHEAD)
                    yield
                    time.sleep(_STAGED_POLL_S)
        finally:
            self._give(piece)

    def _read_ahead(self, rows: TokenRows, num_pieces: int) -> None:
        while len(self._pieces) < num_pieces and self._read_next(rows):
            pass

    def _read_next(self, rows: TokenRows) -> bool:
        """Begin to copy the next chunk to a slot, if there is one of both."""
        slot = self._backend.ring.take() if self._unread else None
        if slot is None:
            return False
        chunk = self._unread.popleft()
        try:
            copy = begin_store(rows, chunk, slot[: chunk.end - chunk.begin])
        except BaseException:
            self._backend.ring.give(slot)
            raise
        self._pieces.append(_Piece(slot, copy))
        return True

    def _give(self, piece: _Piece) -> None:
        piece.copy.wait()
        self._backend.ring.give(piece.slot)

    def _write(self, chunk: Chunk, pieces: Pieces, kind: str, device: int) -> Generator[None, None, None]:
        """Write pieces to a chunk's place; yields between looks at how far that is."""
        ends = np.cumsum(pieces.lengths, dtype=np.uint64)
        begins = np.uint64(self._target.address + chunk.begin) + ends - pieces.lengths
        local = self._descriptors(pieces.addresses, pieces.lengths, device, kind)
        remote = self._descriptors(begins, pieces.lengths, 0, "DRAM")
        is_there = False
        try:
            with _as_unavailable():
                handle = self._agent.initialize_xfer("WRITE", local, remote, self._target.agent)
                state = self._agent.transfer(handle)
            while state == "PROC":
                yield
                with _as_unavailable():
                    state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise UnavailableError(f"KV transfer by NIXL ended as {state}; see the log of UCX")
            is_there = True
            handle.release()
        finally:
            if not is_there:  # whatever is under way on that connection ends with it
                self.has_loose_writes = True  # what the kernel has it sends, connection or not
                with contextlib.suppress(Exception):
                    handle.release()
                self._backend.forget_target(self._target.agent)

    def _descriptors(
        self, addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64], device: int, kind: str
    ) -> Any:
        table = np.empty((len(addresses), 3), np.uint64)  # (address, bytes, device)
        table[:, 0], table[:, 1], table[:, 2] = addresses, lengths, device
        return self._agent.get_xfer_descs(table, kind)


class NixlInlet(Inlet):
    def __init__(self, staging: Staging, room: range, target: WriteTarget) -> None:
        self._staging, self._room = staging, room
        self.target = target
        self._last: RowCopy | None = None

    def load(self, rows: TokenRows, chunk: Chunk) -> None:
        self._last = self._staging.load(rows, chunk, self._room.start + chunk.begin)

    def wait(self) -> None:
        if self._last is not None:
            self._last.wait()

    def close(self) -> None:
        self._staging.give(self._room)


def _load(between_hosts: bool) -> Any:
    if not between_hosts and "UCX_TLS" not in os.environ:
        os.environ.update(_WITHIN_ONE_HOST)
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")  # signals are this process's own
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for name in sorted(MODULES, key=lambda name: not name.endswith(_cuda())):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(name)
            exit_without_destructors()
            return module
    raise ConfigError(
        "cache_transceiver_config.backend: NIXL needs the package nixl-cu12: pip install --no-deps nixl-cu12"
        " (nixl-cu13 with CUDA 13); DEFAULT needs none, on one host"
    )


@functools.cache
def exit_without_destructors() -> None:
    """Have the kernel unload this process's libraries at its end; Python's exit handlers run as ever.

    Where the host has libibverbs (every host with InfiniBand) NIXL's own copy of it loads the host's as well, and their
    two copies of libnl-route take apart one list: the process would end by SIGSEGV whatever its exit status.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def _cuda() -> str:
    """Return the CUDA of an engine with torch, `cu13`; "" of others, which have no GPU's memory."""
    version = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return f"cu{version.partition('.')[0]}" if version else ""


@contextlib.contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except BiremeError:
        raise
    except Exception as error:
        raise ConfigError(
            f"cache_transceiver_config.backend: NIXL can't start UCX: {type(error).__name__}: {error};"
            " see UCX_TLS and UCX_NET_DEVICES, or set DEFAULT on one host"
        ) from error


@contextlib.contextmanager
def _as_unavailable() -> Iterator[None]:
    try:
        yield
    except BiremeError:
        raise
    except Exception as error:  # nixl has a class for each of its error codes, of no common base
        raise UnavailableError(f"KV transfer by NIXL failed: {type(error).__name__}: {error}") from error
