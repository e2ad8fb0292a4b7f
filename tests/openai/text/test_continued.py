"""Answers that go on with the assistant's last message, alike in all three APIs; over fake workers."""

import pytest

PATHS = {"chat/completions": "messages", "responses": "input", "messages": "messages"}
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "4 "}]
EACH = pytest.mark.parametrize("path", PATHS)


def ask(bench, path, turns, **fields):
    limit = {"responses": "max_output_tokens"}.get(path, "max_tokens")
    return bench.call("POST", f"/v1/{path}", {"model": "test", PATHS[path]: turns, limit: 2, **fields})


async def prompt_of(bench, path, turns=TURNS, **fields):
    """Return the prompt that the engine gets."""
    reply = ask(bench, path, turns, **fields)
    await bench.workers.emit(0)
    prompt = "".join(map(chr, bench.workers.running[-1].prompt))
    await bench.workers.emit(2)
    assert (await reply.end()).status == 200
    return prompt


@EACH
async def test_the_prompt_ends_where_the_last_message_does(frontend, path):
    assert await prompt_of(await frontend(), path, continue_final_message=True) == "user:hi\nassistant:4 "


@EACH
async def test_a_new_answer_begins_after_the_last_message_where_the_request_says_so(frontend, path):
    prompt = await prompt_of(await frontend(), path, continue_final_message=False)
    assert prompt == "user:hi\nassistant:4 \nassistant:"


async def test_messages_alone_go_on_unasked(frontend):
    bench = await frontend()
    ends = {path: (await prompt_of(bench, path)).endswith("4 ") for path in PATHS}
    assert ends == {"chat/completions": False, "responses": False, "messages": True}


@EACH
@pytest.mark.parametrize(
    ("turns", "fields", "field"),
    [(TURNS[:1], {}, "continue_final_message"), (TURNS, {"add_generation_prompt": True}, "add_generation_prompt")],
)
async def test_what_can_not_be_gone_on_with_is_refused_by_name(frontend, path, turns, fields, field):
    refused = await ask(await frontend(), path, turns, continue_final_message=True, **fields).end()
    assert refused.status == 400 and refused.json()["error"]["message"].startswith(f"{field}: ")


async def test_tokens_are_told_of_the_same_prompt(frontend):
    body = {"model": "test", "messages": TURNS, "continue_final_message": True}
    reply = await (await frontend()).call("POST", "/tokenize", body).end()
    assert "".join(map(chr, reply.json()["tokens"])) == "user:hi\nassistant:4 "


@EACH
async def test_what_begins_an_answer_can_be_left_out(frontend, path):
    assert await prompt_of(await frontend(), path, TURNS[:1], add_generation_prompt=False) == "user:hi\n"
