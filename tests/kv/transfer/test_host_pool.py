"""Memory that another process maps: what is copied out of it, and what is not taken for it."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from bireme.errors import UnavailableError
from bireme.kv.transfer.host_pool import HostPool
from bireme.kv.transfer.mapped import MappableMemory
from bireme.kv.transfer.wire import SharedMemory
from tests.repository.house import CHECKOUT

SHAPES = [[(100, 8), (100, 24)], [(50, 4)]]
OWNER = f"""
import sys, msgspec
from bireme.kv.transfer.host_pool import HostPool
pool = HostPool({SHAPES})
for array in (pool.arrays[0][0], pool.arrays[0][1], pool.arrays[1][0]):
    array[:] = 7
print(msgspec.json.encode(pool.shared()).decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner():
    """Return a process that has a pool, and what it shows of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=CHECKOUT
    )
    yield process, msgspec.json.decode(process.stdout.readline(), type=SharedMemory)
    process.stdin.close()
    process.stdout.close()
    process.wait()


def filled():
    pool, dice = HostPool(SHAPES), np.random.default_rng(3)
    for array in (array for group in pool.arrays for array in group):
        array[:] = dice.integers(0, 256, array.shape, np.uint8)
    return pool


def test_a_pool_is_zero_and_takes_no_memory_before_it_is_touched():
    pool = HostPool([[(1 << 20, 64), (1 << 20, 64)]])
    assert isinstance(pool, MappableMemory)
    assert os.fstat(pool._descriptor).st_blocks == 0
    assert not pool.arrays[0][1][-1].any()


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_copied_tensor_by_tensor_wherever_they_lie(seed):
    source, target, dice = filled(), HostPool(SHAPES), np.random.default_rng(seed)
    there, here = (dice.permutation(np.arange(100).reshape(25, 4)).reshape(-1)[:50] for _ in range(2))
    mapped = target.map(source.shared())
    mapped.copy(0, there, here, None)
    mapped.copy(1, np.arange(50), np.arange(50), None)
    for theirs, ours in zip(source.arrays[0], target.arrays[0], strict=True):
        assert (ours[here] == theirs[there]).all()
        assert not np.delete(ours, here, axis=0).any()
    assert (target.arrays[1][0] == source.arrays[1][0]).all()


def test_memory_of_a_process_that_has_died_is_there_until_it_is_closed(owner):
    process, shared = owner
    pool = HostPool(SHAPES)
    mapped = pool.map(shared)
    process.kill()
    process.wait()
    mapped.copy(1, np.arange(50), np.arange(50), None)
    assert (pool.arrays[1][0] == 7).all()
    mapped.close()
    with pytest.raises(UnavailableError, match="prefill again"):
        mapped.copy(1, np.arange(50), np.arange(50), None)
    with pytest.raises(UnavailableError, match="can't be opened"):
        pool.map(shared)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (os.MFD_ALLOW_SEALING, "can shrink"),
        (0, "can shrink"),
        (None, "not the memory that was offered"),
    ],
)
def test_what_could_shrink_or_is_something_else_is_not_mapped(tmp_path, flags, reason):
    shared = HostPool(SHAPES).shared()
    name = shared.handles[0].decode().split()[1]
    if flags is None:
        descriptor = os.open(tmp_path / f"memfd:{name}", os.O_RDWR | os.O_CREAT)
    else:
        descriptor = os.memfd_create(name, flags)
    os.ftruncate(descriptor, 1 << 20)
    try:
        with pytest.raises(UnavailableError, match=reason):
            HostPool(SHAPES).map(msgspec.structs.replace(shared, handles=(f"{descriptor} {name}".encode(),)))
    finally:
        os.close(descriptor)


def test_a_descriptor_that_has_another_pool_by_now_is_not_mapped():
    pool, other = HostPool(SHAPES), HostPool(SHAPES)
    name = pool.shared().handles[0].decode().split()[1]
    handle = f"{other._descriptor} {name}".encode()
    with pytest.raises(UnavailableError, match="not the memory that was offered"):
        other.map(msgspec.structs.replace(pool.shared(), handles=(handle,)))


@pytest.mark.parametrize("handle", [b"", b"x", b"x y", b"\xff\xff 1", b"1 2 3"])
def test_a_handle_that_cannot_be_read_is_unavailable(handle):
    pool = HostPool(SHAPES)
    with pytest.raises(UnavailableError, match="can't be opened"):
        pool.map(msgspec.structs.replace(pool.shared(), handles=(handle,)))


def test_more_than_there_is_cannot_be_mapped():
    pool = HostPool(SHAPES)
    with pytest.raises(UnavailableError, match="were offered"):
        pool.map(msgspec.structs.replace(pool.shared(), sizes=(1 << 30,)))


def test_a_pool_that_is_gone_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    pool = HostPool(SHAPES)
    mapped = pool.map(pool.shared())
    mapped.close()
    del pool
    assert len(os.listdir("/proc/self/fd")) == before
