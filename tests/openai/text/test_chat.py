"""/v1/chat/completions over fake workers."""

import asyncio

import pytest

from bireme.errors import EngineLostError, ResourceExhaustedError, UnavailableError
from bireme.messages import temperature_of
from bireme.workers.fake import token_at


def expected(bench, count=4):
    prompt = bench.workers.running[0].prompt
    return "".join(chr(token_at(prompt, position)) for position in range(count))


async def test_a_whole_answer_has_openais_form(frontend):
    bench = await frontend()
    reply = bench.chat()
    await bench.workers.emit()
    text = expected(bench)
    await bench.workers.emit(3)
    body = (await reply.end()).json()
    message = body["choices"][0]["message"]
    assert (body["object"], message) == ("chat.completion", {"role": "assistant", "content": text, "refusal": None})
    assert body["usage"]["completion_tokens"] == 4 and body["choices"][0]["finish_reason"] == "length"


async def test_each_token_is_an_event_at_once(frontend):
    bench = await frontend()
    reply = bench.chat(stream=True)
    await bench.workers.emit()
    await asyncio.sleep(0.01)
    assert [event["choices"][0]["delta"] for event in reply.events()] == [
        {"role": "assistant", "content": ""},
        {"content": expected(bench, 1)},
    ]
    await bench.workers.emit(3)
    events = (await reply.end()).events()
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
    assert reply.headers["content-type"].startswith("text/event-stream")


async def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(frontend):
    bench = await frontend()
    reply = bench.chat(stream=True, stream_options={"include_usage": True})
    await bench.workers.emit(4)
    events = (await reply.end()).events()
    assert events[0]["usage"] is None
    assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 4


async def test_n_answers_have_their_indices(frontend):
    bench = await frontend()
    reply = bench.chat(n=2)
    while len(bench.workers.running) < 2:
        await asyncio.sleep(0)
    await bench.workers.emit(4)
    body = (await reply.end()).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 8


async def test_sampling_reaches_the_engine(frontend):
    bench = await frontend()
    reply = bench.chat(
        temperature=0.5, seed=3, logit_bias={"7": -100}, bireme={"top_k": 4, "min_p": 0.1, "priority": 1}
    )
    await bench.workers.reached("decode")
    request = bench.workers.running[0].request
    params = request.sampling
    assert (params.temperature, params.seed, params.logit_bias, params.top_k) == (0.5, 3, {7: -100.0}, 4)
    assert (params.min_p, request.options.priority, params.max_tokens) == (0.1, 1, 4)
    reply.leave()
    await reply.end()


async def test_the_newer_name_of_max_tokens_wins(frontend):
    bench = await frontend()
    reply = bench.chat(max_tokens=10, max_completion_tokens=2)
    await bench.workers.emit(2)
    assert (await reply.end()).json()["usage"]["completion_tokens"] == 2


async def test_what_clients_send_without_meaning_it_is_taken(frontend):
    bench = await frontend()
    reply = bench.chat(verbosity="medium", best_of=1, n=1, user="me", service_tier="auto")
    await bench.workers.emit(4)
    assert (await reply.end()).status == 200


async def test_running_usage_may_be_asked_for_and_comes_at_the_end(frontend):
    bench = await frontend()
    options = {"include_usage": True, "continuous_usage_stats": True}
    for ask in (bench.chat, bench.complete):
        reply = ask(stream=True, stream_options=options)
        await bench.workers.emit(4)
        usages = [event["usage"] for event in (await reply.end()).events()[:-1]]
        assert usages[-1]["completion_tokens"] == 4 and set(map(str, usages[:-1])) == {"None"}


