"""Guided decoding in the torch engine, on random weights: whatever the model wants, the guide holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from bireme.config import GuidedDecodingConfig, Limits
from bireme.errors import RequestError, ResourceExhaustedError
from bireme.kv.transfer.fake import FakeNetwork
from bireme.text.parsers import REASONING, TOOLS, create_parser
from bireme.text.parsers.base import CallArguments, CallStart, Content, ParserRequest
from tests.engines.engine_fixtures import wait_for
from tests.engines.torch.host_resident import HostResident
from tests.engines.torch.schemas import make_schemas
from tests.engines.torch.torch_harness import Harness, make_prompts, request

pytest.importorskip("xgrammar")
MODEL = Path(__file__).parents[3] / "models" / "tiny-llama"
TOKENIZER = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")) if MODEL.exists() else None
PROMPT = make_prompts(9, seed=3)[0]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "size": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
ANY_SIZE = Limits(max_guide_bytes=1 << 31, max_guide_depth=1 << 31, max_bad_words=4096)
pytestmark = pytest.mark.skipif(TOKENIZER is None, reason="models/tiny-llama is missing: make models")


@pytest.fixture(scope="module")
def engine():
    config = GuidedDecodingConfig(compile_timeout_s=20, num_processes=1)
    with Harness(str(MODEL), limits=ANY_SIZE, guided_decoding_config=config) as harness:
        yield harness


def guided(raw, max_tokens=160, **fields):
    return request(PROMPT, max_tokens, **{"ignore_eos": False, "guided_decoding": raw} | fields)


def text_of(result):
    """Return the answer's text; it must have ended by its guide."""
    finish = result.finish
    assert (finish.reason, finish.error, finish.stop_token_id in (2, 4)) == ("stop", "", True)
    return TOKENIZER.decode(result.tokens, skip_special_tokens=True)


def answer(engine, raw, **fields):
    return text_of(engine.submit(guided(raw, **fields)))


def error_of(engine, raw, **fields):
    finish = engine.submit(guided(raw, **fields)).finish
    assert finish.reason == "error"
    return finish.error


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_to_random_schemas_are_valid(engine, temperature, count):
    jsonschema = pytest.importorskip("jsonschema")
    schemas = make_schemas(count, seed=int(temperature))
    sampling = {"temperature": temperature, "seed": 1}
    results = []
    for at in range(0, count, 60):
        [result.finish for result in results]
        results += [engine.submit(guided({"json": schema}, 300, **sampling)) for schema in schemas[at : at + 60]]
    for schema, result in zip(schemas, results, strict=True):
        jsonschema.validate(json.loads(text_of(result)), schema)


def test_a_regex_is_matched_as_a_whole(engine):
    assert re.fullmatch(r"[a-z]{3,6}-[0-9]{4}", answer(engine, {"regex": "[a-z]{3,6}-[0-9]{4}"}))


def test_a_choice_is_one_of_its_texts(engine):
    assert answer(engine, {"choice": ["north", "south west", "ünï"]}) in ("north", "south west", "ünï")


def test_a_grammar_is_followed(engine):
    text = answer(engine, {"grammar": 'root ::= "(" [a-c] (root | "") ")"'}, temperature=2.0, seed=4)
    assert re.fullmatch(r"(\([a-c])+\)+", text) and text.count("(") == text.count(")")


def test_a_json_object_is_an_object(engine):
    result = engine.submit(guided({"json_object": True}, 60, temperature=1.0, seed=3))
    assert result.finish.reason in ("stop", "length")
    text = TOKENIZER.decode(result.tokens)
    assert text.startswith("{") and (result.finish.reason == "length" or isinstance(json.loads(text), dict))


def test_a_structural_tag_has_its_markers(engine):
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<tool_call>",
            "content": {"type": "json_schema", "json_schema": SCHEMA},
            "end": "</tool_call>",
        },
    }
    result = engine.submit(guided({"structural_tag": tag}))
    assert result.finish.error == ""
    text = TOKENIZER.decode(result.tokens, skip_special_tokens=False)
    assert json.loads(re.fullmatch(r"<tool_call>(.*)</tool_call>", text)[1])["kind"] in ("a", "b")


