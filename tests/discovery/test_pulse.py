"""The sign of life of a process, as its launch reads it."""

import asyncio
import contextlib
import errno
import gc
import os
import subprocess
import sys

import pytest

from bireme.discovery.pulse import PulseReader, has_writer, own_pulse, pulse_path

PREFIX = f"bireme_test_{os.getpid()}_"


@pytest.fixture
def pulse(monkeypatch):
    monkeypatch.setenv("BIREME_SHM_PREFIX", PREFIX)
    pulse = own_pulse()
    yield pulse
    pulse_path(PREFIX, os.getpid()).unlink(missing_ok=True)


def test_each_beat_moves_the_count(pulse):
    reader = PulseReader.open(PREFIX, os.getpid())
    before = reader.count()
    pulse.beat()
    assert reader.count() == before + 1
    reader.close()


def test_a_beat_tells_whether_there_are_requests(pulse):
    reader = PulseReader.open(PREFIX, os.getpid())
    assert reader.is_idle()
    pulse.beat(num_requests=3)
    assert not reader.is_idle()
    reader.close()


def test_a_beat_tells_whether_its_process_asks_to_be_replaced(pulse):
    reader = PulseReader.open(PREFIX, os.getpid())
    assert not reader.is_worn()
    pulse.beat(num_requests=3, is_worn=True)
    assert reader.is_worn() and not reader.is_idle()
    reader.close()


def test_a_loop_that_turns_beats(pulse):
    reader = PulseReader.open(PREFIX, os.getpid())
    before = reader.count()

    async def turn():
        task = asyncio.ensure_future(pulse.run())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(turn())
    assert reader.count() == before + 1
    reader.close()


def test_a_pulse_that_was_removed_says_nothing(pulse):
    reader = PulseReader.open(PREFIX, os.getpid())
    pulse.remove()
    pulse.beat()  # a late one disturbs nobody
    assert reader.count() is None
    reader.close()


def test_a_process_without_a_launch_has_no_pulse(monkeypatch):
    monkeypatch.delenv("BIREME_SHM_PREFIX", raising=False)
    assert own_pulse() is None
    assert PulseReader.open(PREFIX, 1) is None


def test_a_first_beat_for_which_there_is_no_room_leaves_nothing(monkeypatch):
    def pwrite(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("BIREME_SHM_PREFIX", PREFIX)
    monkeypatch.setattr(os, "pwrite", pwrite)
    before = os.listdir("/proc/self/fd")
    assert own_pulse() is None
    assert os.listdir("/proc/self/fd") == before and not pulse_path(PREFIX, os.getpid()).exists()


def test_a_pulse_without_a_beat_is_none_yet(pulse):
    os.truncate(pulse_path(PREFIX, os.getpid()), 0)
    before = os.listdir("/proc/self/fd")
    assert PulseReader.open(PREFIX, os.getpid()) is None
    assert os.listdir("/proc/self/fd") == before
    pulse.beat()
    reader = PulseReader.open(PREFIX, os.getpid())
    assert reader.count() == 2
    reader.close()


def test_only_the_process_that_has_a_pulse_open_is_its_writer(pulse):
    path = pulse_path(PREFIX, os.getpid())
    assert has_writer(path)
    pulse.remove()
    path.touch()  # a former process's that had the same pid
    assert not has_writer(path)
    assert not has_writer(path.with_name(f"{PREFIX}region"))


def test_a_process_that_ends_writes_its_pulse_no_more():
    own = "from bireme.discovery.pulse import own_pulse; pulse = own_pulse(); print(flush=True); input()"
    environment = os.environ | {"BIREME_SHM_PREFIX": PREFIX}
    with subprocess.Popen([sys.executable, "-c", own], env=environment, stdin=-1, stdout=-1) as other:
        path = pulse_path(PREFIX, other.pid)
        other.stdout.readline()
        assert has_writer(path)
        other.kill()
        other.wait()
    assert path.exists() and not has_writer(path)
    path.unlink()


def test_where_nobody_can_be_looked_up_a_pulse_is_taken_for_a_living_one(pulse, monkeypatch):
    def listdir(_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "listdir", listdir)
    assert has_writer(pulse_path(PREFIX, os.getpid()))


def test_a_reader_that_nobody_has_any_more_holds_no_descriptor(pulse):
    def num_open():  # by name: another thread may have got its number
        path, found = str(pulse_path(PREFIX, os.getpid())), 0
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found += os.readlink(f"/proc/self/fd/{number}") == path
        return found

    gc.collect()
    before = num_open()
    reader = PulseReader.open(PREFIX, os.getpid())
    assert num_open() == before + 1
    del reader
    gc.collect()
    assert num_open() == before
