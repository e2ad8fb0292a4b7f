"""Fields beyond OpenAI's: at the top level as vLLM takes them, in nvext as Dynamo does, and in `bireme`."""

import json
import re
import time
from pathlib import Path

import msgspec
import pytest

import bireme.openai
from bireme.canary_mark import new_mark
from bireme.messages import temperature_of
from bireme.pipelines.chat_request import ChatBody
from bireme.pipelines.extensions import TopLevelNames

PLAYGROUND = Path(bireme.openai.__file__).parent / "playground"

SAMPLING = {
    "ignore_eos": (True, True),
    "min_tokens": (2, 2),
    "top_k": (7, 7),
    "min_p": (0.25, 0.25),
    "repetition_penalty": (1.5, 1.5),
    "stop_token_ids": ([5, 6], (5, 6)),
    "skip_special_tokens": (False, False),
    "include_stop_str_in_output": (True, True),
}
SCHEMA = {"type": "object"}
GUIDES = {
    "guided_json": ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    "guided_json as text": ({"guided_json": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
    "guided_regex": ({"guided_regex": "a+"}, {"regex": "a+"}),
    "guided_choice": ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    "guided_grammar": ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    "structured_outputs": ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
    "an object": ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    "nvext": ({"nvext": {"guided_choice": ["a"]}}, {"choice": ["a"]}),
    "the same twice": ({"guided_regex": "a+", "bireme": {"guided_decoding": {"regex": "a+"}}}, {"regex": "a+"}),
}
POSTS = pytest.mark.parametrize("post", ["chat", "complete"])


async def engine_request(bench, post, **fields):
    """Return what the engine is asked for."""
    reply = getattr(bench, post)(**fields)
    await bench.workers.reached("decode")
    request = bench.workers.running[-1].request
    reply.leave()
    await reply.end()
    return request


@POSTS
@pytest.mark.parametrize("name", SAMPLING)
async def test_sampling_fields_mean_the_same_in_every_place(frontend, post, name):
    value, wanted = SAMPLING[name]
    for fields in ({name: value}, {"bireme": {name: value}}, {name: value, "bireme": {name: value}}):
        request = await engine_request(await frontend(), post, **fields)
        assert getattr(request.sampling, name) == wanted


@POSTS
@pytest.mark.parametrize("form", GUIDES)
async def test_guides_of_other_servers_become_ours(frontend, post, form):
    fields, wanted = GUIDES[form]
    request = await engine_request(await frontend(), post, **fields)
    assert request.sampling.guided_decoding == wanted


@POSTS
async def test_what_dynamo_takes_in_nvext_is_served(frontend, post):
    nvext = {"ignore_eos": True, "top_k": 3, "repetition_penalty": 1.5, "cache_salt": "x", "annotations": []}
    request = await engine_request(await frontend(), post, nvext=nvext)
    params = request.sampling
    assert (params.ignore_eos, params.top_k, params.repetition_penalty, request.options.cache_salt) == (
        True,
        3,
        1.5,
        "x",
    )


@POSTS
async def test_greed_sampling_beats_the_temperature(frontend, post):
    request = await engine_request(await frontend(), post, nvext={"greed_sampling": True}, temperature=1.5, top_p=0.5)
    assert temperature_of(request.sampling) == 0


async def test_salts_of_every_place_reach_the_engine(frontend):
    for fields in ({"cache_salt": "x"}, {"bireme": {"cache_salt": "x"}}):
        assert (await engine_request(await frontend(), "chat", **fields)).options.cache_salt == "x"


async def test_a_lower_priority_at_the_top_level_comes_earlier(frontend):
    bench = await frontend()
    found = [(await engine_request(bench, "chat", priority=rank)).options.priority for rank in (-1000, -1, 0, 1, 1000)]
    assert found == sorted(found, reverse=True) and len(set(found)) == 5
    assert found[2] == 0.5 and all(0 <= priority <= 1 for priority in found)


@pytest.mark.parametrize("tier", ["priority", "fast", "flex", "default", "auto", None])
async def test_a_service_tier_is_a_priority_and_the_answer_repeats_it(frontend, tier):
    bench = await frontend()
    shown = {"auto": "default", "fast": "priority"}.get(tier, tier)
    reply = bench.chat(stream=True, **({"service_tier": tier} if tier else {}))
    await bench.workers.emit(4)
    assert {chunk.get("service_tier") for chunk in (await reply.end()).events()[:-1]} == {shown}
    request = await engine_request(bench, "chat", **({"service_tier": tier} if tier else {}))
    assert request.options.priority == {"flex": 0.25, "priority": 0.75}.get(shown, 0.5)


ASKED = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "responses": {"input": "hi", "max_output_tokens": 4},
}


@pytest.mark.parametrize("path", ASKED)
async def test_a_whole_answer_repeats_its_service_tier(frontend, path):
    bench = await frontend()
    reply = bench.call("POST", f"/v1/{path}", {"model": "test", "service_tier": "flex", **ASKED[path]})
    await bench.workers.emit(4)
    assert (await reply.end()).json()["service_tier"] == "flex"


@POSTS
@pytest.mark.parametrize("stream", [False, True])
async def test_dynamos_fields_of_an_answer_come_when_they_are_asked_for(frontend, post, stream):
    bench = await frontend()
    reply = getattr(bench, post)(nvext={"extra_fields": ["timing", "worker_id"]}, stream=stream)
    await bench.workers.emit(4)
    await reply.end()
    nvext = (reply.events()[-2] if stream else reply.json())["nvext"]
    assert nvext["worker_id"] == {"prefill_worker_id": "decode", "decode_worker_id": "decode"}
    timing = nvext["timing"]
    assert 0 <= timing["ttft_ms"] <= timing["total_time_ms"] and timing["kv_hit_rate"] == 0
    assert abs(timing["request_received_ms"] / 1e3 - time.time()) < 60


@POSTS
async def test_dynamos_annotations_are_the_first_events_of_a_stream(frontend, post):
    bench = await frontend()
    names = ["formatted_prompt", "request_id", "token_ids"]
    reply = getattr(bench, post)(stream=True, nvext={"annotations": names})
    await bench.workers.emit(4)
    *told, first = (await reply.end()).data.decode().split("\n\n")[:4]
    values = [json.loads(event.partition("\n: ")[2]) for event in told]
    prompt = "user:hi\nassistant:" if post == "chat" else "hi"
    assert [event.partition("\n")[0] for event in told] == [f"event: {name}" for name in names]
    assert values == [prompt, reply.headers["x-request-id"], [ord(letter) for letter in prompt]]
    assert first.startswith("data: ")


async def test_a_chat_that_is_refused_sends_no_annotation(frontend):
    reply = await (await frontend()).chat(stream=True, max_tokens=0, nvext={"annotations": ["token_ids"]}).end()
    assert reply.status == 400


async def test_template_variables_are_taken_at_the_top_level(frontend):
    request = await engine_request(await frontend(), "chat", chat_template_kwargs={"unused": 1})
    assert request.prompt == (await engine_request(await frontend(), "chat")).prompt


async def test_a_contradiction_names_both_places(frontend):
    reply = await (await frontend()).chat(top_k=1, bireme={"top_k": 2}).end()
    assert reply.json()["error"]["message"] == "top_k: 1 contradicts bireme.top_k: 2; send one of them"


def test_the_playgrounds_python_code_gives_the_names_to_the_official_client_as_it_takes_them():
    code = (PLAYGROUND / "js" / "code_dialog.js").read_text()
    listed = set(re.findall(r'"(\w+)"', re.search(r"OPENAI = new Set\((.*?)\)", code, re.DOTALL).group(1)))
    ours = {field.encode_name for field in msgspec.structs.fields(TopLevelNames)}
    ours |= {"best_of", "add_generation_prompt", "continue_final_message", "return_token_ids"}
    assert listed == {field.encode_name for field in msgspec.structs.fields(ChatBody)} - ours


async def test_the_schema_knows_the_names(frontend):
    schemas = (await (await frontend()).call("GET", "/openapi.json").end()).json()["components"]["schemas"]
    for kind in ("ChatBody", "CompletionBody"):
        assert {*SAMPLING, "priority", "guided_json", "structured_outputs", "nvext"} <= schemas[kind][
            "properties"
        ].keys()


# where requests go


async def finished(bench, reply):
    await bench.workers.emit(4)
    await reply.end()
    return reply.json()["bireme"]["timing"][0]


@POSTS
async def test_a_request_may_name_its_worker(frontend, post):
    bench = await frontend(workers={"decode": {"engine": "mocker", "replicas": 3}})
    fields = {"routing": {"decode_worker": "decode_2"}, "return_timing": True}
    timing = await finished(bench, getattr(bench, post)(bireme=fields))
    assert timing["decode_worker"] == "decode_2"


@pytest.mark.parametrize("where", ["field", "header", "prompt_cache_key"])
async def test_requests_of_a_session_stay_together(frontend, where):
    bench = await frontend(workers={"decode": {"engine": "mocker", "replicas": 4}}, router={"mode": "round_robin"})
    fields = {"return_timing": True} | ({"session_id": "s"} if where == "field" else {})
    headers = {"x-session-id": "s"} if where == "header" else None
    named = {"prompt_cache_key": "s"} if where == "prompt_cache_key" else {}
    timings = [await finished(bench, bench.chat(headers, bireme=fields, **named)) for _ in range(4)]
    assert len({timing["decode_worker"] for timing in timings}) == 1


async def test_a_cache_key_that_is_too_long_is_refused_by_name(frontend):
    reply = await (await frontend()).chat(prompt_cache_key="k" * 5000).end()
    assert reply.status == 400 and reply.json()["error"]["message"].startswith("prompt_cache_key: 5000 characters")


@POSTS
async def test_a_whole_answer_tells_its_times_in_a_header(frontend, post):
    bench = await frontend()
    reply = getattr(bench, post)(bireme={"return_timing": True})
    timing = await finished(bench, reply)
    told = dict(part.split(";dur=") for part in reply.headers["server-timing"].split(", "))
    assert list(told) == ["queue", "prefill", "transfer", "decode", "total"]
    assert float(told["decode"]) == timing["decode_ms"] and float(told["total"]) > 0


@POSTS
async def test_a_query_is_answered_with_the_placement_and_nothing_runs(frontend, post):
    bench = await frontend(workers={"decode": {"engine": "mocker", "replicas": 2}})
    reply = await getattr(bench, post)(bireme={"routing": {"query_only": True}}).end()
    answer = reply.json()
    assert answer["object"] == "bireme.placement" and answer["decode_worker"] in ("decode", "decode_1")
    assert [one["worker"] for one in answer["candidates"]] == ["decode", "decode_1"]
    assert bench.workers.log == []


@POSTS
async def test_when_all_workers_are_busy_the_reply_says_when_to_come_again(frontend, post):
    bench = await frontend(router={"busy": [{"max_waiting_tokens": 1}]})
    first = bench.complete(prompt="a long prompt")
    await bench.workers.reached("decode")
    reply = await getattr(bench, post)().end()
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["code"] == "overloaded"
    await bench.workers.emit(4)
    await first.end()


@POSTS
@pytest.mark.parametrize("key", ["ab" * 32, "cd" * 32])
async def test_a_canary_is_counted_apart_from_load(frontend, post, key, monkeypatch):
    monkeypatch.setenv("BIREME_KEY", "ab" * 32)
    bench = await frontend()
    reply = getattr(bench, post)(bireme={"cache_salt": new_mark(key)})
    await bench.workers.emit(4)
    await reply.end()
    counted = {name for name, *_ in bench.app._metrics.take_delta().counters}
    requests = {"bireme_requests_total", "bireme_http_requests_total", "bireme_routed_total"}
    assert counted & requests == (requests if key == "cd" * 32 else set())
    assert ("bireme_canaries_total" in counted) == (key == "ab" * 32)


@pytest.mark.parametrize(
    "content", ["to be edited", [{"type": "text", "text": "to be "}, {"type": "text", "text": "edited"}]]
)
async def test_a_predicted_output_reaches_the_engine_as_tokens(frontend, content):
    bench = await frontend()
    request = await engine_request(bench, "chat", prediction={"type": "content", "content": content})
    told = memoryview(request.prediction).cast("i").tolist()
    assert bytes(told) == b"to be edited"
    assert (await engine_request(bench, "chat")).prediction == b""


async def test_a_prediction_of_another_type_is_refused_by_name(frontend):
    reply = await (await frontend()).chat(prediction={"type": "tokens", "content": "a"}).end()
    assert reply.status == 400
    message = reply.json()["error"]["message"]
    assert "prediction.type" in message and "tokens" in message


async def test_a_prediction_of_other_parts_is_refused(frontend):
    content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    reply = await (await frontend()).chat(prediction={"type": "content", "content": content}).end()
    assert reply.status == 400
    assert "prediction.content[0].type: image_url; send parts of type text" in reply.json()["error"]["message"]
