"""The sign of life of a process, as its launch reads it."""

import asyncio
import os

import pytest

from bireme.discovery.pulse import PulseReader, own_pulse, pulse_path

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
