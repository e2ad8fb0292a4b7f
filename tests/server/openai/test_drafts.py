"""Drafts of n-grams in a real deployment: what it says through every API is what it says without them."""

import asyncio
import dataclasses
import json

import anthropic
import httpx
import openai
import pytest

from models.training.chat_world import examples
from tests.server.generated_requests import message_bodies, response_bodies
from tests.server.openai.test_random import LIMIT, said
from tests.server.openai.test_same_answers import (
    chat,
    message,
    response,
    streamed_message,
    streamed_response,
)
from tests.server.openai_served import PORTS, URL, five_ports, gauge, served, settled
from tests.server.triton_client import Client

pytestmark = pytest.mark.server
DRAFTING = five_ports()
DRAFTS = {"decoding_type": "NGram", "max_draft_len": 8, "draft_len_schedule": {"1": 8, "12": 2}}
OVERRIDE = {"workers": {"decode": {"engine_config": {"speculative_config": DRAFTS}}}}
STORY = "Go on: Once upon a time, Rosa lost a red kite in the forest."


@pytest.fixture(scope="module")
def drafting(chat_deployment, tmp_path_factory):
    """tiny-chat once more, with drafts. `chat_deployment`, which has none, says what must come of a request."""
    log = tmp_path_factory.mktemp("drafts") / "log"
    with served("recipes/tiny-chat", log, "--override", json.dumps(OVERRIDE), ports=DRAFTING) as running:
        yield running


@pytest.fixture
async def drafts(drafting):
    async with httpx.AsyncClient(base_url=drafting.url, timeout=300) as client:
        yield client


@pytest.fixture
async def plain(chat_deployment):
    async with httpx.AsyncClient(base_url=URL, timeout=300) as client:
        yield client


async def post(client, path, body):
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, (reply.text, body)
    return reply.json()


async def events(client, path, body):
    reply = await client.post(path, json=body | {"stream": True})
    assert reply.status_code == 200, (reply.text, body)
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def num_accepted():
    return settled("bireme_accepted_draft_tokens_total", DRAFTING["metrics"])


def asked_before(task):
    """Return the task with its question asked and answered before: what was said then is drafted."""
    answer = {"role": "assistant", "content": task.answer["content"]}
    return dataclasses.replace(task, messages=[*task.messages, answer, task.messages[-1]], thinking=False)


def predicted(text):
    return {"prediction": {"type": "content", "content": text}}


def told(choice):
    return choice["finish_reason"], choice["message"]["content"], choice["message"].get("tool_calls")


async def streamed_chat(client, task):
    fields = {"model": "tiny-chat", "messages": task.messages, "max_tokens": 200}
    chunks = [chunk async for chunk in await client.chat.completions.create(**fields, stream=True)]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks).strip(), "", []


async def test_every_api_says_the_same_with_drafts_whole_and_streamed(drafting):
    tasks = [asked_before(task) for kind in ("repeat", "count", "json") for task in examples(41, 6, True, (kind,))]
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300) as client:
        expected = [await chat(client, task) for task in tasks]
    before = num_accepted()
    openais = openai.AsyncOpenAI(base_url=f"{drafting.url}/v1", api_key="none", max_retries=0, timeout=300)
    anthropics = anthropic.AsyncAnthropic(base_url=drafting.url, api_key="none", max_retries=0, timeout=300)
    for client, ways in (
        (openais, (chat, streamed_chat, response, streamed_response)),
        (anthropics, (message, streamed_message)),
    ):
        async with client:
            for way in ways:
                assert [await way(client, task) for task in tasks] == expected, way.__name__
    assert num_accepted() - before > 6 * 2 * len(tasks)


async def test_a_completion_and_its_log_probabilities_are_the_same(drafts, plain):
    question = "<|im_start|>user\nCount from 11 to 22.<|im_end|>\n<|im_start|>assistant\n"
    answer = ", ".join(map(str, range(11, 23)))
    body = {"model": "tiny-chat", "prompt": f"{question}{answer}<|im_end|>\n{question}", "max_tokens": 60}
    body |= {"logprobs": 2, "temperature": 0}
    with_drafts, without = await post(drafts, "/v1/completions", body), await post(plain, "/v1/completions", body)
    assert with_drafts["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    [one], [other] = with_drafts["choices"], without["choices"]
    assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"]) == (answer, "stop")
    assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
    assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-3)
    streamed = await events(drafts, "/v1/completions", body)
    parts = [choice for event in streamed for choice in event["choices"]]
    assert "".join(part["text"] for part in parts) == other["text"]
    logprobs = [value for part in parts if part["logprobs"] for value in part["logprobs"]["token_logprobs"]]
    assert logprobs == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-3)


