"""A pipeline of several stubs: they share its requests, count together, and one that dies takes only its own along."""

from __future__ import annotations

import os
import signal

import pytest

from bireme.engines.mocker.tokens import expected_tokens, printable_ids
from bireme.launch import free_ports, processes
from bireme.launch.canaries import CanarySettings
from bireme.launch.deployment import DeploymentSettings
from bireme.recipe_files import load_recipe
from tests.server.faults.test_faults import PROMPT, Run
from tests.server.triton_client import Client
from tests.server.watch import is_idle, outliving_a_killed_stub, total, until
from tests.servers import supervised

pytestmark = [pytest.mark.server, pytest.mark.flaky(reruns=1)]

STUBS = ("generate", "generate_1", "generate_2")
LENGTH = 150


@pytest.fixture(scope="module")
def deployment(sample_model, write_recipe):
    engine = {"engine": "mocker", "engine_config": {"max_batch_size": 64, "mocker": {"step_ms": 20}}}
    recipe = write_recipe(
        sample_model("llama"), {"decode": engine}, pipeline={"instances": {"generate": len(STUBS), "completion": 2}}
    )
    settings = DeploymentSettings(
        recipe=load_recipe(recipe), ports=free_ports(), health_port=0, canaries=CanarySettings(interval_s=0)
    )
    with supervised(settings) as running:
        yield running


@pytest.fixture(scope="module")
def right(sample_model):
    """Return the tokens of the streams of a Run."""
    ids, _ = printable_ids(str(sample_model("llama")))
    return [expected_tokens([*PROMPT, 300 + number], LENGTH, ids) for number in range(24)]


def served(server):
    return {name: total(server, "bireme_requests_total", worker=name, outcome="length") for name in STUBS}


def streams(server):
    return {name: total(server, "bireme_streams", worker=name) for name in STUBS}


def num_right(run, right):
    return sum(answer == expected for answer, expected in zip(run.answers, right, strict=True))


def test_all_stubs_serve_and_count_their_own(deployment, right):
    server, num_asked = deployment.server, 0
    assert set(processes.stubs(server.pid)) >= {*STUBS, "completion_1", "chat"}
    while not num_asked or not all(served(server).values()):
        assert num_asked < 5 * len(right), served(server)
        assert Run(server, "generate", count=len(right), max_tokens=LENGTH, stream=True).join() == right
        num_asked += len(right)
        until(lambda asked=num_asked: sum(served(server).values()) == asked, 10, "all requests counted")


def test_a_unary_pipeline_of_two_stubs_answers(deployment):
    answers = [Client(deployment.server.grpc).infer("completion", input_ids=PROMPT, max_tokens=4) for _ in range(6)]
    assert all(len(answer["output_ids"]) == 4 for answer in answers)
    until(lambda: total(deployment.server, "bireme_requests_total", worker="completion_1") > 0, 10, "its second stub")


def test_a_client_that_leaves_is_noticed_by_the_stub_that_has_its_stream(deployment):
    server = deployment.server
    readers = [Client(server.grpc).stream("generate", input_ids=PROMPT, max_tokens=5000, stream=True) for _ in range(9)]
    answers = [iter(reader) for reader in readers]  # kept: a reader whose iterator is gone has left
    for one in answers:
        next(one)
    until(lambda: sum(streams(server).values()) == len(readers), 10, "streams on the page")
    for reader in readers:
        reader.cancel()
    until(lambda: is_idle(server), 20, "nothing left in the engine")
    until(lambda: not any(streams(server).values()), 10, "no stream open")


@pytest.mark.parametrize("victim", STUBS[::2])
def test_a_killed_stub_is_replaced_while_streams_of_the_others_go_on(deployment, right, victim):
    server = deployment.server
    run = Run(server, "generate", count=24, max_tokens=LENGTH, stream=True)
    until(lambda: all(count > 5 for count in run.tokens), 30, "streams under way")
    until(lambda: sum(streams(server).values()) == len(right), 10, "streams on the page")
    with outliving_a_killed_stub(server):
        before, own = deployment._watchdog.stubs(), streams(server)[victim]
        os.kill(before[victim], signal.SIGKILL)
        until(lambda: deployment.health()["status"] == "not_ready", 10, "readiness says so")
        until(lambda: deployment.health()["status"] == "ready", 30, "ready again")
        assert not {before[name] for name in STUBS} & set(deployment._watchdog.stubs().values())
        until(lambda: num_right(run, right) >= 24 - own, 30, "the others' streams at their end")
        until(lambda: all(len(processes.stubs(server.pid)[name]) == 1 for name in STUBS), 20, "the former stubs' end")
        count = sum(served(server).values())
        assert Run(server, "generate", count=24, max_tokens=LENGTH, stream=True).join() == right
        until(lambda: sum(served(server).values()) - count >= 24, 10, "counters go on")
