"""Drafts are looked up among a sequence's own tokens, and verified as far as that pays."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bireme.engines.torch.scheduling.speculation.budget import DraftBudget
from bireme.engines.torch.scheduling.speculation.lengths import MeasuredLengths
from bireme.engines.torch.scheduling.speculation.ngram import NgramDrafter
from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
from bireme.engines.torch.step import Draft, Drafting, DraftOffer


class Sequence(SimpleNamespace):
    """What drafters and lengths read of one."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __init__(self, tokens=(), predicted=()):
        prediction = np.array(predicted, "<i4").tobytes()
        drafting = Drafting.with_prediction(prediction)
        super().__init__(tokens=list(tokens), computed=100, num_output=10, drafting=drafting)


def draft(tokens, most=4, size=3, is_oldest=True):
    found = NgramDrafter(size, is_oldest).propose({(one := Sequence(tokens)): most})
    return (found[one].tokens, found[one].kind) if found else None


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], ([4, 5, 6, 1], 3)),
        ([9, 3, 7, 1, 2, 3, 4, 5, 2, 3], ([4, 5, 2, 3], 2)),  # the longest match before the oldest
        ([3, 7, 8, 8, 9, 9, 4, 3], ([7, 8, 8, 9], 1)),
        ([1, 2, 1, 2], ([1, 2, 1, 2], 2)),  # what repeats goes on repeating
        ([1, 2, 3, 4], None),
        ([1], None),
    ],
)
def test_what_followed_the_same_tokens_before_is_drafted(tokens, told):
    assert draft(tokens) == told


def test_of_several_places_the_oldest_or_the_newest_counts():
    tokens = [1, 2, 7, 1, 2, 8, 5, 5, 1, 2]
    assert draft(tokens, 1)[0] == [7]
    assert draft(tokens, 1, is_oldest=False)[0] == [8]


def test_what_has_come_since_the_last_look_is_found():
    drafter, one = NgramDrafter(3, True), Sequence([1, 2, 3])
    assert not drafter.propose({one: 2})
    one.tokens += [4, *range(100, 900), 2, 3]
    assert drafter.propose({one: 2})[one].tokens == [4, 100]


def test_a_predicted_output_is_looked_up_first_and_its_drafts_are_of_a_kind_of_their_own():
    drafter, one = NgramDrafter(2, True), Sequence([1, 2, 3, 7, 1], predicted=[9, 1, 5, 6, 2])
    assert drafter.propose({one: 3})[one] == Draft([5, 6, 2], 1 + 3)
    one.tokens += [2, 8, 1, 2]
    assert drafter.propose({one: 1})[one] == Draft([3], 2)  # two tokens match, and stand in the prompt alone


def learned(a_row_ms, sizes=range(1, 9)):
    """Return the costs of an engine whose steps take 10 ms, and so much for each row beyond the first."""
    costs = StepCosts()
    for rows in sizes:
        for _ in range(6):
            costs.landed([StepWork(rows, 0, 100 * rows)], (10 + a_row_ms * (rows - 1)) / 1e3)
    return costs


def chosen(lengths, one, kind=0):
    plan = SimpleNamespace(decodes=[one], drafts={}, chunks=[])
    return lengths.choose(plan, {one: DraftOffer(6, kind)}).get(one, 0)


def test_a_draft_that_is_always_right_is_verified_whole_and_one_that_never_is_not_at_all():
    lengths, right, wrong = MeasuredLengths(*[learned(1)] * 2, 2), Sequence(), Sequence()
    for _ in range(8):
        lengths.learn(right, 1, 6, 6)
        lengths.learn(wrong, 0, 6, 0)
    assert (chosen(lengths, right, 1), chosen(lengths, wrong)) == (6, 0)


