"""The pipelines on a real tritonserver with the mocker: both ways in, a lost engine, a client that leaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request

import pytest

from bireme.discovery import run_folder
from bireme.errors import UnavailableError
from bireme.workers.client import Workers
from bireme.workers.grpc import GrpcChannel
from tests.server.triton_client import Client
from tests.servers import start_server

pytestmark = pytest.mark.server
PROMPT = {"text_input": "Hello world", "max_tokens": 24}


@pytest.fixture(scope="module")
def server(sample_model):
    sample_model("llama")
    with start_server("recipes/mocker-disagg") as running:
        yield running


@pytest.fixture
def client(server):
    return Client(server.grpc)


def metric(server, name, **labels):
    text = urllib.request.urlopen(f"http://{server.metrics}/metrics").read().decode()
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    wanted = [line for line in lines if all(f'{key}="{value}"' in line for key, value in labels.items())]
    return sum(float(line.rsplit(" ", 1)[1]) for line in wanted)


def until(condition, seconds=100.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def test_streamed_and_whole_answers_are_the_same(client):
    streamed = client.generate(**PROMPT, stream=True)
    whole = client.generate(**PROMPT)
    unary = client.infer("completion", **PROMPT)
    assert whole["responses"] == 1
    assert streamed["text_output"] == whole["text_output"] == unary["text_output"]
    assert streamed["output_ids"] == unary["output_ids"]


def test_usage_names_the_workers_of_both_stages(client):
    usage = json.loads(client.infer("completion", **PROMPT)["usage"])
    assert (usage["prefill_worker"], usage["decode_worker"]) == ("prefill", "decode")
    assert usage["completion_tokens"] == 24


@pytest.mark.parametrize("worker", ["prefill", "decode"])
def test_a_ping_is_answered_with_the_engine_s_state(server, worker):
    url = f"http://{server.http}/v2/models/{worker}/generate"
    with urllib.request.urlopen(url, b'{"ping": true}', timeout=30) as answer:
        assert json.load(answer)["state"] == "ready"


async def test_workers_of_a_frontend_are_checked_until_one_is_lost(server):
    workers = Workers(GrpcChannel(server.grpc), 10.0)
    for worker in ("prefill", "decode"):
        await workers.check(worker)
    os.kill(run_folder.find(server.run_folder.path, "prefill").pid, signal.SIGKILL)
    with pytest.raises(UnavailableError):
        while True:
            await asyncio.wait_for(workers.check("prefill"), 20)
    await workers.close()


def test_a_prefill_of_300_ms_is_counted_once(sample_model):
    sample_model("llama")
    override = json.dumps({"workers": {"prefill": {"engine_config": {"mocker": {"prefill_ms": 300}}}}})
    with start_server("recipes/mocker-disagg", override=override) as server:
        usage = json.loads(Client(server.grpc).infer("completion", **PROMPT)["usage"])
    assert usage["prefill_worker"] == "prefill" and 300 <= usage["prefill_ms"] < 600


def test_plain_json_over_http_gets_one_answer(server):
    body = json.dumps(PROMPT).encode()
    with urllib.request.urlopen(f"http://{server.http}/v2/models/generate/generate", body, timeout=30) as answer:
        assert json.load(answer)["finish_reason"] == "length"


def test_bad_values_come_back_with_their_code(client):
    with pytest.raises(Exception, match="INVALID_ARGUMENT: top_p: 7.0"):
        client.generate(**PROMPT, top_p=7.0)


@pytest.mark.flaky(reruns=1)
def test_stream_of_a_killed_engine_goes_on_exactly(server, client):
    expected = client.generate(**PROMPT, stream=True)
    tokens, text, is_killed = [], "", False
    for answer in client.stream("generate", **PROMPT, stream=True):
        tokens += answer["output_ids"]
        text += answer["text_output"]
        if not is_killed and len(tokens) > 4:
            os.kill(run_folder.find(server.run_folder.path, "decode").pid, signal.SIGKILL)
            is_killed = True
    assert (tokens, text) == (expected["output_ids"], expected["text_output"])


def test_a_client_that_leaves_stops_the_engine_and_frees_everything(server, client):
    stream = client.stream("generate", text_input="Hello", max_tokens=100000, stream=True)
    answers = iter(stream)  # kept: an iterator that is dropped leaves by itself
    next(answers)
    until(lambda: metric(server, "bireme_requests_running", worker="decode") == 1)
    stream.close()
    until(lambda: metric(server, "bireme_requests_running", worker="decode") == 0)
    until(lambda: metric(server, "bireme_kv_blocks_used") == 0)
    until(lambda: metric(server, "bireme_kv_leases") == 0)
    until(lambda: metric(server, "bireme_bus_subscriptions") == 0)
