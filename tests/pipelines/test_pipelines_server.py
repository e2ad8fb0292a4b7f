"""The pipelines on a real tritonserver with the mocker: both ways in, a lost engine, a client that leaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from bireme.discovery import run_folder
from bireme.errors import UnavailableError
from bireme.workers.client import Workers
from bireme.workers.grpc import GrpcChannel
from tests.server.triton_client import Client
from tests.servers import start_server
from tools import simulate

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


@pytest.fixture(scope="module")
def slow_server(sample_model, tmp_path_factory):
    """A prefill takes 300 ms; requests are logged."""
    sample_model("llama")
    folder = tmp_path_factory.mktemp("logged")
    override = {
        "workers": {"prefill": {"engine_config": {"mocker": {"prefill_ms": 300}}}},
        "observability": {"request_log": {"path": str(folder / "requests"), "trace_block_size": 32}},
    }
    with start_server("recipes/mocker-disagg", override=json.dumps(override)) as running:
        running.log_folder = folder
        yield running


def test_a_prefill_of_300_ms_is_counted_once(slow_server):
    began = time.monotonic()
    usage = json.loads(Client(slow_server.grpc).infer("completion", **PROMPT)["usage"])
    took_ms = 1e3 * (time.monotonic() - began)
    assert usage["prefill_worker"] == "prefill" and 300 <= usage["prefill_ms"] < took_ms


def logged(server, model, count):
    """Return the lines of a model's log once there are so many."""
    file = server.log_folder / f"requests.{model}.jsonl"
    until(lambda: file.exists() and file.read_bytes().count(b"\n") >= count)
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_what_is_logged_replays_as_it_was_served(slow_server, capsys):
    client = Client(slow_server.grpc)
    prompts = [[*range(2, 130), *range(200 * number, 200 * number + 70)] for number in range(1, 5)]
    with ThreadPoolExecutor() as pool:
        sent = [pool.submit(client.generate, input_ids=prompt, max_tokens=5) for prompt in prompts]
        sent += [
            pool.submit(client.generate, input_ids=prompts[0], max_tokens=5, cache_salt=salt, session_id="talk")
            for salt in ("a", "b")
        ]
        usages = [json.loads(one.result()["usage"]) for one in sent]
    stream = client.stream("generate", input_ids=prompts[0], max_tokens=100000, stream=True, cache_salt="c")
    answers = iter(stream)
    next(answers)
    stream.close()
    lines = logged(slow_server, "generate", 7)
    assert {line["bireme"]["outcome"] for line in lines} == {"length", "CANCELLED"}
    cancelled = next(line for line in lines if line["bireme"]["outcome"] == "CANCELLED")
    assert 0 < cancelled["request"]["output_tokens"] < 100000
    ended = [line for line in lines if line is not cancelled]
    for line in ended:
        workers = line["bireme"]["prefill_worker"], line["bireme"]["decode_worker"], line["bireme"]["attempts"]
        assert workers == ("prefill", "decode", 1) and line["request"]["output_tokens"] == 5
        assert 300 <= line["request"]["prefill_time_ms"] < line["request"]["ttft_ms"] < line["request"]["total_time_ms"]
    times = sorted(line["request"]["prefill_time_ms"] for line in ended)
    assert times == pytest.approx(sorted(usage["prefill_ms"] for usage in usages), abs=0.001)
    assert [line.get("agent_context") for line in ended].count({"session_id": "talk"}) == 2
    hashes = [tuple(line["request"]["replay"]["input_sequence_hashes"]) for line in lines]
    assert len({one[0] for one in hashes}) == 4  # a block that unsalted prompts share, and one for each salt

    file = slow_server.log_folder / "requests.generate.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert simulate.main([str(file), "--modes", "kv", "--workers", "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["statistics"]
    assert (found["requests"], found["prompt_mean"]) == (7, 198)
    assert found["endless_hit_rate"] == pytest.approx(3 * 128 / (7 * 198))


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
