"""What requests under way are told when the drain timeout has passed: uvicorn cancels their tasks."""

import asyncio
import contextlib
import json
import signal

import pytest

from tests.openai.frontend_process import LIMIT_S, frontend_server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_a_request_that_outlasts_the_drain_gets_a_503_that_clients_understand(frontend, kind, stream):
    bench = await frontend()
    reply = getattr(bench, kind)(stream=stream)
    while not bench.workers.running:
        await asyncio.sleep(0)
    reply.task.cancel("Task cancelled, timeout graceful shutdown exceeded")
    await reply.end()
    error = reply.json()["error"]
    assert (reply.status, error["type"], error["code"]) == (503, "server_error", "unavailable")
    assert reply.headers["retry-after"] and "shutting down" in error["message"]
    assert not bench.workers.running


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event(frontend):
    bench = await frontend()
    reply = bench.chat(stream=True)
    while not bench.workers.running:
        await asyncio.sleep(0)
    while not reply.messages:
        bench.workers.running[0].emit()
        await asyncio.sleep(0.01)
    reply.task.cancel()
    *_, error, end = (await reply.end()).events()
    assert "shutting down" in error["error"]["message"] and end == "[DONE]"


def test_the_process_ends_without_a_traceback(tmp_path):
    with (
        frontend_server(tmp_path, "--drain-timeout", "1") as server,
        contextlib.closing(server.connect()) as connection,
    ):
        connection.putrequest("POST", "/v1/chat/completions")
        for header in ("content-type: application/json", "content-length: 100"):  # a body that does not come
            connection.putheader(*header.split(": "))
        connection.endheaders()
        server.wait_for_requests(1)
        server.process.send_signal(signal.SIGTERM)
        reply = connection.getresponse()
        assert reply.status == 503 and json.loads(reply.read())["error"]["code"] == "unavailable"
        server.process.wait(LIMIT_S)
        assert "Traceback" not in server.log.read_text()
