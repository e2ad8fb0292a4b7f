"""A decode worker of several stubs: one engine, one token bus; a stub that dies takes only its own streams along."""

from __future__ import annotations

import os
import signal

import pytest
from tritonclient.utils import InferenceServerException

from bireme.discovery.run_folder import ask_sleep, wake
from bireme.engines.mocker.tokens import expected_tokens, printable_ids
from bireme.launch import free_ports, processes
from bireme.launch.canaries import CanarySettings
from bireme.launch.deployment import DeploymentSettings
from bireme.recipe_files import load_recipe
from tests.server.faults.test_faults import PROMPT, Run
from tests.server.test_pipeline_instances import num_right
from tests.server.triton_client import Client
from tests.server.watch import is_idle, outliving_a_killed_stub, total, until
from tests.servers import supervised

pytestmark = [pytest.mark.server, pytest.mark.flaky(reruns=1)]

STUBS = ("decode", "decode.1", "decode.2")
LENGTH = 200
COUNT = 24


@pytest.fixture(scope="module")
def deployment(sample_model, write_recipe):
    engine = {"engine": "mocker", "instances": 3, "engine_config": {"max_batch_size": 64, "mocker": {"step_ms": 20}}}
    settings = DeploymentSettings(
        recipe=load_recipe(write_recipe(sample_model("llama"), {"decode": engine})),
        ports=free_ports(),
        health_port=0,
        canaries=CanarySettings(interval_s=0),
    )
    with supervised(settings) as running:
        yield running
        broker = processes.broker(running.server.run_folder.path, "decode")
    until(lambda: not processes.is_alive(broker), 10, "the broker's end with its server's")


@pytest.fixture(scope="module")
def right(sample_model):
    """Return the tokens of the streams of a Run."""
    ids, _ = printable_ids(str(sample_model("llama")))
    return [expected_tokens([*PROMPT, 300 + number], LENGTH, ids) for number in range(COUNT)]


def streams(server):
    return {name: total(server, "bireme_streams", worker=name) for name in STUBS}


def start(server, model="decode"):
    extra = {"stream": True} if model == "generate" else {}
    return Run(server, model, count=COUNT, max_tokens=LENGTH, **extra)


def served(server):
    return total(server, "bireme_requests_total", worker="decode", outcome="length")


def test_direct_streams_are_shared_and_counted_once(deployment, right):
    server = deployment.server
    assert set(processes.stubs(server.pid)) >= {*STUBS}
    run = start(server)
    until(lambda: sum(streams(server).values()) >= COUNT, 10, "streams on the page")
    assert all(streams(server).values())
    assert run.join() == right
    until(lambda: served(server) == COUNT, 10, "all requests counted")


def test_the_token_bus_serves_pipelines_as_with_one_stub(deployment, right):
    before = served(deployment.server)
    assert start(deployment.server, "generate").join() == right
    until(lambda: served(deployment.server) == before + COUNT, 10, "all requests counted")


def test_a_request_is_aborted_by_whichever_stub_is_told_to(deployment):
    server, client = deployment.server, Client(deployment.server.grpc)
    streams = [
        iter(Client(server.grpc).stream("decode", input_ids=PROMPT, max_tokens=5000, request_id=f"long-{number}"))
        for number in range(6)
    ]
    for one in streams:
        next(one)
    for number in range(6):
        list(client.stream("decode", abort=True, request_id=f"long-{number}"))
    for one in streams:
        with pytest.raises(InferenceServerException, match="aborted"):
            list(one)
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        list(client.stream("decode", abort=True, request_id="long-7"))


def test_a_client_that_leaves_is_noticed_by_the_stub_that_has_its_stream(deployment):
    server = deployment.server
    readers = [Client(server.grpc).stream("decode", input_ids=PROMPT, max_tokens=5000) for _ in range(9)]
    for one in [iter(reader) for reader in readers]:
        next(one)
    for reader in readers:
        reader.cancel()
    until(lambda: is_idle(server), 20, "nothing left in the engine")


@pytest.mark.parametrize("victim", STUBS[::2])
def test_a_killed_stub_is_replaced_while_engine_and_streams_of_the_others_go_on(deployment, right, victim):
    until(lambda: deployment.health()["status"] == "ready", 30, "ready, whatever went before")
    server = deployment.server
    engine = server.engine_pid("decode")
    until(lambda: not any(streams(server).values()), 10, "no stream of an earlier test on the page")
    run = start(server)
    until(lambda: all(count > 5 for count in run.tokens), 30, "streams under way")
    until(lambda: sum(streams(server).values()) == COUNT, 10, "streams on the page")
    with outliving_a_killed_stub(server):
        before, own = deployment._watchdog.stubs(), streams(server)[victim]
        os.kill(before[victim], signal.SIGKILL)
        until(lambda: deployment.health()["status"] == "not_ready", 10, "readiness says so")
        until(lambda: deployment.health()["status"] == "ready", 30, "ready again")
        assert server.engine_pid("decode") == engine
        assert not {before[name] for name in STUBS} & set(deployment._watchdog.stubs().values())
        until(lambda: num_right(run, right) >= COUNT - own, 30, "the others' streams at their end")
        until(lambda: is_idle(server), 20, "the dead one's requests aborted")
        count = served(server)
        assert start(server).join() == right
        until(lambda: served(server) - count == COUNT, 10, "counters go on")
        assert server.engine_pid("decode") == engine


def subscribed(server):
    return [name for name in STUBS if total(server, "bireme_bus_subscriptions", worker=name)]


def test_streams_of_pipelines_outlive_the_stub_of_their_subscription(deployment, right):
    server = deployment.server
    engine = server.engine_pid("decode")
    run = start(server, "generate")
    until(lambda: all(count > 5 for count in run.tokens), 30, "streams under way")
    until(lambda: subscribed(server), 10, "the subscription on the page")
    os.kill(deployment._watchdog.stubs()[subscribed(server)[0]], signal.SIGKILL)
    assert run.join() == right
    assert server.engine_pid("decode") == engine
    until(lambda: deployment.health()["status"] == "ready", 30, "ready again")


def test_a_worker_of_several_stubs_sleeps_and_is_woken(deployment, right):
    server = deployment.server
    broker = processes.broker(server.run_folder.path, "decode")
    ask_sleep(server.run_folder.path, "decode")
    until(lambda: deployment.health()["workers"]["decode"]["reason"] == "asleep", 30, "readiness says so")
    assert processes.engines(broker) == []
    until(lambda: "decode is asleep" in refusal(server), 10, "each stub knows why")
    assert wake(server.run_folder.path, "decode")
    until(lambda: deployment.health()["status"] == "ready", 30, "ready again")
    assert start(server).join() == right


def refusal(server):
    with pytest.raises(InferenceServerException) as caught:
        list(Client(server.grpc).stream("decode", input_ids=PROMPT, max_tokens=5))
    return str(caught.value)


def test_a_killed_engine_is_started_again_for_all_stubs(deployment, right):
    server = deployment.server
    engine = server.engine_pid("decode")
    os.kill(engine, signal.SIGKILL)
    folder = server.run_folder.path
    until(lambda: processes.engines(processes.broker(folder, "decode")) not in ([], [engine]), 20, "another")
    until(lambda: deployment.health()["status"] == "ready", 30, "ready again")
    assert start(server).join() == right
