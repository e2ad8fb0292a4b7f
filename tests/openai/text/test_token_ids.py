"""`return_token_ids`, vLLM's field: the ids of prompt and answer in chats and completions; over fake workers."""

import pytest

from bireme.messages import Finish, Usage
from bireme.workers.fake import token_at

CHAT_PROMPT = [ord(letter) for letter in "user:hi\nassistant:"]
PROMPT = [ord(letter) for letter in "hi"]
STOP = 7


def ids(prompt, count=4):
    return [token_at(prompt, position) for position in range(count)]


async def answered(bench, post, **fields):
    reply = getattr(bench, post)(**fields)
    await bench.workers.emit(4)
    return await reply.end()


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True}])
async def test_a_chat_tells_the_prompt_s_beside_its_choices_and_the_answer_s_in_each(frontend, logprobs):
    answer = (await answered(await frontend(), "chat", return_token_ids=True, n=2, **logprobs)).json()
    assert answer["prompt_token_ids"] == CHAT_PROMPT
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids(CHAT_PROMPT)] * 2


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True}])
async def test_a_streamed_chat_tells_the_prompt_s_once_and_each_chunk_s_own(frontend, logprobs):
    reply = await answered(await frontend(), "chat", return_token_ids=True, stream=True, **logprobs)
    chunks = reply.events()[:-1]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [CHAT_PROMPT] + [None] * (len(chunks) - 1)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert sum((choice.get("token_ids", []) for choice in choices), []) == ids(CHAT_PROMPT)
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == "".join(map(chr, ids(CHAT_PROMPT)))


async def test_ids_whose_text_is_held_back_come_with_the_next_chunk(frontend):
    bench = await frontend(chat={"reasoning_parser": "deepseek_r1"})
    reply = await answered(bench, "chat", return_token_ids=True, stream=True)
    choices = [choice for chunk in reply.events()[:-1] for choice in chunk["choices"]]
    assert sum((choice.get("token_ids", []) for choice in choices), []) == ids(CHAT_PROMPT)


async def test_a_completion_tells_both_in_each_choice(frontend):
    bench = await frontend()
    answer = (await answered(bench, "complete", return_token_ids=True, prompt=["hi", "ho"])).json()
    told = [(choice["prompt_token_ids"], choice["token_ids"]) for choice in answer["choices"]]
    prompts = [PROMPT, [ord(letter) for letter in "ho"]]
    assert told == [(prompt, ids(prompt)) for prompt in prompts]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"echo": True}])
async def test_a_streamed_completion_tells_the_prompt_s_once(frontend, fields):
    reply = await answered(await frontend(), "complete", return_token_ids=True, stream=True, **fields)
    choices = [choice for chunk in reply.events()[:-1] for choice in chunk["choices"]]
    assert [choice.get("prompt_token_ids") for choice in choices] == [PROMPT] + [None] * (len(choices) - 1)
    assert sum((choice["token_ids"] for choice in choices), []) == ids(PROMPT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("post", ["chat", "complete"])
async def test_the_token_that_ends_an_answer_is_the_last_one(frontend, post, stream):
    bench = await frontend()
    reply = getattr(bench, post)(return_token_ids=True, stream=stream)
    await bench.workers.emit(1)
    generation = bench.workers.running[0]
    generation.is_over = True
    generation.sink.finish(Finish("stop", Usage(), stop_token_id=STOP))
    await reply.end()
    answers = reply.events()[:-1] if stream else [reply.json()]
    told = sum((choice.get("token_ids", []) for answer in answers for choice in answer["choices"]), [])
    assert told == [*ids(CHAT_PROMPT if post == "chat" else PROMPT, 1), STOP]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("post", ["chat", "complete"])
async def test_nothing_is_told_unasked(frontend, post, stream):
    reply = await answered(await frontend(), post, stream=stream)
    assert b"token_ids" not in reply.data


async def test_responses_refuse_it_by_name(frontend):
    bench = await frontend()
    reply = await bench.call("POST", "/v1/responses", {"model": "test", "input": "hi", "return_token_ids": True}).end()
    assert (reply.status, reply.json()["error"]["param"]) == (400, "return_token_ids")
