import json
import queue
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.coalescing import MAX_GROWTH
from bireme.messages import Finish, SamplingParams, Usage
from bireme.specs import DECODE
from bireme.text.output import TextStream, TokenDelta

LETTERS = [chr(code) for code in range(97, 123)]


class Letters:
    """A detokenizer of one letter a token; 26 and above are bytes of an unfinished character."""

    def __init__(self):
        self.held = 0

    def push(self, tokens):
        text = "".join(LETTERS[token] for token in tokens if token < 26)
        self.held += sum(token >= 26 for token in tokens)
        return text

    def flush(self):
        return "\ufffd" if self.held else ""


class Client:
    """Collects what a stream sends."""

    def __init__(self, sampling=None, index=None):
        self.deltas, self.finishes, self.num_aborts = [], [], 0
        self.stream = TextStream(
            Letters(), sampling or SamplingParams(), self.deltas.append, self.finishes.append, self.abort, index
        )

    def abort(self):
        self.num_aborts += 1

    def push(self, letters, **more):
        self.stream.push([LETTERS.index(letter) for letter in letters], **more)

    @property
    def text(self):
        return "".join(delta.text for delta in self.deltas)

    @property
    def num_tokens(self):
        return sum(len(delta.tokens) for delta in self.deltas)


def finish(reason="length", **more):
    return Finish(reason, Usage(prompt_tokens=3, completion_tokens=7), **more)


def test_a_delta_grows_until_somebody_looks_and_the_end_brings_reason_and_usage():
    client = Client()
    client.push("a")
    client.push("bc")
    assert [delta.text for delta in client.deltas] == ["abc"]
    client.push("d")
    client.push("e")
    assert client.deltas[1].tokens == [3, 4]
    client.push("f")
    client.stream.finish(finish())
    assert [delta.text for delta in client.deltas] == ["abc", "de", "f", ""]
    last = client.deltas[-1]
    assert (last.finish_reason, last.usage.completion_tokens, last.is_last) == ("length", 6, True)
    assert client.finishes == [finish()]


def test_a_delta_grows_up_to_what_its_size_has_room_for():
    client = Client()
    sizes = []
    for _ in range(MAX_GROWTH + 1):
        client.push("a")
        sizes.append(client.deltas[0].num_bytes)
    assert [len(delta.tokens) for delta in client.deltas] == [MAX_GROWTH, 1]
    assert len(set(sizes)) == 1


def test_log_probabilities_stay_with_the_tokens_that_they_belong_to():
    client = Client()
    client.push("a")
    client.push("b", logprobs=[[(1, -0.5)]])
    client.push("c")
    client.stream.finish(finish())
    assert [(delta.text, delta.logprobs) for delta in client.deltas] == [
        ("a", None),
        ("b", [[(1, -0.5)]]),
        ("c", None),
        ("", None),
    ]


def test_text_is_whole_whatever_was_merged_before_it_was_looked_at():
    client = Client()
    client.push("a")
    client.push("b", logprobs=[[(1, -0.5)]])
    client.stream.push([26])  # the beginning of a character
    client.stream.finish(finish())
    first, *others = client.deltas
    for delta in others:
        assert first.merge(delta) is first
    assert (first.text, first.tokens, first.finish_reason) == ("ab\ufffd", [0, 1, 26], "length")


def test_who_looks_at_a_delta_waits_for_the_tokens_that_it_is_taking():
    delta = TokenDelta([0], detokenizer=Letters())
    seen: list[list[int]] = []
    reader = threading.Thread(target=lambda: seen.append(list(delta.tokens)))

    class Tokens:
        """Somebody looks at the delta while it takes them."""

        def __iter__(self):
            reader.start()
            reader.join(0.1)
            assert reader.is_alive()
            return iter([1, 2])

    assert delta.grow(Tokens())
    reader.join(10)
    assert seen == [[0, 1, 2]]
    assert not delta.grow([3])


def test_what_comes_after_the_end_grows_nothing():
    closed, ended = Client(), Client()
    closed.push("a")
    closed.stream.close()
    closed.push("b")
    ended.push("a")
    ended.stream.finish(finish())
    ended.push("b")
    assert closed.deltas[0].tokens == [0]
    assert ended.deltas[0].tokens == [0]


