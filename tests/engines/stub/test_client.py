"""The client and its engine process: requests, buses, bad input, restarts."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from bireme.discovery import run_folder
from bireme.engines.mocker.tokens import expected_tokens
from bireme.engines.stub.client import EngineClient
from bireme.engines.stub.life import Life
from bireme.errors import ConfigError, UnavailableError
from bireme.kv.transfer import shm_file
from bireme.launch import processes
from bireme.messages import Abort, Commands, Drain, SamplingParams, Submit, encode
from bireme.metrics import Registry
from tests.engines.engine_fixtures import PROMPT, Bus, Collector, make_request, recipe_in, wait_for


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """Return a client as `client` is, for all tests that leave its engine as it was."""
    folder = tmp_path_factory.mktemp("run")
    lasting = EngineClient(recipe_in(folder), "decode", Registry("decode"), logging.getLogger("test"), folder)
    lasting.start()
    yield lasting
    lasting.stop()


def commands(client, *items, life=None):
    return encode(Commands(client.life if life is None else life, list(items)))


def test_a_request_gets_its_tokens_and_one_finish(lasting):
    sink = Collector()
    lasting.submit(make_request(max_tokens=20), sink)
    finish = sink.wait()
    assert sink.tokens == expected_tokens(PROMPT, 20)
    assert (finish.reason, finish.usage.prompt_tokens, finish.usage.completion_tokens) == ("length", len(PROMPT), 20)
    assert len(sink.finishes) == 1


def test_log_probs_arrive_with_their_tokens(lasting):
    sink = Collector()
    lasting.submit(make_request(sampling=SamplingParams(max_tokens=5, logprobs=1, prompt_logprobs=0)), sink)
    sink.wait()
    assert [entry[0][0] for entry in sink.logprobs] == sink.tokens == expected_tokens(PROMPT, 5)
    assert [entry[0][0] for entry in sink.prompt_logprobs] == PROMPT[1:]


def test_a_full_queue_is_refused_as_exhausted(make_recipe, start_client):
    engine = {"max_batch_size": 1, "scheduler_config": {"max_queue_size": 1}}
    client = start_client(make_recipe(engine=engine, step_ms=20))
    sinks = [Collector() for _ in range(4)]
    for sink in sinks:
        client.submit(make_request(max_tokens=1000), sink)
    assert sinks[-1].wait().error.startswith("RESOURCE_EXHAUSTED: queue: 1 requests wait")


def test_many_requests_at_once_keep_their_tokens_apart(lasting):
    prompts = [[400 + i, *PROMPT[: i % 7]] for i in range(100)]
    sinks = [Collector() for _ in prompts]
    for prompt, sink in zip(prompts, sinks, strict=True):
        lasting.submit(make_request(prompt, 5 + len(prompt)), sink)
    for prompt, sink in zip(prompts, sinks, strict=True):
        sink.wait()
        assert sink.tokens == expected_tokens(prompt, 5 + len(prompt))


def test_an_abort_ends_the_request_as_cancelled(lasting):
    sink = Collector()
    number = lasting.submit(make_request(max_tokens=100_000), sink)
    wait_for(lambda: sink.tokens)
    lasting.abort(number)
    assert sink.wait().reason == "cancelled"
    lasting.abort(number)  # harmless


def test_a_failing_sink_hurts_no_other_stream(lasting):
    class Failing(Collector):
        def push(self, *_):
            raise RuntimeError("sink is broken")

    good = Collector()
    lasting.submit(make_request(max_tokens=50), Failing())
    lasting.submit(make_request(max_tokens=50), good)
    assert good.wait().reason == "length"
    assert len(good.tokens) == 50
    wait_for(lambda: lasting.pong.num_running == 0)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (make_request([]), "INVALID_ARGUMENT: prompt: no tokens"),
        (make_request([5, -1]), "token id -1 at position 1"),
        (make_request([5, 32000]), "ids of this model are 0 to 31999"),
        (make_request(max_tokens=0), "max_tokens: 0; 1 or more"),
        (make_request(sampling=SamplingParams(temperature=float("nan"))), "temperature: nan"),
        (make_request(lora_name="x"), "INVALID_ARGUMENT: lora_name"),
        (make_request(request_type="generation_only"), "needs disaggregated_params"),
        (make_request(request_type="context_only"), "moves no KV"),
    ],
)
def test_a_bad_request_is_refused_with_its_reason(lasting, request_, text):
    sink = Collector()
    lasting.submit(request_, sink)
    finish = sink.wait()
    assert finish.reason == "error"
    assert text in finish.error


def test_a_bus_gets_the_steps_of_its_own_requests(lasting):
    bus, other = Bus(lasting), Bus(lasting)
    lasting.send_commands(bus.consumer, commands(lasting, Submit(7, make_request(max_tokens=12))))
    assert bus.finish_of(7).reason == "length"
    assert bus.tokens_of(7) == expected_tokens(PROMPT, 12)
    assert not other.steps


def test_a_closed_bus_leaves_nothing_running(lasting):
    bus = Bus(lasting)
    lasting.send_commands(
        bus.consumer, commands(lasting, *[Submit(i, make_request(max_tokens=99999)) for i in (1, 2, 3)])
    )
    wait_for(lambda: bus.tokens_of(3))
    lasting.close_bus(bus.consumer)
    wait_for(lambda: lasting.pong.num_running == 0)
    with pytest.raises(UnavailableError, match="subscription has ended"):
        lasting.send_commands(bus.consumer, commands(lasting, Abort(1)))


def test_commands_for_another_life_are_refused_or_ignored(lasting):
    bus = Bus(lasting)
    stale = commands(lasting, Submit(1, make_request()), life=lasting.life - 1)
    lasting.send_commands(bus.consumer, stale)
    assert bus.finish_of(1).error.startswith(f"UNAVAILABLE: engine life {lasting.life - 1} has ended")


def test_a_bus_cannot_drain_the_engine(lasting):
    bus = Bus(lasting)
    lasting.send_commands(bus.consumer, commands(lasting, Drain(), Submit(1, make_request())))
    assert bus.finish_of(1).reason == "length"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        encode("text"),
        encode([[], {}]),
        b"\x91" * 5000,
        b"\x92\x01\x91\x92\xa1\xff\x01",
    ],
)
def test_garbage_does_not_hurt_the_engine(lasting, payload):
    bus, life = Bus(lasting), lasting.life
    lasting.send_commands(bus.consumer, payload)
    lasting.send_commands(bus.consumer, commands(lasting, Submit(1, make_request())))
    assert bus.finish_of(1).reason == "length"
    assert lasting.life == life


def test_a_malformed_submit_is_answered_and_its_neighbors_run(lasting):
    bus = Bus(lasting)
    good = encode(Submit(2, make_request()))
    batch = encode([lasting.life, [["s", 1, {"prompt": 5}], msgspec.msgpack.decode(good), ["unknown"]]])
    lasting.send_commands(bus.consumer, batch)
    assert "malformed submit" in bus.finish_of(1).error
    assert bus.finish_of(2).reason == "length"


def test_a_number_used_twice_ends_both_requests(lasting):
    bus = Bus(lasting)
    lasting.send_commands(bus.consumer, commands(lasting, Submit(1, make_request(max_tokens=99999))))
    wait_for(lambda: bus.tokens_of(1))
    lasting.send_commands(bus.consumer, commands(lasting, Submit(1, make_request(PROMPT[:3]))))
    assert "number: 1 is in flight" in bus.finish_of(1).error
    wait_for(lambda: lasting.pong.num_running == 0)
    assert sum(1 in step.finished for step in bus.steps) == 1


@pytest.mark.flaky(reruns=1)
def test_a_killed_engine_fails_what_was_in_flight_and_serves_again(client):
    sink, bus, life = Collector(), Bus(client), client.life
    client.submit(make_request(max_tokens=99999), sink)
    client.send_commands(bus.consumer, commands(client, Submit(1, make_request(max_tokens=99999))))
    wait_for(lambda: sink.tokens and bus.steps)
    os.kill(client.pid, signal.SIGKILL)
    assert sink.wait(5).error.startswith(
        "UNAVAILABLE: engine lost: the engine process of decode has ended (signal SIGKILL)"
    )
    wait_for(lambda: bus.steps[-1].lost)
    assert bus.steps[-1].life == life
    wait_for(lambda: client.is_ready)
    assert client.life > life
    again = Collector()
    client.submit(make_request(), again)
    assert again.wait().reason == "length"


def with_standby(make_recipe, start_client):
    """Return a client whose engine has a process beside it that waits, and that one's id."""
    started = start_client(make_recipe(top={"supervisor": {"restart_backoff_s": 0.01, "standby": True}}))
    wait_for(standbys)
    return started, standbys()[0]