def test_reasoning_passes_freely_and_the_guide_follows(engine):
    raw = {"regex": "[0-9]{3}", "reasoning_end": "</think>"}
    thinking = engine.submit(guided(raw, 20, bad_token_ids=((9,),)))  # the end never comes
    free = engine.run([request(PROMPT, 20, bad_token_ids=((2,), (4,), (9,)))])[0]
    assert (thinking.finish.reason, thinking.tokens) == ("length", free)
    # Until the end of the reasoning, as another engine would have made it.
    asked = request([*PROMPT, 100, 101, 9], 30, ignore_eos=False, guided_decoding=raw, num_resumed=3)
    assert re.fullmatch(r"\s{0,4}[0-9]{3}", text_of(engine.submit(asked)))


def test_a_guide_overrules_min_tokens_at_its_end_only(engine):
    assert answer(engine, {"choice": ["abc"]}, min_tokens=50) == "abc"
    long = engine.submit(guided({"regex": "[a-z ]+"}, 60, min_tokens=40, temperature=1.0, seed=1))
    assert long.finish.error == "" and len(long.tokens) >= 40


FUNCTIONS = ({"name": "store", "parameters": SCHEMA}, {"name": "now"})


# One of each family has the guide of a single call, too.
SINGLE = ("hermes", "mistral", "kimi_k2", "kimi_k3", "qwen3_coder", "minimax_m2", "minimax_m3", "glm45", "harmony")
TO_END = {2: 100.0, 4: 100.0}


FORMS = [(name, True) for name in TOOLS if name not in ("pythonic", "gemma3", "lfm2", "hunyuan3")]
FORMS += [(name, False) for name in SINGLE]


@pytest.fixture(scope="module")
def under_tool_guides(engine):
    """All side by side: several calls where they may be, and whatever is drawn an end as soon as there may be one."""
    return {
        (name, is_parallel): engine.submit(
            guided(
                TOOLS[name].guide(FUNCTIONS, is_parallel),
                600,
                temperature=1.0,
                seed=8,
                min_tokens=150 * is_parallel,
                logit_bias=TO_END,
            )
        )
        for name, is_parallel in FORMS
    }


@pytest.mark.parametrize(("name", "is_parallel"), FORMS)
def test_calls_under_a_tool_guide_are_read_back(under_tool_guides, name, is_parallel):
    result = under_tool_guides[name, is_parallel]
    assert (result.finish.error, result.finish.reason) == ("", "stop")
    reasoning = REASONING["kimi_k3"] if name == "kimi_k3" else None  # its guide begins within the answer's own marks
    parser = create_parser(reasoning, TOOLS[name], ParserRequest(FUNCTIONS, "<|open|>response<|sep|>"))
    text = TOKENIZER.decode(result.tokens, skip_special_tokens=False)
    events = [*parser.feed(text), *parser.close(False)]
    names = [event.name for event in events if isinstance(event, CallStart)]
    assert names and set(names) <= {"store", "now"}
    assert len(names) == 1 or is_parallel
    first = json.loads("".join(event.text for event in events if isinstance(event, CallArguments) and event.index == 0))
    assert set(first) == ({"kind", "size"} if names[0] == "store" else set()), text
    assert not [event for event in events if isinstance(event, Content)], text


CALL = TOKENIZER.token_to_id("<tool_call>") if TOKENIZER else 0
OFTEN = {"temperature": 1.0, "logit_bias": {CALL: 7.0}}


def triggered(functions=FUNCTIONS, **trigger):
    return {**TOOLS["hermes"].guide(functions, True), "trigger": {"token": CALL, **trigger}}


def calls_of(tokens):
    """Return the calls behind a mark that is a token; one that was cut off is left out."""
    found = []
    for at in [at for at, token in enumerate(tokens) if token == CALL]:
        text = TOKENIZER.decode(tokens[at + 1 :], skip_special_tokens=False)
        if "</tool_call>" in text:  # as a token, or spelled
            found.append(json.loads(text[: text.index("</tool_call>")]))
    return found


SEEDS = range(6)


@pytest.fixture(scope="module")
def often_marked(engine):
    """All side by side."""
    return [engine.submit(guided(triggered(), 400, **OFTEN, seed=seed, bad_token_ids=((2,), (4,)))) for seed in SEEDS]


