"""Requests made to break the frontend: each is refused or answered, never with a 5xx, and the server lives."""

import json
import socket
import time

import pytest

from tests.server.openai_served import PORTS, call, chat, gauge, settled, wait_for
from tests.server.raw_http import RawHttp, post, statuses

pytestmark = pytest.mark.server
PORT = PORTS["openai"]
GOOD = json.dumps(chat("hi", max_tokens=1)).encode()
LONG = json.dumps(chat("Count from 1 to 9.", max_tokens=900, bireme={"ignore_eos": True}, stream=True)).encode()
BEGIN = json.dumps(chat("hi"))[:-1].encode()
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(autouse=True)
def alive(chat_deployment):
    """After each attack the same process serves on, idle."""
    pid = chat_deployment.frontend_pid()
    yield
    assert call("/v1/chat/completions", chat("What is 12 + 30?"))[1]["choices"][0]["message"]["content"] == "42"
    assert chat_deployment.frontend_pid() == pid and chat_deployment.process.poll() is None
    wait_for(lambda: gauge("bireme_requests_running") == 0)


def attack(data, *more):
    """Send it and return the statuses of what came back; the server may also just close."""
    with RawHttp(PORT) as connection:
        try:
            for part in (data, *more):
                connection.send(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has heard enough
        return statuses(connection.read())


SMUGGLING = {
    "both lengths": post(GOOD, b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(GOOD)),
    "two lengths": post(GOOD, b"Content-Length: %d" % len(GOOD), b"Content-Length: 3"),
    "negative length": post(GOOD, b"Content-Length: -1"),
    "length with a sign": post(GOOD, b"Content-Length: +%d" % len(GOOD)),
    "length with a list": post(GOOD, b"Content-Length: 5, 5"),
    "length in hex": post(GOOD, b"Content-Length: 0x10"),
    "huge length": post(GOOD, b"Content-Length: 10737418240"),
    "length of 40 digits": post(GOOD, b"Content-Length: " + b"9" * 40),
    "unknown coding": post(GOOD, b"Transfer-Encoding: gzip, identity"),
    "coding with a tab": post(GOOD, b"Transfer-Encoding:\tchunkedx"),
    "space before the colon": post(GOOD, b"Content-Length : %d" % len(GOOD), b"Content-Length: 3"),
    "folded header": GET + b"X-A: b\r\n c\r\n\r\n",
    "NUL in a header": GET + b"X-A: b\0c\r\n\r\n",
    "bare line feed in a header": GET + b"X-A: b\nTransfer-Encoding: chunked\r\n\r\n",
    "bad chunk size": post(b"zz\r\nhello\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
    "chunk size that overflows": post(b"f" * 17 + b"\r\n", b"Transfer-Encoding: chunked"),
    "negative chunk size": post(b"-5\r\nhello\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
    "no such version": b"GET /v1/models HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303"),
    "no HTTP": b"\x00\xff" * 500 + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", SMUGGLING)
def test_a_request_that_two_parsers_could_read_differently_is_refused(name):
    found = attack(SMUGGLING[name])
    assert len(found) <= 1 and all(status == 200 or 400 <= status < 500 for status in found), found
    if name in ("both lengths", "two lengths", "negative length", "length with a list", "bad chunk size"):
        assert 200 not in found


HOSTS = {
    "none": (b"",),
    "two": (b"Host: x", b"Host: y"),
    "with a path": (b"Host: x/health/live?",),
    "with userinfo": (b"Host: a@b",),
    "with a space": (b"Host: x y",),
    "with a fragment": (b"Host: x#/health/live",),
    "with a backslash": (b"Host: x\\health",),
    "very long": (b"Host: " + b"a" * 60_000,),
}


@pytest.mark.parametrize("name", HOSTS)
def test_a_strange_host_changes_nothing_and_breaks_nothing(name):
    first, *more = HOSTS[name]
    found = attack(post(b'{"model": "none", "messages": []}', *more, host=first))
    assert found in ([400], [403], [404], []), found


OVERSIZED = {
    "a long path": (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
    "a long header": (GET + b"X-A: " + b"a" * (1 << 20) + b"\r\n\r\n", 431),
    "a header without an end": (GET + b"X-A: " + b"a" * (1 << 20), 431),
    "many headers": (GET + b"".join(b"X-%d: y\r\n" % number for number in range(20_000)) + b"\r\n", 431),
    "headers just over the limit": (GET + b"X-A: " + b"a" * (64 << 10) + b"\r\n\r\n", 431),
    "a long method": (b"A" * 100_000 + b" / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "a body over the limit": (post(b" " * (33 << 20)), 413),
    "a chunked body over the limit": (
        post((b"100000\r\n" + b" " * (1 << 20) + b"\r\n") * 33 + b"0\r\n\r\n", b"Transfer-Encoding: chunked"), 413,
    ),
    "100,000 chunks of one byte": (post(b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n", b"Transfer-Encoding: chunked"), 400),
}  # fmt: skip


@pytest.mark.parametrize("name", OVERSIZED)
def test_what_is_too_large_is_refused(name):
    data, status = OVERSIZED[name]
    assert attack(data) == [status]


BODIES = {
    "no UTF-8": b'{"model": "tiny-chat", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "overlong UTF-8": b'{"model": "tiny-chat", "messages": [{"role": "user", "content": "\xc0\xaf"}]}',
    "a lone surrogate": rb'{"model": "tiny-chat", "messages": [{"role": "user", "content": "\ud800"}]}',
    "UTF-16": json.dumps(chat("hi")).encode("utf-16"),
    "depth of 100,000": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "depth inside metadata": BEGIN + b',"tools":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "huge integer": BEGIN + b',"max_tokens":' + b"9" * 5000 + b"}",
    "huge exponent": BEGIN + b',"temperature":1e999999}',
    "NaN": BEGIN + b',"temperature":NaN}',
    "Infinity": BEGIN + b',"top_p":-Infinity}',
    "huge seed": BEGIN + b',"seed":' + b"1" * 400 + b"}",
    "many answers": json.dumps(chat("hi", n=100_000)).encode(),
    "5,000 stop strings": json.dumps(chat("hi", stop=[str(number) for number in range(5000)])).encode(),
    "large logit_bias": json.dumps(chat("hi", logit_bias={str(number): 1 for number in range(200_000)})).encode(),
    "wrong logit_bias": json.dumps(chat("hi", logit_bias={"x": 1, "-1": 2})).encode(),
    "an array": b"[]",
    "a string": b'"hi"',
    "nothing": b"",
    "two objects": GOOD + GOOD,
    "cut off": GOOD[:-3],
    "JSON with comments": b"/* */ " + GOOD,
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_wrong_is_a_400(name):
    found = attack(post(BODIES[name]))
    assert found == [400], found


def test_more_tokens_than_there_is_room_for_are_cut_to_what_is_left():
    assert attack(post(BEGIN + b',"max_tokens":2147483647}')) == [200]


def test_more_tokens_than_any_context_holds_are_a_400():
    assert attack(post(BEGIN + b',"max_tokens":9223372036854775808}')) == [400]


def test_of_duplicate_keys_the_last_counts_as_everywhere_in_json():
    body = b'{"model": "none", "messages": [], "model": "tiny-chat", "messages": [{"role": "user", "content": "hi"}]}'
    assert attack(post(body[:-1] + b', "max_tokens": 1}')) == [200]


def test_a_chunked_body_that_ends_early_is_no_request():
    before = settled("bireme_requests_total")
    with RawHttp(PORT) as connection:
        connection.send(post(b"%x\r\n%b" % (len(GOOD), GOOD), b"Transfer-Encoding: chunked"))  # all but the end
    assert attack(post(GOOD)) == [200]
    assert settled("bireme_requests_total") == before + 1


def test_a_body_that_does_not_come_keeps_nobody_else_waiting():
    with RawHttp(PORT) as slow:
        slow.send(post(b"", b"Content-Length: 100") + b"{")
        assert call("/v1/models")[0] == 200  # others are served meanwhile


def test_many_half_open_connections_keep_nobody_out():
    halves = [socket.create_connection(("127.0.0.1", PORT)) for _ in range(200)]
    for half in halves:
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
    began = time.monotonic()
    assert call("/v1/models")[0] == 200 and time.monotonic() - began < 10
    for half in halves:
        half.close()


def test_a_request_byte_by_byte_is_a_request():
    message = post(GOOD)
    assert attack(*(message[at : at + 1] for at in range(len(message)))) == [200]


def test_pipelined_requests_are_answered_in_order():
    one = GET + b"\r\n"
    two = b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = GET + b"Connection: close\r\n\r\n"
    assert attack(one + two + one + last) == [200, 404, 200, 200]


def test_a_chat_after_another_on_one_connection_is_answered_in_order():
    streamed = json.dumps(chat("What is 12 + 30?", stream=True)).encode()
    first = post(streamed).replace(b"Connection: close\r\n", b"")
    assert attack(first + post(GOOD)) == [200, 200]


def test_a_client_that_leaves_after_pipelining_stops_its_requests():
    ended, before = settled("bireme_requests_total"), gauge("bireme_cancellations_total")
    with RawHttp(PORT) as connection:
        connection.send(post(LONG).replace(b"Connection: close\r\n", b"") * 2)
        assert b"data: " in connection.read_until(b"data: ")
    wait_for(lambda: gauge("bireme_cancellations_total") == before + 1 and gauge("bireme_requests_running") == 0)
    assert attack(post(GOOD)) == [200]
    assert settled("bireme_requests_total") == ended + 2  # the one that was cancelled, and this: the second never began


@pytest.mark.parametrize("method", [b"TRACE", b"CONNECT", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"get", b"FOO"])
def test_other_methods_are_refused(method):
    found = attack(method + b" /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert found in ([405], [400]), found


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/v1/./models", "/health/../v1/models", "/v1/models;x", "/v1/models/", "*",
     "/%00", "/v1/models/%0d%0aX: y", "/v1/models/\xff", "?", "/v1/models/../../etc/passwd"],
)  # fmt: skip
def test_paths_that_play_tricks_lead_nowhere(path):
    found = attack(b"GET " + path.encode("latin-1") + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert found in ([404], [400], [405], [])


@pytest.mark.parametrize("path", [b"/v1%2fmodels", b"http://x/v1/models", b"/v1/models?key=x"])
def test_the_decoded_path_is_what_counts(path):
    assert attack(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") == [200]


def test_an_upgrade_is_not_taken():
    upgrade = b"Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    found = attack(GET + upgrade + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
    assert all(status < 500 for status in found) and 101 not in found


def test_a_header_of_the_client_is_not_reflected_unchecked():
    with RawHttp(PORT) as connection:
        connection.send(GET + b"X-Request-Id: a b\tc\xff\r\nConnection: close\r\n\r\n")
        reply = connection.read()
    assert statuses(reply) == [200] and b"a b" not in reply


def test_a_reader_that_stands_still_does_not_stop_others():
    with RawHttp(PORT) as connection:
        connection.send(post(LONG))  # and nothing is read
        wait_for(lambda: gauge("bireme_requests_running") == 1)
        assert call("/v1/chat/completions", chat("What is 12 + 30?"))[0] == 200