def standbys():
    mine = processes.children(os.getpid())
    return [pid for pid in mine if "--standby" in processes.command_line(pid) and not processes.is_engine(pid)]


@pytest.mark.flaky(reruns=1)
def test_a_process_that_waits_begins_the_life_after_a_kill(make_recipe, start_client):
    client, standby = with_standby(make_recipe, start_client)
    os.kill(client.pid, signal.SIGKILL)
    wait_for(lambda: client.is_ready and client.pid == standby)
    wait_for(lambda: processes.is_engine(standby) and standbys())
    sink = Collector()
    client.submit(make_request(), sink)
    assert sink.wait().error == ""


@pytest.mark.flaky(reruns=1)
def test_a_process_that_waits_and_is_killed_is_no_obstacle(make_recipe, start_client):
    client, standby = with_standby(make_recipe, start_client)
    engine = client.pid
    os.kill(standby, signal.SIGKILL)
    wait_for(lambda: processes.state(standby) == "")
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: client.is_ready and client.pid not in (engine, standby))


@pytest.mark.flaky(reruns=1)
def test_tokens_before_a_kill_are_the_start_of_the_answer(client):
    sink = Collector()
    client.submit(make_request(max_tokens=99999), sink)
    wait_for(lambda: len(sink.tokens) > 20)
    os.kill(client.pid, signal.SIGKILL)
    sink.wait()
    assert sink.tokens == expected_tokens(PROMPT, len(sink.tokens))


