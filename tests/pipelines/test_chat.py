"""The chat model over fake workers: JSON in, JSON out, chunks when asked for."""

import asyncio
import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.errors import RequestError
from bireme.messages import Usage
from bireme.metrics import Registry
from bireme.pipelines.chat import Chat
from bireme.pipelines.chat_answer import Choice, ResponseMeta, WholeAnswer
from bireme.pipelines.chat_request import parse_chat
from bireme.pipelines.chat_stream import ChunkTemplate, StreamedAnswer
from bireme.text.output import TokenDelta
from bireme.text.parsers import create_parser, reasoning_format, tool_format
from bireme.text.parsers.base import ParserRequest
from bireme.text.tokenizer import TextTokenizer
from bireme.types import Cancelled, Inputs, StageContext
from bireme.workers.fake import FakeWorkers

TEMPLATE = "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}assistant:"
FIELDS = {"model": "none", "workers": {"decode": {"engine": "mocker"}}, "name": "test"}
RECIPE = convert(FIELDS, Recipe, "test")
MESSAGES = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def letters():
    inner = Inner(models.WordLevel({chr(code): code for code in range(1, 1000)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return TextTokenizer(inner, templates={"default": TEMPLATE})


@pytest.fixture
async def stage():
    workers = FakeWorkers()
    chat = Chat(workers, letters())
    await chat.start(StageContext("chat", RECIPE, None, Registry("chat")))
    yield chat, workers
    await chat.stop()


async def ask(stage, count, **fields):
    """Return the responses' JSON, merged as for a slow reader."""
    chat, workers = stage
    responses = []

    def send(response):
        if not responses or responses[-1].merge(response) is None:
            responses.append(response)

    body = json.dumps({"messages": MESSAGES, "max_tokens": count, **fields}).encode()
    inputs = Inputs({"request": np.array([body], object)})
    task = asyncio.ensure_future(chat.handle(inputs, send, Cancelled()))
    await asyncio.sleep(0)
    if not task.done():
        await workers.emit(count)
    await asyncio.wait_for(task, 5)
    return [json.loads(response.tensors()["response"][0]) for response in responses]


async def test_one_response_has_the_whole_answer(stage):
    (body,) = await ask(stage, 4)
    assert body["object"] == "chat.completion" and len(body["choices"][0]["message"]["content"]) == 4


async def test_chunks_of_a_slow_reader_are_merged_without_loss(stage):
    (whole,) = await ask(stage, 4)
    chunks = await ask(stage, 4, stream=True)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == [
        "",
        whole["choices"][0]["message"]["content"],
        None,
    ]


async def test_a_wrong_request_is_refused(stage):
    with pytest.raises(RequestError, match="temperature: 9"):
        await ask(stage, 4, temperature=9)


def deltas(text, size):
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    last = TokenDelta([], "", finish_reason="stop", usage=Usage(prompt_tokens=3, completion_tokens=len(pieces)))
    return [*(TokenDelta([1], piece) for piece in pieces), last]


def parser(prompt_end=""):
    request = ParserRequest(({"name": "add"},), prompt_end)
    return create_parser(reasoning_format("think"), tool_format("hermes"), request)


class Sink:
    def __init__(self, template):
        self.template, self.chunks, self.is_over = template, [], False

    def text(self, index, text):
        self.chunk(self.template.text(index, text))

    def chunk(self, data):
        self.chunks.append(json.loads(data))

    def end(self):
        self.is_over = True


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_and_calls_are_put_where_clients_look_for_them(size):
    answer = WholeAnswer(ResponseMeta.of("m"), 1)
    choice = Choice(0, answer, parser())
    for delta in deltas(f"<think>\nadd them\n</think>\n{CALL}", size):
        choice.add(delta)
    body = json.loads(answer.json())
    message = body["choices"][0]["message"]
    assert message["reasoning_content"].strip() == "add them" and message["content"] is None
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0 or size == 1000


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_streamed_calls_come_in_pieces_that_join(size):
    template = ChunkTemplate(ResponseMeta.of("m"), 1)
    sink = Sink(template)
    choice = Choice(0, StreamedAnswer(template, sink, 1), parser())
    for delta in deltas(CALL, size):
        choice.add(delta)
    calls = [part for chunk in sink.chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "add" and calls[0]["id"] and calls[0]["type"] == "function"
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"a": 1}
    assert sink.is_over and sink.chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_reasoning_has_the_names_that_the_recipe_says():
    names = ("reasoning_content", "reasoning")
    whole = WholeAnswer(ResponseMeta.of("m", reasoning_names=names), 1)
    sink = Sink(template := ChunkTemplate(ResponseMeta.of("m", reasoning_names=names), 1))
    for answer in (whole, StreamedAnswer(template, sink, 1)):
        choice = Choice(0, answer, parser())
        for delta in deltas("<think>hm</think>yes", 100):
            choice.add(delta)
    shown = json.loads(whole.json())["choices"][0]["message"]
    streamed = [chunk["choices"][0]["delta"] for chunk in sink.chunks]
    assert all(shown[name] == "hm" and any(delta.get(name) == "hm" for delta in streamed) for name in names)


DETAILS = [{"type": "reasoning.text", "text": "a "}, {"type": "reasoning.summary", "summary": "sum"}]


@pytest.mark.parametrize(
    ("fields", "thoughts"),
    [
        ({"reasoning": "a sum"}, "a sum"),
        ({"reasoning": "a sum", "reasoning_content": "a sum", "reasoning_details": DETAILS}, "a sum"),
        ({"reasoning": None, "reasoning_details": [*DETAILS, {"type": "reasoning.encrypted", "data": "x"}]}, "a sum"),
        ({"content": None, "reasoning_content": "a sum"}, "a sum"),
        ({"content": None, "tool_calls": []}, None),
        ({"content": None}, None),
    ],
)
def test_a_history_has_its_thoughts_under_each_of_their_names(fields, thoughts):
    body = {"messages": [*MESSAGES, {"role": "assistant", "content": "42", **fields}]}
    message = parse_chat(json.dumps(body), RECIPE).messages[1]
    assert message.get("reasoning_content") == thoughts and message["content"] == ("" if "content" in fields else "42")


def test_thoughts_under_two_names_have_to_be_the_same():
    body = {"messages": [{"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"}]}
    with pytest.raises(RequestError, match=r"messages\[0\].reasoning: not the same as reasoning_content"):
        parse_chat(json.dumps(body), RECIPE)


def test_pictures_of_results_are_shown_behind_them_all():
    picture = {"type": "image_url", "image_url": {"url": "data:,x"}}
    results = [{"role": "tool", "tool_call_id": "1", "content": content} for content in ([picture], "b")]
    for last, shown in (
        ({"role": "assistant", "content": "c"}, ["b", [{"type": "image"}], "c"]),
        ({"role": "user", "content": "c"}, ["b", [{"type": "image"}, {"type": "text", "text": "c"}]]),
    ):
        request = parse_chat(json.dumps({"messages": [*results, last]}), RECIPE)
        assert [message["content"] for message in request.messages][1:] == shown and len(request.pictures) == 1


def test_without_parallel_calls_only_the_first_is_delivered():
    answer = WholeAnswer(ResponseMeta.of("m"), 1)
    choice = Choice(0, answer, parser(), is_parallel=False)
    for delta in deltas(f"{CALL}\n{CALL}", 5):
        choice.add(delta)
    assert len(json.loads(answer.json())["choices"][0]["message"]["tool_calls"]) == 1


def test_reasoning_effort_switches_thinking():
    for effort, is_on in (("none", False), ("minimal", False), ("low", True), ("high", True)):
        body = {"messages": MESSAGES, "reasoning_effort": effort}
        assert parse_chat(json.dumps(body), RECIPE).variables["enable_thinking"] is is_on


@pytest.mark.parametrize(("fields", "is_loose"), [({}, True), ({"strict": False}, True), ({"strict": True}, False)])
def test_a_tool_s_schema_is_loose_unless_it_is_strict_which_no_template_sees(fields, is_loose):
    function = {"name": "tag", "parameters": {"type": "array", "uniqueItems": True}}
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": {**function, **fields}}]}
    request = parse_chat(json.dumps(body), RECIPE)
    assert request.tools == [{"type": "function", "function": function}]
    guide = json.dumps(tool_format("hermes").guide(request.functions, is_parallel=True))
    assert ('"is_loose": true' in guide) is is_loose


def test_verbosity_is_the_template_s_variable():
    body = {"messages": [{"role": "user", "content": "hi"}], "verbosity": "low"}
    assert parse_chat(json.dumps(body), RECIPE).variables == {"verbosity": "low"}


def test_developer_is_the_newer_name_of_system_and_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse_chat(json.dumps({"messages": [{"role": "developer", "content": parts}]}), RECIPE)
    assert request.messages == [{"role": "system", "content": "a\nb"}]


def test_the_clients_own_history_comes_back_as_it_was():
    function = {"name": "add", "arguments": "{}"}
    calls = [{"id": "c", "type": "function", "function": function}]
    empty = {"content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None}
    assistant = {"role": "assistant", "tool_calls": calls, **empty}
    history = [*MESSAGES, assistant, {"role": "tool", "tool_call_id": "c", "content": "3"}]
    messages = parse_chat(json.dumps({"messages": history}), RECIPE).messages
    assert messages[1]["tool_calls"][0]["function"] == function and messages[2]["tool_call_id"] == "c"
