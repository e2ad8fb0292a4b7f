"""Drafts are looked up among a sequence's own tokens, and verified as far as that pays."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bireme.engines.torch.scheduling.speculation.lengths import MeasuredLengths
from bireme.engines.torch.scheduling.speculation.looks import Looks
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


def test_a_sequence_whose_drafts_fail_is_tried_again_now_and_then():
    lengths, one = MeasuredLengths(*[learned(2)] * 2, 1), Sequence()
    for _ in range(20):
        lengths.learn(one, 0, 6, 0)
    counts = [chosen(lengths, one) for _ in range(100)]
    assert sum(counts) == 4 and max(counts) == 2


def looked_for(looks, one, look_s, gained):
    """Return for each of 64 steps of 10 ms whether it was looked for a draft, which gains so many tokens."""
    plan, told = SimpleNamespace(decodes=[one], drafts={}, chunks=[]), []
    for _ in range(64):
        told.append(one in looks.due({one: 4}))
        if told[-1]:
            looks.took(plan, 1, look_s)
            one.drafting.num_accepted += gained
    return told


@pytest.mark.parametrize(("look_s", "gained", "is_resting"), [(1e-3, 0, True), (1e-3, 1, False), (5e-3, 0, True)])
def test_a_sequence_is_looked_for_drafts_each_step_where_that_pays_and_else_now_and_then(look_s, gained, is_resting):
    looks = Looks(learned(1))
    for _ in range(8):
        looked_for(looks, Sequence(), look_s, gained)
    counts = sum(looked_for(looks, one := Sequence(), look_s, gained)), sum(looked_for(looks, one, look_s, 4))
    assert counts[0] == 64 if not is_resting else counts[0] < 40
    assert counts[1] > 20  # what comes to repeat itself is noticed


def test_a_first_look_that_took_long_keeps_nobody_from_the_next():
    looks, one = Looks(learned(1)), Sequence()
    looked_for(looks, one, 1e-3, 1)
    cold = Looks(learned(1))
    cold.took(SimpleNamespace(decodes=[one], drafts={}, chunks=[]), 1, 50e-3)
    assert sum(looked_for(cold, Sequence(predicted=[5]), 1e-3, 1)) > 10


def test_what_a_request_predicts_is_looked_for_at_first_whatever_others_gained():
    looks = Looks(learned(1))
    for _ in range(40):
        looked_for(looks, Sequence(), 5e-3, 0)
    plain, predicted = Sequence(), Sequence(predicted=[5, 6])
    assert list(looks.due({plain: 4, predicted: 4})) == [predicted]


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
    for _ in range(10 * 65):
        if lengths.is_hopeful(plan, dict.fromkeys(plan.decodes, 3)):
            num_waits += 1
            probe, after = lengths.choose(plan, offers), lengths.choose(plan, offers)
            num_probes += sum(probe.values()) == 2
            assert after == {}  # the step behind a probe is one without drafts, from which others are started ahead
    assert num_waits == num_probes == 10


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
