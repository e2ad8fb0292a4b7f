"""Prompts that join a step while the one before it runs are answered as alone, and when such a step is started."""

from __future__ import annotations

import random
import time

import pytest
import torch

from bireme.engines.torch.scheduling.pace import StepPace
from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
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
        assert "max_num_tokens" not in settings or resident.num_gone_on
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


FEW, MANY = StepWork(8, 0, 800), StepWork(200, 0, 20_000)


def test_a_step_is_started_shortly_before_the_one_under_way_ends():
    pace = StepPace(StepCosts())
    for began_at in (3.0, 4.0):
        assert pace.starts_next_at(FEW, 5.0) == 0.0  # one step may be an exception
        pace.landed(FEW, began_at, began_at + 0.010)
        pace.rest()
    pace.started(0.0005)
    assert pace.starts_next_at(FEW, 5.0) == pytest.approx(5.0085)
    assert pace.starts_next_at(MANY, 5.0) == pace.starts_next_at(StepWork(8, 64, 800), 5.0) == 0.0


def test_an_estimate_follows_quicker_steps_at_once():
    pace = StepPace(StepCosts())
    for end in (1.010, 1.016, 1.036):  # the first since 1.0, the others since the end before
        pace.landed(FEW, 1.0, end)
    assert pace.starts_next_at(FEW, 5.0) == pytest.approx(1.036 + 0.006 - 0.001)
    pace.landed(FEW, 1.036, 1.037)
    assert pace.starts_next_at(FEW, 5.0) == 0.0  # too short to wait for anybody


def test_nobody_waits_as_long_as_a_machine_that_was_suspended():
    pace, now = StepPace(StepCosts()), 0.0
    for _ in range(3):
        pace.landed(FEW, now, now := now + 600.0)
    assert 0.2 < pace.starts_next_at(FEW, now) - now < 0.3


def test_steps_whose_ends_nobody_awaits_are_measured_together():
    costs = StepCosts()
    pace, chunk = StepPace(costs), StepWork(0, 512, 0)
    pace.landed(chunk, 1.0, 1.001, is_seen=False)
    assert not costs.num_landed
    pace.landed(chunk, 1.001, 1.020)
    assert costs.num_landed == 2 and costs.usual_s(chunk) == pytest.approx(0.010)
