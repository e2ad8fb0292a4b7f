"""Rows that the importer copies out of the exporter's memory: kept until it has them, worth nothing if they were not.

Pools of a host, and of a GPU: without one a stand-in's lie in files that the other side maps. Freed rows are
overwritten at once.
"""

from __future__ import annotations

import logging
import signal
import threading

import msgspec
import numpy as np
import pytest
import zmq

from bireme.config import CacheTransceiverConfig
from bireme.errors import BiremeError, ConfigError, KvTransferError, NotFoundError, RequestCancelledError
from bireme.kv.transfer import create_transfer, wire
from bireme.kv.transfer.mapped import MappedBackend, _rows_of
from bireme.kv.transfer.memory import HostMemory, MemoryKind
from bireme.kv.transfer.process import Process
from bireme.kv.transfer.shm import ShmBackend
from bireme.metrics import Registry
from tests.kv.transfer.kv_side import LAYOUT, wait_until
from tests.kv.transfer.needs import needs_cuda
from tests.kv.transfer.shared_pools import NUM_ROWS, FilePool

on_cuda_too = pytest.mark.parametrize("backend", ["cuda_ipc", "mapped", pytest.param("cuda", marks=needs_cuda)])


@pytest.fixture(params=["cuda_ipc", "mapped"])
def backend(request):
    return request.param


@on_cuda_too
def test_rows_cross_to_another_process(make_child, decode, backend):
    child = make_child("prefill", backend=backend)
    for num_tokens in (500, 3, 129):
        fetching = decode.fetch(child.export(num_tokens))
        assert fetching.result() is None and fetching.is_right
        assert fetching.tokens_written(0) == list(range(num_tokens))
    assert child.call("is_free")


def test_blocks_are_kept_until_the_importer_has_them(prefill, decode):
    fetching = decode.fetch(prefill.export(100), write_delay_s=0.1)
    assert fetching.began_writing.wait(60)
    assert (prefill.num_released, prefill.lease_counts()) == (0, {"claimed": 1})
    assert fetching.result() is None and fetching.is_right
    wait_until(lambda: prefill.num_released == 1 and not prefill.lease_counts())


@pytest.mark.parametrize("way", ["abort", "timeout", "close"])
def test_rows_that_were_freed_while_they_were_copied_are_never_taken(make_side, decode, way):
    prefill = make_side("prefill", timeout_ms=1000 if way == "timeout" else 60_000)
    lease = prefill.reserve()
    fetching = decode.fetch(prefill.export_lease(lease, 100), write_delay_s=2.0 if way == "timeout" else 0.5)
    assert fetching.began_writing.wait(60)
    if way != "timeout":
        {"abort": lease.abort, "close": prefill.close}[way]()
    wait_until(lambda: prefill.num_released == 1)
    assert isinstance(fetching.result(), NotFoundError | KvTransferError)


def test_an_importer_that_learns_too_late_that_rows_were_freed_is_refused(prefill, decode):
    gate, has_copied, lease = threading.Event(), threading.Event(), prefill.reserve()
    fetching = decode.fetch(prefill.export_lease(lease, 100), write_delay_s=0.3)
    assert fetching.began_writing.wait(60)
    decode.transfer._mailbox.post(gate.wait)  # it reads no message, as a process that was stopped
    lease.abort()
    wait_until(lambda: prefill.num_released == 1)
    decode.transfer._copier.call(has_copied.set)
    assert has_copied.wait(60) and not fetching.is_right
    gate.set()
    assert isinstance(fetching.result(), NotFoundError)


def test_an_acknowledgement_that_comes_too_late_is_refused(prefill):
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(prefill.transfer.endpoint)
    dealer.send(wire.encode(wire.Ack(lease_id=123, generation=4, number=7)))
    assert dealer.poll(30_000)
    answer = wire.decode_to_importer(dealer.recv())
    dealer.close(linger=0)
    assert isinstance(answer, wire.Refuse) and answer.number == 7 and "prefill again" in answer.error


def test_a_cancel_while_rows_are_copied_ends_after_the_copy(prefill, decode):
    fetching = decode.fetch(prefill.export(100), write_delay_s=0.1)
    assert fetching.began_writing.wait(60)
    fetching.handle.cancel()
    assert isinstance(fetching.result(), RequestCancelledError)
    wait_until(lambda: prefill.num_released == 1 and not prefill.lease_counts())


def test_memory_is_mapped_once_in_its_exporters_life(prefill, decode):
    for _ in range(5):
        assert decode.fetch(prefill.export(100)).result() is None
    assert (decode.pool.num_mapped, decode.pool.num_open) == (1, 1)
    decode.close()
    assert decode.pool.num_open == 0


def test_memory_that_cannot_be_mapped_is_named_once_and_rows_go_through_the_host(prefill, decode, caplog):
    caplog.set_level(logging.WARNING)
    decode.pool.reaches_others = False
    error = decode.fetch(prefill.export(100)).result()
    assert isinstance(error, KvTransferError) and "no peer access" in str(error)
    for num_tokens in (100, 700):
        fetching = decode.fetch(prefill.export(num_tokens))
        assert fetching.result() is None and fetching.is_right
    assert caplog.text.count("event=staged") == 1
    wait_until(lambda: prefill.num_released == 3 and not prefill.lease_counts())


