"""/v1/conversations through the official client, and responses that go on from them; over fake workers."""

import asyncio

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from bireme.openai.text.response_store import ResponseStore
from tests.openai.api_keys import bearer, keys_of
from tests.openai.text.test_responses import ask, expected

HI, WELL = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}


@pytest.fixture
async def bench(frontend):
    return await frontend()


@pytest.fixture
async def client(bench):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=bench.app)) as http_client:
        yield AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=http_client, max_retries=0,
            _strict_response_validation=True,
        )  # fmt: skip


async def texts(client, name):
    page = await client.conversations.items.list(name, order="asc")
    return [item.content[0].text async for item in page]


async def until_texts(client, name, count):
    """Return a conversation's texts once there are so many: a response in the background adds its own at its end."""
    async with asyncio.timeout(10):
        while len(found := await texts(client, name)) < count:
            await asyncio.sleep(0.001)
    return found


async def test_a_conversation_is_made_shown_changed_and_deleted(client):
    made = await client.conversations.create(metadata={"a": "b"})
    assert made == await client.conversations.retrieve(made.id) and made.metadata == {"a": "b"}
    changed = await client.conversations.update(made.id, metadata={"c": "d"})
    assert changed.metadata == {"c": "d"} and changed.created_at == made.created_at
    assert (await client.conversations.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve(made.id)


async def test_items_are_added_listed_shown_and_deleted(client):
    made = await client.conversations.create(items=[HI])
    added = await client.conversations.items.create(made.id, items=[WELL, {"role": "user", "content": "and"}])
    assert await texts(client, made.id) == ["hi", "well", "and"]
    newest = await client.conversations.items.list(made.id, limit=1)
    assert newest.data == added.data[1:] and newest.has_more
    assert await client.conversations.items.retrieve(added.first_id, conversation_id=made.id) == added.data[0]
    assert (await client.conversations.items.delete(added.first_id, conversation_id=made.id)).id == made.id
    assert await texts(client, made.id) == ["hi", "and"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("form", [str, lambda name: {"id": name}])
async def test_a_response_goes_on_from_a_conversation_and_adds_to_it(bench, client, background, form):
    made = await client.conversations.create(items=[HI, WELL])
    reply = ask(bench, input="and", conversation=form(made.id), background=background)
    await bench.workers.emit(4)
    await reply.end()
    answer = expected("user:hi\nassistant:well\nuser:and\nassistant:")
    kept = await until_texts(client, made.id, 4)
    assert kept == ["hi", "well", "and", answer] and reply.json()["conversation"] == {"id": made.id}


@pytest.mark.parametrize("background", [False, True])
async def test_an_item_has_one_id_in_its_response_and_its_conversation(bench, client, background):
    made = await client.conversations.create()
    reply = ask(bench, conversation=made.id, background=background)
    await bench.workers.emit(4)
    name = (await reply.end()).json()["id"]
    await until_texts(client, made.id, 2)
    kept = [item.id async for item in await client.conversations.items.list(made.id, order="asc")]
    assert kept[:1] == [item.id async for item in await client.responses.input_items.list(name)]


@pytest.mark.parametrize("fields", [{"store": False}, {"stream": True}])
async def test_whatever_form_the_answer_has_it_is_added(bench, client, fields):
    made = await client.conversations.create()
    reply = ask(bench, conversation=made.id, **fields)
    await bench.workers.emit(4)
    await reply.end()
    assert await texts(client, made.id) == ["hi", expected("user:hi\nassistant:")]


async def test_a_response_and_its_turn_are_kept_in_one_write(bench, client, monkeypatch):
    """A process that ends between two writes leaves a response that its conversation does not know."""
    made = await client.conversations.create()
    monkeypatch.setattr(ResponseStore, "add_items", None)
    reply = ask(bench, conversation=made.id)
    await bench.workers.emit(4)
    await client.responses.retrieve((await reply.end()).json()["id"])
    assert await texts(client, made.id) == ["hi", expected("user:hi\nassistant:")]


async def test_a_response_of_a_conversation_goes_on_by_that_alone(bench, client):
    made = await client.conversations.create()
    reply = ask(bench, conversation=made.id)
    await bench.workers.emit(4)
    name = (await reply.end()).json()["id"]
    for previous in (name, made.id):
        refused = await ask(bench, previous_response_id=previous).end()
        assert (refused.status, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
    refused = await ask(bench, conversation=made.id, previous_response_id=name).end()
    assert (refused.status, refused.json()["error"]["param"]) == (400, "conversation")


async def test_a_conversation_is_no_response(bench, client):
    made = await client.conversations.create()
    assert (await bench.call("GET", f"/v1/responses/{made.id}").end()).status == 404


async def test_what_does_not_exist_is_a_404(bench, client):
    assert (await ask(bench, conversation="conv_1").end()).status == 404
    made = await client.conversations.create()
    for path in ("conv_1", "conv_1/items", f"{made.id}/items/msg_1", f"{made.id}/x", f"{made.id}/items/a/b"):
        assert (await bench.call("GET", f"/v1/conversations/{path}").end()).status == 404


def said(**part):
    return [{"role": "user", "content": [part]}]


@pytest.mark.parametrize(
    "items",
    [
        [],
        [HI] * 21,
        [{"type": "web_search_call", "id": "ws_1"}],
        [{"role": "user", "content": 1}],
        said(type="input_audio", text="hm"),
        said(type="input_file", file_id="file_1"),
        said(type="input_text"),
        said(type="input_image"),
        [{"role": "assistant", "content": [{"type": "input_image", "image_url": "data:,x"}]}],
        [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_audio"}]}],
        [{"type": "reasoning", "summary": [], "encrypted_content": "of another server"}],
    ],
)
async def test_wrong_items_are_a_400(client, items):
    made = await client.conversations.create()
    with pytest.raises(openai.BadRequestError, match="items"):
        await client.conversations.items.create(made.id, items=items)


async def test_no_more_is_added_than_a_response_could_go_on_from(frontend):
    bench = await frontend(frontend={"max_body_bytes": 2000})
    made = (await bench.call("POST", "/v1/conversations", {}).end()).json()["id"]
    long = {"items": [{"role": "user", "content": "x" * 900}]}
    first, second = [await bench.call("POST", f"/v1/conversations/{made}/items", long).end() for _ in range(2)]
    assert (first.status, second.status, second.json()["error"]["param"]) == (200, 400, "items")
    assert len((await bench.call("GET", f"/v1/conversations/{made}/items").end()).json()["data"]) == 1
    await bench.app._stored.stop()


async def test_another_key_s_conversation_does_not_exist(frontend):
    bench = await frontend(keys_of("alice", "bob"))
    alice, bob = bearer("alice"), bearer("bob")
    made = (await bench.call("POST", "/v1/conversations", {}, alice).end()).json()["id"]
    for method, part, body in (
        ("GET", "", None), ("POST", "", {"metadata": {}}), ("DELETE", "", None), ("POST", "/items", {"items": [HI]}),
    ):  # fmt: skip
        assert (await bench.call(method, f"/v1/conversations/{made}{part}", body, bob).end()).status == 404
    assert (await bench.call("GET", f"/v1/conversations/{made}", headers=alice).end()).status == 200


async def test_without_a_store_there_are_none(frontend):
    bench = await frontend(frontend={"responses": {"max_responses": 0}})
    assert (await bench.call("POST", "/v1/conversations", {}).end()).status == 404
    assert (await ask(bench, conversation="conv_1").end()).status == 400
