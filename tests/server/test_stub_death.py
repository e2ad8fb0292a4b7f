"""A decode stub dies under the launcher: its streams end or go on, nobody else's is disturbed, it comes back."""

from __future__ import annotations

import os
import signal
import time

import pytest

from bireme.engines.mocker.tokens import expected_tokens, printable_ids
from bireme.launch import free_ports
from bireme.launch.canaries import CanarySettings
from bireme.launch.deployment import DeploymentSettings
from bireme.recipe_files import load_recipe
from tests.server.faults.test_faults import Run
from tests.server.triton_client import Client
from tests.server.watch import PATIENCE, until
from tests.servers import supervised

pytestmark = [pytest.mark.server, pytest.mark.flaky(reruns=1)]

STALL_S = 4.0
LENGTH = 300
PROMPT = list(range(400, 480))


@pytest.fixture(scope="module")
def deployment(sample_model, write_recipe):
    engine = {"engine": "mocker", "engine_config": {"max_batch_size": 64, "mocker": {"step_ms": 20}}}
    recipe = write_recipe(
        sample_model("llama"), {"decode": engine | {"replicas": 2}}, pipeline={"stall_timeout_s": STALL_S}
    )
    settings = DeploymentSettings(
        recipe=load_recipe(recipe), ports=free_ports(), health_port=0, canaries=CanarySettings(interval_s=0)
    )
    with supervised(settings) as running:
        yield running


def test_pipeline_streams_survive_and_direct_streams_of_the_other_worker_go_on(deployment, sample_model):
    until(lambda: all(_answers(deployment.server, model) for model in ("decode", "decode_1")), 60, "both replicas")
    server = deployment.server
    ids, _ = printable_ids(str(sample_model("llama")))
    through_generate = Run(server, "generate", count=6, max_tokens=LENGTH, stream=True)
    beside = Run(server, "decode_1", count=4, max_tokens=LENGTH)
    until(lambda: all(count > 10 for count in through_generate.tokens + beside.tokens), 30, "streams under way")
    stub = server.stub_pid("decode")
    killed_at = time.monotonic()
    os.kill(stub, signal.SIGKILL)
    until(lambda: _answers(server, "decode"), 10, "decode serving again")
    expected = [expected_tokens([*PROMPT, 300 + i], LENGTH, ids) for i in range(6)]
    assert beside.join() == expected[:4]
    for answer, right in zip(through_generate.join(), expected, strict=True):
        assert answer == right or "UNAVAILABLE" in str(answer)
    ended = [at for at, answer in zip(through_generate.ended_at, through_generate.answers, strict=True) if answer != []]
    assert max(ended) - killed_at < PATIENCE * (LENGTH * 0.02 + STALL_S + 5)


def _answers(server, model):
    try:
        answer = Client(server.grpc).generate(model, input_ids=PROMPT, max_tokens=3)
    except Exception:
        return False
    return len(answer["output_ids"]) == 3
