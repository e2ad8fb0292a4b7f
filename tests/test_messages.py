from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme import messages
from bireme.messages import (
    CONTROL,
    VERSION,
    Abort,
    Capacity,
    Commands,
    Drain,
    Drop,
    Encode,
    EncodeRequest,
    EncodeSource,
    EngineRequest,
    Finish,
    Hello,
    Ping,
    Pong,
    Release,
    SamplingParams,
    Step,
    Submit,
    TokenLogprob,
    Usage,
    Welcome,
    deliver,
    frame,
    pack_welcome,
    split,
    temperature_of,
    unpack_bus,
)

CAPACITY = Capacity(
    max_seq_len=8, max_batch_size=1, max_num_tokens=8, max_queue_size=1, tokens_per_block=4, num_blocks=2, vocab_size=9
)


@given(st.integers(0, CONTROL), st.binary(max_size=200))
def test_a_frame_gives_back_consumer_and_payload(consumer, payload):
    assert split(frame(consumer, payload)) == (consumer, payload)


def test_commands_survive_the_wire():
    request = EngineRequest(
        prompt=b"\x01\0\0\0",
        sampling=SamplingParams(temperature=0.0, seed=2**64 - 1, top_k=0, stop=("a",), logit_bias={3: -1.5}),
        request_type="generation_only",
        num_resumed=1,
        disaggregated_params=b"signed",
    )
    pictures = EncodeRequest(sources=(EncodeSource("image", b"\x89PNG"),), timeout_ms=5)
    commands = Commands(
        7, [Submit(1, request), Encode(4, pictures), Release(("a",)), Abort(2), Drop(), Ping(3), Drain()]
    )
    assert messages.decode_commands(messages.encode(commands)) == commands


def test_unset_and_zero_stay_different():
    sampling = SamplingParams(temperature=0.0, max_tokens=0)
    decoded = msgspec.msgpack.decode(messages.encode(sampling), type=SamplingParams)
    assert (decoded.temperature, decoded.max_tokens, decoded.top_k) == (0.0, 0, None)


@pytest.mark.parametrize(
    "step",
    [
        Step(1, 2, [5, 6], [50, 60]),
        Step(1, 2, [5, 6], [50, 51, 60], [2, 1]),
        Step(1, 3, finished={5: Finish("stop", Usage(prompt_tokens=3), stop_token_id=2)}),
        Step(
            1,
            4,
            [5],
            [50],
            logprobs={5: [[TokenLogprob(50, -0.5, 7), TokenLogprob(3, -1.0, 1)]]},
            prompt_logprobs={5: []},
        ),
        Step(1, 5, lost=True),
    ],
)
def test_steps_survive_the_wire(step):
    assert messages.decode_step(messages.encode(step)) == step


def test_deltas_split_the_columns_by_request():
    assert list(Step(1, 2, [5, 6], [50, 60]).deltas()) == [(5, [50]), (6, [60])]
    assert list(Step(1, 2, [5, 6, 7], [50, 51, 70], [2, 0, 1]).deltas()) == [(5, [50, 51]), (6, []), (7, [70])]


def test_columns_of_different_length_are_an_error():
    with pytest.raises(ValueError):
        list(Step(1, 2, [5, 6], [50]).deltas())


def packed(*steps):
    """Return them as a decode stub sends them."""
    return b"".join(messages.U32.pack(len(data)) + data for data in map(messages.encode, steps))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_packed_steps_come_out_in_order(numbers):
    steps = [Step(1, number, [number], [number]) for number in numbers]
    assert list(unpack_bus(packed(*steps))) == steps


def test_late_steps_coalesce_by_appending():
    assert [step.number for step in unpack_bus(packed(Step(1, 1)) + packed(Step(1, 2)))] == [1, 2]


def test_a_subscription_opens_with_its_welcome():
    welcome = Welcome(VERSION, "secret", 3, CAPACITY)
    items = list(unpack_bus(pack_welcome(welcome) + packed(Step(3, 1))))
    assert items == [welcome, Step(3, 1)]


@pytest.mark.parametrize(
    "control", [Hello(VERSION, 1, CAPACITY), Hello(VERSION, 1, error="no"), Pong(1, 2, 3, 4.5, 0, 1, b"m")]
)
def test_control_messages_survive_the_wire(control):
    assert messages.decode_control(messages.encode(control)) == control


def test_a_truncated_step_is_an_error_and_not_half_a_step():
    data = packed(Step(1, 2, [5], [50]))
    with pytest.raises((msgspec.DecodeError, ValueError)):
        list(unpack_bus(data[:-1]))


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode([1, [["x"]]])])
def test_malformed_commands_are_decode_errors(payload):
    with pytest.raises(msgspec.DecodeError):
        messages.decode_commands(payload)


@pytest.mark.parametrize(
    ("params", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.0, "top_p": 0.9}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"top_k": 5}, 1.0),
        ({"top_p": 1.0}, 1.0),
        ({"min_p": 0.1}, 1.0),
        ({"top_k": 0}, 0.0),
        ({"min_p": 0.0}, 0.0),
        ({"seed": 5}, 0.0),
        ({"top_k": 1, "temperature": 0.7}, 0.0),
        ({"top_p": 0.0, "temperature": 0.7}, 0.0),
    ],
)
def test_the_temperature_follows_from_what_is_asked_for(params, temperature):
    assert temperature_of(SamplingParams(**params)) == temperature


class Pushed:
    """A sink that keeps what it is given; `broken`: a request number whose sink raises."""

    def __init__(self, broken=False):
        self.broken, self.pushes, self.finishes = broken, [], []

    def push(self, tokens, logprobs=None, prompt_logprobs=None):
        if self.broken:
            raise ValueError("broken")
        self.pushes.append((list(tokens), logprobs, prompt_logprobs))

    def finish(self, finish):
        self.finishes.append(finish)
        if self.broken:
            raise ValueError("broken at the end")


ENTRY = [TokenLogprob(50, -0.5, 7)]
END = Finish("stop", Usage())


def test_tokens_and_finishes_come_to_their_sinks():
    sinks, failures = {5: Pushed(), 6: Pushed()}, []
    five = sinks[5]
    deliver(Step(1, 2, [5, 6, 9], [50, 60, 90], finished={5: END, 9: END}), sinks, failures.append)
    assert (five.pushes, five.finishes) == ([([50], None, None)], [END])
    assert list(sinks) == [6] and sinks[6].pushes == [([60], None, None)]  # 9 is nobody's


def test_log_probabilities_come_with_their_tokens_and_those_of_a_prompt_also_without():
    sinks = {5: Pushed(), 6: Pushed()}
    step = Step(1, 2, [5], [50, 51], [2], logprobs={5: [ENTRY, ENTRY]}, prompt_logprobs={6: [ENTRY]})
    deliver(step, sinks, lambda number, error: None)
    assert sinks[5].pushes == [([50, 51], [ENTRY, ENTRY], None)]
    assert sinks[6].pushes == [([], None, [ENTRY])]


@pytest.mark.parametrize("counts", [None, [1, 1]])
def test_a_sink_that_raises_is_told_of_and_the_others_go_on(counts):
    sinks, failures = {5: Pushed(broken=True), 6: Pushed()}, []
    step = Step(1, 2, [5, 6], [50, 60], counts, finished={5: END})
    deliver(step, sinks, lambda number, error: failures.append((number, str(error))))
    assert failures == [(5, "broken"), (5, "broken at the end")]
    assert sinks[6].pushes == [([60], None, None)]
