"""What two answers say, in each API's form."""

import json

import pytest

from bireme.openai.mirror.answers import CHAT, COMPLETIONS, MESSAGES, RESPONSES, difference, read_answer


def whole(path, document):
    return read_answer(path, json.dumps(document).encode())


def streamed(path, *events):
    lines = [": still working", *(f"data: {json.dumps(event)}" for event in events), "data: [DONE]"]
    return read_answer(path, "\n\n".join(lines).encode())


def choice(**fields):
    return {"choices": [{"index": 0, **fields}]}


def test_a_stream_says_what_the_whole_answer_does():
    call = {"id": "call_1", "function": {"name": "f", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ":1}"}}
    pieces = streamed(
        CHAT, choice(delta={"role": "assistant", "content": ""}), choice(delta={"content": "Hel"}),
        choice(delta={"content": "lo", "tool_calls": [call | {"index": 0}]}), choice(delta={"tool_calls": [rest]}),
        choice(delta={}, finish_reason="tool_calls"), {"choices": [], "usage": {}},
    )  # fmt: skip
    call = {"id": "call_2", "function": {"name": "f", "arguments": '{"a":1}'}}
    one = whole(CHAT, choice(message={"content": "Hello", "tool_calls": [call]}, finish_reason="tool_calls"))
    assert pieces == one and not one.error and difference(pieces, one) == ""


def test_token_ids_count_where_both_have_them():
    old = whole(COMPLETIONS, choice(text="a", token_ids=[1, 2], finish_reason="stop"))
    assert difference(old, whole(COMPLETIONS, choice(text="a", finish_reason="stop"))) == ""
    other = whole(COMPLETIONS, choice(text="a", token_ids=[1, 3], finish_reason="stop"))
    assert difference(old, other) == "choices[0].token_ids: they differ at 1 of 2 and 2"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"text": "abc", "finish_reason": "length"}, "choices[0].finish_reason: they differ at 0 of 4 and 6"),
        ({"text": "abcd", "finish_reason": "stop"}, "choices[0].text: they differ at 3 of 3 and 4"),
        ({"text": "", "finish_reason": "stop"}, "choices[0].text: only the old answer has it"),
    ],
)
def test_a_difference_is_told_by_its_place(fields, told):
    old = whole(COMPLETIONS, choice(text="abc", finish_reason="stop"))
    assert difference(old, whole(COMPLETIONS, choice(**fields))) == told


def test_messages_are_read_whole_and_streamed():
    blocks = [{"type": "text", "text": "Hello"}, {"type": "tool_use", "id": "x", "name": "f", "input": {"a": 1}}]
    one = whole(MESSAGES, {"type": "message", "content": blocks[:1], "stop_reason": "end_turn"})
    pieces = streamed(
        MESSAGES, {"type": "message_start", "message": {}}, {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, {"type": "message_stop"},
    )  # fmt: skip
    assert pieces == one
    other = whole(MESSAGES, {"type": "message", "content": blocks, "stop_reason": "end_turn"})
    assert difference(one, other) == "content[1].type: only the new answer has it"


def test_responses_are_read_whole_and_streamed():
    answer = {"object": "response", "status": "completed", "output": [
        {"type": "message", "id": "msg_1", "content": [{"type": "output_text", "text": "Hello"}]},
        {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
    ]}  # fmt: skip
    pieces = streamed(RESPONSES, {"type": "response.created"}, {"type": "response.completed", "response": answer})
    assert pieces == whole(RESPONSES, answer) and "output[0].content" in pieces.values


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (CHAT, {"error": {"message": "secret", "code": "UNAVAILABLE"}}),
        (MESSAGES, {"type": "error", "error": {"type": "UNAVAILABLE", "message": "secret"}}),
        (RESPONSES, {"type": "error", "code": "UNAVAILABLE", "message": "secret"}),
    ],
)
def test_a_stream_that_an_error_ended_is_no_answer(path, event):
    assert streamed(path, event).error == "its stream ended with the error UNAVAILABLE"


def test_a_stream_that_was_cut_off_is_no_answer():
    assert streamed(CHAT, choice(delta={"content": "Hel"})).error == "it has no end"
