"""Decoupled models through the adapter, on a real tritonserver: order, ends, errors, cancellation, limits."""

from __future__ import annotations

import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.server
LIMIT_S = 60


def running(client):
    """Sequences that the ticker of `tokens` still works on."""
    with client.call("tokens", report=1) as call:
        return int(next(iter(call)).as_numpy("running")[0])


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def open_generate_stream(server, model, body):
    connection = socket.create_connection(tuple(server.http.rsplit(":", 1)), timeout=20)
    payload = json.dumps(body).encode()
    head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    connection.sendall(head.encode() + payload)
    return connection


def test_tokens_arrive_in_order_and_the_stream_ends(client):
    assert client.tokens("tokens", count=20) == list(range(20))


def test_a_token_is_not_held_while_the_pipe_is_idle(client):
    with client.call("tokens", count=20, when_asked=1) as call:
        results = iter(call)
        for at in range(20):  # the next one is made when this one has come
            client.tokens("tokens", ask=1)
            assert next(results).as_numpy("tokens").tolist() == [at]


def test_what_piles_up_is_merged_and_nothing_is_lost(client):
    """10,000 responses of 256 bytes stay under the stream's limit of 4 MiB even if none is sent before the last."""
    with client.call("bursts", count=10_000) as call:
        assert call.tokens() == list(range(10_000))
    assert call.num_responses < 5_000


def test_64_streams_side_by_side_lose_nothing(client):
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: client.tokens("tokens", count=40), range(64)))
    assert answers == [list(range(40))] * 64


def test_an_empty_answer_still_ends(client):
    assert client.tokens("bursts", count=0) == []


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("request", "INVALID_ARGUMENT: max_tokens: -1; at least 1"),
        ("lost", "UNAVAILABLE: engine lost: the engine died"),
        ("value", "INTERNAL: ValueError: odd"),
        ("exit", "INTERNAL: SystemExit: 3"),
        ("interrupt", "INTERNAL: KeyboardInterrupt"),
        ("memory", "INTERNAL: MemoryError"),
        ("cancel_self", "CANCELLED: the request was cancelled"),
        ("wrong_name", "INTERNAL: failing has no output tokenz"),
        ("wrong_type", "INTERNAL: failing.tokens: float32"),
        ("bad_object", "INTERNAL: AttributeError"),
        ("tensors_raises", "INTERNAL: RuntimeError: no tensors today"),
    ],
)
def test_a_stream_that_fails_says_why_and_ends(client, how, message, after):
    tokens = []
    with pytest.raises(InferenceServerException) as caught, client.call("failing", how=how, after=after) as call:
        for result in call:
            tokens += result.as_numpy("tokens").tolist()
    assert message in caught.value.message()
    assert tokens == list(range(after))


def test_the_final_flag_travels_with_the_last_response_and_nothing_follows(client):
    assert client.tokens("failing", how="late") == [7]


def test_a_callback_that_exits_disturbs_nobody(client):
    assert client.tokens("failing", how="loop_exit") == [1]


def test_a_grpc_cancel_reaches_the_stage(client):
    with client.call("tokens", count=100_000) as call:
        next(iter(call))
        assert running(client) == 1
    assert wait_for(lambda: running(client) == 0)


def test_an_http_client_that_leaves_reaches_the_stage(server, client):
    connection = open_generate_stream(server, "tokens", {"count": 100_000})
    received = b""
    while b"data: " not in received:
        received += connection.recv(65536)
    connection.close()
    assert wait_for(lambda: running(client) == 0)


def test_http_generate_stream_delivers_all(server):
    connection = open_generate_stream(server, "tokens", {"count": 20})
    received = b""
    while not received.endswith(b"\r\n0\r\n\r\n"):
        received += connection.recv(65536)
    events = [json.loads(line[6:]) for line in received.decode().splitlines() if line.startswith("data: ")]
    tokens = [event["tokens"] for event in events if "tokens" in event]
    assert [token for item in tokens for token in (item if isinstance(item, list) else [item])] == list(range(20))


def test_cancelling_one_stream_leaves_the_others(client):
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(client.tokens, "tokens", count=60) for _ in range(8)]
        for _ in range(8):
            with client.call("tokens", count=100_000) as call:
                next(iter(call))
        assert [other.result() for other in others] == [list(range(60))] * 8


def test_200_clients_that_drop_at_random_leave_the_server_alive(client, server):
    chance = random.Random(9)

    def drop(_):
        with client.call("tokens", count=100_000) as call:
            for _ in range(chance.randrange(8)):
                next(iter(call))
            time.sleep(chance.random() * 0.1)

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(drop, range(200)))
    assert wait_for(lambda: running(client) == 0)
    assert server.is_running
    assert client.tokens("tokens", count=5) == list(range(5))


def test_a_stage_that_ignores_the_cancel_is_ended(client):
    with client.call("stubborn", any=1) as call:
        next(iter(call))
    assert client.tokens("tokens", count=3) == [0, 1, 2]


def test_a_reader_too_slow_for_what_is_made_is_told_so(client):
    with pytest.raises(InferenceServerException) as caught, client.call("flood", count=10_000) as call:
        call.tokens()
    assert "RESOURCE_EXHAUSTED: slow reader" in caught.value.message()
    assert "limits.max_stream_buffer_bytes" in caught.value.message()
