"""The OpenAI frontend on a real deployment, through the official client."""

import asyncio
import itertools
import json
import os
import signal
import socket
import threading
import time

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from bireme.launch import processes
from tests.server.openai_served import PORTS, URL, call, chat, engine_of, gauge, kill, settled, wait_for

pytestmark = pytest.mark.server
WORDS = "Count from 1 to 9."
LONG = {"max_tokens": 600, "bireme": {"ignore_eos": True}}


@pytest.fixture
def deployment(chat_deployment):
    return chat_deployment


@pytest.fixture
def client(deployment):
    return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def ask(client, text, **fields):
    return client.chat.completions.create(model="tiny-chat", messages=[{"role": "user", "content": text}], **fields)


def test_a_question_is_answered_rightly(client):
    answer = ask(client, "What is 12 + 30?")
    assert answer.choices[0].message.content == "42"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_the_whole_answer(client):
    whole = ask(client, WORDS, max_tokens=12).choices[0].message.content
    chunks = list(ask(client, WORDS, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_async_client_streams_many_answers_at_once(deployment):
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)

    async def one(number):
        stream = await client.chat.completions.create(**chat(f"What is {number} + 10?"), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    answers = await asyncio.gather(*(one(number) for number in range(11, 27)))
    assert answers == [str(number + 10) for number in range(11, 27)]


def test_n_answers_are_told_apart_and_a_seed_repeats_them(client):
    first, again = (ask(client, WORDS, n=3, temperature=1.5, seed=7, max_tokens=8) for _ in range(2))
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert [c.message.content for c in first.choices] == [c.message.content for c in again.choices]


def test_logprobs_have_an_entry_for_each_token(client):
    answer = ask(client, "What is 12 + 30?", logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == "42"
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)


def test_a_stop_string_ends_the_answer_and_is_not_in_it(client):
    answer = ask(client, WORDS, stop=["3"])
    assert "3" not in answer.choices[0].message.content and answer.choices[0].finish_reason == "stop"


def test_max_tokens_ends_with_length(client):
    answer = ask(client, WORDS, max_completion_tokens=2)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 2


def test_completions_take_texts_and_token_ids(client):
    ids = call("/tokenize", {"model": "tiny-chat", "prompt": "One day"})[1]["tokens"]
    both = client.completions.create(model="tiny-chat", prompt=["One day", "One day"], max_tokens=6)
    same = client.completions.create(model="tiny-chat", prompt=ids, max_tokens=6, logprobs=2)
    assert both.choices[0].text == both.choices[1].text == same.choices[0].text
    assert len(same.choices[0].logprobs.tokens) == 6


def test_models_are_listed_and_an_unknown_one_is_404(client):
    assert [model.id for model in client.models.list()] == ["tiny-chat"]
    assert client.models.retrieve("tiny-chat").owned_by == "bireme"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])


def test_tokens_and_text_are_converted(client):
    tokens = call("/tokenize", {"model": "tiny-chat", "prompt": "two banks"})[1]["tokens"]
    assert call("/detokenize", {"model": "tiny-chat", "tokens": tokens}) == (200, {"prompt": "two banks"})


def test_the_next_question_reuses_the_prompts_blocks(client):
    text = "Repeat after me: " + "oar " * 60
    ask(client, text, max_tokens=1)
    assert ask(client, text, max_tokens=1).usage.prompt_tokens_details.cached_tokens >= 32


def running():
    return gauge("bireme_requests_running")


def cancelled():
    return gauge("bireme_cancellations_total")


def test_a_client_that_leaves_a_stream_stops_the_engine(client):
    fields = {"stream": True, "logprobs": True, "extra_body": {"bireme": {"ignore_eos": True}}}
    list(ask(client, WORDS, max_tokens=40, **fields))  # the client's first stream is slow: it would be far behind
    made, before = settled("bireme_generated_tokens_total"), cancelled()
    stream = ask(client, WORDS, max_tokens=900, **fields)
    chunks = itertools.islice(stream, 40)
    num_read = sum(len(choice.logprobs.content) for chunk in chunks for choice in chunk.choices if choice.logprobs)
    stream.close()
    wait_for(lambda: cancelled() == before + 1 and running() == 0)
    assert 30 < num_read <= settled("bireme_generated_tokens_total") - made < 900


def test_a_client_that_leaves_a_unary_request_frees_the_engine(deployment):
    body = json.dumps(chat(WORDS, **LONG)).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}"
    before = cancelled()
    with socket.create_connection(("127.0.0.1", PORTS["openai"])) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_for(lambda: running() == 1)
    wait_for(lambda: cancelled() == before + 1 and running() == 0)