async def test_log_probabilities_of_accepted_tokens_are_those_without_drafts(drafts, plain):
    body = {"model": "tiny-chat", "messages": [{"role": "user", "content": STORY}], "max_tokens": 60}
    body |= {"logprobs": True, "top_logprobs": 3, "temperature": 0.8, "seed": 5}
    without = (await post(plain, "/v1/chat/completions", body))["choices"][0]
    body |= predicted(without["message"]["content"])
    answer = await post(drafts, "/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 10
    one, other = answer["choices"][0]["logprobs"]["content"], without["logprobs"]["content"]
    assert [token["token"] for token in one] == [token["token"] for token in other]
    for ours, theirs in zip(one, other, strict=True):
        assert [top["token"] for top in ours["top_logprobs"]] == [top["token"] for top in theirs["top_logprobs"]]
        assert ours["logprob"] == pytest.approx(theirs["logprob"], abs=1e-3)


def content_of(streamed):
    choices = [choice for event in streamed for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]


async def test_a_stop_string_inside_a_burst_ends_the_text_and_the_count_there(drafts, plain):
    body = {"model": "tiny-chat", "messages": [{"role": "user", "content": STORY}], "max_tokens": 100}
    whole = (await post(plain, "/v1/chat/completions", body))["choices"][0]["message"]["content"]
    assert len(words := whole.split(" ")) > 12
    for at in range(3, 12):
        cut = body | {"stop": [" ".join(words[at : at + 2])]}
        without = await post(plain, "/v1/chat/completions", cut)
        with_drafts = cut | predicted(whole)
        answer = await post(drafts, "/v1/chat/completions", with_drafts)
        assert told(answer["choices"][0]) == told(without["choices"][0])
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == without["usage"]["completion_tokens"]
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] <= answer["usage"]["completion_tokens"]
        streamed = await events(drafts, "/v1/chat/completions", with_drafts)
        assert content_of(streamed) == (without["choices"][0]["message"]["content"], "stop")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_last_token_of_max_tokens_may_be_anywhere_in_a_burst(drafts, plain, stream):
    body = {"model": "tiny-chat", "messages": [{"role": "user", "content": STORY}]}
    whole = (await post(plain, "/v1/chat/completions", body))["choices"][0]["message"]["content"]
    for count in range(1, 24):
        without = await post(plain, "/v1/chat/completions", body | {"max_tokens": count})
        assert without["usage"]["completion_tokens"] == count
        cut = body | {"max_tokens": count} | predicted(whole)
        if stream:
            streamed = await events(drafts, "/v1/chat/completions", cut | {"stream_options": {"include_usage": True}})
            *parts, last = streamed
            assert content_of(parts) == (without["choices"][0]["message"]["content"], "length")
            assert last["usage"]["completion_tokens"] == count
        else:
            answer = await post(drafts, "/v1/chat/completions", cut)
            assert told(answer["choices"][0]) == told(without["choices"][0])
            assert answer["usage"]["completion_tokens"] == count


async def test_a_delta_may_have_several_tokens_of_a_burst_and_its_count_is_true(drafting, plain):
    prompt = "Say plam five times. plam plam plam plam plam. Say plam"
    fields = {"text_input": prompt, "max_tokens": 40, "ignore_eos": True}
    expected = Client(f"127.0.0.1:{PORTS['grpc']}").generate(**fields, stream=True)
    parts = list(Client(f"127.0.0.1:{DRAFTING['grpc']}").stream("generate", **fields, stream=True))
    assert [token for part in parts for token in part["output_ids"]] == expected["output_ids"]
    assert "".join(part["text_output"] for part in parts) == expected["text_output"]
    usage = json.loads(parts[-1]["usage"])
    assert len(parts) <= 40 - usage["accepted_tokens"] + 1
    assert usage["accepted_tokens"] > 3


async def test_the_outputs_of_generate_tell_how_many_drafted_tokens_were_accepted(drafting):
    client = Client(f"127.0.0.1:{DRAFTING['grpc']}")
    fields = {"text_input": "plam plam plam plam plam plam", "max_tokens": 30, "return_perf_metrics": True}
    answer = client.infer("completion", **fields)
    usage, [accepted] = json.loads(answer["usage"]), answer["total_accepted_draft_tokens"]
    assert (answer["total_draft_tokens"], accepted) == ([usage["drafted_tokens"]], usage["accepted_tokens"])
    assert answer["acceptance_rate"] == pytest.approx([accepted / usage["drafted_tokens"]]) and accepted > 0
    [plain] = Client(f"127.0.0.1:{PORTS['grpc']}").infer("completion", **fields)["acceptance_rate"]
    assert plain == 0


def called(message):
    """Return a message's text, and name and arguments of each call."""
    functions = [call["function"] for call in message["tool_calls"]]
    return message["content"] or "", [(one["name"], one["arguments"]) for one in functions]