@pytest.mark.parametrize(("a_row_ms", "least", "most"), [(0.1, 4, 6), (3, 1, 2), (9, 0, 0)])
def test_the_dearer_a_row_the_shorter_a_draft(a_row_ms, least, most):
    lengths, one = MeasuredLengths(*[learned(a_row_ms)] * 2, 1), Sequence()
    for _ in range(8):
        lengths.learn(one, 0, 6, 1)
        lengths.learn(one, 0, 6, 4)
    assert least <= chosen(lengths, one) <= most


def test_where_no_draft_pays_one_in_several_is_verified_in_part():
    lengths, one = MeasuredLengths(*[learned(2)] * 2, 1), Sequence()
    for _ in range(20):
        lengths.learn(one, 0, 6, 0)
    counts = [chosen(lengths, one) for _ in range(96)]
    assert sum(counts) == 2 * 96 / 16 and max(counts) == 2


def plan_of(*decodes, drafts=None):
    return SimpleNamespace(decodes=decodes, drafts=drafts or {}, chunks=[])


def said(budget, one, num_steps, seconds, gained=0):
    """Have a sequence say a token in each of so many steps; return in how many it was due, which took the seconds."""
    count = 0
    for _ in range(num_steps):
        if budget.due(plan_of(one)):
            count += 1
            budget.paid(plan_of(one), [one], seconds)
            budget.gained(one, gained)
            one.tokens += [0] * gained
        one.tokens.append(0)
    return count


@pytest.mark.parametrize("steps", [0.05, 0.3, 2.0])
def test_drafts_that_gain_nothing_take_a_small_part_of_the_time_and_begin_with_little(steps):
    budget = DraftBudget(learned(1))
    lost = [steps * said(budget, Sequence([0]), 400, 10e-3 * steps) for _ in range(6)]
    assert lost[0] <= 400 * 0.015 + 16 / 2 + 1 + steps
    assert sum(lost) <= 6 * (400 * 0.015 + steps) + 16 and sum(lost) > 6 * 400 * 0.015 - 6 * steps - 1
    assert lost[-1] <= 400 * 0.015 + steps + 1


@pytest.mark.parametrize("steps", [0.05, 0.3, 2.0])
def test_drafts_that_gain_more_than_they_take_go_on(steps):
    budget, one = DraftBudget(learned(1)), Sequence([0])
    assert said(budget, one, 200, 10e-3 * steps, gained=3) == 200


def test_a_sequence_that_comes_to_repeat_itself_is_noticed_and_one_that_stops_is_left_alone():
    budget, one = DraftBudget(learned(1)), Sequence([0])
    said(budget, one, 500, 1e-3)
    assert said(budget, one, 100, 1e-3, gained=3) > 90
    assert said(budget, one, 1000, 1e-3) <= 10 * (1000 * 0.015 + 4 + 32 / 2) + 1


def test_a_copy_is_drafted_within_some_tokens_and_then_always_where_all_before_it_failed():
    budget, lost = DraftBudget(learned(1)), 0.0
    for _ in range(101):  # a look takes 5% of a step, and each tenth finds what takes 40% to verify, and is wrong
        one = Sequence([0])
        for _ in range(6):
            lost += 0.05 * said(budget, one, 9, 0.5e-3) + 0.45 * said(budget, one, 1, 4.5e-3)
    assert not budget.is_open and lost <= 0.02 * 101 * 60
    copy = Sequence([0])
    assert sum(said(budget, copy, 1, 4.5e-3, gained=3) for _ in range(40)) >= 8
    assert said(budget, copy, 30, 4.5e-3, gained=3) == 30


def test_one_bill_of_a_stalled_host_keeps_nobody_from_drafts_for_long():
    budget, one = DraftBudget(learned(1)), Sequence([0])
    budget.due(plan_of(one))
    budget.paid(plan_of(one), [one], 5.0, once_s=5.0)
    assert not budget.is_open and said(budget, one, 1800, 1e-3, gained=1) > 50