@pytest.mark.flaky(reruns=1)
def test_a_stream_goes_on_when_its_engine_is_killed(deployment, client):
    fields = {"max_tokens": 900, "extra_body": {"bireme": {"ignore_eos": True}}}
    expected = ask(client, WORDS, **fields).choices[0].message.content
    texts, moved = [], gauge("bireme_migrations_total", PORTS["openai"])
    for number, chunk in enumerate(ask(client, WORDS, stream=True, **fields)):
        texts.append(chunk.choices[0].delta.content or "")
        if number == 20:
            kill(engine_of(deployment))
    assert "".join(texts) == expected
    assert gauge("bireme_migrations_total", PORTS["openai"]) > moved  # the engine did not end before it was killed


@pytest.mark.flaky(reruns=1)
def test_readiness_knows_of_an_engine_that_is_gone(deployment):
    wait_for(_is_up)
    kill(engine_of(deployment))
    wait_for(lambda: not _is_up())
    wait_for(_is_up)
    assert call("/health/ready")[1] == {"status": "ready", "models": {"tiny-chat": {"decode": "ready"}}}


@pytest.mark.flaky(reruns=1)
def test_a_draining_frontend_lets_streams_end(deployment, client):
    stream = ask(client, WORDS, stream=True, max_tokens=900, extra_body={"bireme": {"ignore_eos": True}})
    chunks, pid = list(itertools.islice(stream, 2)), deployment.frontend_pid()
    os.kill(pid, signal.SIGTERM)
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    wait_for(lambda: deployment.frontend_pid() not in (pid, None) and _is_up(), 60)  # serve.py has started another


def _is_up():
    try:
        return call("/health/ready")[0] == 200
    except OSError:
        return False


def test_responses_in_chunks_of_a_stream_are_timed_and_name_workers(client):
    answer = ask(client, "What is 1 + 10?", extra_body={"bireme": {"return_timing": True}})
    assert answer.bireme["timing"][0]["decode_worker"] == "decode"


def test_many_streams_for_a_while_neither_fail_nor_hang(deployment):
    errors = []

    def loop(until):
        client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
        while time.monotonic() < until:
            try:
                assert list(ask(client, "What is 12 + 30?", stream=True))[-1].choices[0].finish_reason == "stop"
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=loop, args=(time.monotonic() + 3,)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


class Person(BaseModel):
    name: str
    age: int


def test_structured_outputs_are_parsed_by_the_client(client):
    message = {"role": "user", "content": "Give me a record of Ada as JSON."}
    answer = client.chat.completions.parse(
        model="tiny-chat", messages=[message], response_format=Person, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_the_stream_helper_tells_deltas_and_parses_the_whole(client):
    message = {"role": "user", "content": "Give me a record of Ada as JSON."}
    deltas = []
    with client.chat.completions.stream(
        model="tiny-chat", messages=[message], response_format=Person, max_tokens=200
    ) as stream:
        for event in stream:
            if event.type == "content.delta":
                deltas.append(event.delta)
    final = stream.get_final_completion().choices[0].message
    assert isinstance(final.parsed, Person) and "".join(deltas) == final.content


class GetWeather(BaseModel):
    """Weather of a city."""

    city: str


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_called_tool_s_arguments_are_parsed_by_the_async_client(deployment, is_streaming):
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    fields = chat("What is the weather in Oslo?", max_tokens=100, tool_choice="required")
    fields["tools"] = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    if is_streaming:
        async with client.chat.completions.stream(**fields) as stream:
            answer = await stream.get_final_completion()
    else:
        answer = await client.chat.completions.parse(**fields)
    [call_made] = answer.choices[0].message.tool_calls
    assert isinstance(call_made.function.parsed_arguments, GetWeather)
    assert call_made.function.parsed_arguments.city == "Oslo"


def test_a_conversation_goes_on_after_a_tool_has_answered(client):
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = client.chat.completions.create(
        model="tiny-chat", messages=messages, tools=[tool], tool_choice="required", max_tokens=100
    )
    called = first.choices[0].message
    messages += [called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "sunny, 20 degrees"}]
    second = client.chat.completions.create(model="tiny-chat", messages=messages, tools=[tool], max_tokens=60)
    assert second.choices[0].finish_reason in ("stop", "length") and second.usage.prompt_tokens > 20


def test_json_schema_holds_in_a_stream(client):
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    chunks = ask(client, "Say x", response_format=form, stream=True, max_tokens=100)
    jsonschema.validate(json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks)), schema)


def test_the_frontend_has_the_key_of_its_launch_or_it_knew_no_block_of_a_prompt_with_a_salt(deployment):
    def key_of(pid):
        return [text for text in processes.environment(pid) if text.startswith("BIREME_KEY=")]

    assert key_of(deployment.frontend_pid()) == key_of(engine_of(deployment)) != []
