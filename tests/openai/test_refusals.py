"""What is refused, and how: 4xx with OpenAI's error body, never 5xx, never silence."""

import json
import re

import pytest

import bireme
from bireme.errors import RequestError, ResourceExhaustedError
from bireme.openai.http.error_replies import reply_of
from bireme.openai.openapi import OPERATIONS

MESSAGES = [{"role": "user", "content": "hi"}]
BIG = "1" + "0" * 30


def raw(**fields):
    return json.dumps({"model": "test", "messages": MESSAGES, **fields}).encode()


BAD_BODIES = {
    "no JSON": (b"{", None),
    "empty": (b"", None),
    "a list": (b"[]", None),
    "not UTF-8": (b'{"model": "\xff"}', None),
    "NaN": (b'{"model":"test","messages":[],"temperature":NaN}', None),
    "too deep": (b'{"model":"test","messages":' + b"[" * 100_000, None),
    "lone surrogate": (b'{"model":"test","messages":[{"role":"user","content":"\\ud800"}]}', None),
    "no messages": (b'{"model":"test"}', "messages"),
    "empty messages": (raw(messages=[]), "messages"),
    "a role": (raw(messages=[{"role": "wizard", "content": "x"}]), "messages[0].role"),
    "content of a number": (raw(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
    "an image": (
        raw(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
        "messages[0].content[0].type",
    ),
    "temperature": (raw(temperature=2.5), "temperature"),
    "huge max_tokens": (raw(max_tokens=int(BIG)), "max_tokens"),
    "max_tokens that no context holds": (raw(max_tokens=2**63), "max_tokens"),
    "max_tokens 0": (raw(max_tokens=0), "max_tokens"),
    "text for a number": (raw(max_tokens="5"), "max_tokens"),
    "5000 stops": (raw(stop=["x"] * 5000), "stop"),
    "a long stop": (raw(stop="x" * (1 << 20)), "stop"),
    "n": (raw(n=100_000), "n"),
    "top_logprobs alone": (raw(top_logprobs=2), "top_logprobs"),
    "top_logprobs": (raw(logprobs=True, top_logprobs=10**6), "top_logprobs"),
    "logit_bias": (raw(logit_bias={"1": 500}), "logit_bias.1"),
    "logit_bias of no id": (raw(logit_bias={str(2**40): 5}), "logit_bias"),
    "logit_bias of a word": (raw(logit_bias={"x": 5}), "logit_bias"),
    **{
        f"logit_bias of {key!r}": (raw(logit_bias={key: 5}), "logit_bias")
        for key in (" 5", "+5", "1_0", "٥", "05", "-1")
    },
    "penalty": (raw(presence_penalty=3), "presence_penalty"),
    "unknown field": (raw(tempreature=1), "tempreature"),
    "functions": (raw(functions=[]), "functions"),
    "options of a cache": (raw(prompt_cache_options={"ttl": "1h"}), "prompt_cache_options"),
    **{
        f"{name} of another API": (raw(messages=[MESSAGES[0] | {name: value}]), f"messages[0].{name}")
        for name, value in (("cache_control", {"type": "ephemeral"}), ("id", "msg_1"), ("thinking", "hm"))
    },
    "verbosity": (raw(verbosity="some"), "verbosity"),
    "best_of that is not n": (raw(best_of=2), "best_of"),
    "a place of nobody's": (raw(logits_processors=[]), "logits_processors"),
    "two values": (raw(top_k=1, bireme={"top_k": 2}), "top_k"),
    "two guides": (raw(guided_regex="a", structured_outputs={"choice": ["a"]}), "guided_regex"),
    "a guide beside a format": (raw(guided_choice=["a"], response_format={"type": "json_object"}), "guided_choice"),
    "a guide's option": (raw(structured_outputs={"whitespace_pattern": " "}), "structured_outputs.whitespace_pattern"),
    "a guide that is none": (raw(structured_outputs={"jsn": {}}), "structured_outputs.jsn"),
    "a priority of both kinds": (raw(priority=1, bireme={"priority": 0.5}), "priority"),
    "a priority that is no rank": (raw(priority=0.5), "priority"),
    "Dynamo's annotations": (raw(nvext={"annotations": ["request_id"]}), "nvext.annotations"),
    "another of Dynamo's": (raw(nvext={"annotations": ["llm_metrics"]}, stream=True), "nvext.annotations[0]"),
    "a field of Dynamo's": (raw(nvext={"extra_fields": ["engine_data"]}), "nvext.extra_fields[0]"),
    "a tier that is bought": (raw(service_tier="scale"), "service_tier"),
    "a tier beside a priority": (raw(service_tier="flex", bireme={"priority": 0.5}), "service_tier"),
    "Dynamo's placing": (raw(nvext={"backend_instance_id": 5}), "nvext.backend_instance_id"),
    "Dynamo's raw prompt": (raw(nvext={"use_raw_prompt": True}), "nvext.use_raw_prompt"),
    "unknown to Dynamo": (raw(nvext={"topk": 5}), "nvext.topk"),
    "unknown extension": (raw(bireme={"topk": 1}), "bireme.topk"),
    "a template": (raw(bireme={"chat_template_kwargs": {"chat_template": "x"}}), None),
    "processor arguments": (
        raw(bireme={"logits_processors": [{"name": "x", "args": {"a": int(BIG)}}]}),
        "bireme.logits_processors",
    ),
    "a deep schema": (
        b'{"model":"test","messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema",'
        b'"json_schema":{"name":"x","schema":' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}}}",
        "response_format.json_schema.schema",
    ),
    "tool_choice without tools": (raw(tool_choice="required"), "tool_choice"),
    "tools without a parser": (raw(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
    "a tool's name": (raw(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name"),
    "2000 tools": (raw(tools=[{"type": "function", "function": {"name": "f"}}] * 2000), "tools"),
    "stream_options": (raw(stream_options={"include_usage": True}), "stream_options"),
    "a tool's answer to nothing": (raw(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_wrong_request_is_a_400_that_names_the_field(frontend, name):
    body, param = BAD_BODIES[name]
    reply = await (await frontend()).call("POST", "/v1/chat/completions", body).end()
    error = reply.json()["error"]
    assert reply.status == 400 and error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param, error


BAD_COMPLETIONS = {
    "empty prompt": {"prompt": ""},
    "no prompts": {"prompt": []},
    "ids outside": {"prompt": [5, 10**9]},
    "negative ids": {"prompt": [-1]},
    "huge ids": {"prompt": [10**30]},
    "a mixture": {"prompt": ["x", 1]},
    "100000 prompts": {"prompt": ["x"] * 100_000},
    "suffix": {"prompt": "x", "suffix": "y"},
    "best_of": {"prompt": "x", "best_of": 100_000},
    "logprobs": {"prompt": "x", "logprobs": 50},
    "floats": {"prompt": [1.5]},
    "no ids": {"prompt": [[]], "echo": True, "logprobs": 1},
    "nothing to answer": {"prompt": "x", "max_tokens": 0},
    "a template": {"prompt": "x", "chat_template_kwargs": {"a": 1}},
}


@pytest.mark.parametrize("name", BAD_COMPLETIONS)
async def test_a_wrong_completion_is_a_400(frontend, name):
    body = {"model": "test", **BAD_COMPLETIONS[name]}
    reply = await (await frontend()).call("POST", "/v1/completions", body).end()
    assert reply.status == 400, reply.data


async def test_a_wrong_prompt_is_named_before_a_wrong_sampling_value(frontend):
    reply = await (await frontend()).complete(prompt=["x", 1], temperature=9).end()
    assert reply.json()["error"]["param"] == "prompt[1]"


async def test_prompts_are_not_scored_where_the_engine_cannot(frontend):
    bench = await frontend(workers={"decode": {"engine": "trtllm"}})
    reply = await bench.complete(echo=True, logprobs=1).end()
    assert reply.status == 400 and "TensorRT-LLM" in reply.json()["error"]["message"]


async def test_an_unknown_model_is_404_and_a_missing_one_400(frontend):
    bench = await frontend()
    assert (await bench.chat(model="x").end()).status == 404
    assert (await bench.call("POST", "/v1/chat/completions", {"messages": MESSAGES}).end()).status == 400
    assert (await bench.call("GET", "/v1/models/x").end()).status == 404


@pytest.mark.parametrize(
    "path", ["/playground", "//v1/models", "/v1/./models", "/v1/models;x", "/V1/models", "/health/../metrics"]
)
async def test_paths_that_are_not_in_the_table_are_404(frontend, path):
    assert (await (await frontend()).call("GET", path).end()).status == 404


async def test_a_wrong_method_is_405_and_names_the_right_one(frontend):
    reply = await (await frontend()).call("GET", "/v1/chat/completions").end()
    assert reply.status == 405 and reply.headers["allow"] == "POST"


async def test_a_body_that_is_too_large_is_413(frontend):
    bench = await frontend(frontend={"max_body_bytes": 100})
    assert (await bench.call("POST", "/tokenize", b"x" * 101).end()).status == 413
    length = {"content-length": "10737418240"}
    assert (await bench.call("POST", "/tokenize", b"", length).end()).status == 413


async def test_a_body_that_does_not_come_in_time_is_408(frontend):
    bench = await frontend(frontend={"body_timeout_s": 0.05})
    never = bench.call("POST", "/tokenize", b"", {"content-length": "5"}, is_body_coming=False)
    reply = await never.end()
    assert reply.status == 408 and reply.json()["error"]["code"] == "timeout"


async def test_pictures_are_not_counted_by_the_tokenizer(frontend):
    part = {"type": "image_url", "image_url": {"url": "data:,x"}}
    body = {"model": "test", "messages": [{"role": "user", "content": [part]}]}
    reply = await (await frontend()).call("POST", "/tokenize", body).end()
    assert reply.status == 400 and b"messages[0].content[0].image_url: a picture" in reply.data


async def test_only_plain_json_is_read(frontend):
    bench = await frontend()
    assert (await bench.chat({"content-type": "text/plain"}).end()).status == 415
    assert (await bench.chat({"content-encoding": "gzip"}).end()).status == 415


@pytest.mark.parametrize("host", ["localhost/health", "a?b", "a#b", "user@host", "a\\b"])
async def test_a_host_header_that_could_be_read_as_a_path_is_refused(frontend, host):
    assert (await (await frontend()).call("GET", "/v1/models", None, {"host": host}).end()).status == 400


async def test_request_ids_come_back_and_strange_ones_are_replaced(frontend):
    bench = await frontend()
    assert (await bench.call("GET", "/health/live", None, {"x-request-id": "abc"}).end()).headers[
        "x-request-id"
    ] == "abc"
    made = (await bench.call("GET", "/health/live", None, {"x-request-id": "a b\n"}).end()).headers["x-request-id"]
    assert len(made) == 32


async def test_the_version_is_told_and_a_ping_answered(frontend):
    bench = await frontend()
    assert (await bench.call("GET", "/version").end()).json() == {"version": bireme.__version__}
    assert [(await bench.call(method, "/ping").end()).status for method in ("GET", "POST")] == [200, 200]


def described(path):
    return {one.method for one in OPERATIONS if one.path == path}


async def test_every_route_is_described_with_its_methods_and_no_other_is(frontend):
    app = (await frontend()).app
    texts = [
        one
        for one in OPERATIONS
        if "video" not in one.path and "images" not in one.path and not one.path.startswith("/files")
    ]
    routes = {path: set(methods) for path, methods in app._routes.items()}
    assert routes == {path: described(path) for path in routes}
    for one in texts:
        assert set(app._methods(re.sub("{[^}]*}", "x", one.path))) == described(one.path), one.path


async def test_openapi_has_every_operation(frontend):
    paths = (await (await frontend()).call("GET", "/openapi.json").end()).json()["paths"]
    told = {(method.upper(), path) for path in paths for method in paths[path]}
    assert told == {(one.method, one.path) for one in OPERATIONS}


REFUSED_FIELDS = [
    (one.path, name, reason)
    for one in OPERATIONS
    for name, reason in one.refused.items()
    if "." not in name and "=" not in name and "video" not in one.path and "images" not in one.path
]


@pytest.mark.parametrize(("path", "name", "reason"), REFUSED_FIELDS)
async def test_a_field_that_is_called_refused_is_refused_with_that_reason(frontend, path, name, reason):
    bench = await frontend()
    error = (await bench.call("POST", path, {"model": "test", name: 1}).end()).json()["error"]
    assert error["message"] == f"{name}: {reason}"


TOO_LONG = [
    "prompt: 4849 tokens; this worker takes 1023 (a context of 1024, less one to generate); shorten the prompt",
    "prompt: 4849 tokens; the context of 1024 must hold it and at least one more, shorten the prompt",
    "prompt: 4849 tokens; limits.max_prompt_tokens is 512, shorten the prompt",
]


@pytest.mark.parametrize("message", TOO_LONG)
async def test_a_prompt_that_is_too_long_has_openais_code_whoever_noticed(frontend, message):
    bench = await frontend()
    bench.workers.errors.append(RequestError(message))
    reply = await bench.chat().end()
    assert reply.status == 400 and reply.json()["error"]["code"] == "context_length_exceeded"


async def test_an_empty_prompt_is_not_too_long(frontend):
    bench = await frontend()
    bench.workers.errors.append(RequestError("prompt: 0 tokens; send at least one"))
    assert (await bench.chat().end()).json()["error"]["code"] == "invalid_value"


@pytest.mark.parametrize(
    "told", ["prompt: 1025 tokens; the context of 1024 must hold it", "prompt: 80001 bytes; 1000 tokens (the context)"]
)
async def test_a_prompt_that_does_not_fit_has_the_code_that_clients_look_for(told):
    error = json.loads(reply_of(RequestError(told)).body)["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


async def test_a_refusal_for_want_of_room_says_when_to_come_again():
    headers = dict(reply_of(ResourceExhaustedError("decode: all 2 workers are busy", retry_after_s=7)).headers)
    assert headers[b"retry-after"] == b"7"
