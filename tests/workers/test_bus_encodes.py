import asyncio

import pytest

from bireme.errors import EngineLostError, RequestCancelledError, RequestError, UnavailableError
from bireme.messages import Finish, Usage
from bireme.multimodal.wire import EncodeAnswer, EncodeJob, encode_answer
from bireme.workers.bus_encodes import BusEncodes
from bireme.workers.unary import encode_request

REQUEST = encode_request(EncodeJob(sources=()), 0)


class OneBus:
    """Takes requests; the test says how they end."""

    failure = None
    was_sent = True

    def decode(self, worker, request, sink):
        self.worker, self.request, self.sink = worker, request, sink
        return self

    def abort(self):
        self.sink.finish(Finish("cancelled", Usage()))


@pytest.fixture
def bus():
    return OneBus()


async def begin(bus):
    encodes = BusEncodes(bus)
    running = asyncio.ensure_future(encodes.run("decode_1", REQUEST, "mine"))
    await asyncio.sleep(0)
    return encodes, running


async def test_the_answer_comes_with_the_finish(bus):
    _, running = await begin(bus)
    answer = EncodeAnswer(pictures=(), embeddings=b"rows")
    bus.sink.finish(Finish("stop", Usage(), encoded=encode_answer(answer)))
    assert await running == answer and (bus.worker, bus.request) == ("decode_1", REQUEST)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("INVALID_ARGUMENT: images[0]: no", RequestError),
        ("UNAVAILABLE: it broke down", EngineLostError),  # the engine had it: another may be tried at once
    ],
)
async def test_an_engine_s_error_is_raised(bus, text, kind):
    _, running = await begin(bus)
    bus.sink.finish(Finish("error", Usage(), error=text))
    with pytest.raises(kind, match=text.partition(": ")[2].replace("[", r"\[")):
        await running


async def test_a_bus_that_never_opened_says_so_itself(bus):
    _, running = await begin(bus)
    bus.failure = UnavailableError("decode_1 is loading")
    bus.sink.finish(Finish("error", Usage(), error="UNAVAILABLE: decode_1 is loading"))
    with pytest.raises(UnavailableError) as caught:
        await running
    assert caught.value is bus.failure


async def test_an_abort_ends_it_once(bus):
    encodes, running = await begin(bus)
    encodes.abort("mine")
    encodes.abort("another")
    with pytest.raises(RequestCancelledError):
        await running
    encodes.abort("mine")