@pytest.mark.parametrize("seed", SEEDS)
def test_where_the_mark_s_token_comes_there_is_a_call_and_everything_else_is_free(often_marked, seed):
    jsonschema = pytest.importorskip("jsonschema")
    result = often_marked[seed]
    assert (result.finish.error, result.finish.reason) == ("", "length")
    calls = calls_of(result.tokens)
    assert len(calls) > 2 and {call["name"] for call in calls} <= {"store", "now"}
    for call in calls:
        jsonschema.validate(call["arguments"], SCHEMA if call["name"] == "store" else {"maxProperties": 0})
    assert len(result.tokens) > 10 * len(calls)


def test_without_parallel_calls_the_answer_ends_with_the_first(engine):
    result = engine.submit(guided(triggered(stop_after_first=True), 400, **OFTEN, seed=3))
    assert (result.finish.error, result.finish.reason) == ("", "stop")
    assert len(calls_of(result.tokens)) == result.tokens.count(CALL) == 1
    assert TOKENIZER.decode(result.tokens, skip_special_tokens=False).endswith("\n</tool_call>")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_without_a_call_is_what_it_would_be_without_a_guide(engine, temperature):
    sampling = {"temperature": temperature, "seed": 4, "ignore_eos": False}
    plain = engine.submit(request(PROMPT, 60, **sampling))
    result = engine.submit(request(PROMPT, 60, guided_decoding=triggered(), **sampling))
    assert plain.finish.error == "" and CALL not in plain.tokens
    assert (result.finish.reason, result.tokens) == (plain.finish.reason, plain.tokens)


def marked_by(token):
    """Return a guide that begins with a token that an answer has anyway."""
    number = {"type": "regex", "pattern": "[0-9]{4}"}
    form = {"type": "tag", "begin": TOKENIZER.decode([token]), "content": number, "end": ";"}
    return {"structural_tag": {"format": form}, "trigger": {"token": token}}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.skipif(torch.cuda.is_available(), reason="it draws on the host what a GPU has drawn itself")
def test_steps_are_started_ahead_but_for_those_that_a_guide_holds(engine, temperature):
    sampling = {"temperature": temperature, "seed": 9}
    plain = engine.run([request(PROMPT, 40, **sampling)])[0]
    token = next(one for at, one in enumerate(plain) if at > 5 and TOKENIZER.decode([one]).strip().isascii())
    fields = {"ignore_eos": False, "guided_decoding": marked_by(token), **sampling}
    asked = [request(PROMPT, 40, **fields), request(PROMPT, 40, **sampling)]
    expected = [engine.run([one])[0] for one in asked]
    assert re.search(re.escape(TOKENIZER.decode([token])) + "[0-9]{4};", TOKENIZER.decode(expected[0]))
    with Harness(str(MODEL)) as ahead:
        resident = HostResident.put_into(ahead.core._parts)
        assert ahead.run(asked) == expected and resident.num_ahead > 20


LARGE = {"enum": [f"value number {at}" for at in range(100_000)]}
HOPELESS_TOOL = ({"name": "now", "parameters": {"type": "object", "properties": {"a": LARGE}, "required": ["a"]}},)


def test_a_loose_guide_that_can_not_be_had_leaves_the_answer_free_and_the_log_says_so(impatient, caplog):
    expected = impatient.run([request(PROMPT, 8)])[0]
    loose = impatient.submit(guided(triggered(HOPELESS_TOOL, is_loose=True), 8))
    assert (loose.finish.error, loose.tokens) == ("", expected)
    assert "guide_left_out reason=" in caplog.text and "guided_decoding" in caplog.text
    assert error_of(impatient, triggered(HOPELESS_TOOL)).startswith("INVALID_ARGUMENT: guided_decoding")


def test_where_guides_are_switched_off_loose_ones_are_left_out():
    with Harness(str(MODEL), guided_decoding_backend=None) as engine:
        loose = engine.submit(guided(triggered(is_loose=True), 8))
        assert loose.finish.error == "" and loose.tokens == engine.run([request(PROMPT, 8)])[0]
        with pytest.raises(RequestError, match="backend"):
            engine.submit(guided(triggered()))


def test_bans_that_leave_nothing_are_named(engine):
    ids = tuple((token,) for token in range(4096) if "a" in (TOKENIZER.decode([token]) or ""))
    text = error_of(engine, {"regex": "a+"}, bad_token_ids=ids)
    assert text.startswith("INVALID_ARGUMENT: guided_decoding") and "exclude every token" in text


