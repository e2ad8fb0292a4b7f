"""Responses that are kept: gone on from, asked for later, run in the background; over fake workers."""

import asyncio
import json

import pydantic
import pytest
from openai.types.responses import ResponseItem

from bireme.errors import RequestError, ResourceExhaustedError, UnavailableError
from bireme.openai import store_thread
from bireme.openai.text import stored_responses
from bireme.openai.text.response_answer import ResponseAnswer
from bireme.openai.text.response_store import ResponseStore
from bireme.openai.text.stored_responses import StoredResponses
from bireme.pipelines.chat_service import ChatService
from tests.openai.api_keys import bearer, keys_of
from tests.openai.text.strict import events_of, response_of, whole_of
from tests.openai.text.test_responses import answered, ask, expected

PATH = "/v1/responses"


async def get(bench, path, query="", method="GET", headers=None):
    reply = bench.call(method, f"{PATH}/{path}", headers=headers, query=query)
    return await reply.end()


async def ended(bench, response_id):
    """Return a background response once it has ended."""
    async with asyncio.timeout(60):
        while True:
            response = response_of((await get(bench, response_id)).data)
            if response.status not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.01)


@pytest.fixture
async def bench(frontend):
    return await frontend()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_is_kept_as_it_was_answered(bench, stream):
    reply = await answered(bench, stream=stream)
    told = whole_of(events_of(reply.data)) if stream else reply.json()
    kept = await get(bench, told["id"])
    assert response_of(kept.data).output_text and kept.json()["output"] == told["output"]


@pytest.mark.parametrize("error", [UnavailableError("full"), OSError("no descriptor")])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_that_can_t_be_kept_is_answered_and_says_so(bench, error, stream, monkeypatch, caplog):
    def fail():
        raise error

    monkeypatch.setattr(bench.app._stored.store, "_store", fail)
    reply = await answered(bench, stream=stream)
    told = json.loads(reply.data.rpartition(b"data: ")[2])["response"] if stream else reply.json()
    assert told["store"] is False
    assert f"response_not_kept id={told['id']} error={error}" in caplog.text


async def test_a_request_goes_on_from_a_response_and_what_came_before_it(bench):
    first = (await answered(bench, instructions="be")).json()
    second = (await answered(bench, input="and", previous_response_id=first["id"])).json()
    reply = await answered(bench, input="then", instructions="do", previous_response_id=second["id"])
    texts = [one["output"][0]["content"][0]["text"] for one in (first, second)]
    prompt = f"system:do\nuser:hi\nassistant:{texts[0]}\nuser:and\nassistant:{texts[1]}\nuser:then\nassistant:"
    assert response_of(reply.data).output_text == expected(prompt)
    assert reply.json()["previous_response_id"] == second["id"]


async def test_what_is_not_to_be_stored_is_not(bench):
    told = (await answered(bench, store=False)).json()
    assert (await get(bench, told["id"])).status == 404
    reply = await ask(bench, previous_response_id=told["id"]).end()
    assert (reply.status, reply.json()["error"]["code"]) == (400, "previous_response_not_found")


async def test_a_deleted_response_is_gone(bench):
    told = (await answered(bench)).json()
    assert (await get(bench, told["id"], method="DELETE")).json()["deleted"] is True
    assert (await get(bench, told["id"], method="DELETE")).status == 404
    assert (await ask(bench, previous_response_id=told["id"]).end()).status == 400


async def test_the_items_of_the_input_are_listed_page_by_page(bench):
    parts = [{"type": "input_text", "text": "and"}]
    first = (await answered(bench)).json()
    history = [{"role": "assistant", "content": "well"}, {"role": "user", "content": parts}]
    told = (await answered(bench, input=history, previous_response_id=first["id"])).json()
    page = (await get(bench, f"{told['id']}/input_items", "order=asc&limit=3")).json()
    rest = (await get(bench, f"{told['id']}/input_items", f"order=asc&after={page['last_id']}")).json()
    items = pydantic.TypeAdapter(list[ResponseItem]).validate_python(page["data"] + rest["data"])
    assert [item.role for item in items] == ["user", "assistant", "assistant", "user"]
    assert page["has_more"] and not rest["has_more"]
    newest = (await get(bench, f"{told['id']}/input_items", "limit=1")).json()
    assert newest["data"] == rest["data"]


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=x", "page=2"])
async def test_a_wrong_page_is_a_400(bench, query):
    told = (await answered(bench)).json()
    assert (await get(bench, f"{told['id']}/input_items", query)).status == 400