def test_resumed_tokens_go_on_exactly(lasting):
    answer, sink = expected_tokens(PROMPT, 30), Collector()
    lasting.submit(make_request(PROMPT + answer[:12], 30, num_resumed=12), sink)
    finish = sink.wait()
    assert answer[:12] + sink.tokens == answer
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (len(PROMPT), 30)


@pytest.mark.flaky(reruns=1)
def test_a_stopped_process_is_killed_and_replaced(make_recipe, start_client):
    supervisor = {"ping_interval_s": 0.05, "ping_timeout_s": 0.3, "restart_backoff_s": 0.01}
    client, sink = start_client(make_recipe(top={"supervisor": supervisor})), Collector()
    client.submit(make_request(max_tokens=99999), sink)
    wait_for(lambda: sink.tokens)
    os.kill(client.pid, signal.SIGSTOP)
    assert "no answer to pings for 0.3 s" in sink.wait().error
    wait_for(lambda: client.is_ready)


def test_a_step_without_end_is_killed_as_a_stall(make_recipe, start_client):
    supervisor = {"ping_interval_s": 0.05, "stall_timeout_s": 0.3, "restart_backoff_s": 0.01}
    client, sink = start_client(make_recipe(step_ms=60_000, top={"supervisor": supervisor})), Collector()
    bus = Bus(client)
    client.submit(make_request(), sink)
    assert "supervisor.stall_timeout_s is 0.3" in sink.wait().error
    assert sink.finishes[0].error.startswith("UNAVAILABLE: engine stalled: ")
    wait_for(lambda: bus.steps and bus.steps[-1].has_stalled)
    wait_for(lambda: client.is_ready)


def test_a_second_stall_ends_the_request_that_was_tried_alone_and_not_those_beside_it(make_recipe, start_client):
    supervisor = {"ping_interval_s": 0.05, "stall_timeout_s": 0.5, "restart_backoff_s": 0.01}
    client = start_client(make_recipe(step_ms=60_000, top={"supervisor": supervisor}))
    bus, tried, waits = Bus(client), Collector(), Collector()
    client.submit(make_request(was_in_stall=True), tried)
    client.submit(make_request(was_in_stall=True), waits)
    client.send_commands(bus.consumer, commands(client, Submit(1, make_request())))
    assert tried.wait().error.startswith("INVALID_ARGUMENT: the request was in an engine that stalled, and was tried")
    assert waits.wait().error.startswith("UNAVAILABLE: engine lost: ")
    wait_for(lambda: bus.steps and bus.steps[-1].lost)
    assert not bus.steps[-1].has_stalled


