"""KV rows to and from host memory, layer by layer: through page-locked memory where there is a GPU."""

from __future__ import annotations

import importlib.util
import logging

import numpy as np
import pytest
import torch

from bireme.engines.torch.geometry import LayerGeometry, group_layers
from bireme.engines.torch.pools import row_copies
from bireme.engines.torch.pools.block_mover import _runs, page_locked
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.engines.torch.pools.row_copies import RowCopies, staging_memory
from bireme.kv.transfer.memory import zero_pages

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
ROWS = np.array([5, 6, 7, 30, 2], dtype=np.int64)


@pytest.fixture
def store():
    """Two layers that see all, one with a window, of different sizes."""
    sizes = [(2, 16, 16, 0), (2, 16, 8, 0), (1, 4, 4, 8)]
    geometry = [LayerGeometry(heads, keys, values, window, torch.float32, ()) for heads, keys, values, window in sizes]
    made = KvStore(geometry, group_layers(geometry), [4, 4], 8, DEVICE)
    for tensor in (*made.keys, *made.values):
        tensor.copy_(torch.randn(tensor.shape))
    return made


@pytest.fixture(params=[False, pytest.param(True, marks=needs_triton)], ids=["indexed", "kernel"])
def copies(store, request):
    return RowCopies([store._tensors(group) for group in range(2)], DEVICE, request.param)


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8).reshape(-1).cpu().numpy().tobytes()


def test_rows_are_read_layer_by_layer_keys_before_values(store, copies):
    tensors = [store.keys[0], store.values[0], store.keys[1], store.values[1]]
    assert copies.read(0, ROWS, None).tobytes() == b"".join(
        bytes_of(tensor[torch.from_numpy(ROWS)]) for tensor in tensors
    )
    assert len(copies.read(1, ROWS, None)) == len(ROWS) * store.groups[1].bytes_per_token


def test_rows_that_are_written_are_those_that_are_read_and_no_others(store, copies):
    before, others = store.values[1].clone(), np.setdiff1d(np.arange(40), ROWS)
    room = copies.room(0, len(ROWS))
    data = np.random.default_rng(0).integers(0, 255, len(room), np.uint8).tobytes()
    room[:] = data
    copies.write(0, ROWS, room, None)
    assert copies.read(0, ROWS, None).tobytes() == data
    assert torch.equal(store.values[1][others], before[others])


def test_bytes_that_lie_elsewhere_are_written_as_well(copies):
    data = np.random.default_rng(1).integers(0, 255, len(copies.read(1, ROWS, None)), np.uint8)
    copies.write(1, ROWS, memoryview(data), None)
    assert copies.read(1, ROWS, None).tobytes() == data.tobytes()


def test_more_than_a_chunk_is_copied_through_memory_of_its_own(store, monkeypatch):
    monkeypatch.setattr(row_copies, "CHUNK_BYTES", 64)
    copies = RowCopies([store._tensors(0)], DEVICE, False)
    data = copies.read(0, ROWS, None).tobytes()
    copies.write(0, ROWS[::-1].copy(), memoryview(data), None)
    assert copies.read(0, ROWS[::-1].copy(), None).tobytes() == data
    assert sum(copies.staging_bytes.values()) == 64


def test_copies_that_are_begun_end_in_their_order(store, copies):
    size = len(ROWS) * store.groups[0].bytes_per_token
    host = zero_pages(2 * size)
    first, second = np.frombuffer(host, np.uint8)[:size], np.frombuffer(host, np.uint8)[size:]
    wanted = copies.read(0, ROWS, None).tobytes()
    copies.page_lock(np.frombuffer(host, np.uint8))
    copies.begin_read(0, ROWS, first, None)
    copies.begin_write(0, ROWS[::-1].copy(), first, None)
    last = copies.begin_read(0, ROWS[::-1].copy(), second, None)
    last.wait()
    assert last.is_done() and first.tobytes() == second.tobytes() == wanted
    copies.page_unlock(np.frombuffer(host, np.uint8))


def test_memory_of_a_transfer_s_own_is_counted_by_its_kind(copies):
    told = []
    copies.on_change = lambda: told.append(sum(copies.staging_bytes.values()))
    before, memory = sum(copies.staging_bytes.values()), np.frombuffer(zero_pages(1 << 20), np.uint8)
    copies.page_lock(memory)
    copies.page_unlock(memory)
    assert told == [before + (1 << 20), before]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here page-locked memory can be had")
def test_without_page_locked_memory_copies_go_on_with_a_line_in_the_log(caplog):
    caplog.set_level(logging.WARNING)
    memory, kind = staging_memory(100, is_cuda=True)
    assert (memory.nbytes, kind) == (100, "pageable")
    assert caplog.text.count("staging event=pageable") == 1


def test_blocks_that_follow_each_other_are_copied_at_once():
    assert list(_runs([4, 5, 6, 9, 3, 4])) == [(0, 3), (3, 4), (4, 6)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_waits_for_what_the_engine_had_been_given_when_the_rows_were_named(store):
    large = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(50):
        large = large @ large * 1e-3
    store.keys[0][8:16] = 7.0  # behind all that, on the engine's stream
    data = store.token_rows([[1], [1]], 8)
    read = np.frombuffer(data.read(0, 0, 8), np.float32)
    assert (read[: 8 * 32] == 7.0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_page_locked_memory_has_the_size_that_was_asked_for_and_is_given_back():
    for _ in range(3):  # the same address may come again
        memory = page_locked(48 << 20)
        assert memory.nbytes == 48 << 20 and memory.is_pinned()
        memory.copy_(torch.full((48 << 20,), 7, dtype=torch.uint8, device=DEVICE), non_blocking=True)
        torch.cuda.synchronize()
        assert (memory == 7).all()
        del memory