@pytest.mark.parametrize("path", ["resp_1", "resp_1/input_items", "resp_1/x", "resp_1/cancel/x"])
async def test_what_does_not_exist_is_404(bench, path):
    assert (await get(bench, path)).status == 404


async def test_a_key_sees_its_own_responses_alone(frontend):
    bench = await frontend(keys_of("alice", "bob"))
    alice, bob = bearer("alice"), bearer("bob")
    reply = bench.call("POST", PATH, {"model": "test", "input": "hi", "max_output_tokens": 4}, alice)
    await bench.workers.emit(4)
    name = (await reply.end()).json()["id"]
    assert (await get(bench, name, headers=alice)).status == 200
    assert (await get(bench, name, headers=bob)).status == 404
    for method, path in (("DELETE", name), ("POST", f"{name}/cancel"), ("GET", f"{name}/input_items")):
        assert (await get(bench, path, method=method, headers=bob)).status == 404
    body = {"model": "test", "input": "hi", "previous_response_id": name}
    assert (await bench.call("POST", PATH, body, bob).end()).status == 400


async def test_a_background_response_is_answered_at_once_and_ends_later(bench):
    queued = response_of((await ask(bench, background=True).end()).data)
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    await bench.workers.emit(4)
    response = await ended(bench, queued.id)
    assert (response.status, response.output_text) == ("incomplete", expected("user:hi\nassistant:"))


async def test_a_background_response_tries_again_what_may_pass(bench):
    bench.workers.errors.append(ResourceExhaustedError("the queue is full"))
    queued = (await ask(bench, background=True).end()).json()
    while len(bench.workers.log) < 2 or not bench.workers.running:  # the one that was refused runs for a moment, too
        await asyncio.sleep(0.01)
    await bench.workers.emit(4)
    assert (await ended(bench, queued["id"])).status == "incomplete"


async def test_a_background_response_that_cannot_be_answered_has_failed(bench):
    bench.workers.errors.append(RequestError("prompt: 9 tokens; this worker takes 5"))
    queued = (await ask(bench, background=True).end()).json()
    response = await ended(bench, queued["id"])
    assert (response.status, response.error.code) == ("failed", "invalid_prompt")


@pytest.mark.parametrize("lacks", ["run", "json"])
async def test_a_background_response_that_meets_a_defect_has_failed(bench, lacks, monkeypatch, caplog):
    async def run(*_):
        raise RuntimeError("a defect")

    if lacks == "run":
        monkeypatch.setattr(ChatService, "run", run)
    else:
        monkeypatch.setattr(ResponseAnswer, "json", lambda _: 1 / 0)
    queued = (await ask(bench, background=True).end()).json()
    if lacks == "json":
        await bench.workers.emit(4)
    response = await ended(bench, queued["id"])
    assert (response.status, response.error.code, response.output) == ("failed", "server_error", [])
    assert "Traceback" in caplog.text and not bench.app._stored._running


async def test_arguments_that_are_nested_too_deeply_are_refused(bench):
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "[" * 3000 + "]" * 3000},
        {"type": "function_call_output", "call_id": "a", "output": "b"},
    ]
    reply = await ask(bench, input=items).end()
    assert (reply.status, reply.json()["error"]["message"].partition(":")[0]) == (400, "messages")
    queued = (await ask(bench, input=items, background=True).end()).json()
    response = await ended(bench, queued["id"])
    assert (response.status, response.error.code) == ("failed", "invalid_prompt")


@pytest.mark.parametrize(("method", "part"), [("POST", "/cancel"), ("DELETE", "")])
async def test_a_background_response_that_is_not_wanted_any_more_stops(bench, method, part):
    queued = (await ask(bench, background=True, max_output_tokens=100).end()).json()
    await bench.workers.emit(2)
    generation = bench.workers.running[0]
    reply = await get(bench, queued["id"] + part, method=method)
    while not generation.is_aborted:
        await asyncio.sleep(0.01)
    assert reply.status == 200 and (method == "DELETE" or response_of(reply.data).status == "cancelled")