def test_guided_and_free_requests_share_a_batch(engine):
    alone = engine.run([request(PROMPT, 40)])[0]
    results = [engine.submit(guided({"json": SCHEMA})) for _ in range(4)]
    beside = [engine.submit(request(PROMPT, 40)) for _ in range(4)]
    assert len({text_of(result) for result in results}) == 1
    assert [one.finish.error or one.tokens for one in beside] == [alone] * 4


def test_logprobs_are_the_model_s_own(engine):
    result = engine.submit(guided({"choice": ["north"]}, logprobs=2))
    assert text_of(result) == "north"
    assert [entry[0][0] for entry in result.logprobs] == result.tokens
    assert all(entry[0][1] <= 0 for entry in result.logprobs)


def test_an_equal_guide_is_compiled_once(engine):
    counts = engine.engine._loaded.guides.compiler.counts
    answer(engine, {"regex": "once[0-9]"})
    compiled = counts.compiled
    for _ in range(3):
        answer(engine, {"regex": "once[0-9]"})
    assert counts.compiled == compiled


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ignore_eos": True}, "ignore_eos: with guided_decoding"),
        ({"guided_decoding": {"sql": ""}}, "exactly one of"),
    ],
)
def test_what_does_not_go_together_is_refused(engine, fields, words):
    with pytest.raises(RequestError, match=words):
        engine.submit(
            guided(**{"raw": {"regex": "a"}} | fields) if "ignore_eos" in fields else guided(fields["guided_decoding"])
        )


def test_a_guide_can_be_switched_off():
    with Harness(str(MODEL), guided_decoding_backend=None) as harness, pytest.raises(RequestError, match="backend"):
        harness.submit(guided({"regex": "a"}))


def nested(levels):
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOPELESS: dict[str, dict[str, Any]] = {
    "refers_to_itself": {"json": {"$ref": "#"}},
    "recursive": {"json": {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}},
    "240_deep": {"json": nested(240)},
    "huge_enum": {"json": {"enum": [f"value number {at}" for at in range(100_000)]}},
    "1e9_items": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000_000}},
    "1e9_characters": {"json": {"type": "string", "minLength": 1_000_000_000}},
    "redos": {"regex": "((a+)+|(a|a)*)*b(.*.*.*)*c"},
    "large_repeat": {"regex": "(([a-z]{1,1000}){1,1000}){1,1000}"},
    "left_recursion": {"grammar": 'root ::= root root "a" | root | ""'},
    "deep_grammar": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "deep_regex": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "alternatives": {
        "json": {"anyOf": [{"type": "object", "properties": {f"p{a}": {"type": "integer"}}} for a in range(2000)]}
    },
}


@pytest.fixture(scope="module")
def impatient():
    """One engine for all that is hopeless: what comes after it is served, too."""
    config = GuidedDecodingConfig(compile_timeout_s=1.5, num_processes=1)
    with Harness(str(MODEL), limits=ANY_SIZE, guided_decoding_config=config, max_seq_len=512) as harness:
        yield harness


@pytest.mark.parametrize("name", HOPELESS)
def test_a_hopeless_guide_neither_ends_the_engine_nor_holds_others_up(impatient, name):
    expected = impatient.run([request(PROMPT, 8)])[0]
    hopeless = impatient.submit(guided(HOPELESS[name], 64))
    while not hopeless.is_over.wait(0.1):
        assert impatient.run([request(PROMPT, 8)])[0] == expected
    error = hopeless.finish.error
    assert hopeless.finish.reason in (("error",) if error else ("length", "stop"))
    assert not error or error.startswith("INVALID_ARGUMENT: guided_decoding"), error
    assert answer(impatient, {"choice": ["still here"]}) == "still here"


def test_a_schema_deeper_than_python_s_stack_is_refused(engine):
    with pytest.raises(RequestError, match="recursion"):
        engine.submit(guided({"json": nested(5000)}))


def test_an_abort_reaches_a_request_whose_guide_is_being_compiled():
    config = GuidedDecodingConfig(num_processes=1)
    with Harness(str(MODEL), limits=ANY_SIZE, guided_decoding_config=config) as engine:
        waiting = engine.submit(guided(HOPELESS["huge_enum"]))
        late = engine.submit(guided({"regex": "a"}, timeout_ms=50))
        engine.abort(waiting)
        assert waiting.finish.reason == "cancelled"
        assert late.finish.reason in ("timeout", "stop")