def test_a_pass_after_a_step_does_not_pay_for_the_step_s_drafts_again():
    budget, one = DraftBudget(learned(1)), Sequence([0])
    budget.due(plan := plan_of(one, drafts={one: [1, 2, 3]}))
    before = one.drafting.credit
    budget.paid(plan, (), 0.0, once_s=1e-3)
    assert one.drafting.credit == before


def test_a_sequence_pays_for_its_own_drafts_and_not_for_another_s():
    budget, right, wrong = DraftBudget(learned(1)), Sequence([0]), Sequence([0])
    counts = {right: 0, wrong: 0}
    for _ in range(300):
        for one in budget.due(plan := plan_of(right, wrong)):
            counts[one] += 1
            budget.paid(plan, [one], 5e-3)
            budget.gained(one, 3 if one is right else 0)
            one.tokens.append(0)
        right.tokens.append(0)
        wrong.tokens.append(0)
    assert counts[right] == 300 and counts[wrong] < 16 + 20


def test_what_drafts_make_a_step_take_more_is_paid_by_those_that_have_them():
    budget, drafted, other = DraftBudget(learned(1)), Sequence([0]), Sequence([0])
    plan = plan_of(drafted, other, drafts={drafted: [1, 2, 3, 4]})
    budget.due(plan)
    before = other.drafting.credit
    budget.paid(plan, [drafted, other], 0.0)
    taken = 2 * (budget.verify_s(StepWork(6, 0, 600)) / budget.verify_s(StepWork(2, 0, 200)) - 1)
    assert other.drafting.credit == before and before - drafted.drafting.credit == pytest.approx(taken, rel=0.1)


def test_what_a_request_predicts_is_looked_for_at_first_whatever_others_gained():
    budget = DraftBudget(learned(1))
    for _ in range(40):
        said(budget, Sequence([0]), 20, 5e-3)
    plain, predicted = Sequence([0]), Sequence([0], predicted=[5, 6])
    assert budget.due(plan_of(plain, predicted)) == [predicted]


def off(batch):
    """Return lengths of a batch whose drafts have failed, its plan, and offers for all of it."""
    costs = learned(2, [1 << power for power in range(10)])
    lengths, ones = MeasuredLengths(costs, costs, 1), [Sequence() for _ in range(batch)]
    for one in ones * 8:
        lengths.learn(one, 0, 3, 0)
    return lengths, SimpleNamespace(decodes=ones, drafts={}, chunks=[]), {one: DraftOffer(3) for one in ones}


@pytest.mark.parametrize("batch", [1, 8, 64, 128])
def test_a_batch_whose_drafts_fail_waits_for_one_probe_in_many_steps(batch):
    lengths, plan, offers = off(batch)
    num_waits = num_probes = 0
    for _ in range(65 + 129 + 257):
        if lengths.is_hopeful(plan, dict.fromkeys(plan.decodes, 3)):
            num_waits += 1
            probe, after = lengths.choose(plan, offers), lengths.choose(plan, offers)
            num_probes += sum(probe.values()) == 2
            assert after == {}  # the step behind a probe is one without drafts, from which others are started ahead
    assert num_waits == num_probes == 3  # behind 64 steps without, 128, and 256 from then on


def test_drafts_that_pay_are_not_given_up_for_a_few_that_fail():
    lengths, one = MeasuredLengths(*[learned(1)] * 2, 1), Sequence()
    for number in range(200):
        lengths.learn(one, 0, 3, (0, 1, 0, 3, 1)[number % 5])  # 5 of 10 tokens
    assert chosen(lengths, one) > 0
    for _ in range(4):
        lengths.learn(one, 0, 3, 0)
    assert chosen(lengths, one) > 0


def test_no_step_becomes_longer_than_streams_may_wait():
    lengths, one = MeasuredLengths(*[learned(1)] * 2, 1, most_s=12.5e-3), Sequence()
    for _ in range(8):
        lengths.learn(one, 0, 6, 6)
    assert 1 <= chosen(lengths, one) <= 3