@pytest.mark.parametrize(
    ("tree", "fields", "wanted"),
    [
        ({}, {}, 1.0),
        ({}, {"bireme": {"top_k": 0, "min_p": 0}, "seed": 5}, 1.0),
        ({"sampling": {"temperature": 0}}, {}, 0.0),
        ({"sampling": {"top_k": 0}}, {}, 1.0),
    ],
)
async def test_temperature_is_one_unless_request_or_recipe_say_otherwise(frontend, tree, fields, wanted):
    bench = await frontend(**tree)
    reply = bench.chat(**fields)
    await bench.workers.reached("decode")
    assert temperature_of(bench.workers.running[0].request.sampling) == wanted
    reply.leave()
    await reply.end()


async def test_a_response_format_becomes_a_guide(frontend):
    bench = await frontend()
    schema = {"type": "object"}
    reply = bench.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    await bench.workers.reached("decode")
    assert bench.workers.running[0].request.sampling.guided_decoding == {"json": schema}
    reply.leave()
    await reply.end()


async def test_an_error_before_the_first_token_has_a_status(frontend):
    bench = await frontend()
    bench.workers.errors.append(ResourceExhaustedError("the queue is full"))
    reply = await bench.chat(stream=True).end()
    assert reply.status == 503 and reply.json()["error"]["code"] == "overloaded"
    assert reply.headers["retry-after"] == "1"


async def test_an_error_in_mid_stream_is_an_event_and_the_end(frontend):
    bench = await frontend(pipeline={"migration_limit": 0})
    reply = bench.chat(stream=True, max_tokens=100)
    await bench.workers.emit(2)
    bench.workers.down["decode"] = UnavailableError("gone")
    await bench.workers.lose("decode")
    events = (await reply.end()).events()
    assert events[-2]["error"]["code"] == "unavailable" and events[-1] == "[DONE]"


async def test_a_stream_moves_on_when_its_engine_is_lost(frontend):
    bench = await frontend()
    reply = bench.chat(stream=True)
    await bench.workers.emit(2)
    text = expected(bench)
    bench.workers.running[0].fail(EngineLostError("died"))
    await asyncio.sleep(0.05)
    await bench.workers.emit(2)
    events = (await reply.end()).events()[1:-2]
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == text


async def test_a_slow_reader_is_cancelled_instead_of_filling_memory(frontend):
    bench = await frontend(limits={"max_stream_buffer_bytes": 2000})
    reply = bench.chat(stream=True, max_tokens=1000)
    await bench.workers.reached("decode")
    generation = bench.workers.running[0]
    for _ in range(50):  # no chance to write in between
        generation.emit()
    await reply.end()
    assert generation.is_aborted


async def test_a_silent_stream_gets_comments(frontend):
    bench = await frontend(frontend={"comment_interval_s": 0.05})
    reply = bench.chat(stream=True)
    await bench.workers.reached("decode")
    await asyncio.sleep(0.2)
    assert reply.status == 200 and reply.data.startswith(b": ")
    await bench.workers.emit(4)
    assert (await reply.end()).events()[-1] == "[DONE]"


async def test_more_requests_than_the_limit_are_turned_away(frontend):
    bench = await frontend(limits={"max_concurrent_requests": 1})
    first = bench.chat()
    await bench.workers.reached("decode")
    assert (await bench.chat().end()).status == 503
    await bench.workers.emit(4)
    assert (await first.end()).status == 200


async def test_completions_take_several_prompts(frontend):
    bench = await frontend()
    reply = bench.complete(prompt=["hi", "ho"], echo=True)
    while len(bench.workers.running) < 2:
        await asyncio.sleep(0)
    await bench.workers.emit(4)
    body = (await reply.end()).json()
    assert [choice["text"][:2] for choice in body["choices"]] == ["hi", "ho"]
    assert body["usage"]["prompt_tokens"] == 4 and body["object"] == "text_completion"


async def test_completions_stream(frontend):
    bench = await frontend()
    reply = bench.complete(stream=True)
    await bench.workers.emit()
    text = expected(bench)
    await bench.workers.emit(3)
    events = (await reply.end()).events()
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text
    assert events[-2]["choices"][0]["finish_reason"] == "length"
