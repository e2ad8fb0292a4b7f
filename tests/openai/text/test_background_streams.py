"""Responses in the background that are streamed: told again from any event on, to any reader; over fake workers."""

import asyncio

import httpx
import pytest
from openai import AsyncOpenAI

from bireme.errors import EngineLostError, RequestError, UnavailableError
from bireme.openai import store_thread
from bireme.openai.text import response_events
from bireme.openai.text.response_store import ResponseStore
from tests.openai.api_keys import bearer, keys_of
from tests.openai.text.strict import events_of, response_of, whole_of
from tests.openai.text.test_responses import ask, expected

PATH = "/v1/responses"
TEXT = expected("user:hi\nassistant:")


def begin(bench, **fields):
    return ask(bench, background=True, stream=True, **fields)


def read(bench, name, after=None, headers=None):
    query = "stream=true" if after is None else f"stream=true&starting_after={after}"
    return bench.call("GET", f"{PATH}/{name}", query=query, headers=headers)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def begun(bench, **fields):
    """Return a running response's id, and what reads it."""
    reply = begin(bench, **fields)
    await until(lambda: len(reply.messages) > 1 and b"response.queued" in reply.data)
    return events_of(reply.data)[0].response.id, reply


def told(reply):
    """Return what was told, without comments."""
    return b"".join(part + b"\n\n" for part in reply.data.split(b"\n\n")[:-1] if not part.startswith(b":"))


@pytest.fixture
async def bench(frontend, tmp_path):
    return await frontend(responses_folder=tmp_path)


@pytest.fixture
async def other(frontend, tmp_path, monkeypatch):
    """A second process over the same store."""
    monkeypatch.setattr(store_thread, "_LOOK_S", 0.02)
    return await frontend(responses_folder=tmp_path)


async def test_a_background_stream_tells_everything_in_typed_events(bench):
    name, reply = await begun(bench)
    await bench.workers.emit(4)
    events = events_of((await reply.end()).data)
    kinds = [event.type for event in events[:4]]
    assert kinds == [
        *(f"response.{kind}" for kind in ("created", "queued", "in_progress")),
        "response.output_item.added",
    ]
    assert whole_of(events)["output"][0]["content"][0]["text"] == TEXT
    kept = await bench.call("GET", f"{PATH}/{name}").end()
    assert events[-1].response == response_of(kept.data) and events[0].response.status == "queued"


async def test_events_are_told_again_after_each_number(bench):
    name, reply = await begun(bench)
    await bench.workers.emit(4)
    whole = told(await reply.end())
    assert told(await read(bench, name).end()) == whole
    frames = whole.split(b"\n\n")[:-1]
    for after in range(len(frames)):
        again = await read(bench, name, after).end()
        assert told(again) == b"".join(frame + b"\n\n" for frame in frames[after + 1 :])


async def test_a_response_goes_on_when_its_client_leaves(bench):
    name, reply = await begun(bench)
    await bench.workers.emit(2)
    await until(lambda: b"output_text.delta" in reply.data)
    last = events_of(reply.data)[-1].sequence_number
    reply.leave()
    await until(reply.task.done)
    rest = read(bench, name, last)
    await bench.workers.emit(2)
    events = events_of(reply.data) + events_of((await rest.end()).data, last + 1)
    assert whole_of(events)["output"][0]["content"][0]["text"] == TEXT


async def test_a_reader_in_the_response_s_own_process_does_not_ask_the_store_for_nothing(bench, monkeypatch):
    monkeypatch.setattr(response_events, "_POLL_S", 0.0)
    name, reply = await begun(bench)
    asked, events = [], ResponseStore.events
    monkeypatch.setattr(ResponseStore, "events", lambda *values: asked.append(values) or events(*values))
    for _ in range(50):
        await bench.call("GET", f"{PATH}/{name}").end()
    assert len(asked) <= 1
    await bench.workers.emit(4)
    assert whole_of(events_of((await reply.end()).data))["output"][0]["content"][0]["text"] == TEXT


