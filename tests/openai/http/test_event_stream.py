"""Text on its way into events: one event a piece, in order, whatever piles up until it is written."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.messages import Finish, SamplingParams, Usage
from bireme.openai.http.call import ClientGoneError
from bireme.openai.http.event_stream import DONE, EventStream
from bireme.openai.http.pace import Pacer
from bireme.openai.text.completion_answer import CompletionTemplate, StreamedCompletion, WholeCompletion
from bireme.pipelines.chat import _Sink
from bireme.pipelines.chat_answer import Choice as AnswerChoice
from bireme.pipelines.chat_answer import ResponseMeta, WholeAnswer
from bireme.pipelines.chat_stream import ChunkTemplate, StreamedAnswer
from bireme.text.detokenizer import TableDetokenizer
from bireme.text.output import TextStream, TokenDelta
from bireme.text.vocabulary import Vocabulary

# Letters, the three bytes of a euro sign, a token without text, and quotes that JSON has to escape.
VOCABULARY = Vocabulary(["a", "b", None, None, None, "", '"\n'], {2: b"\xe2", 3: b"\x82", 4: b"\xac"})
EURO = [2, 3, 4]
HEADING = ResponseMeta("chat-1", "m", 0)


class Choice:
    """A sequence that grows, and the text that its stream makes of it."""

    def __init__(self, stream, index=0):
        self.detokenizer = TableDetokenizer(VOCABULARY)
        send = functools.partial(stream.delta, index)
        self._text = TextStream(self.detokenizer, SamplingParams(), send, lambda finish: None, lambda: None)

    def push(self, *tokens):
        self._text.push(tokens)


def make(n=1, max_bytes=1 << 20):
    template = ChunkTemplate(HEADING, n, prefix=b"data: ", suffix=b"\n\n")
    return EventStream(template, Pacer(), max_bytes)


def contents(data):
    """Return (choice, text) of each event."""
    events = [json.loads(line[6:]) for line in data.decode().split("\n\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return [(choice["index"], choice.get("delta", {}).get("content", choice.get("text", ""))) for choice in choices]


@dataclass
class Told:
    """What one answer is told through, and what it has said."""

    add: Callable[[TokenDelta], None]
    take: Callable[[], None]
    text: Callable[[], str]


def streamed(add, stream):
    taken: list[bytes] = []

    def text():
        taken.append(stream.take())
        return "".join(text for _, text in contents(b"".join(taken)))

    return Told(add, lambda: taken.append(stream.take()), text)


def streamed_chat():
    stream = make()
    choice = AnswerChoice(0, StreamedAnswer(ChunkTemplate(HEADING, 1, prefix=b"data: ", suffix=b"\n\n"), stream, 1))
    return streamed(choice.add, stream)


def whole_chat():
    answer = WholeAnswer(HEADING, 1)
    choice = AnswerChoice(0, answer)
    text = lambda: json.loads(answer.json())["choices"][0]["message"]["content"]  # noqa: E731
    return Told(choice.add, lambda: None, text)


def streamed_completion():
    template = CompletionTemplate(HEADING, 1, False)
    stream = EventStream(template, Pacer(), 1 << 20)
    answer = StreamedCompletion(template, stream, [""], None)
    return streamed(functools.partial(answer.add, 0), stream)


def whole_completion():
    answer = WholeCompletion(HEADING, [""], None)
    text = lambda: json.loads(answer.json(1, False))["choices"][0]["text"]  # noqa: E731
    return Told(functools.partial(answer.add, 0), lambda: None, text)


def chat_model():
    template, sent = ChunkTemplate(HEADING, 1), []
    choice = AnswerChoice(0, StreamedAnswer(template, _Sink(template, sent.append), 1))

    def text():
        chunks = [json.loads(response.tensors()["response"][0]) for response in sent]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    return Told(choice.add, lambda: None, text)


ANSWERS = {
    "streamed chat": streamed_chat,
    "whole chat": whole_chat,
    "streamed completion": streamed_completion,
    "whole completion": whole_completion,
    "chat model": chat_model,
}


async def test_tokens_that_pile_up_are_an_event_each():
    stream = make()
    choice = Choice(stream)
    choice.push(0)
    choice.push(1)
    choice.push(6)
    await stream.wait()
    assert contents(stream.take()) == [(0, "a"), (0, "b"), (0, '"\n')]
    assert stream.take() == b"", "what was taken does not come again"


async def test_tokens_without_text_make_no_event():
    stream = make()
    choice = Choice(stream)
    choice.push(5)
    choice.push(*EURO[:2])
    assert stream.take() == b""
    choice.push(EURO[2])
    assert contents(stream.take()) == [(0, "€")]


async def test_text_stands_before_what_follows_it():
    stream = make(n=2)
    first, second = Choice(stream), Choice(stream, 1)
    first.push(0)
    second.push(1)
    stream.text(0, "(rest)")
    first.push(1)
    stream.end()
    data = stream.take()
    assert contents(data) == [(0, "a"), (1, "b"), (0, "(rest)"), (0, "b")]
    assert data.endswith(DONE)


async def test_text_for_a_client_that_does_not_read_counts_against_the_limit():
    stream = make(max_bytes=5000)
    choice = Choice(stream)
    choice.push(0)
    await stream.wait()
    stream.take()  # and the write does not return
    for _ in range(100):
        choice.push(0)
    assert not stream.is_overrun
    await asyncio.sleep(0.05)  # the pacer looks at it
    assert stream.is_overrun and stream.is_closed


async def test_nothing_is_kept_for_a_client_over_the_limit():
    stream = make(max_bytes=5000)
    for _ in range(100):
        stream.text(0, "a" * 100)
    assert stream.is_overrun and stream._size < 5500
    for way in (stream.take, stream.wait):
        with pytest.raises(ClientGoneError):
            await way()


async def test_during_a_write_only_the_end_is_waited_for():
    stream = make()
    stream.text(0, "a")
    stream.take()
    waiting = asyncio.ensure_future(stream.wait())
    stream.text(0, "b")
    await asyncio.sleep(0.05)
    assert not waiting.done()
    stream.close()
    await asyncio.wait_for(waiting, 60)


async def test_what_comes_during_a_write_is_written_after_it():
    stream, written = make(), []
    choice = Choice(stream)
    choice.push(0)
    await stream.wait()
    stream.take()
    choice.push(1)
    await asyncio.sleep(0.05)
    assert not written

    def write(data):
        written.append(data)
        return True

    stream.go_on(write)
    await asyncio.sleep(0.05)
    assert contents(b"".join(written)) == [(0, "b")]
    choice.push(1)
    await asyncio.sleep(0.05)
    assert contents(b"".join(written)) == [(0, "b"), (0, "b")]


PUSHES = st.lists(st.lists(st.integers(0, 8), max_size=5), max_size=12)


@pytest.mark.parametrize(
    "answer", ["streamed chat", "whole chat", "streamed completion", "whole completion", "chat model"]
)
@settings(deadline=None, max_examples=100)
@given(pushes=PUSHES, taken_after=st.sets(st.integers(0, 12)))
def test_an_answer_holds_the_whole_text_with_what_was_held_back_to_its_end(answer, pushes, taken_after):
    async def run():
        told = ANSWERS[answer]()
        detokenizer = TableDetokenizer(VOCABULARY)
        text = TextStream(detokenizer, SamplingParams(), told.add, lambda finish: None, lambda: None)
        for at, tokens in enumerate(pushes):
            text.push(tokens)
            if at in taken_after:
                told.take()
        text.finish(Finish("length", Usage()))
        return told.text()

    whole = TableDetokenizer(VOCABULARY)
    tokens = [token for push in pushes for token in push]
    assert asyncio.run(run()) == whole.push(tokens) + whole.flush()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(st.integers(0, 8), max_size=5), max_size=12), st.sets(st.integers(0, 12)))
def test_events_hold_the_whole_text_whenever_they_are_taken(pushes, taken_after):
    async def run():
        stream, data = make(), b""
        choice = Choice(stream)
        for at, tokens in enumerate(pushes):
            choice.push(*tokens)
            if at in taken_after:
                data += stream.take()
        data += stream.take()
        found = contents(data)
        assert all(text for _, text in found)
        return "".join(text for _, text in found) + choice.detokenizer.flush()

    whole = TableDetokenizer(VOCABULARY)
    tokens = [token for push in pushes for token in push]
    assert asyncio.run(run()) == whole.push(tokens) + whole.flush()