def test_requests_that_wait_to_be_tried_can_be_aborted(make_recipe, start_client):
    client, sinks = start_client(make_recipe(step_ms=60_000)), [Collector(), Collector()]
    _, number = [client.submit(make_request(was_in_stall=True), sink) for sink in sinks]
    client.abort(number)
    assert sinks[1].wait().reason == "cancelled" and not sinks[0].finishes


def test_requests_are_tried_one_after_the_other(make_recipe, start_client):
    client, sinks = start_client(make_recipe(step_ms=1)), [Collector() for _ in range(5)]
    for sink in sinks:
        client.submit(make_request(was_in_stall=True), sink)
    assert [sink.wait().reason for sink in sinks] == ["length"] * 5
    assert all(sink.tokens == expected_tokens(PROMPT, 10) for sink in sinks)


def test_a_long_step_within_the_limit_is_no_hang(make_recipe, start_client):
    supervisor = {"ping_interval_s": 0.05, "ping_timeout_s": 0.2}
    client, sink = start_client(make_recipe(step_ms=700, top={"supervisor": supervisor})), Collector()
    client.submit(make_request(max_tokens=1), sink)
    assert sink.wait().reason == "length"


@pytest.mark.flaky(reruns=1)
def test_after_too_many_restarts_slow_ones_go_on(make_recipe, start_client):
    supervisor = {"ping_interval_s": 0.05, "max_restarts": 1, "restart_backoff_s": 0.01, "slow_restart_s": 0.5}
    client = start_client(make_recipe(top={"supervisor": supervisor}))
    for _ in range(3):
        before = client.life
        os.kill(client.pid, signal.SIGKILL)
        wait_for(lambda before=before: client.is_ready and client.life != before)
    os.kill(client.pid, signal.SIGKILL)
    wait_for(lambda: "0.5 s (supervisor.slow_restart_s)" in client.state)


@pytest.mark.flaky(reruns=1)
def test_too_many_restarts_leave_the_worker_down_with_a_remedy(make_recipe, start_client):
    supervisor = {"ping_interval_s": 0.05, "max_restarts": 1, "restart_backoff_s": 0.01, "slow_restart_s": 0}
    client = start_client(make_recipe(top={"supervisor": supervisor}))
    first = client.life
    os.kill(client.pid, signal.SIGKILL)
    wait_for(lambda: client.is_ready and client.life != first)
    os.kill(client.pid, signal.SIGKILL)
    wait_for(lambda: "stays down" in client.state)
    with pytest.raises(UnavailableError, match="started again 1 times in 300 s .*reload the model decode"):
        client.submit(make_request(), Collector())


@pytest.mark.flaky(reruns=1)
def test_submits_that_race_a_restart_all_end(client):
    sinks, refused = [], 0
    killer = threading.Timer(0.1, lambda: os.kill(client.pid, signal.SIGKILL))
    killer.start()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        sink = Collector()
        try:
            client.submit(make_request(max_tokens=3), sink)
            sinks.append(sink)
        except UnavailableError as error:
            refused += 1
            assert str(error)
        time.sleep(0.001)
    for sink in sinks:
        finish = sink.wait()
        assert finish.reason == "length" or finish.error.startswith("UNAVAILABLE")
        assert len(sink.finishes) == 1
    assert refused


@pytest.mark.flaky(reruns=1)
def test_what_a_killed_engine_left_is_swept(client, tmp_path):
    folder, life = tmp_path / "run", client.life
    left = shm_file.SHM_DIR / f"{shm_file.file_prefix(folder, 'decode')}left"
    left.write_bytes(b"x")
    os.kill(client.pid, signal.SIGKILL)
    wait_for(lambda: client.is_ready and client.life != life)
    assert not left.exists()
    assert run_folder.find(folder, "decode").life == client.life
    assert not [path for path in folder.iterdir() if str(life) in path.name]


def test_stop_ends_the_process_and_withdraws_it(make_recipe, start_client, tmp_path):
    client = start_client(make_recipe())
    pid, sink = client.pid, Collector()
    client.submit(make_request(max_tokens=99999), sink)
    client.stop()
    assert sink.wait().error.startswith("UNAVAILABLE") or sink.wait().reason == "cancelled"
    assert not Path(f"/proc/{pid}").exists()
    assert not (tmp_path / "run" / "decode.json").exists()
    client.stop()  # harmless


