"""A client that goes away stops its generation within a few tokens and frees blocks and leases."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time

import pytest

from tests.server.shared_deployments import STEP_MS
from tests.server.triton_client import Client
from tests.server.watch import PATIENCE, held, is_idle, total, until

pytestmark = pytest.mark.server

STEP_S = STEP_MS / 1e3
PUBLISHED_S = 1.0  # by then the metrics tell what has happened
PROMPT = list(range(400, 500))


def _generated(server):
    return total(server, "bireme_generated_tokens_total", worker="decode")


def _ended(server):
    return total(server, "bireme_requests_total", worker="decode")


def _assert_stops(server, ended):
    """After the cancel of the request that makes `ended` one more: everything is freed, and no more is generated."""
    until(lambda: _ended(server) > ended, 5, "cancelled request counted")
    until(lambda: is_idle(server), 5, "cancelled request freed")
    before = _generated(server)
    time.sleep(20 * STEP_S)
    assert _generated(server) == before


@pytest.mark.parametrize("model", ["decode", "generate"])
def test_cancelling_a_grpc_stream_stops_the_engine(server, model):
    before, ended = _generated(server), _ended(server)
    stream = Client(server.grpc).stream(model, input_ids=PROMPT, max_tokens=5000, **_streaming(model))
    answers = iter(stream)
    for _ in range(5):
        next(answers)
    stream.cancel()
    _assert_stops(server, ended)
    assert _generated(server) - before < 5 + 0.5 * PATIENCE / STEP_S  # of 5,000


def _streaming(model):
    return {"stream": True} if model == "generate" else {}


def test_cancelling_a_unary_completion_stops_the_engine(server):
    import tritonclient.grpc as grpcclient

    from tests.server.triton_client import inputs_of

    with grpcclient.InferenceServerClient(server.grpc) as client:
        ended = _ended(server)
        inputs = inputs_of("completion", {"input_ids": PROMPT, "max_tokens": 5000})
        call = client.async_infer("completion", inputs, callback=lambda result, error: None)
        until(lambda: held(server) > 0, 5, "completion running")
        call.cancel()
        _assert_stops(server, ended)


def test_leaving_generate_stream_over_http_stops_the_engine(server):
    ended, connection = _ended(server), http.client.HTTPConnection(server.http)
    body = {"input_ids": PROMPT, "max_tokens": 5000, "stream": True}
    connection.request("POST", "/v2/models/generate/generate_stream", json.dumps(body))
    response = connection.getresponse()
    for _ in range(10):
        response.readline()
    response.close()
    connection.close()
    _assert_stops(server, ended)


def test_abort_by_request_id_ends_a_decode_stream(server):
    ended, client = _ended(server), Client(server.grpc)
    answers = iter(client.stream("decode", input_ids=PROMPT, max_tokens=5000, request_id="abort-me"))
    next(answers)
    client.generate("decode", abort=True, request_id="abort-me")
    list_of_rest = _drain(answers)
    assert len(list_of_rest) < PATIENCE / STEP_S
    _assert_stops(server, ended)


def _drain(answers):
    """Read to the end; a CANCELLED error is a way to end."""
    rest = []
    try:
        rest.extend(answers)
    except Exception as error:
        assert "CANCELLED" in str(error)
    return rest


def test_two_hundred_clients_dropping_at_random_times_leave_nothing(server):
    rng = random.Random(7)
    plans = [(rng.choice(["decode", "generate"]), rng.uniform(0, 1.5), rng.randrange(1, 300)) for _ in range(200)]

    def drop(model, after_s, prompt_length):
        stream = Client(server.grpc).stream(
            model, input_ids=PROMPT[:1] * prompt_length, max_tokens=5000, **_streaming(model)
        )
        time.sleep(after_s)
        stream.close()

    for start_at in range(0, 200, 50):
        threads = [threading.Thread(target=drop, args=plan) for plan in plans[start_at : start_at + 50]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    time.sleep(PUBLISHED_S)
    until(lambda: is_idle(server), 20, "all dropped requests freed")
    answer = Client(server.grpc).generate("generate", input_ids=PROMPT, max_tokens=5, stream=True)
    assert len(answer["output_ids"]) == 5