async def test_only_a_background_response_can_be_cancelled(bench):
    told = (await answered(bench)).json()
    assert (await get(bench, f"{told['id']}/cancel", method="POST")).status == 400


async def test_too_many_background_responses_are_refused(frontend):
    bench = await frontend(frontend={"responses": {"max_background": 1}})
    replies = [ask(bench, background=True) for _ in range(4)]
    assert sorted([(await reply.end()).status for reply in replies]) == [200, 429, 429, 429]


async def test_what_a_process_leaves_unfinished_another_one_runs(bench, tmp_path):
    stored = bench.app._stored
    stored.store._folder = tmp_path
    queued = (await ask(bench, background=True, metadata={"a": "b"}).end()).json()
    await bench.workers.emit(2)
    await stored.stop()
    config, models = bench.app._config, bench.app._models
    other = StoredResponses(config, models, None, tmp_path)
    bench.app._stored = other
    other.start()
    await bench.workers.emit(4)
    response = await ended(bench, queued["id"])
    assert response.output_text == expected("user:hi\nassistant:") and response.created_at == queued["created_at"]
    assert response.metadata == {"a": "b"}


async def left_to(bench, folder, count):
    """Leave background responses unfinished; return their ids, and what is to take them over when it starts."""
    stored = bench.app._stored
    stored.store._folder = folder
    ids = [(await ask(bench, background=True).end()).json()["id"] for _ in range(count)]
    await bench.workers.emit(1)
    await stored.stop()
    config, models = bench.app._config, bench.app._models
    bench.app._stored = StoredResponses(config, models, None, folder)
    return ids, bench.app._stored


def failing_at_first(ask, errors):
    """Return `ask` that raises each of the errors before it answers."""
    left = list(errors)

    async def asked(*values):
        if left:
            raise left.pop()
        return await ask(*values)

    return asked


async def until_running(bench, count):
    """Wait for the workers: a response that can't be taken over yet is among those that run for a moment, too."""
    async with asyncio.timeout(10):
        while len(bench.workers.running) < count:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("error", [UnavailableError("locked"), ResourceExhaustedError("the queue is full")])
async def test_what_could_not_be_taken_over_for_a_while_is_tried_again(bench, tmp_path, error, monkeypatch):
    monkeypatch.setattr(store_thread, "_LOOK_S", 0.02)
    ids, other = await left_to(bench, tmp_path, 2)
    monkeypatch.setattr(other, "history", failing_at_first(other.history, [error] * 2))
    other.start()
    await until_running(bench, 2)
    await bench.workers.emit(4)
    assert [(await ended(bench, one)).status for one in ids] == ["incomplete"] * 2 and not other._orphans


def lock_histories(store, monkeypatch):
    async def fail(*_):
        raise UnavailableError("locked")

    monkeypatch.setattr(store, "history", fail)


