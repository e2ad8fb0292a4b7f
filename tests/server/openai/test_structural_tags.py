"""A call that the model decides on itself keeps to its schema in responses, messages and batches, too."""

import json

import pytest

from models.training.chat_world import Example
from tests.server.chats.test_structural_tags import MINUTES, timers
from tests.server.openai.test_batches import begin, client_of, lines_of
from tests.server.openai.test_same_answers import WAYS

pytestmark = pytest.mark.server


@pytest.mark.parametrize(("make", "way"), WAYS, ids=[way.__name__ for _, way in WAYS])
async def test_a_call_keeps_to_its_schema(chat_deployment, make, way):
    async with make() as client:
        for asked in timers(3):
            _, _, calls = await way(client, Example("tool", "", asked["messages"], {}, asked["tools"]))
            assert [(name, arguments["minutes"] in MINUTES) for name, arguments in calls] == [("set_timer", True)]


def test_a_call_of_a_batch_keeps_to_its_schema(chat_deployment):
    client = client_of(chat_deployment.url)
    rows = [
        {"custom_id": f"t{at}", "method": "POST", "url": "/v1/chat/completions", "body": asked}
        for at, asked in enumerate(timers(3))
    ]
    lines = lines_of(client, begin(client, "\n".join(map(json.dumps, rows)).encode()).id)
    for line in lines:
        [call] = line["response"]["body"]["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["minutes"] in MINUTES
