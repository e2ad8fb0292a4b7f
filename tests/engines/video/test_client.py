"""The stub's side of a video engine, over a real engine process with the mocker."""

import logging
import os
import queue
import signal

import pytest

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.engines.video.client import VideoClient
from bireme.engines.video.link import EngineLink
from bireme.errors import (
    DeadlineExceededError,
    EngineLostError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)
from bireme.messages import frame
from bireme.metrics import Registry
from bireme.video import wire
from bireme.video.rules import RequestedVideo, resolve

LIMIT_S = 120


class Sink:
    """Keeps what it is told, in order."""

    def __init__(self):
        self.news = queue.SimpleQueue()

    def queued(self, position):
        self.news.put(("queued", position))

    def stepped(self, event):
        self.news.put(("step", event.step))

    def made(self, event):
        self.news.put(("made", event))

    def failed(self, error):
        self.news.put(("failed", error))

    def until(self, kind):
        """Return what comes with the next news of this kind."""
        while True:
            name, value = self.news.get(timeout=LIMIT_S)
            if name == kind:
                return value
            assert name not in ("made", "failed"), value

    def rest(self):
        """Return the steps that are still told, and what ends the work."""
        steps = []
        while (news := self.news.get(timeout=LIMIT_S))[0] == "step":
            steps.append(news[1])
        return steps, news[1]


@pytest.fixture
def start(tmp_path):
    clients = []

    def start(step_ms=20, supervisor=None, **video):
        entry = {"engine": "mocker", "engine_config": {"mocker": {"step_ms": step_ms}}}
        timing = {"ping_interval_s": 0.05, "restart_backoff_s": 0.01} | (supervisor or {})
        tree = {"model": "none", "workers": {"video_diffusion": entry}, "video": video, "supervisor": timing}
        recipe = convert(tree, Recipe, "test")
        client = VideoClient(
            recipe, "video_diffusion", Registry("video_diffusion"), logging.getLogger("test"), tmp_path
        )
        clients.append(client)
        client.start()
        return client

    yield start
    for client in clients:
        client.stop()


def submit(client, steps=5, **fields):
    sink = Sink()
    from bireme.config import VideoConfig

    work = resolve(RequestedVideo(prompt="x", seed=1, num_inference_steps=steps, **fields), client.facts, VideoConfig())
    return sink, client.submit(work, sink)


