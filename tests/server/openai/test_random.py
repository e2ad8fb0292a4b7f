"""The frontend under random input: requests made from its own document, and schemas that answers must keep to."""

import asyncio
import json
import subprocess
import sys

import httpx
import openai
import pytest

from tests.engines.torch.schemas import make_schemas
from tests.openai.text import strict, strict_messages
from tests.server.generated_requests import message_bodies, response_bodies, spoiled
from tests.server.openai_served import URL, call

jsonschema = pytest.importorskip("jsonschema")
pytestmark = [pytest.mark.server, pytest.mark.slow]
SCHEMAS = make_schemas(200, seed=11)
LIMIT = 16  # at once
EXAMPLES = 10  # of each operation
COUNTS = [24, pytest.param(500, marks=pytest.mark.soak)]


async def answer(client, schema, is_streaming):
    """Return the text of an answer by a schema, and why it ended."""
    form = {"type": "json_schema", "json_schema": {"name": "random", "schema": schema, "strict": True}}
    reply = await client.chat.completions.create(
        model="tiny-chat",
        messages=[{"role": "user", "content": "Answer in JSON."}],
        response_format=form,
        max_tokens=600,
        temperature=1.0,
        seed=3,
        stream=is_streaming,
    )
    if not is_streaming:
        return reply.choices[0].message.content, reply.choices[0].finish_reason
    chunks = [chunk async for chunk in reply]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0].finish_reason


async def test_answers_to_200_random_schemas_are_valid_whole_and_streamed(chat_deployment):
    limit = asyncio.Semaphore(LIMIT)
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)

    async def one(schema, is_streaming):
        async with limit:
            text, reason = await answer(client, schema, is_streaming)
        assert reason == "stop", (schema, text)
        jsonschema.validate(json.loads(text), schema)

    await asyncio.gather(*(one(schema, number % 2 == 1) for number, schema in enumerate(SCHEMAS)))


@pytest.mark.parametrize("limit_s", [10, pytest.param(60, marks=pytest.mark.soak)])
def test_requests_made_from_the_document_cause_no_error_of_ours(chat_deployment, limit_s):
    pytest.importorskip("schemathesis")
    command = [
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", f"{URL}/openapi.json",
        f"--max-examples={EXAMPLES}", "--seed=7", "--phases=examples,coverage,fuzzing", "--checks=not_a_server_error",
        "--generation-database=none", "--suppress-health-check=all", "--request-timeout=60", "--warnings=off",
        f"--max-time={limit_s}", "--no-color",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "generated" in done.stdout and call("/health/ready")[0] == 200


async def side_by_side(check, bodies):
    """Check all bodies, LIMIT at once; a failure says which one it was."""
    limit = asyncio.Semaphore(LIMIT)

    async def one(body):
        async with limit:
            try:
                await check(body)
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error}\n{json.dumps(body)}") from error

    await asyncio.gather(*map(one, bodies))


async def answered(client, path, body):
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.content


def said(items):
    """Return the items without what differs from answer to answer."""
    parts = [
        {key: value for key, value in part.items() if key != "logprobs"}
        for item in items
        for part in item.get("content") or ()
    ]
    return parts, [{key: item[key] for key in item if key not in ("id", "call_id", "content")} for item in items]


@pytest.mark.parametrize("count", COUNTS)
async def test_generated_requests_have_published_responses_whole_streamed_and_in_the_background(chat_deployment, count):
    async def in_background(client, body):
        began = strict.response_of(await answered(client, "/v1/responses", body | {"background": True, "store": True}))
        while True:
            got = await client.get(f"/v1/responses/{began.id}")
            if strict.response_of(got.content).status not in ("queued", "in_progress"):
                return got.json()
            await asyncio.sleep(0.05)

    async with httpx.AsyncClient(base_url=URL, timeout=300) as client:

        async def check(body):
            whole = await answered(client, "/v1/responses", body)
            strict.response_of(whole)
            events = strict.events_of(await answered(client, "/v1/responses", body | {"stream": True}))
            streamed = strict.whole_of(events)
            strict.response_of(json.dumps(streamed).encode())
            later = await in_background(client, body)
            assert said(streamed["output"]) == said(later["output"]) == said(json.loads(whole)["output"])

        await side_by_side(check, response_bodies(count, seed=5))


@pytest.mark.parametrize("count", COUNTS)
async def test_generated_requests_have_published_messages_whole_and_streamed(chat_deployment, count):
    async with httpx.AsyncClient(base_url=URL, timeout=300) as client:

        async def check(body):
            whole = await answered(client, "/v1/messages", body)
            strict_messages.message_of(whole)
            events = strict_messages.events_of(await answered(client, "/v1/messages", body | {"stream": True}))
            streamed = strict_messages.whole_of(events)
            assert said(streamed["content"]) == said(json.loads(whole)["content"])

        await side_by_side(check, message_bodies(count, seed=5))


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("path", "bodies"), [("/v1/responses", response_bodies), ("/v1/messages", message_bodies)])
async def test_a_wrong_value_anywhere_is_no_error_of_ours(chat_deployment, path, bodies, count):
    async with httpx.AsyncClient(base_url=URL, timeout=300) as client:

        async def check(body):
            data = json.dumps(body).encode()
            reply = await client.post(path, content=data, headers={"content-type": "application/json"})
            assert reply.status_code < 500, reply.text
            if reply.status_code >= 400:
                assert reply.json()["error"]["message"] and "Traceback" not in reply.text

        await side_by_side(check, [spoiled(body, at) for at, body in enumerate(bodies(count, seed=6))])
    assert call("/health/ready")[0] == 200
