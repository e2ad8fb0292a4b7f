"""The campaign's own clients see every wrong answer, and its records call it wrong, not merely failed."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.chaos.faults import HONEST
from benchmarks.chaos.load import outcome_of
from benchmarks.chaos.ways import make_client, ways_of
from benchmarks.load.grpc_streams import make_request
from benchmarks.load.http_streams import make_request as http_request
from benchmarks.load.meter import LoadError, Meter, Trace, WrongAnswerError
from benchmarks.load.openai_answers import OpenAIAnswers
from benchmarks.load.runner import LoadPlan, Runner
from benchmarks.load.workload import make_workload

PLAN = LoadPlan(streams=2, seconds=0.3, warmup_s=0.0, drain_s=5)
WAYS = [(is_chat, is_streamed) for is_chat in (True, False) for is_streamed in (True, False)]


def answer_to(ids, num_tokens):
    return [(sum(ids) + 7 * i) % 1000 for i in range(num_tokens)]


@pytest.fixture
def workload():
    return make_workload(
        answer_to, num_prompts=1, prompt_tokens=4, max_tokens=6, to_text=lambda ids: "".join(f"<{i}>" for i in ids)
    )


class Frontend:
    """Answers every request with one text, as OpenAI's API would."""

    def __init__(self, pieces, num_tokens):
        self.pieces, self.num_tokens = pieces, num_tokens
        self.target = ""

    async def serve(self, reader, writer):
        while line := await reader.readline():
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(size))
            is_chat = b"/chat/" in line
            data = self.stream(is_chat) if body.get("stream") else self.whole(is_chat)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))

    def whole(self, is_chat):
        text = "".join(self.pieces)
        choice = {"message": {"content": text}} if is_chat else {"text": text}
        usage = {"completion_tokens": self.num_tokens}
        return json.dumps({"choices": [{**choice, "finish_reason": "length"}], "usage": usage}).encode()

    def stream(self, is_chat):
        chunks = [{"choices": [{"delta": {"content": p}} if is_chat else {"text": p}]} for p in self.pieces]
        chunks[-1]["choices"][0]["finish_reason"] = "length"
        chunks.append({"choices": [], "usage": {"completion_tokens": self.num_tokens}})
        events = [json.dumps(chunk).encode() for chunk in chunks] + [b"[DONE]"]
        return b": a comment\n\n" + b"".join(b"data: " + event + b"\n\n" for event in events)


async def errors_of(workload, change, is_chat, is_streamed, num_tokens=6):
    """Return what a client says of a frontend whose pieces of the right answer were changed."""
    pieces = [f"<{token}>" for token in workload.prompts[0].expected]
    frontend = Frontend(change(pieces), num_tokens)
    server = await asyncio.start_server(frontend.serve, "127.0.0.1", 0)
    target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    told = []
    client = OpenAIAnswers(target, "m", is_chat=is_chat, is_streamed=is_streamed)
    meter = await Runner(client, workload, PLAN, on_end=lambda trace, error: told.append((trace, error))).run()
    server.close()
    assert meter.requests or meter.errors
    return {outcome_of(*item) for item in told}


@pytest.mark.parametrize(("is_chat", "is_streamed"), WAYS)
async def test_a_right_answer_passes(workload, is_chat, is_streamed):
    assert await errors_of(workload, lambda pieces: pieces, is_chat, is_streamed) == {"ok"}


@pytest.mark.parametrize(("is_chat", "is_streamed"), WAYS)
@pytest.mark.parametrize(
    "change",
    [lambda p: p[:2] + p[3:], lambda p: p[:3] + p[2:], lambda p: [*p, p[-1]], lambda p: [p[1], p[0], *p[2:]]],
    ids=["lost", "repeated", "more", "reordered"],
)
async def test_a_wrong_answer_is_wrong(workload, change, is_chat, is_streamed):
    assert await errors_of(workload, change, is_chat, is_streamed) == {"wrong"}


async def test_a_usage_that_counts_other_tokens_is_wrong(workload):
    assert await errors_of(workload, lambda pieces: pieces, True, True, num_tokens=5) == {"wrong"}


@pytest.mark.parametrize(
    ("error", "is_dropped", "is_stalled", "outcome"),
    [
        (None, False, False, "ok"),
        (WrongAnswerError("a token came again"), True, False, "wrong"),
        (LoadError("cancelled by this client"), True, False, "dropped"),
        (LoadError("closed by this client"), False, True, "hung"),
        (LoadError("UNAVAILABLE"), False, False, "failed"),
    ],
)
def test_an_outcome_says_what_became_of_a_request(workload, error, is_dropped, is_stalled, outcome):
    trace = Trace(Meter(), workload.prompts[0])
    trace.is_dropped, trace.is_stalled = is_dropped, is_stalled
    assert outcome_of(trace, error) == outcome


def test_a_prompt_with_a_seed_asks_for_it_on_every_way(workload):
    from dataclasses import replace

    prompt = replace(workload.prompts[0], seed=7)
    assert b'"seed":7' in http_request("generate", "x", prompt)
    assert {"seed", "temperature"} <= {tensor.name for tensor in make_request("generate", "1", prompt).inputs}


@pytest.mark.parametrize("name", ways_of(num_decode=2))
async def test_every_way_refuses_honestly_where_nobody_serves(workload, name):
    way = ways_of(num_decode=2)[name]
    told = []
    client = make_client(way, dict.fromkeys(("grpc", "http", "openai"), "127.0.0.1:1"), "m")
    await Runner(
        client, workload, PLAN, on_end=lambda trace, error: told.append((outcome_of(trace, error), error))
    ).run()
    assert told and all(outcome == "failed" and HONEST.search(str(error)) for outcome, error in told)
