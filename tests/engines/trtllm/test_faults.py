"""Errors of requests: whose they are is found out by a request of the engine's own."""

from __future__ import annotations

import asyncio

import pytest

from bireme.engines.trtllm.faults import FAILURES_IN_A_ROW, FaultWatch


class Engine:
    """Answers probes, or not."""

    def __init__(self, is_well=True):
        self.is_well = is_well
        self.num_probes = 0
        self.reasons = []

    async def probe(self):
        self.num_probes += 1
        await asyncio.sleep(0)
        if not self.is_well:
            raise RuntimeError("CUDA error")

    async def meet(self, *texts):
        """None stands for an answer, a text for an error."""
        watch = FaultWatch(self.probe, asyncio.get_running_loop(), self.reasons.append)
        for text in texts:
            watch.request_answered() if text is None else watch.request_failed(text)
            await asyncio.sleep(0.01)


def test_clients_errors_alone_end_nothing():
    engine = Engine()
    asyncio.run(engine.meet(*["Prompt length exceeds"] * 10 * FAILURES_IN_A_ROW))
    assert engine.reasons == [] and engine.num_probes == 10


def test_an_answer_in_between_is_a_sign_of_life():
    engine = Engine(is_well=False)
    asyncio.run(engine.meet(*["wrong", "wrong", None] * 5))
    assert engine.reasons == [] and engine.num_probes == 0


@pytest.mark.parametrize("texts", [["CUDA error: an illegal memory access"], ["odd"] * FAILURES_IN_A_ROW])
def test_when_a_request_of_the_engine_s_own_fails_too_the_engine_is_ended(texts):
    engine = Engine(is_well=False)
    asyncio.run(engine.meet(*texts))
    (reason,) = engine.reasons
    assert texts[0] in reason and "so does one of the engine's own: CUDA error" in reason


def test_a_client_can_not_end_the_engine_by_the_text_of_an_error():
    engine = Engine()
    asyncio.run(engine.meet("Guided decoding error: unexpected 'NCCL error'", None))
    assert engine.reasons == [] and engine.num_probes == 1