@on_cuda_too
def test_an_exporter_that_dies_while_its_rows_are_copied_is_unavailable_and_let_go(make_child, decode, backend):
    child = make_child("prefill", backend=backend)
    assert decode.fetch(child.export(100)).result() is None
    params = child.export(1000)
    child.signal(signal.SIGSTOP)  # it answers nothing any more
    fetching = decode.fetch(params)
    child.kill()
    wait_until(lambda: not Process(child.process.pid).is_alive())
    assert isinstance(fetching.result(), KvTransferError)
    wait_until(lambda: not decode.transfer._backend._mapped)


def test_an_exporter_that_dies_before_it_says_that_rows_were_kept_costs_the_transfer(make_child, decode, backend):
    child = make_child("prefill", backend=backend)
    fetching = decode.fetch(child.export(100), write_delay_s=0.2)
    assert fetching.began_writing.wait(60)
    child.kill()
    assert isinstance(fetching.result(), KvTransferError)
    wait_until(lambda: decode.pool.num_open == 0)


@on_cuda_too
def test_a_later_life_is_mapped_anew(make_child, decode, backend):
    for life in (1, 2):
        child = make_child("prefill", life=life, backend=backend)
        fetching = decode.fetch(child.export(300))
        assert fetching.result() is None and fetching.is_right
        child.kill()
    wait_until(lambda: not decode.transfer._backend._mapped)


def test_an_importer_that_dies_while_it_copies_frees_the_lease(prefill, make_child, backend):
    child = make_child("decode", backend=backend)
    child.fetch(prefill.export(1000), write_delay_s=5.0)
    assert child.call("wait_writing")
    assert prefill.num_released == 0
    child.kill()
    wait_until(lambda: prefill.num_released == 1 and not prefill.lease_counts())


@pytest.mark.parametrize(
    "runs", [[(0, 3)], [(0, 2), (-1, 2)], [(97, 4)], [(0, 5), (0, -1)], [(2**62, 4)], [(0, 2**62)]]
)
def test_rows_that_an_offer_may_not_name_are_refused(runs):
    with pytest.raises(BiremeError, match="names rows that are not 4 of the 100"):
        _rows_of(np.array(runs, np.int64).tobytes(), 4, 100)
    with pytest.raises(BiremeError, match="can't be read"):
        _rows_of(b"x", 4, 100)


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1},
        {"offset": -1},
        {"num_rows": NUM_ROWS + 1},
        {"allocation": 2},
        {"allocation": -1},
        {"row_bytes": 64},
    ],
)
def test_tensors_that_do_not_lie_in_what_is_shared_are_refused(tmp_path, change):
    pool = FilePool(tmp_path / "pool", LAYOUT)
    made = MappedBackend(MemoryKind.VRAM, ShmBackend(tmp_path, "decode", 1))
    made.start(LAYOUT, pool, 1 << 20)
    shared = pool.shared()
    wrong = msgspec.structs.replace(shared.regions[0][0], **change)
    with pytest.raises(BiremeError, match="does not lie in the memory|rows of"):
        made.map("ipc://prefill", msgspec.structs.replace(shared, regions=((wrong,), shared.regions[1])))
    assert pool.num_mapped == 0


@pytest.mark.parametrize(("ours", "theirs"), [(False, False), (True, False), (False, True)])
def test_where_one_side_has_no_pool_rows_go_through_files(make_side, ours, theirs):
    prefill, decode = make_side("prefill", has_pool=ours), make_side("decode", has_pool=theirs)
    for num_tokens in (100, 700):
        fetching = decode.fetch(prefill.export(num_tokens))
        assert fetching.result() is None and fetching.is_right
        assert fetching.tokens_written(0) == list(range(num_tokens))
    assert not decode.transfer._backend._mapped


def test_rows_that_go_through_files_are_copied_by_the_copier(make_side):
    prefill, decode = make_side("prefill", has_pool=False), make_side("decode")
    lease, found, answered = prefill.reserve(), [], threading.Event()
    fetching = decode.fetch(prefill.export_lease(lease, 100, read_delay_s=0.05))
    assert prefill.began_reading.wait(60)
    prefill.transfer._mailbox.post(lambda: (found.append(lease._is_copying), answered.set()))
    assert answered.wait(60) and found == [True]  # the control thread is free while rows are copied
    assert fetching.result() is None and fetching.is_right


def test_rows_in_too_many_pieces_are_refused_with_the_key(prefill, decode, monkeypatch):
    monkeypatch.setattr("bireme.kv.transfer.mapped.MAX_MESSAGE_BYTES", 100)
    error = decode.fetch(prefill.export(1000)).result()
    assert "kv_cache_config.tokens_per_block" in str(error)
    wait_until(lambda: prefill.num_released == 1)


def test_an_engine_without_a_gpu_is_refused_with_the_key_and_the_remedy(tmp_path):
    config = CacheTransceiverConfig(backend="CUDA_IPC")
    transfer = create_transfer(
        "CUDA_IPC", run_dir=tmp_path, worker="prefill", life=1, config=config, metrics=Registry("prefill")
    )
    with pytest.raises(ConfigError, match="cache_transceiver_config.backend: CUDA_IPC .* set DEFAULT"):
        transfer.start(LAYOUT, HostMemory([[np.zeros((4, 128), np.uint8)], [np.zeros((4, 32), np.uint8)]]))
    transfer.close()
