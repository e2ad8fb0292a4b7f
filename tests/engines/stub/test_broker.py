"""Several stubs of one worker share an engine process: real brokers and mocker engines; the stubs are clients here."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys

import pytest
from msgspec.structs import replace

from bireme.engines.mocker.tokens import expected_tokens
from bireme.engines.stub.broker_wire import lock_path, slot_of, socket_path
from bireme.engines.stub.client import EngineClient
from bireme.errors import ConfigError, UnavailableError
from bireme.launch import processes
from bireme.messages import Commands, Submit, encode
from bireme.metrics import Registry
from tests.engines.engine_fixtures import PROMPT, Bus, Collector, make_request, wait_for

STUB = """
import logging, sys, time
from pathlib import Path
from bireme.engines.stub.client import EngineClient
from bireme.metrics import Registry
from bireme.recipe_files import load_recipe
from tests.engines.engine_fixtures import Collector, make_request
client = EngineClient(load_recipe(Path(sys.argv[1]), override=""), "decode", Registry("decode.2"), logging.getLogger(),
                      run_dir=Path(sys.argv[2]))
client.start()
sink = Collector()
client.submit(make_request(max_tokens=100_000), sink)
while not sink.tokens:
    time.sleep(0.01)
print("running", flush=True)
time.sleep(600)
"""


@pytest.fixture
def recipe(make_recipe):
    """Return a recipe of two stubs."""
    decode = make_recipe().workers["decode"]
    shared = {"engine": "mocker", "instances": 2, "engine_config": {"mocker": {"vocab_size": 32000, "step_ms": 2}}}
    assert decode.instances == 1
    return make_recipe(top={"workers": {"decode": shared}})


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def pair(recipe, start_client, folder):
    clients = start_client(recipe), start_client(recipe)
    yield clients
    broker = processes.broker(folder, "decode")
    for client in clients:
        client.stop()
    wait_for(lambda: broker is None or not processes.is_alive(broker))  # without stubs it ends


def submit(client, count=1, max_tokens=100_000):
    sinks = [Collector() for _ in range(count)]
    for sink in sinks:
        client.submit(make_request(max_tokens=max_tokens), sink)
    return sinks


def running(metrics):
    return sum(value for name, _, value in metrics.take_delta().gauges if name == "bireme_requests_running")


def test_stubs_share_one_engine_and_their_requests_stay_apart(pair):
    one, other = pair
    assert one.pid == other.pid and one.life == other.life and one.capacity == other.capacity
    sinks = submit(one, 20, 30) + submit(other, 20, 30)
    for sink in sinks:
        assert sink.wait().reason == "length"
        assert sink.tokens == expected_tokens(PROMPT, 30)


def test_a_stub_that_leaves_takes_its_own_requests_along(pair):
    one, other = pair
    [lost], [kept] = submit(one), submit(other, max_tokens=400)
    wait_for(lambda: lost.tokens and kept.tokens)
    one.stop()
    assert lost.wait().error.startswith("UNAVAILABLE")
    wait_for(lambda: not other.peers)
    assert kept.wait().reason == "length" and kept.tokens == expected_tokens(PROMPT, 400)


def test_a_killed_stub_takes_its_own_requests_along_also_the_one_that_started_the_engine(recipe, start_client, folder):
    registry = Registry("decode")
    command = [sys.executable, "-c", STUB, recipe.folder, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stub:
        assert stub.stdout.readline() == "running\n"
        client = EngineClient(recipe, "decode", registry, logging.getLogger("test"), run_dir=folder)
        try:
            client.start()
            engine, [sink] = client.pid, submit(client, max_tokens=600)
            wait_for(lambda: sink.tokens)
            os.kill(stub.pid, signal.SIGKILL)
            assert sink.wait().reason == "length" and client.pid == engine
            wait_for(lambda: not client.peers)
            wait_for(lambda: running(registry) == 0)  # it publishes now, and the dead one's request was aborted
        finally:
            client.stop()


def test_metrics_of_the_engine_are_told_to_one_stub_alone(recipe, folder):
    registries = Registry("decode"), Registry("decode.1")
    clients = [EngineClient(recipe, "decode", one, logging.getLogger("test"), run_dir=folder) for one in registries]
    try:
        for client in clients:
            client.start()
        for sink in submit(clients[0], 3, 5) + submit(clients[1], 4, 5):
            sink.wait()
        counts = [0.0, 0.0]

        def count():
            for at, registry in enumerate(registries):
                delta = registry.take_delta()
                counts[at] += sum(value for name, _, value in delta.counters if name == "bireme_requests_total")
            return sum(counts) == 7

        wait_for(count)
        assert sorted(counts) == [0, 7]
    finally:
        for client in clients:
            client.stop()


def test_any_stub_passes_commands_of_a_subscription_on(pair):
    one, other = pair
    bus = Bus(one)
    wait_for(lambda: slot_of(bus.consumer) in other.peers)
    batch = encode(Commands(other.life, [Submit(1, make_request(max_tokens=12))]))
    other.send_commands(bus.consumer, batch)
    assert bus.finish_of(1).reason == "length"
    assert bus.tokens_of(1) == expected_tokens(PROMPT, 12)
    one.close_bus(bus.consumer)
    other.send_commands(bus.consumer, batch)  # can't know: what the engine makes of it is dropped
    with pytest.raises(UnavailableError, match="ended"):
        other.send_commands(9 << 20, batch)


def test_what_a_stub_says_reaches_the_others(pair):
    one, other = pair
    heard = []
    other.on_told = lambda slot, text: heard.append((slot, text))
    wait_for(lambda: one.peers and other.peers)
    one.tell(b"to all")
    one.tell(b"to one", *one.peers)
    wait_for(lambda: len(heard) == 2)
    assert heard == [(*other.peers, b"to all"), (*other.peers, b"to one")]


@pytest.mark.parametrize("victim", ["engine", "broker"])
def test_all_stubs_get_the_next_life_of_the_engine(pair, folder, victim):
    life, sinks = pair[0].life, submit(pair[0]) + submit(pair[1])
    wait_for(lambda: all(sink.tokens for sink in sinks))
    os.kill(pair[0].pid if victim == "engine" else processes.broker(folder, "decode"), signal.SIGKILL)
    for sink in sinks:
        assert sink.wait().error.startswith("UNAVAILABLE: engine lost")
    wait_for(lambda: all(client.is_ready and client.life > life for client in pair))
    wait_for(lambda: pair[0].life == pair[1].life)
    for sink in submit(pair[0], 1, 5) + submit(pair[1], 1, 5):
        assert sink.wait().reason == "length"


def test_a_run_folder_that_was_cleaned_lets_new_stubs_find_the_engine(pair, recipe, start_client, folder):
    engine = pair[0].pid
    shutil.rmtree(folder)
    wait_for(lambda: lock_path(folder, "decode").exists() and os.path.exists(socket_path(folder, "decode")))
    third = start_client(recipe)
    assert third.pid == engine
    [sink] = submit(pair[1], 1, 5)
    assert sink.wait().reason == "length"
    third.stop()


def test_an_engine_that_can_t_start_fails_the_start_of_all_stubs(make_recipe, start_client):
    engine = {"engine": "mocker", "instances": 2, "engine_config": {"mocker": {"vocab_size": 0}}}
    recipe = make_recipe(top={"workers": {"decode": engine}})
    for _ in range(2):
        with pytest.raises((ConfigError, UnavailableError), match="no tokenizer.json|ended before it was ready"):
            start_client(recipe)


def test_a_stub_with_another_recipe_does_not_share_the_engine(pair, recipe, start_client):
    entry = replace(recipe.workers["decode"], instances=3)
    with pytest.raises(UnavailableError, match="runs with another recipe"):
        start_client(replace(recipe, workers={"decode": entry}))
    [sink] = submit(pair[0], 1, 5)
    assert sink.wait().reason == "length"


def test_only_decode_has_several_stubs(make_recipe):
    with pytest.raises(ConfigError, match="workers.prefill.instances: 2; only decode"):
        make_recipe(top={"workers": {"decode": {}, "prefill": {"instances": 2}}})
