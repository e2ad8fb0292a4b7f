"""Faults of a KV transfer, drawn by a seed, each beside a transfer that nothing is wrong with.

Whatever is injected, a fetch must end with the right rows or with an error of the kind that fits, and in the end
nothing may be held: no lease, block, file, room, registration, descriptor or process.

    python -m tests.kv.transfer.fault_campaign --faults 10000 --seed 7             # over every backend that runs here
    python -m tests.kv.transfer.fault_campaign --faults 500 --backend nixl

Prints what was injected and what it ended in, then a line of JSON; exit code 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from bireme.disagg import DisaggregatedParams
from bireme.errors import BiremeError, ConfigError, KvTransferError, NotFoundError, RequestCancelledError, RequestError
from bireme.kv.transfer.fake import FakeNetwork
from bireme.kv.transfer.file_pool import KEEP_S
from bireme.kv.transfer.memory import HostMemory
from bireme.kv.transfer.nixl import MODULES, NixlBackend
from bireme.kv.transfer.shm_file import sweep
from tests.kv.transfer.kv_side import (
    LAYOUT,
    NIXL,
    Calls,
    Fetching,
    Side,
    SlowMemory,
    all_files_of,
    expected_rows,
    files_of,
    wait_until,
)

# Each one's part; NIXL takes longest.
BACKENDS = {"shm": 3, "mapped": 3, "nixl": 1, "staged": 1, "cuda_ipc": 2, "fake": 1}
# Descriptors that UCX's connections may have come to hold: it makes one when two agents first need it, of up to five
# descriptors, and closes it when its peer's end is noticed. The last lives of both far sides may not have been yet.
FEW = 10
MAPPED = ("mapped", "cuda_ipc")  # whose importer copies out of the exporter's memory
HANG_S = 30.0  # a fetch that takes longer hangs
SHORT_MS = 400  # kv_transfer_timeout_ms of those that meet a peer that was stopped
MOST_TOKENS = 200
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.kv.transfer.kv_side", *(name for name in MODULES if find_spec(name))])


@dataclass
class Tally:
    """What was injected, what it ended in, and what should not have been."""

    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)  # "kind: error"
    seconds: Counter[str] = field(default_factory=Counter)  # that a kind took
    wrong: list[str] = field(default_factory=list)  # wrong rows, or an end that does not fit
    hangs: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)


def inject(backend: str, num_faults: int, seed: int, folder: Path) -> Tally:
    """Inject faults into transfers of a backend. `folder`: a new one, with a short path."""
    if backend == "fake":
        return _FakeCampaign(seed).inject(num_faults)
    campaign = Campaign(backend, seed, folder)
    try:
        campaign.inject(num_faults)
    finally:
        campaign.close()
    return campaign.tally


def inject_and_check(backend: str, num_faults: int, seed: int) -> None:
    """For tests."""
    if backend not in backends_here():
        pytest.skip("nixl-cu12 is not installed")
    logger = logging.getLogger("bireme.kv.transfer")
    logger.propagate = False  # pytest would keep the records, these their frames, and those what was mapped
    try:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            tally = inject(backend, num_faults, seed, Path(folder))
    finally:
        logger.propagate = True
    found = {"wrong": tally.wrong, "hangs": tally.hangs, "leaks": tally.leaks}
    assert not any(found.values()), found
    assert tally.faults.total() == num_faults and len(tally.faults) >= 10


class Campaign:
    def __init__(self, backend: str, seed: int, folder: Path) -> None:
        self.tally = Tally()
        self._backend, self._folder = backend, folder
        self._dice = random.Random(seed)
        _count_registrations()
        self._prefill = Side(folder, "prefill", backend=backend)
        self._decode = Side(folder, "decode", backend=backend)
        self._tight = Side(folder, "tight", backend=backend, max_tokens=120)
        self._hasty = Side(folder, "hasty", backend=backend, timeout_ms=SHORT_MS)
        self._sides = (self._prefill, self._decode, self._tight, self._hasty)
        self._num_leases: Counter[str] = Counter()
        self._peers: dict[str, Peer] = {}
        self._lives: Counter[str] = Counter()
        self._context = zmq.Context()
        self._is_harmed = False  # the fault may hit the transfer beside it

    def inject(self, num_faults: int) -> None:
        faults = self._faults()
        kinds, weights = list(faults), [weight for weight, _ in faults.values()]
        for kind in kinds:  # what is made once, and kept, is made now
            self._inject(kind, faults[kind][1])
        self._end_peers()
        before = _descriptors()
        while self.tally.faults.total() < num_faults:
            kind = self._dice.choices(kinds, weights)[0]
            self._inject(kind, faults[kind][1])
        self._end_peers()
        self._check_nothing_is_held(before)

    def _inject(self, kind: str, fault: Callable[[str], None]) -> None:
        began = time.monotonic()
        self.tally.faults[kind] += 1
        self._is_harmed = False
        beside = self._begin(self._prefill)
        try:
            fault(kind)
            self._check(f"beside {kind}", beside, (BiremeError, None) if self._is_harmed else (None,))
        except HangError as hang:
            self.tally.hangs.append(f"{kind}: {hang}")
        except EndedError as ended:
            self.tally.wrong.append(f"{kind}: {ended}")
            for worker in list(self._peers):
                self._kill(worker)
        self.tally.seconds[kind] += time.monotonic() - began

    def _end_peers(self) -> None:
        for worker in list(self._peers):
            self._kill(worker)
        with contextlib.suppress(AssertionError):  # connections to the dead are closed within a tick
            wait_until(
                lambda: not any(side.transfer._importer._peers.keys() - self._living() for side in self._sides), 5
            )

    def _living(self) -> set[str]:
        return {side.transfer.endpoint for side in self._sides}

    def close(self) -> None:
        for peer in self._peers.values():
            peer.end()
        for side in self._sides:
            side.close()
        self._context.term()
        left = [name for side in self._sides for name in all_files_of(self._folder, side.worker)]
        self.tally.leaks += [f"file {name}" for name in left]

    def _faults(self) -> dict[str, tuple[float, Callable[[str], None]]]:
        """Return kind -> how often, and what injects it."""
        found: dict[str, tuple[float, Callable[[str], None]]] = {
            "unknown reference": (12, self._unknown),
            "out-of-range reference": (12, self._out_of_range),
            "reused reference": (10, self._reused),
            "stale generation": (12, self._stale_generation),
            "expired reference": (6, self._expired),
            "replayed reference": (10, self._replayed),
            "another life": (8, self._another_life),
            "garbage": (6, self._garbage),
            "torn read": (6, self._torn_read),
            "torn write": (6, self._torn_write),
            "abort": (6, self._abort),
            "cancel": (6, self._cancel),
            "full buffer": (4, self._full_buffer),
            "exporter dies": (0.8, self._exporter_dies),
            "importer dies": (0.8, self._importer_dies),
            "exporter hangs": (0.3, self._exporter_hangs),
            "importer hangs": (0.3, self._importer_hangs),
        }
        if self._backend in (*MAPPED, "staged"):  # their owner copies no rows, or into a pool
            del found["torn read"], found["torn write"]
        if self._backend == "shm":
            found["full disk"] = (6, self._full_disk)
        if self._backend in NIXL:
            found["broken UCX"] = (0.3, self._broken_ucx)
            found["unusable UCX address"] = (4, self._unusable_address)
        return found

    # references

    def _unknown(self, kind: str) -> None:
        params = self._export(self._prefill)
        wrong = msgspec.structs.replace(params, lease_id=self._dice.getrandbits(63))
        self._check(kind, self._decode.fetch(wrong), (NotFoundError,))
        self._end_well(self._decode.fetch(params))

    def _out_of_range(self, kind: str) -> None:
        params = self._export(self._prefill)
        count = params.num_tokens
        if self._dice.random() < 0.5:
            wrong = msgspec.structs.replace(params, num_tokens=count + self._dice.choice([-1, 1, 1000]))
            fetching = self._decode.fetch(wrong, (0, 0)) if wrong.num_tokens > 0 else self._decode.fetch(params)
            self._check(kind, fetching, (RequestError,) if wrong.num_tokens > 0 else (None,))
        else:
            firsts = self._dice.choice([(count + 1, 0), (-1, 0), (0,), (0, 0, 0), (0, 1 << 62)])
            self._check(kind, self._decode.fetch(params, firsts), (RequestError,))

    def _reused(self, kind: str) -> None:
        params = self._export(self._prefill)
        self._check(kind, self._decode.fetch(params), (None,))
        self._check(kind, self._decode.fetch(params), (NotFoundError,))

    def _stale_generation(self, kind: str) -> None:
        params = self._export(self._prefill)
        stale = params.generation + self._dice.choice([-1, 1, -(1 << 40), 1 << 40])
        self._check(kind, self._decode.fetch(msgspec.structs.replace(params, generation=stale)), (NotFoundError,))
        self._end_well(self._decode.fetch(params))

    def _expired(self, kind: str) -> None:
        lease, params = self._lease(self._prefill)
        lease._deadline = 0.0
        self._prefill.transfer._mailbox.post(self._prefill.transfer._exporter.tick)
        self._await(kind, lambda: lease.state.value == "expired")
        self._check(kind, self._decode.fetch(params), (NotFoundError,))

    def _replayed(self, kind: str) -> None:
        params = self._export(self._prefill)
        both = [self._decode.fetch(params), self._decode.fetch(params)]
        errors = [self._check(kind, one, (None, NotFoundError)) for one in both]
        if errors.count(None) != 1:
            self.tally.wrong.append(f"{kind}: {errors.count(None)} of two replays were served")

    def _another_life(self, kind: str) -> None:
        params = self._export(self._prefill)
        change = self._dice.choice([-1, 1])
        wrong = msgspec.structs.replace(params, life=params.life + change)
        self._check(kind, self._decode.fetch(wrong), (NotFoundError,) if change < 0 else (KvTransferError,))
        self._end_well(self._decode.fetch(params))

    def _garbage(self, kind: str) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(self._prefill.transfer.endpoint)
        for _ in range(3):
            dealer.send(self._dice.randbytes(self._dice.randint(0, 300)))
        self._end_well(self._begin(self._prefill))
        dealer.close(linger=0)

    # rows

    def _torn_read(self, kind: str) -> None:
        lease = self._reserve(self._prefill)
        memory = TornMemory(MOST_TOKENS, self._dice.randint(0, 20))
        lease.export(MOST_TOKENS, memory.token_rows())
        self._check(kind, self._decode.fetch(self._prefill._params(lease, MOST_TOKENS)), (BiremeError,))

    def _torn_write(self, kind: str) -> None:
        params = self._export(self._prefill, MOST_TOKENS)
        fetching = Fetching(LAYOUT, MOST_TOKENS, 0.0)
        fetching.memory = TornMemory(MOST_TOKENS, self._dice.randint(0, 20), fetching._arrays)
        fetching.handle = self._decode.transfer.fetch(params, (0, 0), fetching.rows, fetching.done)
        self._check(kind, fetching, (BiremeError,))

    def _abort(self, kind: str) -> None:
        lease, params = self._lease(self._prefill, delay_s=0.0001)
        fetching = self._decode.fetch(params)
        time.sleep(self._dice.uniform(0, 0.01))
        lease.abort()
        self._check(kind, fetching, (None, NotFoundError))

    def _cancel(self, kind: str) -> None:
        params = self._export(self._prefill, delay_s=0.0001)
        fetching = self._decode.fetch(params, write_delay_s=self._dice.choice([0.0, 0.0001]))
        time.sleep(self._dice.uniform(0, 0.01))
        fetching.handle.cancel()
        self._check(kind, fetching, (None, RequestCancelledError))

    # room

    def _full_buffer(self, kind: str) -> None:
        together = [self._export(self._tight, self._dice.randint(50, 120)) for _ in range(6)]
        large = self._export(self._tight, 121)
        fetching = [self._decode.fetch(params) for params in together]
        self._check(kind, self._decode.fetch(large), (RequestError,))
        for one in fetching:
            self._check(kind, one, (None,))

    def _full_disk(self, kind: str) -> None:
        self._is_harmed = True
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        params = self._export(self._prefill)
        pool: Any = self._prefill.transfer._backend._staged._pool  # type: ignore[attr-defined]
        limit_bytes, pool.limit_bytes = pool.limit_bytes, 0  # a file that is kept would have room
        pool.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            self._check(kind, self._decode.fetch(params), (KvTransferError,))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            pool.limit_bytes = limit_bytes

    # peers

    def _exporter_dies(self, kind: str) -> None:
        peer = self._peer("far_prefill")
        params = peer.export(self._dice.randint(50, MOST_TOKENS), self._dice.choice([0.0, 0.0005]))
        fetching = self._decode.fetch(params, write_delay_s=self._dice.choice([0.0, 0.0005]))
        time.sleep(self._dice.uniform(0, 0.03))
        self._kill("far_prefill")
        self._check(kind, fetching, (None, KvTransferError))
        later = self._peer("far_prefill").export(50)  # its next life
        self._check("reference of an earlier life", self._decode.fetch(params), (NotFoundError,))
        self._check(kind, self._decode.fetch(later), (None,))

    def _importer_dies(self, kind: str) -> None:
        lease, params = self._lease(self._prefill, self._dice.randint(50, MOST_TOKENS), self._dice.choice([0.0, 5e-4]))
        self._peer("far_decode").fetch(params, self._dice.choice([0.0, 0.0005]))
        time.sleep(self._dice.uniform(0, 0.03))
        self._kill("far_decode")
        self._await(kind, lambda: lease.state.value != "claimed")
        lease.abort()  # where it died before it had claimed
        peer = self._peer("far_decode")
        peer.fetch(self._export(self._prefill), 0.0)
        if peer.call("result") != [None, True]:
            self.tally.wrong.append(f"{kind}: its next life got no rows")

    def _exporter_hangs(self, kind: str) -> None:
        peer = self._peer("far_prefill")
        params = peer.export(self._dice.randint(50, MOST_TOKENS), self._dice.choice([0.0, 0.0005]))
        fetching = self._hasty.fetch(params)
        time.sleep(self._dice.uniform(0, 0.01))
        peer.signal(signal.SIGSTOP)
        self._check(kind, fetching, (None, KvTransferError, NotFoundError))
        peer.signal(signal.SIGCONT)
        self._end_well(self._decode.fetch(peer.export(50)))

    def _importer_hangs(self, kind: str) -> None:
        lease, params = self._lease(self._hasty, self._dice.randint(50, MOST_TOKENS), self._dice.choice([0.0, 5e-4]))
        peer = self._peer("far_decode")
        peer.fetch(params, 0.0)
        time.sleep(self._dice.uniform(0, 0.01))
        peer.signal(signal.SIGSTOP)
        self._await(kind, lambda: lease.state.value in ("acked", "expired", "aborted"))
        peer.signal(signal.SIGCONT)
        error, is_right = peer.call("result")
        self.tally.outcomes[f"{kind}: {error}"] += 1
        if not is_right and (error is None or self._backend not in MAPPED):
            self.tally.wrong.append(f"{kind}: wrong rows")

    # UCX

    def _broken_ucx(self, kind: str) -> None:
        variable = self._dice.choice(["UCX_TLS", "UCX_NET_DEVICES"])
        os.environ[variable] = "nothing_of_that_name"
        try:
            self._start_and_end(kind, variable)
        finally:
            del os.environ[variable]

    def _start_and_end(self, kind: str, variable: str) -> None:
        try:
            Side(self._folder, "broken", backend="nixl").close()
        except ConfigError:
            self.tally.outcomes[f"{kind}: ConfigError"] += 1
        else:
            self.tally.outcomes[f"{kind}: {variable} is not looked at"] += 1

    def _unusable_address(self, kind: str) -> None:
        """The claim names an agent that nobody can reach."""
        self._is_harmed = True
        backend: Any = self._decode.transfer._backend
        self._end_well(self._begin(self._prefill))  # it has an agent now
        right = backend._metadata
        backend._metadata = self._dice.choice([right[: self._dice.randint(0, len(right))], self._dice.randbytes(451)])
        self._check(kind, self._decode.fetch(self._export(self._prefill)), (KvTransferError, None))
        if backend._importing is not None:
            backend._metadata = right
            # Of an agent whose address was read wrongly once, NIXL takes no other: the importer makes a new agent.
            self._check(kind, self._begin(self._prefill), (KvTransferError, None))
        self._end_well(self._begin(self._prefill))

    # what they share

    def _reserve(self, side: Side) -> Any:
        self._num_leases[side.worker] += 1
        return side.reserve()

    def _lease(self, side: Side, num_tokens: int = 0, delay_s: float = 0.0) -> tuple[Any, DisaggregatedParams]:
        lease = self._reserve(side)
        return lease, side.export_lease(lease, num_tokens or self._dice.randint(1, MOST_TOKENS), delay_s)

    def _export(self, side: Side, num_tokens: int = 0, delay_s: float = 0.0) -> DisaggregatedParams:
        return self._lease(side, num_tokens, delay_s)[1]

    def _begin(self, side: Side) -> Fetching:
        params = self._export(side)
        firsts = (self._dice.randint(0, params.num_tokens), self._dice.randint(0, params.num_tokens))
        fetching = self._decode.fetch(params, firsts)
        fetching.firsts = firsts  # type: ignore[attr-defined]
        return fetching

    def _end_well(self, fetching: Fetching) -> None:
        self._check("none", fetching, (None,))

    def _check(self, kind: str, fetching: Fetching, allowed: tuple[Any, ...]) -> BiremeError | None:
        # What is read of freed blocks before the refusal comes lies in rows that nobody uses.
        return check_end(self.tally, kind, fetching, allowed, writes_before_end=self._backend in MAPPED)

    def _await(self, kind: str, condition: Callable[[], bool]) -> None:
        try:
            wait_until(condition, HANG_S)
        except AssertionError as error:
            raise HangError(str(error)) from error

    def _peer(self, worker: str) -> Peer:
        if worker not in self._peers:
            self._lives[worker] += 1
            self._peers[worker] = Peer(self._folder, worker, self._lives[worker], self._backend)
        return self._peers[worker]

    def _kill(self, worker: str) -> None:
        self._peers.pop(worker).end()
        sweep(self._folder, worker)  # as its supervisor does

    def _check_nothing_is_held(self, descriptors: int) -> None:
        for side in self._sides:
            self._check_side(side)
        gc.collect()
        with contextlib.suppress(AssertionError):  # connections to the last lives are forgotten within a tick
            wait_until(lambda: _descriptors() <= descriptors + FEW, KEEP_S + 5)
        if (now := _descriptors()) > descriptors + FEW:
            self.tally.leaks.append(f"{now - descriptors} descriptors")
        if NixlBackend.num_registered:  # type: ignore[attr-defined]
            self.tally.leaks.append(f"{NixlBackend.num_registered} registrations")  # type: ignore[attr-defined]

    def _check_side(self, side: Side) -> None:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not side.lease_counts() and side.num_released == self._num_leases[side.worker], 10)
        if counts := side.lease_counts():
            self.tally.leaks.append(f"{side.worker}: leases {counts}")
        if side.num_released != self._num_leases[side.worker]:
            self.tally.leaks.append(f"{side.worker}: {self._num_leases[side.worker] - side.num_released} held blocks")
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not files_of(self._folder, side.worker), 10)
        self.tally.leaks += [f"{side.worker}: file {name}" for name in files_of(self._folder, side.worker)]
        if used := side.transfer._exporter.buffer.used_bytes:
            self.tally.leaks.append(f"{side.worker}: {used} bytes of the buffer")
        if used := side.room_in_use():
            self.tally.leaks.append(f"{side.worker}: {used} bytes of room")


class HangError(Exception):
    """Something did not end."""


class EndedError(Exception):
    """A process ended that nobody had killed."""


def check_end(
    tally: Tally, kind: str, fetching: Fetching, allowed: tuple[Any, ...], *, writes_before_end: bool = False
) -> BiremeError | None:
    """Wait for a fetch's end, note it, and return its error.

    `allowed`: classes of errors, and None where it may be served. `writes_before_end`: rows may be anything after an
    error. Raises HangError.
    """
    if not fetching.ended.wait(HANG_S):
        raise HangError("done was not called")
    error: BiremeError | None = fetching.errors[0]
    tally.outcomes[f"{kind}: {type(error).__name__ if error else 'served'}"] += 1
    if error is None and None not in allowed:
        tally.wrong.append(f"{kind}: it was served")
    if error is not None and not isinstance(error, tuple(one for one in allowed if one is not None)):
        tally.wrong.append(f"{kind}: {type(error).__name__}: {error}")
    held = getattr(fetching, "firsts", (0, 0))
    wanted = [list(range(first, len(array))) for first, (array,) in zip(held, fetching.arrays, strict=True)]
    if error is None and [fetching.tokens_written(group) for group in range(len(wanted))] != wanted:
        tally.wrong.append(f"{kind}: rows are missing")
    if not fetching.is_right and (error is None or not writes_before_end):
        tally.wrong.append(f"{kind}: wrong rows")
    if fetching.num_done != 1:
        tally.wrong.append(f"{kind}: done was called {fetching.num_done} times")
    return error


class TornMemory(SlowMemory):
    """Rows of which a copy breaks off after so many chunks."""

    def __init__(self, num_tokens: int, num_good: int, arrays: Any = None) -> None:
        super().__init__(LAYOUT, num_tokens, 0.0)
        if arrays is not None:
            self._arrays = HostMemory(arrays)
        else:
            for group, (array,) in enumerate(self._arrays.arrays):
                array[:] = expected_rows(group, 0, num_tokens, array.shape[1])
        self._num_left = num_good

    def read(self, group: int, rows: np.ndarray, ready: Any = None) -> memoryview:
        self._count()
        return super().read(group, rows, ready)

    def write(self, group: int, rows: np.ndarray, data: memoryview, ready: Any = None) -> None:
        self._count()
        super().write(group, rows, data, ready)

    def _count(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise OSError("the copy broke off")


class Peer:
    """A Side in a process of its own, forked from one that has all modules loaded."""

    def __init__(self, folder: Path, worker: str, life: int, backend: str) -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        self._said = folder / f"{worker}-{life}.log"
        self._process = _PROCESSES.Process(target=_serve, args=(theirs, self._said), daemon=True)
        self._process.start()
        theirs.close()
        self.call("start", run_dir=str(folder), worker=worker, life=life, backend=backend)

    def call(self, method: str, **arguments: Any) -> Any:
        """Raises HangError, and EndedError where its process has ended by itself."""
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(2 * HANG_S):
                raise HangError(f"{method} of another process")
            return self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(HANG_S)
            said = self._said.read_text(errors="replace")[-3000:]
            raise EndedError(f"{method}: its process ended with {self._process.exitcode}; it said: {said}") from error

    def export(self, num_tokens: int, read_delay_s: float = 0.0) -> DisaggregatedParams:
        return DisaggregatedParams(**self.call("export", num_tokens=num_tokens, read_delay_s=read_delay_s))

    def fetch(self, params: DisaggregatedParams, write_delay_s: float) -> None:
        fields = {name: getattr(params, name) for name in ("worker", "life", "lease_id", "generation", "num_tokens")}
        self.call("fetch", params=fields, write_delay_s=write_delay_s)

    def signal(self, number: int) -> None:
        assert self._process.pid
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Any, said: Path) -> None:
    log = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)  # UCX logs that peers are gone
    os.dup2(log, 2)
    faulthandler.enable()
    logging.disable()
    calls = Calls()
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(calls, method)(**arguments))


def _count_registrations() -> None:
    """Count what agents of this process have registered: `NixlBackend.num_registered`."""
    if hasattr(NixlBackend, "num_registered"):
        NixlBackend.num_registered = 0
        return
    NixlBackend.num_registered = 0  # type: ignore[attr-defined]
    register, unregister = NixlBackend.register, NixlBackend.unregister

    def counted(self: NixlBackend, memory: Any) -> Any:
        found = register(self, memory)
        NixlBackend.num_registered += 1  # type: ignore[attr-defined]
        return found

    def uncounted(self: NixlBackend, registration: Any) -> None:
        unregister(self, registration)
        NixlBackend.num_registered -= 1  # type: ignore[attr-defined]

    NixlBackend.register, NixlBackend.unregister = counted, uncounted  # type: ignore[method-assign]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class _FakeCampaign:
    """The transfer that engines are tested with must refuse what the real ones refuse."""

    def __init__(self, seed: int) -> None:
        self.tally, self._dice = Tally(), random.Random(seed)
        self._network, self._life = FakeNetwork(), 1
        self._released = self._reserved = 0
        self._prefill, self._decode = self._join("prefill"), self._join("decode")

    def inject(self, num_faults: int) -> Tally:
        faults: dict[str, Callable[[str], None]] = {
            "unknown reference": lambda kind: self._changed(kind, "lease_id", NotFoundError),
            "stale generation": lambda kind: self._changed(kind, "generation", NotFoundError),
            "another life": lambda kind: self._changed(kind, "life", NotFoundError),
            "out-of-range reference": self._out_of_range,
            "reused reference": self._reused,
            "expired reference": self._expired,
            "replayed reference": self._replayed,
            "torn read": self._torn_read,
            "torn write": self._torn_write,
            "abort": self._abort,
            "cancel": self._cancel,
            "exporter dies": self._exporter_dies,
        }
        for number in range(num_faults):
            kind = self._dice.choice(list(faults))
            self.tally.faults[kind] += 1
            try:
                faults[kind](kind)
            except HangError as hang:
                self.tally.hangs.append(f"{kind}: {hang}")
            if number % 10 == 0:
                self._fetch("none", self._export()[1], (None,))
        self._end(self._prefill)
        self._decode.close()
        if self._released != self._reserved:
            self.tally.leaks.append(f"{self._reserved - self._released} held blocks")
        return self.tally

    def _changed(self, kind: str, name: str, error: type[BiremeError]) -> None:
        params = self._export()[1]
        self._fetch(kind, msgspec.structs.replace(params, **{name: getattr(params, name) + 1}), (error,))
        self._fetch("none", params, (None,))

    def _out_of_range(self, kind: str) -> None:
        params = self._export()[1]
        self._fetch(kind, params, (RequestError,), self._dice.choice([(params.num_tokens + 1, 0), (0,), (-1, 0)]))

    def _reused(self, kind: str) -> None:
        params = self._export()[1]
        self._fetch(kind, params, (None,))
        self._fetch(kind, params, (NotFoundError,))

    def _expired(self, kind: str) -> None:
        params = self._export()[1]
        self._prefill.expire_leases()
        self._fetch(kind, params, (NotFoundError,))

    def _replayed(self, kind: str) -> None:
        params = self._export()[1]
        both = [self._begin(params), self._begin(params)]
        if [self._end_of(kind, one, (None, NotFoundError)) for one in both].count(None) != 1:
            self.tally.wrong.append(f"{kind}: not one of two replays was served")

    def _torn_read(self, kind: str) -> None:
        lease = self._reserve()
        lease.export(MOST_TOKENS, TornMemory(MOST_TOKENS, self._dice.randint(0, 3)).token_rows())
        self._fetch(kind, self._params(lease, MOST_TOKENS), (BiremeError,))

    def _torn_write(self, kind: str) -> None:
        fetching = Fetching(LAYOUT, MOST_TOKENS, 0.0)
        fetching.memory = TornMemory(MOST_TOKENS, self._dice.randint(0, 3), fetching._arrays)
        params = self._export(MOST_TOKENS)[1]
        fetching.handle = self._decode.fetch(params, (0, 0), fetching.rows, fetching.done)
        self._end_of(kind, fetching, (BiremeError,))

    def _abort(self, kind: str) -> None:
        lease, params = self._export()
        self._decode.hold()
        fetching = self._begin(params)
        lease.abort()
        self._decode.resume()
        self._end_of(kind, fetching, (NotFoundError,))

    def _cancel(self, kind: str) -> None:
        params = self._export()[1]
        self._decode.hold()
        fetching = self._begin(params)
        fetching.handle.cancel()
        self._decode.resume()
        self._end_of(kind, fetching, (RequestCancelledError,))
        self._fetch(kind, params, (None, NotFoundError))  # it had claimed, or not

    def _exporter_dies(self, kind: str) -> None:
        params = self._export()[1]
        self._end(self._prefill)
        self._fetch(kind, params, (KvTransferError,))
        self._life += 1
        self._prefill = self._join("prefill")
        self._fetch("reference of an earlier life", params, (NotFoundError,))

    def _join(self, worker: str) -> Any:
        transfer = self._network.join(worker, self._life)
        transfer.start(LAYOUT)
        return transfer

    def _end(self, transfer: Any) -> None:
        transfer.close()
        if len(transfer.leases):
            self.tally.leaks.append(f"{len(transfer.leases)} leases")

    def _reserve(self) -> Any:
        self._reserved += 1

        def release() -> None:
            self._released += 1

        return self._prefill.reserve(release)

    def _export(self, num_tokens: int = 0) -> tuple[Any, DisaggregatedParams]:
        lease, count = self._reserve(), num_tokens or self._dice.randint(1, MOST_TOKENS)
        lease.export(count, TornMemory(count, 1 << 30).token_rows())
        return lease, self._params(lease, count)

    def _params(self, lease: Any, num_tokens: int) -> DisaggregatedParams:
        ids = {"lease_id": lease.lease_id, "generation": lease.generation}
        return DisaggregatedParams(worker="prefill", life=self._prefill.life, num_tokens=num_tokens, **ids)

    def _begin(self, params: DisaggregatedParams, firsts: tuple[int, ...] = (0, 0)) -> Fetching:
        fetching = Fetching(LAYOUT, params.num_tokens, 0.0)
        fetching.handle = self._decode.fetch(params, firsts, fetching.rows, fetching.done)
        return fetching

    def _fetch(
        self, kind: str, params: DisaggregatedParams, allowed: tuple[Any, ...], firsts: tuple[int, ...] = (0, 0)
    ) -> None:
        self._end_of(kind, self._begin(params, firsts), allowed)

    def _end_of(self, kind: str, fetching: Fetching, allowed: tuple[Any, ...]) -> BiremeError | None:
        return check_end(self.tally, kind, fetching, allowed)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=1000, help="over all backends together")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--backend", choices=tuple(BACKENDS), action="append", help="may repeat; default: all that run here"
    )
    options = parser.parse_args()
    logging.disable()
    backends = options.backend or backends_here()
    result: dict[str, Any] = {"seed": options.seed}
    for number, backend in enumerate(backends):
        share = share_of(backend, options.faults, backends)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            tally = inject(backend, share, options.seed + number, Path(folder))
        for name, count in sorted(tally.outcomes.items()):
            print(f"{backend:9} {count:6} {name}")
        print(f"{backend:9} seconds:", ", ".join(f"{name} {took:.1f}" for name, took in tally.seconds.most_common(6)))
        result[backend] = {
            "seconds": round(time.monotonic() - began, 1), "faults": tally.faults.total(), "wrong": tally.wrong,
            "hangs": tally.hangs, "leaks": tally.leaks,
        }  # fmt: skip
    print(json.dumps(result))
    return int(any(result[name][kind] for name in backends for kind in ("wrong", "hangs", "leaks")))


def share_of(backend: str, num_faults: int, backends: Collection[str] = BACKENDS) -> int:
    """Return how many of so many faults over all backends are one's, rounded up."""
    return -(-num_faults * BACKENDS[backend] // sum(BACKENDS[name] for name in backends))


def backends_here() -> list[str]:
    has_nixl = any(find_spec(name) for name in MODULES)
    return [name for name in BACKENDS if name not in NIXL or has_nixl]


if __name__ == "__main__":
    sys.exit(main())
