"""Who is alive, who hangs, who stalls."""

from __future__ import annotations

import pytest

from bireme.config import SupervisorConfig
from bireme.engines.stub import heartbeat as module
from bireme.engines.stub.heartbeat import Heartbeat
from bireme.messages import Pong

CONFIG = SupervisorConfig(ping_interval_s=0.1, ping_timeout_s=1.0, stall_timeout_s=5.0)


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def look_for(heartbeat, clock, seconds, pong=None):
    for _ in range(round(seconds / 0.1)):
        clock.now += 0.1
        if pong is not None:
            heartbeat.on_pong(pong)
        if verdict := heartbeat.check():
            return verdict
    return None


def pong(step=1, age_ms=0.0, waiting=0, running=0):
    return Pong(1, 1, step, age_ms, waiting, running)


def test_silence_past_the_limit_is_a_hang(clock):
    heartbeat = Heartbeat(CONFIG)
    assert look_for(heartbeat, clock, 0.9) is None
    assert look_for(heartbeat, clock, 0.5).cause == "hang"


def test_an_engine_that_only_waits_for_a_cpu_is_no_hang_until_the_stall_limit(clock):
    heartbeat = Heartbeat(CONFIG, waits_for_machine=lambda: True)
    assert look_for(heartbeat, clock, 5) is None
    assert "stall_timeout_s is 5" in look_for(heartbeat, clock, 2).text


def test_silence_goes_on_where_it_was_once_the_machine_no_longer_holds_an_engine_up(clock):
    waits = [True] * 20
    heartbeat = Heartbeat(CONFIG, waits_for_machine=lambda: bool(waits and waits.pop()))
    assert look_for(heartbeat, clock, 2.9) is None
    assert look_for(heartbeat, clock, 0.5).cause == "hang"


def test_a_supervisor_that_was_stopped_itself_kills_nobody(clock):
    heartbeat = Heartbeat(CONFIG)
    clock.now += 3600
    assert heartbeat.check() is None


def test_a_step_past_the_limit_is_a_stall(clock):
    heartbeat = Heartbeat(CONFIG)
    assert look_for(heartbeat, clock, 1, pong(age_ms=4900, running=1)) is None
    verdict = look_for(heartbeat, clock, 1, pong(age_ms=5100, running=1))
    assert verdict.cause == "stall"
    assert "supervisor.stall_timeout_s is 5" in verdict.text


def test_work_without_steps_is_a_stall_and_idleness_is_not(clock):
    assert look_for(Heartbeat(CONFIG), clock, 20, pong(waiting=1)).cause == "stall"
    assert look_for(Heartbeat(CONFIG), clock, 20, pong()) is None


def test_waiting_for_kv_is_no_stall(clock):
    assert look_for(Heartbeat(CONFIG, transfer_timeout_s=60.0), clock, 20, pong(waiting=1)) is None


def test_moving_steps_are_no_stall(clock):
    heartbeat = Heartbeat(CONFIG)
    for step in range(200):
        assert look_for(heartbeat, clock, 0.1, pong(step=step, running=1)) is None