def test_only_a_delta_that_can_grow_counts_for_more_than_it_is():
    plain, stopping = Client(), Client(SamplingParams(stop=("zz",)))
    plain.push("a")
    stopping.push("a")
    assert plain.deltas[0].num_bytes - stopping.deltas[0].num_bytes == 8 * (MAX_GROWTH - 1)


def test_no_token_is_lost_or_repeated_between_one_who_pushes_and_one_who_sends():
    news: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
    stream = TextStream(Letters(), SamplingParams(), news.put, lambda finish: None, lambda: None)
    count = 20_000

    def push():
        for at in range(count):
            stream.push((at % 26,))
        stream.finish(finish())

    pusher = threading.Thread(target=push)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        pusher.start()
        tokens, text, delta = [], "", news.get(timeout=10)
        while not delta.finish_reason:
            outputs = delta.tensors()
            tokens += outputs["output_ids"].tolist()
            text += outputs["text_output"][0].decode()
            delta = news.get(timeout=10)
    finally:
        sys.setswitchinterval(interval_s)
        pusher.join(10)
    assert tokens == [at % 26 for at in range(count)]
    assert text == "".join(LETTERS[token] for token in tokens)


def test_a_stop_string_aborts_once_and_ends_with_stop_whatever_the_engine_says():
    client = Client(SamplingParams(stop=("cd",)))
    for letters in ("ab", "cdef", "g"):
        client.push(letters)
    client.stream.finish(finish("cancelled"))
    assert (client.text, client.num_aborts, client.num_tokens) == ("ab", 1, 4)
    assert client.deltas[-1].finish_reason == client.stream.finish_reason == "stop"
    assert client.deltas[-1].stop_string == "cd"
    assert client.deltas[-1].usage.completion_tokens == 4


def test_a_stop_string_found_before_the_engine_died_is_a_good_end():
    client = Client(SamplingParams(stop=("b",), include_stop_str_in_output=True))
    client.push("ab")
    client.stream.finish(finish("error", error="UNAVAILABLE: gone"))
    assert (client.text, client.stream.finish_reason) == ("ab", "stop")


def test_text_held_for_a_stop_string_comes_at_the_end():
    client = Client(SamplingParams(stop=("xyz",)))
    client.push("axy")
    assert client.text == "a"
    client.stream.finish(finish("stop"))
    assert client.text == "axy"


def test_an_unfinished_character_is_flushed_at_the_end():
    client = Client()
    client.stream.push([0, 30])
    client.stream.finish(finish())
    assert client.text == "a\ufffd"


@pytest.mark.parametrize("reason", ["error", "timeout", "cancelled"])
def test_a_failure_sends_nothing_and_is_handed_over(reason):
    client = Client()
    client.push("a")
    client.stream.finish(finish(reason, error="UNAVAILABLE: gone"))
    assert len(client.deltas) == 1 and client.stream.finish_reason == ""
    assert client.finishes[0].reason == reason


def test_after_an_engine_died_the_same_stream_goes_on_elsewhere():
    client = Client(SamplingParams(stop=("bc",)))
    client.push("ab")
    client.stream.finish(finish("error", error="UNAVAILABLE: gone"))
    assert client.stream.output_ids == [0, 1]
    client.push("cd")
    client.stream.finish(finish("cancelled"))
    assert (client.text, client.stream.finish_reason) == ("a", "stop")


def test_replayed_tokens_have_no_text_but_count():
    client = Client(SamplingParams(stop=("bc",)))
    client.stream.replay([0, 1])
    client.push("c")
    client.stream.finish(finish("cancelled"))
    assert (client.text, client.stream.finish_reason) == ("", "stop")
    assert client.deltas[-1].usage.completion_tokens == 3


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 4), max_size=10), st.text("abc", max_size=20), st.sampled_from(["ab", "cab", "bb"]))
def test_the_text_does_not_depend_on_how_steps_were_cut(sizes, letters, stop):
    whole, cut = Client(SamplingParams(stop=(stop,))), Client(SamplingParams(stop=(stop,)))
    whole.push(letters)
    at = 0
    for size in [*sizes, len(letters)]:
        cut.push(letters[at : at + size])
        at += size
    for client in (whole, cut):
        client.stream.finish(finish())
    assert (cut.text, cut.num_tokens) == (whole.text, whole.num_tokens)
    assert cut.deltas[-1].finish_reason == whole.deltas[-1].finish_reason


