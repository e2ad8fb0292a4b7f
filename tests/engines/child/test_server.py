"""What an engine makes, on its way out of the engine process."""

from __future__ import annotations

import time

import pytest
import zmq

from bireme.engines.base import PlainTokens, StepOutput
from bireme.engines.child.server import EngineServer
from bireme.messages import Finish, Usage, decode_step, split
from bireme.metrics import Registry

KEY = (5, 1)


@pytest.fixture
def frames(tmp_path):
    context = zmq.Context()
    sockets = [context.socket(zmq.PUSH), context.socket(zmq.PULL)]
    for socket, end in zip(sockets, "cs", strict=True):
        socket.bind(f"ipc://{tmp_path}/e.{end}")
    yield sockets[1]
    context.destroy(0)


@pytest.fixture
def server(tmp_path, frames):
    server = EngineServer(f"ipc://{tmp_path}/e", 1, Registry("decode"))
    server._ledger.enter(KEY)
    server.start()
    yield server
    server.close()


def receive(frames):
    assert frames.poll(5000), "no frame"
    consumer, payload = split(frames.recv())
    assert consumer == KEY[0]
    return decode_step(payload)


def test_steps_in_quick_succession_share_messages_and_keep_their_order(server, frames):
    for number in range(2000):
        server.emit(number, [], PlainTokens([KEY], [number]))
    server.emit(2000, [StepOutput(KEY, [2000], finish=Finish("length", Usage()))])
    steps = [receive(frames)]
    while not steps[-1].finished:
        steps.append(receive(frames))
    assert [token for step in steps for _, tokens in step.deltas() for token in tokens] == list(range(2001))
    assert len(steps) < 500


def test_what_comes_while_another_frame_is_sent_holds_up_nothing_behind_it(server, frames):
    def make_first():
        server._io.post(b"second")  # sent in the same turn: the call for it finds nothing
        return [b"first"]

    server._io.post(make_first)
    assert [frames.recv() for _ in range(2) if frames.poll(5000)] == [b"first", b"second"]
    assert not frames.poll(100)
    server._io.post(b"third")
    assert frames.poll(5000) and frames.recv() == b"third"


def test_steps_of_an_engine_at_its_pace_go_out_each_on_its_own(server, frames):
    for number in range(20):
        server.emit(number, [], PlainTokens([KEY], [number]))
        time.sleep(0.005)
        assert receive(frames).tokens == [number]


def test_a_step_that_can_not_be_told_takes_no_other_along(server, frames):
    server.emit(1, [StepOutput(KEY, [7]), None])
    server.emit(2, [], PlainTokens([KEY], [8]))
    assert receive(frames).tokens == [8]