def test_work_reports_its_steps_and_then_its_result(start):
    sink, _ = submit(start(), num_frames=5, output_format="frames")
    assert [sink.news.get(timeout=LIMIT_S)[1] for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    made = sink.until("made")
    assert made.shape == (5, 64, 64, 3) and len(made.parts[0]) == 5 * 64 * 64 * 3


def test_work_waits_in_order_and_is_told_its_position(start):
    client = start()
    first, second, third = (submit(client)[0] for _ in range(3))
    assert second.until("queued") == 1 and third.until("queued") == 2
    first.until("made")
    assert third.until("queued") == 1
    second.until("made"), third.until("made")


def test_a_full_queue_refuses(start):
    client = start(max_queue_size=1)
    submit(client, 50)[0].until("step")
    submit(client)
    with pytest.raises(ResourceExhaustedError, match="video.max_queue_size is 1"):
        submit(client)


def test_what_waits_is_aborted_at_once_and_what_runs_after_its_step(start):
    client = start(step_ms=300)
    running, running_number = submit(client, 50)
    waiting, waiting_number = submit(client)
    running.until("step")
    client.abort(waiting_number)
    assert isinstance(waiting.until("failed"), RequestCancelledError)
    client.abort(running_number)
    steps, error = running.rest()
    assert isinstance(error, RequestCancelledError) and len(steps) <= 1  # the one under way
    submit(client, 1)[0].until("made")


def test_what_waits_too_long_ends_with_its_deadline(start):
    client = start(max_queue_time_s=0.1)
    submit(client, 50)
    waiting, number = submit(client)
    client.expire(number)
    assert isinstance(waiting.until("failed"), DeadlineExceededError)


@pytest.mark.flaky(reruns=1)
def test_a_killed_engine_takes_the_work_under_way_along_and_the_queue_goes_on(start):
    client = start(step_ms=50)
    running, waiting = submit(client, 100)[0], submit(client, 2)[0]
    running.until("step")
    os.kill(client.pid, signal.SIGKILL)
    assert isinstance(running.until("failed"), EngineLostError)
    waiting.until("made")


def test_an_engine_that_hangs_in_a_step_is_killed(start):
    client = start(step_ms=60_000, step_timeout_s=0.5)
    error = submit(client)[0].until("failed")
    assert isinstance(error, EngineLostError) and "video.step_timeout_s is 0.5" in str(error)


@pytest.mark.flaky(reruns=1)
def test_an_engine_that_dies_too_often_refuses_what_waits_and_what_comes(start):
    client = start(step_ms=1000, supervisor={"max_restarts": 0})
    running, waiting = submit(client, 50)[0], submit(client)[0]
    running.until("step")
    os.kill(client.pid, signal.SIGKILL)
    assert isinstance(waiting.until("failed"), UnavailableError)
    with pytest.raises(UnavailableError, match="stays down"):
        submit(client)


@pytest.mark.flaky(reruns=1)
def test_a_full_queue_refuses_while_the_engine_is_started_again(start):
    client = start(max_queue_size=1, supervisor={"restart_backoff_s": 30.0})
    running = submit(client, 50)[0]
    running.until("step")
    os.kill(client.pid, signal.SIGKILL)
    running.until("failed")
    for _ in range(2):  # the next one to run, and one that waits
        submit(client)
    with pytest.raises(ResourceExhaustedError, match="video.max_queue_size is 1"):
        submit(client)


def test_an_abort_of_an_unknown_number_disturbs_nobody(start):
    client = start()
    running, number = submit(client, 5)
    running.until("step")
    pid = client.pid
    client.abort(number + 1)
    steps, end = running.rest()
    assert (steps, type(end), client.pid) == ([1, 2, 3, 4, 5], wire.Made, pid)


@pytest.mark.flaky(reruns=1)
def test_an_abort_of_work_that_a_past_life_took_along_disturbs_nobody(start):
    client = start(step_ms=50)
    lost, number = submit(client, 100)
    lost.until("step")
    os.kill(client.pid, signal.SIGKILL)
    assert isinstance(lost.until("failed"), EngineLostError)
    later = submit(client, 5)[0]
    later.until("step")
    client.abort(number)
    steps, end = later.rest()
    assert (steps, type(end)) == ([1, 2, 3, 4, 5], wire.Made)


@pytest.fixture
def link(tmp_path):
    """The engine's side of the sockets, in its second life; commands are obeyed as they would be from its socket."""
    link = EngineLink(f"ipc://{tmp_path}/engine", 2, Registry("video_diffusion"))
    yield link


def test_an_engine_obeys_no_command_that_was_meant_for_a_past_life(link):
    for command in (
        wire.SubmitDiffusion(1, 7, resolve_for_wire()),
        wire.SubmitDiffusion(2, 8, resolve_for_wire()),
        wire.AbortDiffusion(1, 8),
    ):
        link.take(frame(wire.VIDEO, wire.encode(command)))
    assert link.next().number == 8 and not link.is_aborted(8)
    link.take(frame(wire.VIDEO, wire.encode(wire.AbortDiffusion(2, 8))))
    assert link.is_aborted(8)


def test_messages_survive_the_wire():
    work = resolve_for_wire()
    command = wire.decode_command(wire.encode(wire.SubmitDiffusion(3, 1, work)))
    assert command == wire.SubmitDiffusion(3, 1, work)
    event = wire.decode_event(wire.encode(wire.Made(1, [b"x"], (1, 2, 3, 3), 0.5)))
    assert event.shape == (1, 2, 3, 3) and event.parts == [b"x"]


def resolve_for_wire():
    return wire.DiffusionRequest(prompt="x", width=16, height=16, num_steps=1, seed=2)
