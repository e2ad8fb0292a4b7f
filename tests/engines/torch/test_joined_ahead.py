"""Prompts that join a step while the one before it runs are answered as alone, and when such a step is started."""

from __future__ import annotations

import random
import time

import pytest
import torch

from bireme.engines.torch.forward.forward import StepPath
from bireme.engines.torch.scheduling.pace import StepPace
from tests.engines.torch.host_resident import HostResident
from tests.engines.torch.torch_harness import MIXED, Harness, make_prompts, request

PROMPTS = make_prompts(*MIXED)


OTHERS = ({"repetition_penalty": 1.3}, {"logprobs": 2}, {"prompt_logprobs": 1})  # what holds a batch up


def asked(at, prompt):
    drawn = {"temperature": 0.9 + at % 2 / 10, "seed": at, "top_k": at % 3 * 20}
    return request(prompt, 8 + at % 17, **(OTHERS[at - 13] if at > 12 else drawn if at % 3 else {}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it draws on the host what a GPU has drawn itself")
@pytest.mark.parametrize("settings", [{}, {"max_num_tokens": 40}, {"max_batch_size": 3, "max_num_tokens": 64}])
def test_whenever_they_come_they_are_answered_as_alone(tiny, settings):
    wanted = [asked(at, prompt) for at, prompt in enumerate(PROMPTS)]
    with Harness(tiny("llama").path, tokens_per_block=8) as engine:
        alone = [engine.run([one])[0] for one in wanted]
    moments = random.Random(3)
    with Harness(tiny("llama").path, tokens_per_block=8, **settings) as engine:
        resident = HostResident.put_into(engine.core._parts)
        for numbers in ([*range(13)] * 2, range(16)):  # the second time their prompts are there
            results = []
            for at in numbers:
                results.append(engine.submit(wanted[at]))
                time.sleep(moments.random() * 0.01)
            assert [(one.finish.error, one.tokens) for one in results] == [("", alone[at]) for at in numbers]
        engine.settle()
        assert resident.num_ahead > 20 and resident.num_joined
        assert engine.manager.num_referenced == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="it draws on the host what a GPU has drawn itself")
def test_one_that_is_aborted_in_the_step_that_it_joined_leaves_nothing(tiny):
    with Harness(tiny("llama").path, tokens_per_block=8) as engine:
        expected = engine.run([request(PROMPTS[0], 60)])[0]
        HostResident.put_into(engine.core._parts)
        first = engine.submit(request(PROMPTS[0], 60))
        for prompt in PROMPTS[1:]:
            engine.abort(engine.submit(request(prompt, 30)))
        assert (first.finish.error, first.tokens) == ("", expected)
        engine.settle()
        assert engine.manager.num_referenced == 0


def test_a_step_is_started_shortly_before_the_one_under_way_ends():
    pace = StepPace()
    assert pace.starts_next_at(StepPath.RESIDENT, 8, 5.0) == 0.0  # nothing is known
    pace.landed(StepPath.RESIDENT, 8, 0.010)
    pace.started(0.0005)
    assert pace.starts_next_at(StepPath.RESIDENT, 9, 5.0) == pytest.approx(5.0085)
    assert pace.starts_next_at(StepPath.RESIDENT, 200, 5.0) == pace.starts_next_at(StepPath.MIXED, 8, 5.0) == 0.0


def test_an_estimate_follows_quicker_steps_at_once_and_slower_ones_gradually():
    pace = StepPace()
    for seconds in (0.010, 0.006, 0.020):
        pace.landed(StepPath.MIXED, 64, seconds)
    assert pace.starts_next_at(StepPath.MIXED, 64, 5.0) == pytest.approx(5.0 + 0.006 * 1.02 - 0.001)
    pace.landed(StepPath.MIXED, 64, 0.001)
    assert pace.starts_next_at(StepPath.MIXED, 64, 5.0) == 0.0  # too short to wait for anybody
