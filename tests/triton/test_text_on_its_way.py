"""A TextStream over an adapter's Stream: what its client reads when sends and steps take turns as they like."""

from __future__ import annotations

from bireme.messages import Finish, SamplingParams, Usage
from bireme.text.output import TextStream
from bireme.triton.streams import Stream

LOST = Finish("error", Usage(), "UNAVAILABLE: the engine died")
END = Finish("length", Usage())


class Letters:
    """a for 0, b for 1 and so on; -1 has no text and breaks."""

    def push(self, tokens):
        if -1 in tokens:
            raise ValueError("no such token")
        return "".join(chr(97 + token) for token in tokens)

    def flush(self):
        return ""


class Outlet:
    """Reads responses as Triton's side does."""

    def __init__(self):
        self.texts: dict[int, str] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ends: list[str] = []

    def send(self, response, is_final):
        outputs = response.tensors()
        index = int(outputs["index"][0]) if "index" in outputs else 0
        self.texts[index] = self.texts.get(index, "") + outputs["text_output"][0].decode()
        self.tokens.setdefault(index, []).extend(outputs["output_ids"].tolist())
        if is_final:
            self.ends.append("response")

    def fail(self, error):
        self.ends.append(str(error))

    def close(self):
        self.ends.append("flag")

    def is_cancelled(self):
        return False


def make(outlet, *indices):
    stream = Stream(outlet, lambda stream: None, is_decoupled=True, max_buffer_bytes=1 << 20)
    texts = [
        TextStream(Letters(), SamplingParams(), stream.send, lambda finish: None, lambda: None, index)
        for index in indices
    ]
    return stream, texts


def test_a_delta_that_is_open_when_the_engine_is_lost_goes_on_with_the_next_engine():
    outlet = Outlet()
    stream, (text,) = make(outlet, None)
    text.push((0,))
    text.finish(LOST)  # said to `done`; nothing was sent
    text.push((1,))
    stream.flush()
    text.push((2,))
    text.finish(END)
    stream.flush()
    assert (outlet.texts, outlet.tokens, outlet.ends) == ({0: "abc"}, {0: [0, 1, 2]}, ["response"])


def test_two_sequences_with_open_deltas_keep_apart():
    outlet = Outlet()
    stream, (first, second) = make(outlet, 0, 1)
    for at in range(4):
        first.push((at,))
        second.push((at + 10,))
        if at == 1:
            stream.flush()
    first.finish(END)
    second.finish(END)
    stream.finish()
    stream.flush()
    assert outlet.texts == {0: "abcd", 1: "klmn"}
    assert outlet.tokens == {0: [0, 1, 2, 3], 1: [10, 11, 12, 13]}
    assert len(outlet.ends) == 1


def test_text_that_cannot_be_made_ends_the_stream_with_one_error():
    outlet = Outlet()
    stream, (text,) = make(outlet, None)
    text.push((0,))
    stream.flush()
    text.push((-1,))
    stream.flush()
    text.push((2,))
    text.finish(END)
    stream.flush()
    assert outlet.texts == {0: "a"}
    assert outlet.ends == ["no such token"]
    assert stream.cancelled