async def test_several_readers_follow_a_response_each_from_its_own_place(bench):
    name, reply = await begun(bench)
    readers = [read(bench, name, after) for after in (None, 0, 1)]
    await bench.workers.emit(4)
    whole = told(await reply.end())
    for reader, cut in zip(readers, (0, 1, 2), strict=True):
        assert told(await reader.end()) == b"\n\n".join(whole.split(b"\n\n")[cut:])


async def test_another_process_tells_the_events_as_they_are_made(bench, other):
    name, reply = await begun(bench)
    reader = read(other, name)
    await bench.workers.emit(2)
    await until(lambda: b"output_text.delta" in reader.data)
    await bench.workers.emit(2)
    assert told(await reader.end()) == told(await reply.end())


async def test_a_reader_that_takes_nothing_keeps_nobody_waiting(bench):
    name, reply = await begun(bench)
    reader = read(bench, name)
    await until(lambda: len(reader.messages) > 1)
    reader.stop_reading()
    await bench.workers.emit(4)
    whole = told(await reply.end())
    reader.go_on_reading()
    assert told(await reader.end()) == whole


async def test_what_a_dead_process_has_left_begins_anew_under_higher_numbers(bench, other):
    name, reply = await begun(bench)
    reader = read(other, name)
    await bench.workers.emit(2)
    await until(lambda: b"output_text.delta" in reader.data)
    last = events_of(reader.data)[-1].sequence_number
    await bench.app._stored.stop()
    await until(lambda: other.workers.running)
    await until(reader.task.done)
    kinds = [event.type for event in events_of(reader.data)]
    assert kinds.count("response.created") == 1 and "response.incomplete" not in kinds
    again = read(other, name, last)
    await other.workers.emit(4)
    events = events_of((await again.end()).data, last + 2)
    assert events[0].type == "response.created" and whole_of(events)["output"][0]["content"][0]["text"] == TEXT


async def test_an_attempt_that_fails_after_a_token_begins_anew(frontend):
    bench = await frontend(pipeline={"migration_limit": 0})
    name, reply = await begun(bench)
    await bench.workers.emit(2)
    await until(lambda: b"output_text.delta" in reply.data)
    last = events_of(reply.data)[-1].sequence_number
    bench.workers.running[0].fail(EngineLostError("decode died"))
    await until(lambda: len(bench.workers.log) > 1 and bench.workers.running)
    await bench.workers.emit(4)
    await until(reply.task.done)
    events = events_of((await read(bench, name).end()).data, last + 2)
    assert whole_of(events)["output"][0]["content"][0]["text"] == TEXT


async def test_a_cancelled_response_ends_its_streams(bench):
    name, reply = await begun(bench, max_output_tokens=100)
    await bench.workers.emit(2)
    generation = bench.workers.running[0]
    await bench.call("POST", f"{PATH}/{name}/cancel").end()
    last = events_of((await reply.end()).data)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    await until(lambda: generation.is_aborted)


async def test_a_deleted_response_ends_its_streams_and_leaves_no_events(bench):
    name, reply = await begun(bench, max_output_tokens=100)
    await bench.call("DELETE", f"{PATH}/{name}").end()
    await reply.end()
    count = await bench.app._stored._do(lambda store: store.database.read("SELECT id FROM response_events"))
    assert not count and (await read(bench, name).end()).status == 404


async def test_a_response_that_fails_ends_its_stream_with_the_reason(bench):
    bench.workers.errors.append(RequestError("prompt: 9 tokens; this worker takes 5"))
    last = events_of((await begin(bench).end()).data)[-1]
    assert (last.type, last.response.error.code) == ("response.failed", "invalid_prompt")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("stream=yes", "stream"),
        ("starting_after=1", "starting_after"),
        ("stream=true&starting_after=99", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
    ],
)
async def test_a_wrong_place_is_a_400_that_names_it(bench, query, field):
    name, reply = await begun(bench)
    await bench.workers.emit(4)
    await reply.end()
    refused = await bench.call("GET", f"{PATH}/{name}", query=query).end()
    assert (refused.status, refused.json()["error"]["param"]) == (400, field)


