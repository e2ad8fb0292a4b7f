"""Transfers between two live sides in one process: what arrives, what is refused, what is freed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import zmq

from bireme.disagg import DisaggregatedParams
from bireme.discovery import run_folder
from bireme.errors import (
    ConfigError,
    KvTransferError,
    NotFoundError,
    RequestCancelledError,
    RequestError,
    UnavailableError,
)
from bireme.kv.transfer import create_transfer
from bireme.kv.transfer.base import GroupLayout, KvLayout
from bireme.kv.transfer.importer import FetchState
from bireme.kv.transfer.leased import LeasedTransfer
from bireme.kv.transfer.memory import HostMemory, TokenRows
from bireme.kv.transfer.shm import ShmBackend
from tests.kv.transfer.kv_side import LAYOUT, Fetching, Side, SlowMemory, all_files_of, files_of, memory_of, wait_until
from tests.kv.transfer.needs import needs_cuda, needs_nixl
from tests.listening import tcp_listeners

on_all = pytest.mark.parametrize(
    "backend",
    [
        "shm",
        pytest.param("nixl", marks=needs_nixl),
        pytest.param("staged", marks=needs_nixl),
        "cuda_ipc",
        "mapped",
        pytest.param("cuda", marks=needs_cuda),
        pytest.param("vram", marks=[needs_nixl, needs_cuda]),
        pytest.param("staged_vram", marks=[needs_nixl, needs_cuda]),
    ],
)
on_both = pytest.mark.parametrize("backend", ["shm", pytest.param("nixl", marks=needs_nixl)])


class BrokenMemory(SlowMemory):
    def __init__(self):
        super().__init__(LAYOUT, 10, 0)

    def read(self, group, rows, *rest):
        raise ZeroDivisionError

    write = read


@on_all
def test_every_row_arrives_as_it_was_exported(prefill, decode):
    fetching = decode.fetch(prefill.export(100))
    assert fetching.result() is None
    assert fetching.is_right
    assert fetching.tokens_written(0) == fetching.tokens_written(1) == list(range(100))


@needs_nixl
@needs_cuda
@pytest.mark.parametrize("backend", ["vram"])
def test_ucx_reads_a_gpus_rows_where_they_lie(prefill, decode):
    assert prefill.transfer._backend.can_read(memory_of(prefill.pool))
    for num_tokens in (1, 100, 1000):
        fetching = decode.fetch(prefill.export(num_tokens))
        assert fetching.result() is None and fetching.is_right


@needs_nixl
@pytest.mark.parametrize("backend", ["nixl"])
def test_agents_that_have_nothing_to_do_take_no_cpu(prefill, decode):
    assert decode.fetch(prefill.export(100)).result() is None
    began, used = time.monotonic(), time.process_time()
    time.sleep(1)
    assert time.process_time() - used < 0.1 * (time.monotonic() - began)


@pytest.fixture
def listeners_before():
    return tcp_listeners([os.getpid()]).keys()


@on_all
def test_within_one_host_nobody_listens_on_a_port(listeners_before, prefill, decode):
    assert decode.fetch(prefill.export(100)).result() is None
    assert tcp_listeners([os.getpid()]).keys() <= listeners_before


@on_all
def test_other_users_can_map_nothing_of_a_transfer(prefill, decode):
    assert decode.fetch(prefill.export(100)).result() is None
    rows = [row.split() for row in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    assert [row for row in rows if int(row[4]) == os.getpid() and int(row[2], 8) & 0o77] == []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            assert not os.readlink(link).startswith("/dev/shm/") or not link.stat().st_mode & 0o77, os.readlink(link)


@on_all
def test_rows_that_decode_holds_are_not_sent(prefill, decode):
    fetching = decode.fetch(prefill.export(100), firsts=(64, 84))
    assert fetching.result() is None
    assert fetching.tokens_written(0) == list(range(64, 100))
    assert fetching.tokens_written(1) == list(range(84, 100))


@on_all
def test_nothing_to_copy_is_acknowledged_without_a_file(prefill, decode):
    fetching = decode.fetch(prefill.export(100), firsts=(100, 100))
    assert fetching.result() is None
    wait_until(lambda: prefill.num_released == 1 and not prefill.lease_counts())
    assert not fetching.has_written
    assert "bireme_kv_transfer_bytes_total export" not in prefill.counters()


def test_a_finished_transfer_leaves_neither_lease_nor_file_nor_buffer(prefill, decode, tmp_path):
    assert decode.fetch(prefill.export(100)).result() is None
    wait_until(lambda: prefill.num_released == 1 and not prefill.lease_counts() and not files_of(tmp_path, "prefill"))
    wait_until(lambda: prefill.counters().get("bireme_kv_transfer_buffer_bytes") == 0)


def test_blocks_are_free_once_copied_even_if_the_importer_is_slow(prefill, decode):
    fetching = decode.fetch(prefill.export(100), write_delay_s=0.05)
    assert fetching.began_writing.wait(60)
    wait_until(lambda: prefill.num_released == 1)
    assert prefill.lease_counts() == {"claimed": 1}


def test_both_sides_count_the_bytes(prefill, decode):
    assert decode.fetch(prefill.export(10)).result() is None
    wait_until(lambda: not prefill.lease_counts())
    num_bytes = 10 * LAYOUT.bytes_per_token
    assert prefill.counters()["bireme_kv_transfer_bytes_total export"] == num_bytes
    wait_until(lambda: decode.counters().get("bireme_kv_transfer_bytes_total import") == num_bytes)


def test_neither_side_counts_a_canary_s(prefill, decode):
    lease = prefill.reserve()
    lease.is_canary = True
    params = msgspec.structs.replace(prefill.export_lease(lease, 10), is_canary=True)
    assert decode.fetch(params).result() is None
    assert decode.fetch(prefill.export(20)).result() is None
    for side in (prefill, decode):
        check_counts_of_one(side, 20)


def test_what_fetches_take_is_learned_but_for_canaries(prefill, decode):
    for num_tokens in (10, 20, 40):
        assert decode.fetch(prefill.export(num_tokens)).result() is None
    assert decode.transfer.line_ms is None
    assert decode.fetch(prefill.export(20)).result() is None
    wait_until(lambda: decode.transfer.line_ms is not None)
    start, slope = decode.transfer.line_ms
    assert start + 40 * slope > 0 and prefill.transfer.line_ms is None


def check_counts_of_one(side, num_tokens):
    """Once a side has counted a transfer of so many tokens, it has counted no other."""
    counted, numbers = [], []

    def is_counted():
        delta = side.metrics.take_delta()
        counted.extend(value for name, _, value in delta.counters if name == "bireme_kv_transfer_bytes_total")
        numbers.extend(sum(counts) for name, _, counts, _ in delta.histograms if name == "bireme_kv_transfer_seconds")
        return counted and numbers

    wait_until(is_counted)
    assert (sum(counted), sum(numbers)) == (num_tokens * LAYOUT.bytes_per_token, 1)


@on_all
def test_one_side_exports_and_imports_at_once(prefill, decode):
    there, back = decode.fetch(prefill.export(50)), prefill.fetch(decode.export(70))
    assert there.result() is None and back.result() is None
    assert there.is_right and back.is_right


@on_all
def test_a_second_claim_of_the_same_lease_is_not_found(prefill, decode):
    params = prefill.export(10)
    assert decode.fetch(params).result() is None
    error = decode.fetch(params).result()
    assert isinstance(error, NotFoundError)
    assert "before" in str(error)


def test_a_replay_during_the_first_transfer_does_not_disturb_it(prefill, decode):
    params = prefill.export(100)
    first = decode.fetch(params, write_delay_s=0.01)
    assert first.began_writing.wait(60)
    assert isinstance(decode.fetch(params).result(), NotFoundError)
    assert first.result() is None and first.is_right


def test_a_replay_that_is_cancelled_does_not_disturb_the_first(prefill, make_side, decode):
    params = prefill.export(1000, read_delay_s=0.005)
    first = decode.fetch(params)
    assert prefill.began_reading.wait(60)
    for side in (decode, make_side("decode_1")):
        side.fetch(params).handle.cancel()
        side.fetch(params, firsts=(0,)).result()  # refused by its own side, which then cancels
    assert first.result() is None and first.is_right


@pytest.mark.parametrize("field", ["generation", "lease_id"])
def test_a_wrong_generation_or_id_is_not_found_and_leaves_the_lease(prefill, decode, field):
    params = prefill.export(10)
    wrong = msgspec.structs.replace(params, **{field: getattr(params, field) ^ 1})
    # decode's refusal of the wrong one must not cost the right one
    assert isinstance(decode.fetch(wrong).result(), NotFoundError)
    assert decode.fetch(params).result() is None


def test_a_lease_that_is_not_exported_cannot_be_claimed(prefill, decode):
    lease = prefill.reserve()
    params = msgspec.structs.replace(prefill.export(10), lease_id=lease.lease_id, generation=lease.generation)
    error = decode.fetch(params).result()
    assert isinstance(error, NotFoundError) and "not exported yet" in str(error)


def test_params_of_an_earlier_life_are_not_found(prefill, decode):
    params = msgspec.structs.replace(prefill.export(10), life=0)
    error = decode.fetch(params).result()
    assert isinstance(error, NotFoundError)
    assert "life 0" in str(error)


def test_the_exporter_itself_refuses_a_claim_of_another_life(prefill, decode, tmp_path):
    params = msgspec.structs.replace(prefill.export(10), life=7)
    run_folder.publish(tmp_path, msgspec.structs.replace(prefill.record(), life=7))
    error = decode.fetch(params).result()
    assert isinstance(error, NotFoundError) and "life 7" in str(error)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (KvLayout("other", "float32", LAYOUT.groups), "model is tiny on prefill and other on decode"),
        (KvLayout("tiny", "bfloat16", LAYOUT.groups), "dtype is float32 on prefill and bfloat16 on decode"),
        (KvLayout("tiny", "float32", (GroupLayout(0, (64, 64)), GroupLayout(8, (32,)))), r"groups\[1\].window is 16"),
        (KvLayout("tiny", "float32", (GroupLayout(0, (64, 32)), GroupLayout(16, (32,)))), r"groups\[0\].row_bytes"),
        (KvLayout("tiny", "float32", LAYOUT.groups[:1]), "number of groups is 2 on prefill and 1 on decode"),
    ],
)
def test_differing_layouts_are_refused_by_field_and_free_the_lease(prefill, make_side, layout, text):
    decode = make_side("decode", layout=layout)
    error = decode.fetch(prefill.export(10), firsts=(0,) * len(layout.groups)).result()
    with pytest.raises(RequestError, match=text):
        raise error
    wait_until(lambda: prefill.num_released == 1)


@on_all
def test_a_wrong_number_of_tokens_is_refused(prefill, decode):
    params = msgspec.structs.replace(prefill.export(10), num_tokens=11)
    error = decode.fetch(params).result()
    assert isinstance(error, RequestError) and "11 claimed; the lease holds 10" in str(error)


@pytest.mark.parametrize(("firsts", "text"), [((0,), "1 entries"), ((0, 11), "between 0 and num_tokens 10")])
def test_firsts_that_do_not_fit_are_refused_and_free_the_lease(prefill, decode, firsts, text):
    error = decode.fetch(prefill.export(10), firsts=firsts).result()
    assert isinstance(error, RequestError) and text in str(error)
    wait_until(lambda: prefill.num_released == 1)


def test_an_unknown_worker_is_unavailable(prefill, decode):
    params = msgspec.structs.replace(prefill.export(10), worker="prefill_9")
    error = decode.fetch(params).result()
    assert isinstance(error, UnavailableError) and "prefill_9 is not running" in str(error)


def test_a_worker_without_transfer_is_unavailable(prefill, decode, tmp_path):
    params = prefill.export(10)
    run_folder.publish(tmp_path, msgspec.structs.replace(prefill.record(), transfer_endpoint=""))
    error = decode.fetch(params).result()
    assert isinstance(error, UnavailableError) and "cache_transceiver_config.backend" in str(error)


def test_a_lease_nobody_claims_expires(make_side, decode):
    prefill = make_side("prefill", timeout_ms=150)
    params = prefill.export(10)
    wait_until(lambda: prefill.num_released == 1)
    error = decode.fetch(params).result()
    assert isinstance(error, NotFoundError) and "kv_transfer_timeout_ms" in str(error)
    assert prefill.counters()["bireme_kv_leases_expired_total"] == 1


def test_a_reserved_lease_does_not_expire(make_side):
    prefill = make_side("prefill", timeout_ms=50)
    lease = prefill.reserve()
    threading.Event().wait(0.4)
    assert prefill.lease_counts() == {"reserved": 1}
    lease.abort()
    wait_until(lambda: prefill.num_released == 1)


def test_an_aborted_lease_cannot_be_claimed(prefill, decode):
    lease = prefill.reserve()
    params = prefill.export_lease(lease, 10)
    lease.abort()
    lease.abort()
    assert isinstance(decode.fetch(params).result(), NotFoundError)
    wait_until(lambda: prefill.num_released == 1)


@on_both
def test_an_abort_during_the_copy_waits_for_the_chunk_and_refuses_the_claim(prefill, decode):
    lease = prefill.reserve()
    fetching = decode.fetch(prefill.export_lease(lease, 1000, read_delay_s=0.02))
    assert prefill.began_reading.wait(60)
    lease.abort()
    assert isinstance(fetching.result(), NotFoundError)
    wait_until(lambda: prefill.num_released == 1)


def test_an_abort_between_claim_and_copy_offers_nothing(prefill, decode):
    gate, lease = threading.Event(), prefill.reserve()
    prefill.transfer._copier.call(gate.wait)
    fetching = decode.fetch(prefill.export_lease(lease, 10))
    wait_until(lambda: prefill.lease_counts() == {"claimed": 1})
    lease.abort()
    gate.set()
    assert isinstance(fetching.result(), NotFoundError)
    assert not fetching.has_written
    wait_until(lambda: prefill.num_released == 1)


def test_a_cancel_before_the_claim_frees_the_lease_at_once(prefill, decode):
    params = prefill.export(10)
    fetching = decode.fetch(params)
    fetching.handle.cancel()
    assert fetching.result() is None or isinstance(fetching.result(), RequestCancelledError)
    wait_until(lambda: prefill.num_released == 1 and not prefill.lease_counts())


@on_both
def test_a_cancel_while_prefill_copies_stops_the_copy(prefill, decode, tmp_path):
    fetching = decode.fetch(prefill.export(1000, read_delay_s=0.02))
    assert prefill.began_reading.wait(60)
    fetching.handle.cancel()
    assert isinstance(fetching.result(), RequestCancelledError)
    wait_until(lambda: prefill.num_released == 1 and not files_of(tmp_path, "prefill"))


@pytest.mark.parametrize(
    "backend",
    ["shm", pytest.param("nixl", marks=needs_nixl), pytest.param("staged", marks=needs_nixl), "cuda_ipc", "mapped"],
)
def test_a_cancel_while_decode_writes_ends_after_the_write(prefill, decode, tmp_path):
    fetching = decode.fetch(prefill.export(1000), write_delay_s=0.02)
    assert fetching.began_writing.wait(60)
    fetching.handle.cancel()
    fetching.handle.cancel()
    assert isinstance(fetching.result(), RequestCancelledError)
    wait_until(lambda: not prefill.lease_counts() and not files_of(tmp_path, "prefill"))
    assert fetching.num_done == 1


@on_both
def test_chunks_that_come_while_rows_are_written_start_no_second_copy(prefill, decode, monkeypatch):
    importer, states = decode.transfer._importer, []
    load, progress = importer._load, Mock(wraps=importer._on_progress)
    monkeypatch.setattr(importer, "_load", lambda fetch: (states.append(fetch.state), load(fetch)))
    monkeypatch.setattr(importer, "_on_progress", progress)
    fetching = decode.fetch(prefill.export(200, read_delay_s=0.001), write_delay_s=0.02)
    assert fetching.result() is None and fetching.is_right
    assert set(states) == {FetchState.OFFERED} and progress.call_count > len(states)


@needs_nixl
@pytest.mark.parametrize("backend", ["nixl"])
def test_room_comes_back_when_the_exporter_never_says_that_it_has_ended(prefill, decode, monkeypatch):
    """Its messages are lost, as those for a connection that was cut are."""
    importer, backend = decode.transfer._importer, decode.transfer._backend
    cut_off = Mock(wraps=backend.forget_writers)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "forget_writers", cut_off)
        patch.setattr(importer, "on_message", lambda *_: None)
        patch.setattr(importer, "timeout_s", 0.3)
        assert isinstance(decode.fetch(prefill.export(100)).result(), KvTransferError)
        wait_until(lambda: prefill.num_released == 1)
        assert not decode.room_in_use() and cut_off.called
    fetching = decode.fetch(prefill.export(100))
    assert fetching.result() is None and fetching.is_right


def test_a_cancel_after_the_end_does_nothing(prefill, decode):
    fetching = decode.fetch(prefill.export(10))
    assert fetching.result() is None
    fetching.handle.cancel()
    assert decode.fetch(prefill.export(10)).result() is None
    assert fetching.num_done == 1


@on_all
def test_many_fetches_share_a_buffer_of_one_request(make_side, tmp_path):
    prefill, decode = make_side("prefill", max_tokens=50), make_side("decode")
    fetchings = [decode.fetch(prefill.export(50)) for _ in range(40)]
    assert [fetching.result() for fetching in fetchings] == [None] * 40
    assert all(fetching.is_right for fetching in fetchings)
    wait_until(lambda: prefill.num_released == 40 and not files_of(tmp_path, "prefill"))


def test_transfers_one_after_the_other_take_turns_in_one_file(prefill, decode, tmp_path):
    for num_tokens in (100, 100, 40, 200):
        fetching = decode.fetch(prefill.export(num_tokens))
        assert fetching.result() is None and fetching.is_right
        wait_until(lambda: not prefill.lease_counts() and not files_of(tmp_path, "prefill"))
        assert len(all_files_of(tmp_path, "prefill")) == 1


def test_the_file_of_an_aborted_lease_is_removed(prefill, decode, tmp_path):
    lease = prefill.reserve()
    fetching = decode.fetch(prefill.export_lease(lease, 1000, 0.02))
    assert prefill.began_reading.wait(60)
    lease.abort()
    assert isinstance(fetching.result(), NotFoundError)
    wait_until(lambda: not all_files_of(tmp_path, "prefill"))


def test_the_buffer_never_holds_more_than_its_limit(make_side):
    prefill, decode = make_side("prefill", max_tokens=50), make_side("decode")
    peak, buffer = 0, prefill.transfer._exporter.buffer
    fetchings = [decode.fetch(prefill.export(20), write_delay_s=0.002) for _ in range(20)]
    while not all(fetching.ended.is_set() for fetching in fetchings):
        peak = max(peak, buffer.used_bytes)
        time.sleep(0.0005)
    assert 0 < peak <= 50 * LAYOUT.bytes_per_token


def test_a_transfer_larger_than_the_buffer_is_refused_with_the_key(make_side, decode):
    prefill = make_side("prefill", max_tokens=50)
    error = decode.fetch(prefill.export(51)).result()
    assert isinstance(error, RequestError)
    assert "51 tokens" in str(error) and "50 tokens" in str(error) and "max_tokens_in_buffer" in str(error)
    wait_until(lambda: prefill.num_released == 1)


def test_a_slow_importer_makes_others_wait_no_longer_than_the_limit(make_side):
    prefill, decode = make_side("prefill", max_tokens=50, timeout_ms=1500), make_side("decode")
    slow = decode.fetch(prefill.export(50), write_delay_s=0.5)
    assert slow.began_writing.wait(60)
    second = make_side("decode_1").fetch(prefill.export(50))
    # the slow one's file goes when its time is over, and then there is room, or the second one's time is over too
    error = second.result()
    assert error is None or isinstance(error, KvTransferError)
    slow.handle.cancel()
    slow.result()
    wait_until(lambda: prefill.num_released == 2 and not prefill.lease_counts())


@on_both
def test_decode_writes_rows_while_prefill_still_reads(prefill, decode):
    fetching = decode.fetch(prefill.export(500, read_delay_s=0.02), write_delay_s=0.001)
    assert fetching.began_writing.wait(60)
    assert prefill.num_released == 0 and prefill.lease_counts() == {"claimed": 1}
    assert fetching.result() is None and fetching.is_right


def test_sides_with_different_backends_refuse_each_other_by_name(prefill, tmp_path):
    decode = Side(tmp_path, "decode", backend="cuda_ipc")
    error = decode.fetch(prefill.export(10)).result()
    decode.close()
    assert isinstance(error, RequestError) and "decode has cuda_ipc and prefill shm" in str(error)


def test_a_full_dev_shm_is_a_clean_error_with_the_remedy(make_side):
    layout = KvLayout("vast", "float32", (GroupLayout(0, (1 << 50,)),))
    prefill, decode = make_side("prefill", layout=layout), make_side("decode", layout=layout)
    rows = TokenRows(HostMemory([]), (np.arange(1),))  # never touched
    lease, fetching = prefill.reserve(), Fetching(LAYOUT, 1, 0)
    lease.export(1, rows)
    ids = {"lease_id": lease.lease_id, "generation": lease.generation}
    decode.transfer.fetch(DisaggregatedParams(worker="prefill", life=1, num_tokens=1, **ids), (0,), rows, fetching.done)
    error = fetching.result()
    assert isinstance(error, KvTransferError)
    assert "/dev/shm" in str(error) and "--shm-size" in str(error)
    wait_until(lambda: prefill.num_released == 1)


def test_a_small_dev_shm_makes_transfers_wait_for_each_other(prefill, decode, tmp_path, monkeypatch):
    refusals = []
    fallocate = os.posix_fallocate

    def room_for_one_file(descriptor, offset, num_bytes):
        if len(files_of(tmp_path, "prefill")) > 1:
            refusals.append(num_bytes)
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(descriptor, offset, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", room_for_one_file)
    fetchings = [decode.fetch(prefill.export(50), write_delay_s=0.002) for _ in range(10)]
    assert [fetching.result() for fetching in fetchings] == [None] * 10
    assert refusals


@on_both
def test_a_read_that_fails_refuses_the_claim_and_frees_the_blocks(prefill, decode, caplog):
    lease = prefill.reserve()
    params = prefill.export_lease(lease, 10)
    lease._rows = BrokenMemory().token_rows()
    error = decode.fetch(params).result()
    assert "ZeroDivisionError" in str(error)
    wait_until(lambda: prefill.num_released == 1 and not prefill.lease_counts())


@on_both
def test_a_write_that_fails_ends_the_fetch_and_frees_the_lease(prefill, decode, tmp_path):
    fetching = decode.fetch(prefill.export(10))
    broken = decode.transfer.fetch(prefill.export(10), (0, 0), BrokenMemory().token_rows(), fetching.done)
    assert broken
    wait_until(lambda: fetching.num_done == 2)
    assert any("ZeroDivisionError" in str(error) for error in fetching.errors)
    wait_until(lambda: prefill.num_released == 2 and not files_of(tmp_path, "prefill"))


def test_malformed_messages_are_dropped_and_logged(prefill, decode, caplog):
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(prefill.transfer.endpoint)
    no_utf_8 = b"\x91\xa5c\xffaim"
    for payload in (
        b"",
        b"\x00garbage",
        msgspec.msgpack.encode(["claim", 1]),
        msgspec.msgpack.encode({"a": 1}),
        no_utf_8,
    ):
        dealer.send(payload)
    wait_until(lambda: caplog.text.count("malformed_message") == 5)
    dealer.close(linger=0)
    assert decode.fetch(prefill.export(10)).result() is None


def test_another_protocol_version_is_refused_by_number(prefill, decode, monkeypatch):
    monkeypatch.setattr("bireme.kv.transfer.importer.Importer._claim", claim_of_version_99)
    error = decode.fetch(prefill.export(10)).result()
    assert isinstance(error, RequestError) and "version 99" in str(error)


def claim_of_version_99(importer, fetch):
    params = fetch.params
    ids = (params.lease_id, params.generation, params.life, params.num_tokens)
    return ("claim", 99, fetch.number, *ids, importer.layout, fetch.firsts, os.getpid(), "a later field")


def test_files_and_socket_are_for_their_owner_only(prefill, decode, tmp_path):
    fetching = decode.fetch(prefill.export(100), write_delay_s=0.02)
    assert fetching.began_writing.wait(60)
    (name,) = files_of(tmp_path, "prefill")
    assert stat.S_IMODE(os.stat(f"/dev/shm/{name}").st_mode) == 0o600
    assert stat.S_IMODE(os.stat(prefill.transfer.endpoint.removeprefix("ipc://")).st_mode) == 0o600


@on_both
def test_close_aborts_every_lease_and_fetch(make_side, tmp_path):
    prefill, decode = make_side("prefill"), make_side("decode")
    waiting = decode.fetch(prefill.export(1000, read_delay_s=0.01))
    prefill.export(10)
    prefill.reserve()
    assert prefill.began_reading.wait(60)
    prefill.close()
    assert prefill.num_released == 3
    assert isinstance(waiting.result(), UnavailableError)
    assert not all_files_of(tmp_path, "prefill") and not list(tmp_path.glob("kv-prefill*"))


@on_both
def test_close_of_the_importer_ends_its_fetches_and_frees_the_leases(make_side, prefill):
    decode = make_side("decode")
    writing = decode.fetch(prefill.export(1000), write_delay_s=0.01)
    claiming = decode.fetch(prefill.export(1000, read_delay_s=0.01))
    assert writing.began_writing.wait(60)
    decode.close()
    assert isinstance(writing.result(), UnavailableError) and isinstance(claiming.result(), UnavailableError)
    wait_until(lambda: prefill.num_released == 2 and not prefill.lease_counts())


def test_after_close_leases_are_released_and_fetches_fail_at_once(make_side, prefill):
    decode = make_side("decode")
    decode.close()
    decode.close()
    assert isinstance(decode.fetch(prefill.export(10)).result(), UnavailableError)
    decode.reserve()
    assert decode.num_released == 1


def test_close_without_start_is_harmless(tmp_path):
    from bireme.config import CacheTransceiverConfig
    from bireme.metrics import Registry

    backend = ShmBackend(tmp_path, "prefill", 1)
    config, metrics = CacheTransceiverConfig(), Registry()
    transfer = LeasedTransfer(backend, run_dir=tmp_path, worker="prefill", life=1, config=config, metrics=metrics)
    transfer.close()
    assert list(tmp_path.rglob("*")) == []


def test_a_run_directory_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="kv-prefill-1.sock can't be made: .*check BIREME_RUN_DIR"):
        Side(tmp_path / "gone", "prefill")


def test_a_run_directory_with_too_long_a_path_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the limit is 107: set BIREME_RUN_DIR"):
        Side(tmp_path / ("x" * 100), "prefill")


@pytest.mark.parametrize("backend", ["MPI", "MOONCAKE"])
def test_backends_of_other_engines_are_refused_with_what_there_is(backend, tmp_path):
    with pytest.raises(ConfigError, match=f"{backend} is not available.*DEFAULT and.*NIXL"):
        create_transfer(backend, run_dir=tmp_path, worker="prefill", life=1, config=None, metrics=None)


def test_a_socket_that_somebody_deleted_is_made_again(prefill, make_side):
    path = Path(prefill.transfer.endpoint.removeprefix("ipc://"))
    path.unlink()
    wait_until(path.exists)
    assert make_side("decode_9").fetch(prefill.export(10)).result() is None


def test_a_transfer_under_way_outlives_the_file_of_its_socket(prefill, decode):
    """What is said by a connection that was cut is said to nobody, and both sides wait for their time limit."""
    path = Path(prefill.transfer.endpoint.removeprefix("ipc://"))
    fetching = decode.fetch(prefill.export(1000, read_delay_s=0.03))
    assert prefill.began_reading.wait(10)
    path.unlink()
    wait_until(path.exists)
    assert not fetching.ended.is_set()
    assert fetching.result() is None and fetching.is_right