def test_merged_deltas_say_what_the_single_ones_said():
    first = TokenDelta([1], "a", [[(1, -0.5), (2, -1.0)]])
    assert first.merge(TokenDelta([2, 3], "bc", [[(2, -0.25)], [(3, -0.125)]])) is first
    first.merge(TokenDelta([], "", None, None, None, "stop", Usage(completion_tokens=3)))
    tensors = first.tensors()
    assert tensors["output_ids"].tolist() == [1, 2, 3] and tensors["text_output"][0] == b"abc"
    assert tensors["log_probs"].tolist() == [-0.5, -0.25, -0.125]
    assert json.loads(tensors["top_log_probs"][0]) == [[[2, -1.0]], [], []]
    assert tensors["finish_reason"][0] == b"stop"
    usage = json.loads(tensors["usage"][0])
    assert (usage["v"], usage["completion_tokens"], usage["cached_tokens"]) == (1, 3, 0)


def test_deltas_of_different_sequences_do_not_merge():
    assert TokenDelta([1], "a", index=0).merge(TokenDelta([1], "a", index=1)) is None


def test_logprobs_go_with_the_tokens_delivered():
    client = Client(SamplingParams(stop=("b",), logprobs=0))
    client.push("abc", logprobs=[[(0, -1.0)], [(1, -2.0)], [(2, -3.0)]])
    assert client.deltas[0].tensors()["log_probs"].tolist() == [-1.0, -2.0]


def test_prompt_logprobs_begin_with_null():
    client = Client(SamplingParams(prompt_logprobs=0))
    client.push("", prompt_logprobs=[[(5, -1.0)]])
    client.push("a", prompt_logprobs=[[(6, -2.0)]])
    merged = client.deltas[0].merge(client.deltas[1])
    assert json.loads(merged.tensors()["prompt_log_probs"][0]) == [None, [[5, -1.0]], [[6, -2.0]]]


def test_tensors_are_those_of_the_decode_model():
    delta = TokenDelta([1], "é", [[(1, -1.0), (2, -2.0)]], [None], 0, "stop", Usage())
    kinds = {"INT32": "int32", "FP32": "float32", "BYTES": "object"}
    expected = {spec.name: kinds.get(spec.data_type) for spec in DECODE.outputs}
    assert all(array.dtype == expected[name] for name, array in delta.tensors().items())
    assert set(delta.tensors()) == set(expected) - {"state", "steps"}  # of pings, of the token bus


@pytest.mark.parametrize("cut", [1, 2, 3, 8])
def test_stop_strings_do_not_count_among_the_least_tokens(cut):
    client, letters = Client(SamplingParams(stop=("b", "de"), min_tokens=4)), "abcdefgh"
    for at in range(0, len(letters), cut):
        client.push(letters[at : at + cut])
    client.stream.finish(finish("cancelled"))
    assert (client.text, client.num_tokens, client.deltas[-1].stop_string) == ("abc", 5, "de")


def test_a_migrated_request_counts_its_least_tokens_from_its_beginning():
    client = Client(SamplingParams(stop=("b",), min_tokens=4))
    client.stream.replay([0, 1, 2])
    client.push("bab")
    client.stream.finish(finish("cancelled"))
    assert (client.text, client.deltas[-1].finish_reason) == ("ba", "stop")


def test_what_ends_within_its_least_tokens_ends_with_no_stop_string():
    client = Client(SamplingParams(stop=("ab", "\ufffd"), min_tokens=4))
    client.stream.push([0, 1, 0, 26])
    client.stream.finish(finish())
    assert (client.text, client.deltas[-1].finish_reason) == ("aba\ufffd", "length")
