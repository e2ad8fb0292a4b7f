"""Calls to a stub that died hold a pipeline's threads for ever: the pipeline gets a new stub, and its streams go on."""

from __future__ import annotations

import os
import signal
import time

import pytest

from bireme.engines.mocker.tokens import expected_tokens, printable_ids
from bireme.launch import free_ports, processes
from bireme.launch.canaries import CanarySettings
from bireme.launch.deployment import DeploymentSettings
from bireme.recipe_files import load_recipe
from tests.server.faults.test_faults import PROMPT, Run
from tests.server.watch import total, until
from tests.servers import supervised

pytestmark = [pytest.mark.server, pytest.mark.flaky(reruns=1)]

NUM_THREADS = 4  # of a pipeline's BLS, none to spare, where the backend has eight a model
LENGTH = 500


@pytest.fixture
def deployment(sample_model, write_recipe):
    config = {"max_batch_size": 64, "cache_transceiver_config": {"backend": "DEFAULT"}}
    workers = {
        "prefill": {"engine": "mocker", "engine_config": config | {"mocker": {"prefill_ms": 1500}}},
        "decode": {"engine": "mocker", "engine_config": config | {"mocker": {"step_ms": 50}}},
    }
    settings = DeploymentSettings(
        recipe=load_recipe(write_recipe(sample_model("llama"), workers)),
        ports=free_ports(),
        health_port=0,
        canaries=CanarySettings(interval_s=0),
        thread_pool_size=2 * NUM_THREADS,
    )
    with supervised(settings) as running:
        yield running


def queued(server):
    """Return the requests that the prefill engine has, waiting ones among them."""
    return sum(total(server, f"bireme_requests_{state}", worker="prefill") for state in ("running", "waiting"))


def test_a_pipeline_whose_threads_wait_for_a_dead_stub_is_replaced_while_its_streams_go_on(deployment, sample_model):
    server, (ids, _) = deployment.server, printable_ids(str(sample_model("llama")))
    stream = Run(server, "generate", count=1, max_tokens=LENGTH, stream=True)
    until(lambda: stream.tokens[0] > 5, 20, "a stream under way")
    former = server.stub_pid("generate")
    held = Run(server, "generate", count=NUM_THREADS, max_tokens=3, stream=True)
    until(lambda: queued(server) == NUM_THREADS, 10, "all in prefill")
    os.kill(server.stub_pid("prefill"), signal.SIGKILL)
    until(lambda: total(server, "bireme_bls_threads_lost", worker="generate") == NUM_THREADS, 30, "threads lost")
    until(lambda: deployment._watchdog.restarts("generate") == 1, 20, "a new stub")
    began = time.monotonic()
    answers = Run(server, "generate", count=NUM_THREADS, max_tokens=3, stream=True).join()
    assert time.monotonic() - began < 60, "prefill can be called again"
    expected = [expected_tokens([*PROMPT, 300 + at], LENGTH, ids) for at in range(NUM_THREADS)]
    assert answers == held.join() == [tokens[:3] for tokens in expected]
    assert stream.join() == expected[:1]
    until(lambda: not processes.is_alive(former), 20, "the former stub's end")
