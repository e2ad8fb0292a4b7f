"""Which drafts steps of a GPU get: in virtual time, by what its steps, a head's rounds and the host take."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
import torch

from bireme.engines.torch.scheduling.speculation.drafter import PassCosts
from bireme.engines.torch.scheduling.speculation.lengths import MeasuredLengths
from bireme.engines.torch.scheduling.speculation.synthetic import SyntheticDrafter
from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
from bireme.engines.torch.step import Drafting, DraftOffer, SchedulerOutput, Sequence
from bireme.kv.blocks.block_manager import BlockTable
from bireme.messages import EngineRequest, SamplingParams

LENGTH = 3
STEP_S, ROW_S, CONTEXT_S, ROUND_S, HOST_S = 6.5e-3, 2e-5, 2e-8, 1.7e-3, 3e-3  # of an H100 with an 8B model


def stream(number, num_tokens=1000):
    one = Sequence(
        (0, number), EngineRequest(prompt=b"", sampling=SamplingParams(seed=number)), [0] * num_tokens, num_tokens,
        1 << 20, frozenset(), 0.0, BlockTable([[]], [], [], b"", 0, "", ""), drafting=Drafting.with_prediction(b""),
    )  # fmt: skip
    one.computed = num_tokens - 1
    return one


@dataclass
class Gpu:
    """An engine of decodes alone. A step that no draft may follow is started before the one before it has landed."""

    acceptance: float
    most_s: float = 0.0  # that a step may take
    slow: dict[int, float] = field(default_factory=dict)  # seconds more of the rounds of these numbers, on the host
    slow_steps: dict[int, float] = field(default_factory=dict)  # of the steps with drafts
    now: float = 0.0
    num_verified: int = 0
    seen: Counter = field(default_factory=Counter)  # steps by rows of drafts

    def __post_init__(self):
        self.costs, self.verifying, self.passes = StepCosts(), StepCosts(), PassCosts(torch.device("cpu"), True)
        self.lengths = MeasuredLengths(self.costs, self.verifying, 1, self.most_s, self.passes)
        self.drafter, self.is_ahead, self.said = SyntheticDrafter(self.acceptance), False, 0

    @property
    def drafted(self):
        return sum(rows * count for rows, count in self.seen.items())

    def seconds(self, plan):
        return STEP_S + ROW_S * plan.num_decode_rows + CONTEXT_S * sum(one.computed for one in plan.decodes)

    def run(self, streams, num_steps):
        """Return tokens a second over those without drafts."""
        began, plain_s = self.now, 0.0
        for _ in range(num_steps):
            said, step_s = self.said, self.seconds(SchedulerOutput(decodes=streams))
            self.step(SchedulerOutput(decodes=list(streams)))
            plain_s += step_s * (self.said - said) / len(streams)
        return plain_s / (self.now - began)

    def step(self, plan):
        chosen = {}
        if not self.is_ahead and (due := self.lengths.due(plan)):
            chosen = self.lengths.choose(plan, {one: DraftOffer(LENGTH) for one in due})
            self.draft(plan, due, chosen)
        work, host_s = StepWork.of(plan, is_read_once=True), 0.0 if self.is_ahead else HOST_S
        took = host_s + self.seconds(plan)
        if chosen:
            took += ROUND_S + self.slow_steps.get(self.num_verified, 0.0)
        waits = bool(chosen) or self.lengths.is_hopeful(plan, dict.fromkeys(plan.decodes, LENGTH))
        (self.verifying if chosen else self.costs).landed([work], took)
        self.now += took
        self.is_ahead = not waits
        self.num_verified += bool(chosen)
        self.seen[sum(chosen.values())] += 1
        self.deliver(plan, chosen)

    def draft(self, plan, due, chosen):
        seconds = (5e-4 + self.slow.get(self.num_verified, 0.0)) if chosen else 0.0
        if chosen:
            drafts = self.drafter.propose(chosen)
            plan.drafts = {one: draft.tokens for one, draft in drafts.items()}
            self.right = {one: draft.num_right for one, draft in drafts.items()}
            self.passes.launched(len(chosen), seconds)
        self.lengths.paid(plan, chosen or due, seconds)
        self.now += seconds

    def deliver(self, plan, chosen):
        for one in plan.decodes:
            right = self.right[one] if one in chosen else 0
            if one in chosen:
                self.lengths.gained(one, right)
                self.lengths.learn(one, 0, chosen[one], right)
            one.tokens += [0] * (1 + right)
            one.computed += 1 + right
            self.said += 1 + right


def streams_of(count):
    return [stream(number) for number in range(count)]


@pytest.mark.parametrize(("batch", "least"), [(1, 1.3), (8, 1.3), (64, 1.2)])
def test_drafts_that_pay_are_made_of_all_streams_and_whole(batch, least):
    gpu, streams = Gpu(0.7), streams_of(batch)
    gpu.run(streams, 30)
    gpu.seen.clear()
    assert gpu.run(streams, 100) > least
    assert gpu.seen[0] <= 3 and gpu.drafted > 0.9 * 100 * batch * LENGTH


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("what", ["slow", "slow_steps"])
def test_one_that_took_far_too_long_is_forgotten_within_some_steps(batch, what):
    """A kernel was compiled before the first drafts, or in the step that verified them."""
    gpu, streams = Gpu(0.7, **{what: {0: 0.3}}), streams_of(batch)
    gpu.run(streams, 30)
    gpu.seen.clear()
    gpu.run(streams, 60)
    assert gpu.drafted > 0.8 * 60 * batch * LENGTH


def test_the_first_launches_of_rounds_tell_what_later_ones_take_whatever_a_head_has_seen():
    passes = PassCosts(torch.device("cpu"), True)
    for _ in range(2):
        passes.launched(1, 4e-4)
    of_long = [StepWork(1, 0, context) for context in (9000, 9001, 9002)]
    assert passes.before_s(of_long) == pytest.approx(4e-4) == passes.before_s([StepWork(1, 0, 3)])


def test_several_that_took_far_too_long_are_measured_again_in_time():
    gpu, streams = Gpu(0.7, slow_steps={0: 0.3, 1: 0.3}, slow={2: 0.3}), streams_of(8)
    gpu.run(streams, 600)
    assert gpu.run(streams, 40) > 1.2


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_drafts_that_fail_cost_next_to_nothing(batch):
    gpu, streams = Gpu(0.1), streams_of(batch)
    assert gpu.run(streams, 300) > 0.97
    assert gpu.run(streams, 200) > 0.985


def test_no_probe_makes_a_step_longer_than_one_may_be():
    gpu, streams = Gpu(0.1, most_s=13e-3), streams_of(64)  # with all drafts it takes 15 ms, without 9
    gpu.run(streams, 30)
    gpu.seen.clear()
    gpu.run(streams, 600)
    assert gpu.seen[64 * LENGTH] == 0


def test_a_batch_that_grows_is_measured_before_anything_is_believed_of_it():
    gpu, streams = Gpu(0.7), streams_of(64)
    for batch in (1, 8, 64):
        gpu.run(streams[:batch], 40)
    gpu.seen.clear()
    assert gpu.run(streams, 60) > 1.2 and gpu.drafted > 0.9 * 60 * 64 * LENGTH


@pytest.mark.parametrize(("acceptance", "least"), [(0.7, 1.2), (0.1, 0.97)])
def test_while_streams_come_and_go_drafts_pay_or_are_left(acceptance, least):
    gpu, random, streams, plain_s = Gpu(acceptance), Random(3), [], 0.0
    for number in range(1200):
        if not streams or random.random() < 0.05:
            streams.append(stream(number, random.randint(100, 500)))
        said = gpu.said
        step_s = gpu.seconds(SchedulerOutput(decodes=streams))
        gpu.step(SchedulerOutput(decodes=list(streams)))
        plain_s += step_s * (gpu.said - said) / len(streams)
        streams = [one for one in streams if one.num_output < 150]
    assert plain_s / gpu.now > least


def test_whole_drafts_that_no_step_has_room_for_are_not_tried_for_ever():
    gpu, plan = Gpu(0.1), SchedulerOutput(decodes=streams_of(8))
    gpu.costs.landed([StepWork.of(plan)] * 4, 4 * gpu.seconds(plan))
    for one in plan.decodes * 8:
        gpu.lengths.learn(one, 0, LENGTH, 0)
    offers = {one: DraftOffer(LENGTH) for one in plan.decodes}
    assert [bool(gpu.lengths.choose(plan, offers)) for _ in range(12)] == [True] * 4 + [False] * 8
