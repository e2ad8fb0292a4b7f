"""Random use by many consumers: whatever they do, nothing is left behind and no stream is wrong."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from bireme.engines.mocker.tokens import expected_tokens, plain_ids
from bireme.errors import UnavailableError
from bireme.messages import Abort, Commands, Submit, encode
from tests.engines.engine_fixtures import VOCAB_SIZE, Bus, Collector, make_request, wait_for

IDS = plain_ids(VOCAB_SIZE)


def used_blocks(client):
    return {name: value for name, _, value in client.metrics.take_delta().gauges}["bireme_kv_blocks_used"]


def random_prompt(rng):
    return [rng.randrange(300, VOCAB_SIZE) for _ in range(rng.randrange(1, 80))]


def check(prompt, sink):
    finish = sink.wait()
    assert len(sink.finishes) == 1
    assert sink.tokens == expected_tokens(prompt, len(sink.tokens), IDS)
    assert finish.reason in ("length", "cancelled") or finish.error.startswith(("UNAVAILABLE", "RESOURCE_EXHAUSTED"))


def use(client, rng, seconds):
    """Submit, abort, open and close buses, send garbage; return the stub's own requests."""
    used: list[tuple[list[int], Collector]] = []
    buses: list[Bus] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            act(client, rng, used, buses)
        except UnavailableError:
            buses.clear()
            time.sleep(0.01)
        time.sleep(rng.random() * 0.004)
    for bus in buses:
        client.close_bus(bus.consumer)
    return used


def act(client, rng, used, buses):
    kind = rng.randrange(10)
    if kind < 5:
        prompt, sink = random_prompt(rng), Collector()
        number = client.submit(make_request(prompt, rng.choice((1, 5, 50, 5000))), sink)
        used.append((prompt, sink))
        if rng.random() < 0.5:
            client.abort(number)
    elif kind == 5 and len(buses) < 8:
        buses.append(Bus(client))
    elif kind == 6 and buses:
        client.close_bus(buses.pop(rng.randrange(len(buses))).consumer)
    elif kind == 7:
        client.abort(rng.randrange(1, 1000))
    elif buses:
        number, bus = rng.randrange(1, 20), rng.choice(buses)
        items = [Submit(number, make_request(random_prompt(rng), rng.choice((1, 500)))), Abort(rng.randrange(1, 20))]
        payload = encode(Commands(client.life, items))
        client.send_commands(bus.consumer, payload if rng.random() < 0.8 else payload[: rng.randrange(len(payload))])


@pytest.mark.parametrize("seed", [1, 2])
def test_random_use_leaves_nothing_behind(make_recipe, start_client, seed):
    client = start_client(make_recipe(step_ms=1, engine={"kv_cache_config": {"max_tokens": 16384}}))
    used = use(client, random.Random(seed), 3.0)
    for number in range(1, len(used) + 1000):
        client.abort(number)
    for prompt, sink in used:
        check(prompt, sink)
    wait_for(lambda: client.pong.num_running + client.pong.num_waiting == 0)
    wait_for(lambda: used_blocks(client) == 0)


@pytest.mark.flaky(reruns=1)
def test_random_use_across_kills_ends_every_request(make_recipe, start_client):
    supervisor = {"ping_interval_s": 0.05, "restart_backoff_s": 0.01, "max_restarts": 100}
    client = start_client(make_recipe(step_ms=1, top={"supervisor": supervisor}))
    rng = random.Random(3)
    used = []
    for _ in range(3):
        used += use(client, rng, 0.7)
        wait_for(lambda: client.is_ready)
        os.kill(client.pid, signal.SIGKILL)
    wait_for(lambda: client.is_ready)
    for number in range(1, 20_000):
        client.abort(number)
    for prompt, sink in used:
        check(prompt, sink)
    wait_for(lambda: client.pong is not None and client.pong.num_running + client.pong.num_waiting == 0)