def called_in(streamed):
    """Return the same of a stream's deltas."""
    deltas = [choice["delta"] for event in streamed for choice in event["choices"]]
    found = []
    for call in (call["function"] for delta in deltas for call in delta.get("tool_calls") or ()):
        name, arguments = (call["name"], "") if call.get("name") else found.pop()
        found.append((name, arguments + (call.get("arguments") or "")))
    return "".join(delta.get("content") or "" for delta in deltas), found


async def test_tool_calls_that_end_inside_a_burst_are_the_same(drafts, plain):
    tasks = [task for task in examples(43, 12, True, ("tool",)) if task.answer.get("tool_calls")]
    for task in tasks:
        calls = [json.dumps(call["function"]) for call in task.answer["tool_calls"]]
        written = "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        behind = "<|im_end|>\n<|im_start|>user\nThank you!"  # would be in the burst, too
        body = {"model": "tiny-chat", "messages": task.messages, "tools": task.tools, "max_tokens": 100}
        with_drafts = body | predicted(written + behind)
        expected = called((await post(plain, "/v1/chat/completions", body))["choices"][0]["message"])
        answer = await post(drafts, "/v1/chat/completions", with_drafts)
        assert called(answer["choices"][0]["message"]) == expected
        assert called_in(await events(drafts, "/v1/chat/completions", with_drafts)) == expected
    assert tasks and expected[1]


async def test_answers_by_a_schema_are_the_same(drafts, plain):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a long word", "a long world"]}, "all": {"type": "array", "maxItems": 3}},
        "required": ["kind", "all"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for seed in range(6):
        body = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Answer in JSON."}], "max_tokens": 80}
        body |= {"response_format": form, "temperature": 1.0, "seed": seed}
        without = (await post(plain, "/v1/chat/completions", body))["choices"][0]
        guess = without["message"]["content"].replace("world", "word")
        answer = await post(drafts, "/v1/chat/completions", body | predicted(guess))
        assert told(answer["choices"][0]) == told(without)
        assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


async def test_a_prediction_that_is_edited_is_accepted_before_and_after_the_change(drafts, plain):
    body = {"model": "tiny-chat", "messages": [{"role": "user", "content": STORY}], "max_tokens": 100}
    without = await post(plain, "/v1/chat/completions", body)
    text = without["choices"][0]["message"]["content"]
    middle = text.index(" ", len(text) // 2)
    answer = await post(drafts, "/v1/chat/completions", body | predicted(text[:middle] + " never" + text[middle:]))
    assert told(answer["choices"][0]) == told(without["choices"][0])
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0.5 * answer["usage"]["completion_tokens"]


def mixed(count):
    """Return so many requests of three APIs, guides, tools, seeds, penalties, stops and priorities among them."""
    requests = [("/v1/responses", body | {"store": False}) for body in response_bodies(count // 3, seed=8)]
    requests += [("/v1/messages", body) for body in message_bodies(count // 3, seed=8)]
    tasks = examples(9, count - len(requests), True, ("repeat", "count", "json", "sum", "story"))
    for number, task in enumerate(tasks):
        body = {"model": "tiny-chat", "messages": asked_before(task).messages, "max_tokens": 60}
        body |= {"temperature": 0.7 * (number % 2), "seed": number, "priority": number % 3}
        requests.append(("/v1/chat/completions", body | predicted(task.answer["content"])))
    return requests


def words_of(path, answer):
    if path == "/v1/chat/completions":
        return [told(choice) for choice in answer["choices"]], answer["usage"]["completion_tokens"]
    usage = answer["usage"]["output_tokens"]
    return said(answer["output"] if path == "/v1/responses" else answer["content"]), usage


@pytest.mark.parametrize("count", [60, pytest.param(900, marks=pytest.mark.soak)])
async def test_mixed_requests_side_by_side_say_what_they_say_alone_without_drafts(drafts, plain, count):
    requests, limit = mixed(count), asyncio.Semaphore(LIMIT)

    async def one(path, body):
        async with limit:
            return words_of(path, await post(drafts, path, body))

    before = num_accepted()
    together = await asyncio.gather(*(one(path, body) for path, body in requests))
    assert num_accepted() - before > count
    for (path, body), answer in zip(requests, together, strict=True):
        assert answer == words_of(path, await post(plain, path, body)), (path, body)
    assert gauge("bireme_requests_running", DRAFTING["metrics"]) == 0


async def test_the_live_view_tells_the_longest_draft(drafts):
    async with drafts.stream("GET", "/v1/live") as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                [worker] = json.loads(line[6:])["models"][0]["workers"]
                assert (worker["state"], worker["nextn"]) == ("ready", 8)
                return
