"""The frontend under random input: requests made from its own document, and schemas that answers must keep to."""

import asyncio
import json
import subprocess
import sys

import openai
import pytest

from tests.engines.torch.schemas import make_schemas
from tests.server.openai_served import URL, call

jsonschema = pytest.importorskip("jsonschema")
pytestmark = [pytest.mark.server, pytest.mark.slow]
SCHEMAS = make_schemas(200, seed=11)
LIMIT = 16  # at once
EXAMPLES = 10  # of each operation


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


def test_requests_made_from_the_document_cause_no_error_of_ours(chat_deployment):
    pytest.importorskip("schemathesis")
    command = [
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", f"{URL}/openapi.json",
        f"--max-examples={EXAMPLES}", "--seed=7", "--phases=examples,coverage,fuzzing", "--checks=not_a_server_error",
        "--generation-database=none", "--suppress-health-check=all", "--request-timeout=60", "--max-time=30",
        "--warnings=off", "--no-color",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "generated" in done.stdout and call("/health/ready")[0] == 200