def test_requests_whose_guide_is_being_compiled_count_as_waiting():
    config, queue = GuidedDecodingConfig(num_processes=2), {"max_queue_size": 2}
    keys = {"guided_decoding_config": config, "max_batch_size": 1, "queue": queue}
    with Harness(str(MODEL), limits=ANY_SIZE, **keys) as engine:
        waiting = []
        for count in (1, 2, 3):
            waiting.append(engine.submit(guided(HOPELESS["huge_enum"])))
            wait_for(lambda: (engine.core.num_preparing, engine.engine._num_submitted) == (count, 0), 30)  # noqa: B023
        with pytest.raises(ResourceExhaustedError, match="queue: 3 requests wait"):
            engine.submit(guided(HOPELESS["huge_enum"]))
        for one in waiting:
            engine.abort(one)
        assert {one.finish.reason for one in waiting} == {"cancelled"}
        assert answer(engine, {"choice": ["again"]}) == "again"


def test_a_request_that_cannot_be_begun_ends_with_the_reason(engine, monkeypatch):
    def prepare(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(engine.core._parts.guides, "prepare", prepare)
        assert error_of(engine, {"choice": ["a"]}) == "INTERNAL: RuntimeError: can't start new thread"
    assert not engine.core.requests.running and answer(engine, {"choice": ["a"]}) == "a"


RAWS: tuple[dict[str, Any], ...] = (
    {"json": SCHEMA},
    {"regex": "[a-f0-9]{12}"},
    {"choice": ["alpha", "beta"]},
    {"regex": "[0-9]{3}x", "reasoning_end": "zzz"},
    triggered(),
)


def test_disaggregated_answers_equal_aggregated_ones(engine):
    network = FakeNetwork()
    transfers = [network.join("prefill"), network.join("decode")]
    workers = [Harness(str(MODEL), one, name) for one, name in zip(transfers, ("prefill", "decode"), strict=True)]
    for raw in RAWS:
        sampling = {"temperature": 0.8, "seed": 5, "logit_bias": {CALL: 7.0}}
        whole = engine.submit(guided(raw, 40, **sampling))
        first = workers[0].submit(guided(raw, 40, request_type="context_only", **sampling))
        assert first.finish.error == ""
        second = workers[1].submit(guided(raw, 40, request_type="generation_only", **sampling), first.exported)
        assert (second.finish.reason, second.tokens) == (whole.finish.reason, whole.tokens)
    for worker, transfer in zip(workers, transfers, strict=True):
        worker.engine.stop()
        transfer.close()


@pytest.mark.parametrize("raw", RAWS, ids=lambda raw: next(iter(raw)))
def test_a_resumed_stream_goes_on_exactly(engine, raw):
    sampling = {"temperature": 0.8, "ignore_eos": False, "guided_decoding": raw, "logit_bias": {CALL: 7.0}}
    for seed in range(6, 26):  # until there is a call: the tokenizer is trained on the sources of this Python
        sampling["seed"] = seed
        whole = engine.submit(request(PROMPT, 40, **sampling))
        if whole.finish.error or "trigger" not in raw or calls_of(whole.tokens):
            break
    assert whole.finish.error == "" and ("trigger" not in raw or calls_of(whole.tokens))
    places = range(1, len(whole.tokens))
    found = [engine.submit(request([*PROMPT, *whole.tokens[:at]], 40, num_resumed=at, **sampling)) for at in places]
    for at, resumed in zip(places, found, strict=True):
        assert (resumed.finish.reason, whole.tokens[:at] + resumed.tokens) == (whole.finish.reason, whole.tokens)


def test_a_resumed_stream_that_has_ended_is_refused(engine):
    whole = engine.submit(guided({"choice": ["alpha"]}))
    ids = [*PROMPT, *whole.tokens, whole.finish.stop_token_id]
    fields = {"ignore_eos": False, "guided_decoding": {"choice": ["alpha"]}, "num_resumed": len(ids) - len(PROMPT)}
    beside = engine.submit(request(PROMPT, 40))
    assert "nothing is left to be made" in engine.submit(request(ids, 40, **fields)).finish.error
    assert beside.finish.error == ""


def test_resumed_tokens_that_the_guide_does_not_allow_are_refused(engine):
    asked = request([*PROMPT, 100, 101], 40, num_resumed=2, ignore_eos=False, guided_decoding={"json": SCHEMA})
    assert "is not allowed here" in engine.submit(asked).finish.error