def test_a_drained_engine_finishes_what_runs_and_refuses_more(client):
    sink = Collector()
    client.submit(make_request(max_tokens=50), sink)
    assert client.drain(5)
    assert len(sink.tokens) == 50
    with pytest.raises(UnavailableError, match="draining"):
        client.submit(make_request(), Collector())


@pytest.mark.flaky(reruns=1)
def test_engine_metrics_reach_the_stub_and_gauges_of_a_dead_life_are_zero(client):
    sink = Collector()
    client.submit(make_request(max_tokens=99999), sink)
    wait_for(lambda: client.pong and client.pong.step > 20)
    os.kill(client.pid, signal.SIGKILL)
    sink.wait()
    wait_for(lambda: client.is_ready)
    delta = client.metrics.take_delta()
    counters = {(name, labels): value for name, labels, value in delta.counters}
    gauges = {name: value for name, _, value in delta.gauges}
    assert counters["bireme_engine_restarts_total", ("decode", "exit")] == 1
    assert counters["bireme_generated_tokens_total", ("decode",)] > 0
    assert (gauges["bireme_requests_running"], gauges["bireme_engine_up"]) == (0, 1)


def test_a_load_failure_says_why(make_recipe, start_client):
    with pytest.raises(ConfigError, match="set mocker.vocab_size"):
        start_client(make_recipe(vocab_size=0))


def test_the_last_word_of_an_engine_that_has_ended_is_waited_for(tmp_path):
    life = Life("decode", 1, tmp_path)
    with zmq.Context() as context, context.socket(zmq.PUSH) as engine:
        assert list(life.last_frames(0.0)) == []
        later = threading.Timer(0.2, lambda: (engine.connect(f"ipc://{tmp_path}/decode-1.s"), engine.send(b"why")))
        later.start()
        assert list(life.last_frames(60.0)) == [b"why"]
        later.join()
    life.end()


def test_a_key_that_the_engine_refuses_fails_the_load(make_recipe, start_client):
    with pytest.raises(ConfigError, match="max_batch_size: 0; 1 or more"):
        start_client(make_recipe(engine={"max_batch_size": 0}))


def test_a_load_failure_with_a_transfer_ends_just_as_well(make_recipe, start_client):
    engine = {"cache_transceiver_config": {"backend": "DEFAULT"}}
    with pytest.raises(ConfigError, match="set mocker.vocab_size"):
        start_client(make_recipe(vocab_size=0, engine=engine))


def test_a_transfer_that_is_not_there_fails_the_load(make_recipe, start_client):
    with pytest.raises(ConfigError, match="cache_transceiver_config.backend: MPI"):
        start_client(make_recipe(engine={"cache_transceiver_config": {"backend": "MPI"}}))


def test_a_python_that_fails_is_named(make_recipe, start_client, monkeypatch):
    monkeypatch.setenv("BIREME_ENGINE_PYTHON", "/bin/false")
    with pytest.raises(UnavailableError, match=r"before it was ready \(exit status 1\).*BIREME_ENGINE_PYTHON"):
        start_client(make_recipe())


def test_a_load_past_its_limit_is_given_up(make_recipe, start_client):
    with pytest.raises(UnavailableError, match="was not ready in supervisor.start_timeout_s = 0.5"):
        start_client(make_recipe(load_ms=60_000, top={"supervisor": {"start_timeout_s": 0.5}}))


def test_a_worker_that_is_not_in_the_recipe_is_refused(make_recipe, tmp_path):
    with pytest.raises(ConfigError, match="prefill is not in recipe"):
        EngineClient(make_recipe(), "prefill", Registry("prefill"), logging.getLogger("test"), run_dir=tmp_path)


def test_a_start_ends_where_a_stop_comes_before_any_life(make_recipe, tmp_path):
    client = EngineClient(make_recipe(), "decode", Registry("decode"), logging.getLogger("test"), tmp_path)
    client.stop()
    refused = []

    def start():
        with pytest.raises(UnavailableError, match="decode is stopping") as error:
            client.start()
        refused.append(error)

    threading.Thread(target=start, daemon=True).start()
    wait_for(lambda: refused)


def test_a_long_run_directory_still_gets_sockets(make_recipe, tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    recipe = make_recipe()
    client = EngineClient(recipe, "decode", Registry("decode"), logging.getLogger("test"), folder)
    try:
        client.start()
        sink = Collector()
        client.submit(make_request(), sink)
        assert sink.wait().reason == "length"
    finally:
        client.stop()