async def test_what_can_t_be_taken_over_for_too_long_has_failed(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(store_thread, "_LOOK_S", 0.02)
    monkeypatch.setattr(stored_responses, "_RETRY_S", 0.1)
    ids, other = await left_to(bench, tmp_path, 1)
    lock_histories(other, monkeypatch)
    other.start()
    assert (await ended(bench, ids[0])).status == "failed" and not other._orphans


async def test_a_row_that_can_t_be_read_keeps_no_other_from_being_taken_over(bench, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(store_thread, "_LOOK_S", 0.02)
    ids, other = await left_to(bench, tmp_path, 2)
    await other._do(lambda store: store.database.write("UPDATE responses SET response = 'x' WHERE id = ?", ids[0]))
    other.start()
    await until_running(bench, 1)
    await bench.workers.emit(4)
    assert (await ended(bench, ids[1])).status == "incomplete"
    assert caplog.text.count(f"response_not_taken_over id={ids[0]}") == 1


async def test_what_is_cancelled_before_it_is_taken_over_is_forgotten(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(store_thread, "_LOOK_S", 0.02)
    ids, other = await left_to(bench, tmp_path, 1)
    lock_histories(other, monkeypatch)
    other.start()
    async with asyncio.timeout(10):
        while not other._orphans:
            await asyncio.sleep(0.01)
        assert (await get(bench, f"{ids[0]}/cancel", method="POST")).json()["status"] == "cancelled"
        while other._orphans:
            await asyncio.sleep(0.01)
    assert response_of((await get(bench, ids[0])).data).status == "cancelled"


async def test_what_another_process_runs_is_cut_as_it_was(frontend, tmp_path):
    bench = await frontend(limits={"max_prompt_tokens": 50})
    stored = bench.app._stored
    stored.store._folder = tmp_path
    items = [{"role": "user", "content": f"{turn} and more words"} for turn in range(9)]
    queued = (await ask(bench, input=items, truncation="auto", background=True).end()).json()
    await bench.workers.emit(1)
    await stored.stop()
    config, models = bench.app._config, bench.app._models
    bench.app._stored = StoredResponses(config, models, None, tmp_path)
    bench.app._stored.start()
    await bench.workers.emit(4)
    assert (await ended(bench, queued["id"])).status == "incomplete"


async def test_a_background_response_is_kept(bench):
    reply = await ask(bench, background=True, store=False).end()
    assert (reply.status, reply.json()["error"]["param"]) == (400, "store")


async def test_what_can_t_be_kept_is_told_once_and_when_it_changes(bench, monkeypatch, caplog):
    monkeypatch.setattr(stored_responses, "_LONGEST_PAUSE_S", 0.01)
    errors = [UnavailableError(text) for text in ("full", "full", "full", "broken", "broken")]
    end = ResponseStore.end

    def fail(*values):
        if errors:
            raise errors.pop(0)
        return end(*values)

    monkeypatch.setattr(ResponseStore, "end", fail)
    queued = (await ask(bench, background=True).end()).json()
    await bench.workers.emit(4)
    assert (await ended(bench, queued["id"])).status == "incomplete" and not errors
    told = [record.getMessage() for record in caplog.records if "response_not_kept" in record.getMessage()]
    assert told == [f"response_not_kept id={queued['id']} error={error}" for error in ("full", "broken")]


async def test_why_an_orphan_waits_is_told_once(bench, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(store_thread, "_LOOK_S", 0.02)
    ids, other = await left_to(bench, tmp_path, 1)
    monkeypatch.setattr(other, "history", failing_at_first(other.history, [UnavailableError("locked")] * 3))
    other.start()
    await until_running(bench, 1)
    assert caplog.text.count(f"response_waits id={ids[0]} error=locked") == 1


async def test_a_response_whose_process_dies_as_it_ends_is_added_to_its_conversation_once(bench, tmp_path):
    stored, is_ending = bench.app._stored, asyncio.Event()
    stored.store._folder = tmp_path
    do = stored._do

    async def die_at_the_end(method, *values):
        if method.__name__.startswith("end"):
            is_ending.set()
            await asyncio.Event().wait()
        return await do(method, *values)

    stored._do = die_at_the_end
    made = (await bench.call("POST", "/v1/conversations", {}).end()).json()["id"]
    name = (await ask(bench, background=True, conversation=made).end()).json()["id"]
    await bench.workers.emit(4)
    await asyncio.wait_for(is_ending.wait(), 10)
    await stored.stop()
    other = bench.app._stored = StoredResponses(bench.app._config, bench.app._models, None, tmp_path)
    other.start()
    await until_running(bench, 1)
    await bench.workers.emit(4)
    assert (await ended(bench, name)).status == "incomplete"
    kept = (await bench.call("GET", f"/v1/conversations/{made}/items", query="order=asc").end()).json()["data"]
    assert [item["role"] for item in kept] == ["user", "assistant"]


@pytest.mark.parametrize("failing", ["report", "end"])
async def test_whatever_the_store_raises_a_background_response_gets_an_end(bench, failing, monkeypatch):
    monkeypatch.setattr(stored_responses, "_LONGEST_PAUSE_S", 0.01)
    stored, errors = bench.app._stored, [RuntimeError("can't start new thread")]
    do = stored._do

    async def fail_once(method, *values):
        if method.__name__ == failing and errors:
            raise errors.pop()
        return await do(method, *values)

    stored._do = fail_once
    name = (await ask(bench, background=True).end()).json()["id"]
    if failing == "end":
        await bench.workers.emit(4)
    response = await asyncio.wait_for(ended(bench, name), 10)
    assert response.status == ("failed" if failing == "report" else "incomplete") and not errors
