"""Records in a folder: heartbeats, expiry by the reader's clock, ids that are taken."""

import errno
import os

import pytest

from bireme.discovery.directory import DirectoryStore
from bireme.discovery.records import seal_record
from bireme.discovery.store import NameTakenError, StoreError
from bireme.settings import DiscoveryConfig
from tests.discovery.conftest import KEY, by_id, odd_entry, record

LEASE_S = 10.0


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    config = DiscoveryConfig(backend="directory", folder=str(tmp_path / "shared"), lease_s=LEASE_S)
    return lambda key=KEY: DirectoryStore(config, key, clock)


NESTED = b'{"later": ' + b"[" * 5000


def test_what_one_holds_others_read(store):
    writer, reader = store(), store()
    writer.hold(record())
    assert reader.read() == by_id(record())
    writer.hold(record(state="draining"))
    assert reader.read()["decode@b:8001"].is_draining


def test_a_worker_without_heartbeats_is_gone_after_its_lease(store, clock):
    writer, reader = store(), store()
    writer.hold(record())
    reader.read()
    clock.now += LEASE_S + 1
    assert reader.read() == {}


def test_a_heartbeat_keeps_a_worker(store, clock):
    writer, reader = store(), store()
    writer.hold(record())
    for _ in range(4):
        reader.read()
        clock.now += LEASE_S / 2
        writer.hold(record())
    assert reader.read() == by_id(record())


def test_what_nobody_renews_is_removed_at_last(store, clock, tmp_path):
    store().hold(record())
    reader = store()
    reader.read()
    clock.now += 11 * LEASE_S
    assert reader.read() == {} and list((tmp_path / "shared").iterdir()) == []


def test_a_worker_that_leaves_is_gone_at_once(store):
    writer = store()
    writer.hold(record())
    writer.withdraw()
    assert store().read() == {}


def test_a_restarted_worker_takes_its_own_place(store):
    store().hold(record(life=1))
    store().hold(record(life=2))
    assert store().read()["decode@b:8001"].life == 2


def test_an_id_of_another_living_launch_is_refused_by_name(store):
    store().hold(record(launch="first"))
    with pytest.raises(NameTakenError, match=r"decode@b:8001 is registered by another launch already \(first"):
        store().hold(record(launch="second"))
    assert store().read()["decode@b:8001"].launch == "first"


def test_an_id_of_a_dead_launch_is_free_after_its_lease(store, clock):
    store().hold(record(launch="first"))
    second = store()
    with pytest.raises(NameTakenError):
        second.hold(record(launch="second"))
    clock.now += LEASE_S + 1
    second.hold(record(launch="second"))
    assert store().read()["decode@b:8001"].launch == "second"


def test_leaving_takes_nobody_else_s_record_along(store, tmp_path):
    first = store()
    first.hold(record(launch="first"))
    path = tmp_path / "shared" / "decode@b:8001.json"
    path.write_bytes(seal_record(record(launch="second"), KEY))
    first.withdraw()
    assert store().read()["decode@b:8001"].launch == "second"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"worker": 7}', b"\xff" * 100, NESTED])
def test_a_file_that_can_t_be_read_harms_no_other(store, tmp_path, content):
    writer = store()
    writer.hold(record())
    (tmp_path / "shared" / "noise.json").write_bytes(content)
    assert store().read() == by_id(record())


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "wrong text"])
def test_an_odd_entry_is_left_out_by_name_and_told_once(store, tmp_path, caplog, kind):
    writer, reader = store(), store()
    writer.hold(record())
    odd_entry(tmp_path / "shared" / "a.json", kind)
    for _ in range(3):
        assert reader.read() == by_id(record())
    assert caplog.text.count(f"record_unreadable path={tmp_path}/shared/a.json") == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file of somebody else")
def test_another_user_s_file_is_left_out_by_name(store, tmp_path, caplog):
    store().hold(record())
    store().hold(record("prefill"))
    os.chown(tmp_path / "shared" / "prefill@b:8001.json", 12345, -1)
    assert store().read() == by_id(record())
    assert "prefill@b:8001.json error=it belongs to user 12345" in caplog.text


def test_a_record_that_can_t_be_read_any_more_lasts_as_long_as_its_lease(store, clock, tmp_path):
    writer, reader = store(), store()
    writer.hold(record())
    writer.hold(record("prefill"))
    assert len(reader.read()) == 2
    path = tmp_path / "shared" / "prefill@b:8001.json"
    path.unlink()
    path.mkdir()
    assert len(reader.read()) == 2
    clock.now += LEASE_S + 1
    writer.hold(record())
    assert reader.read() == by_id(record())


def test_records_that_can_none_be_read_any_more_are_an_error_of_the_folder(store, tmp_path):
    writer, reader = store(), store()
    writer.hold(record())
    reader.read()
    path = tmp_path / "shared" / "decode@b:8001.json"
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match=r"no record in .*shared can be read any more: it is no regular file"):
        reader.read()


def test_a_reader_without_descriptors_blames_no_file(store, monkeypatch):
    def fail(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    store().hold(record())
    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(StoreError, match="Too many open files"):
        store().read()


def test_a_folder_that_is_gone_is_an_error_with_its_name(store, tmp_path):
    with pytest.raises(StoreError, match=rf"discovery.folder: {tmp_path}/shared can't be read"):
        store().read()


def test_a_deleted_record_comes_back_with_the_next_heartbeat(store, tmp_path):
    writer = store()
    writer.hold(record())
    os.unlink(tmp_path / "shared" / "decode@b:8001.json")
    writer.hold(record())
    assert store().read() == by_id(record())
