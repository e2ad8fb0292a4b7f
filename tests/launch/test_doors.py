"""Ports that answer, refuse, and take connections without a word."""

import http.client
import socket
import threading
from concurrent import futures

import grpc
import pytest

from bireme.launch.doors import Door, ask_grpc, ask_http, get
from bireme.launch.health_server import HealthServer
from bireme.launch.ports import own_host
from bireme.launch.tritonserver import address


@pytest.fixture
def silent_port():
    """A port whose process stands still: the kernel takes the connections."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def health():
    server = HealthServer("127.0.0.1", 0, lambda: (True, {}), lambda: (True, {"status": "ready"}))
    server.start()
    yield server
    server.stop()


class Time:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_door_that_answers_is_open(health):
    door = Door("http", ask_http(f"127.0.0.1:{health.port}", "/health/live"))
    assert door.problem == "it has not answered yet"
    door.turn()
    assert door.problem == "" and door.answers == 1


def test_an_answer_that_is_an_error_opens_nothing(health):
    door = Door("http", ask_http(f"127.0.0.1:{health.port}", "/nowhere"), clock := Time())
    door.turn()
    clock.now = 10.0
    assert "HTTP 404" in door.problem and door.answers == 0


@pytest.mark.parametrize("ask", [lambda address: ask_http(address, "/"), ask_grpc])
def test_a_refused_connection_is_told_at_once(ask, silent_port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        door = Door("any", ask(f"127.0.0.1:{other.getsockname()[1]}"))
        door.turn()
    assert "refused" in door.problem


def test_one_late_answer_is_no_problem_but_silence_is(health, silent_port):
    address = f"127.0.0.1:{health.port}"
    door = Door("http", lambda limit_s: ask_http(address, "/health")(limit_s), clock := Time())
    door.turn()
    address = silent_port
    door.turn()
    assert door.problem == ""
    clock.now = 3.5
    assert "no answer for 4 s" in door.problem


def test_a_grpc_server_answers_before_any_call():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ask_grpc(f"127.0.0.1:{port}")(5.0)
    server.stop(None)


def test_what_is_no_grpc_server_is_told(health):
    with pytest.raises(http.client.HTTPException):
        ask_grpc(f"127.0.0.1:{health.port}")(5.0)


@pytest.mark.parametrize("host", ["::1", "::", "localhost"])
def test_the_health_port_may_be_of_an_ipv6_address_or_a_name(ipv6, host):
    server = HealthServer(host, 0, lambda: (True, {}), lambda: (True, {"status": "ready"}))
    server.start()
    try:
        assert get(address(own_host(host), server.port), "/health/ready", 5.0) == b'{"status": "ready"}'
    finally:
        server.stop()


def test_a_client_that_leaves_the_health_port_leaves_no_traceback(capfd):
    asked, gone = threading.Event(), threading.Event()

    def slow():
        asked.set()
        gone.wait(10)
        return True, {"text": "x" * (1 << 24)}

    server = HealthServer("127.0.0.1", 0, slow, slow)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # leave with a reset
        client.sendall(b"GET /health/ready HTTP/1.0\r\n\r\n")
        assert asked.wait(10)
    threads = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
    gone.set()
    for thread in threads:
        thread.join(10)
    server.stop()
    assert threads and capfd.readouterr().err == ""


@pytest.fixture
def no_thread_left():
    """As under a limit of processes: a stack that no memory is left for is refused by the same call."""
    usual = threading.stack_size()
    yield lambda: threading.stack_size(1 << 46)
    threading.stack_size(usual)


def test_health_is_told_while_no_thread_can_be_started_and_a_silent_client_holds_nobody_up(no_thread_left, capfd):
    server = HealthServer("127.0.0.1", 0, lambda: (True, {}), lambda: (True, {"status": "ready"}))
    server.start()
    no_thread_left()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threading.Thread(target=int).start()
    try:
        with socket.create_connection(("127.0.0.1", server.port)):
            answers = [get(f"127.0.0.1:{server.port}", "/health/ready", 10.0) for _ in range(3)]
    finally:
        server.stop()
    assert answers == 3 * [b'{"status": "ready"}'] and capfd.readouterr().err == ""
