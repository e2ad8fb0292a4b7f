"""Transfers between real processes, one of which is killed or stopped at every stage."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from bireme.errors import KvTransferError, UnavailableError
from bireme.kv.transfer.process import Process
from bireme.kv.transfer.shm_file import SHM_DIR, file_prefix, sweep
from tests.kv.transfer.kv_side import files_of, wait_until

pytestmark = pytest.mark.flaky(reruns=1)


def test_rows_go_from_one_process_to_another(make_child, decode):
    fetching = decode.fetch(make_child("prefill").export(500))
    assert fetching.result() is None and fetching.is_right


def test_rows_go_to_another_process(prefill, make_child):
    child = make_child("decode")
    child.fetch(prefill.export(500))
    assert child.call("result") == [None, True]
    wait_until(lambda: prefill.num_released == 1 and not prefill.lease_counts())


def test_an_exporter_killed_before_the_claim_is_unavailable(make_child, decode):
    child = make_child("prefill")
    params = child.export(10)
    child.kill()
    wait_until(lambda: not Process(child.process.pid).is_alive())
    assert isinstance(decode.fetch(params).result(), UnavailableError)


def test_an_exporter_killed_while_it_copies_is_noticed_at_once(make_child, decode, tmp_path):
    child = make_child("prefill")
    fetching = decode.fetch(child.export(1000, read_delay_s=0.05))
    assert child.call("wait_reading")
    child.kill()
    assert isinstance(fetching.result(), UnavailableError)
    assert len(files_of(tmp_path, "prefill")) == 1
    assert sweep(tmp_path, "prefill") == 1 and not files_of(tmp_path, "prefill")


def test_an_exporter_killed_while_decode_writes_costs_nothing(make_child, decode, tmp_path):
    child = make_child("prefill")
    fetching = decode.fetch(child.export(300), write_delay_s=0.01)
    assert fetching.began_writing.wait(60)
    wait_until(lambda: all(fetch.has_all for fetch in decode.transfer._importer._fetches.values()))
    child.kill()
    assert fetching.result() is None and fetching.is_right
    sweep(tmp_path, "prefill")


def test_a_later_life_serves_after_a_kill(make_child, decode, tmp_path):
    first = make_child("prefill")
    fetching = decode.fetch(first.export(1000, read_delay_s=0.05))
    assert first.call("wait_reading")
    first.kill()
    second = make_child("prefill", life=2)
    assert isinstance(fetching.result(), UnavailableError)
    again = decode.fetch(second.export(100))
    assert again.result() is None and again.is_right
    sweep(tmp_path, "prefill")


def test_a_stopped_exporter_is_given_up_after_the_time_limit(make_child, make_side):
    child, decode = make_child("prefill"), make_side("decode", timeout_ms=300)
    params = child.export(10)
    child.signal(signal.SIGSTOP)
    error = decode.fetch(params).result()
    assert isinstance(error, KvTransferError) and "300 ms" in str(error)


def test_an_importer_killed_while_it_waits_for_room_frees_the_lease(make_side, make_child, decode):
    prefill, child = make_side("prefill", max_tokens=100), make_child("decode_1")
    gate = threading.Event()
    decode.transfer._copier.call(gate.wait)  # so that decode keeps the room until told
    first = decode.fetch(prefill.export(100))
    wait_until(lambda: prefill.num_released == 1)
    child.fetch(prefill.export(100))
    wait_until(lambda: prefill.lease_counts().get("claimed") == 2)
    child.kill()
    wait_until(lambda: prefill.num_released == 2)
    gate.set()
    assert first.result() is None and first.is_right


def test_an_importer_killed_during_the_copy_frees_the_lease(prefill, make_child, tmp_path):
    child = make_child("decode")
    child.fetch(prefill.export(1000, read_delay_s=0.02))
    assert prefill.began_reading.wait(60)
    child.kill()
    wait_until(lambda: prefill.num_released == 1 and not prefill.lease_counts())
    wait_until(lambda: not files_of(tmp_path, "prefill"))


def test_an_importer_killed_while_it_writes_frees_lease_file_and_buffer(prefill, make_child, tmp_path):
    child = make_child("decode")
    child.fetch(prefill.export(1000), write_delay_s=0.05)
    assert child.call("wait_writing")
    child.kill()
    wait_until(lambda: not prefill.lease_counts() and not files_of(tmp_path, "prefill"))
    counters = prefill.counters()
    assert counters["bireme_kv_transfer_failures_total importer_lost"] == 1
    wait_until(lambda: prefill.counters().get("bireme_kv_transfer_buffer_bytes") == 0)


def test_a_stopped_importer_keeps_its_lease_no_longer_than_the_limit(make_side, make_child, tmp_path):
    prefill, child = make_side("prefill", timeout_ms=1000), make_child("decode")
    child.fetch(prefill.export(1000), write_delay_s=0.05)
    assert child.call("wait_writing")
    child.signal(signal.SIGSTOP)
    wait_until(lambda: not prefill.lease_counts() and not files_of(tmp_path, "prefill"))
    assert prefill.counters()["bireme_kv_transfer_failures_total timeout"] == 1


def test_a_stopped_importer_that_wakes_too_late_still_has_its_rows(make_side, make_child):
    prefill, decode, child = make_side("prefill", timeout_ms=1000), make_side("decode_1"), make_child("decode")
    child.fetch(prefill.export(100), write_delay_s=0.01)
    assert child.call("wait_writing")
    child.signal(signal.SIGSTOP)
    wait_until(lambda: not prefill.lease_counts())
    assert [decode.fetch(prefill.export(90), (50, 60)).result() for _ in range(3)] == [None] * 3  # other rows meanwhile
    child.signal(signal.SIGCONT)
    assert child.call("result") == [None, True]


def test_sweeping_takes_only_the_workers_own_files(tmp_path):
    names = [f"{file_prefix(tmp_path, worker)}1-0" for worker in ("decode", "decode_1")]
    for name in names:
        (SHM_DIR / name).touch()
    assert sweep(tmp_path, "decode") == 1
    assert not (SHM_DIR / names[0]).exists() and (SHM_DIR / names[1]).exists()
    assert sweep(tmp_path, "decode_1") == 1


def test_sweeping_takes_the_socket_of_a_killed_engine(make_child, tmp_path):
    first, other = make_child("prefill"), make_child("prefill_1")
    first.kill()
    first.process.wait()
    sweep(tmp_path, "prefill")
    assert [path.name for path in tmp_path.glob("*.sock")] == ["kv-prefill_1-1.sock"]
    assert other.process.poll() is None


@pytest.mark.parametrize("pid", [2**22 + 1, 0])
def test_a_process_that_never_was_is_not_alive(pid):
    assert not Process(pid).is_alive()


def test_this_process_is_alive():
    assert Process(os.getpid()).is_alive()