async def test_the_events_of_other_responses_are_not_kept(bench):
    reply = ask(bench)
    await bench.workers.emit(4)
    refused = await read(bench, (await reply.end()).json()["id"]).end()
    assert refused.status == 400 and "background and stream" in refused.json()["error"]["message"]


async def test_another_key_s_response_does_not_exist(frontend):
    bench = await frontend(keys_of("alice", "bob"))
    alice, bob = bearer("alice"), bearer("bob")
    body = {"model": "test", "input": "hi", "max_output_tokens": 4, "background": True, "stream": True}
    reply = bench.call("POST", PATH, body, alice)
    await bench.workers.emit(4)
    name = events_of((await reply.end()).data)[0].response.id
    assert [(await read(bench, name, headers=key).end()).status for key in (alice, bob)] == [200, 404]


async def test_readers_count_among_a_key_s_requests(frontend):
    bench = await frontend(keys_of("alice", max_concurrent_requests=2))
    alice = bearer("alice")
    body = {"model": "test", "input": "hi", "max_output_tokens": 4, "background": True, "stream": True}
    reply = bench.call("POST", PATH, body, alice)
    await until(lambda: len(reply.messages) > 1 and b"response.queued" in reply.data)
    refused = await read(bench, events_of(reply.data)[0].response.id, headers=alice).end()
    assert refused.status == 429


async def test_events_count_among_a_key_s_bytes(bench):
    name, reply = await begun(bench)
    await bench.workers.emit(4)
    await reply.end()
    size, parts = await bench.app._stored._do(
        lambda store: [
            store.database.read(query)[0][0]
            for query in (
                "SELECT size - LENGTH(response) - LENGTH(items) FROM responses",
                "SELECT SUM(LENGTH(data)) FROM response_events",
            )
        ]
    )
    assert size == parts > 0


async def test_events_that_can_t_be_kept_cost_the_stream_alone(bench, monkeypatch, caplog):
    name, reply = await begun(bench)

    def fail(*_):
        raise UnavailableError("the disk is full")

    monkeypatch.setattr(response_events, "_RETRY_S", 0.01)
    monkeypatch.setattr(ResponseStore, "add_events", fail)
    await bench.workers.emit(4)
    await reply.end()
    last = reply.data.split(b"data: ")[-1]
    assert b'"type":"response.incomplete"' in last and f"response_events_lost id={name}" in caplog.text
    assert response_of((await bench.call("GET", f"{PATH}/{name}").end()).data).output_text == TEXT


async def test_openai_s_own_helper_reads_a_response_from_any_event_on(bench):
    name, reply = await begun(bench)
    await bench.workers.emit(4)
    await reply.end()
    transport = httpx.ASGITransport(app=bench.app)
    async with httpx.AsyncClient(transport=transport) as http_client:
        client = AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http_client)
        async with client.responses.stream(response_id=name, starting_after=2) as stream:
            numbers = [event.sequence_number async for event in stream]
            assert (await client.responses.retrieve(name)).output_text == TEXT
        raw = await client.responses.retrieve(name, stream=True, starting_after=2)
        assert [event.sequence_number async for event in raw] == numbers == list(range(3, 3 + len(numbers)))


async def test_where_events_can_t_begin_the_log_says_so_and_the_response_ends_all_the_same(bench, monkeypatch, caplog):
    store, errors = bench.app._stored.store, [UnavailableError("locked")]
    read_store = store.read

    async def fail_once(method, *values):
        if method is ResponseStore.last_event and errors:
            raise errors.pop()
        return await read_store(method, *values)

    monkeypatch.setattr(store, "read", fail_once)
    reply = begin(bench)
    await bench.workers.emit(4)
    events = (await reply.end()).data
    assert b'"type":"response.incomplete"' in events and b"output_text.delta" not in events
    assert "response_events_lost id=resp_" in caplog.text and "error=locked" in caplog.text
