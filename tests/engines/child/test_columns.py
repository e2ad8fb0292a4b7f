"""Deltas into frames."""

from __future__ import annotations

import pytest

from bireme.disagg import DisaggregatedParams, unseal
from bireme.engines.base import PlainTokens, StepOutput
from bireme.engines.child.columns import StepEncoder
from bireme.engines.child.ledger import Ledger
from bireme.messages import Finish, TokenLogprob, Usage, decode_step, split

KEY = b"k" * 32


@pytest.fixture
def ledger():
    ledger = Ledger()
    for key in ((0, 1), (0, 2), (5, 1)):
        ledger.enter(key, "digest")
    return ledger


def steps_of(ledger, *deltas, plain=None):
    encoder = StepEncoder(7, ledger, KEY)
    encoder.add(3, list(deltas), plain)
    return {consumer: decode_step(payload) for consumer, payload in map(split, encoder.take())}


def test_each_consumer_gets_one_frame_with_its_own(ledger):
    steps = steps_of(ledger, StepOutput((0, 1), [10]), StepOutput((5, 1), [11]), StepOutput((0, 2), [12]))
    assert (steps[0].life, steps[0].number) == (7, 3)
    assert (steps[0].requests, steps[0].tokens, steps[0].counts) == ([1, 2], [10, 12], None)
    assert (steps[5].requests, steps[5].tokens) == ([1], [11])


def test_counts_appear_when_one_request_has_more_than_one_token(ledger):
    step = steps_of(ledger, StepOutput((0, 1), [10]), StepOutput((0, 2), [11, 12]))[0]
    assert step.counts == [1, 2]
    assert list(step.deltas()) == [(1, [10]), (2, [11, 12])]


def test_plain_tokens_and_deltas_share_a_frame(ledger):
    plain = PlainTokens([(5, 1), (0, 1)], [11, 10])
    assert steps_of(ledger, plain=plain)[0].counts is None
    steps = steps_of(ledger, StepOutput((0, 2), [12, 13]), plain=plain)
    assert list(steps[0].deltas()) == [(1, [10]), (2, [12, 13])]
    assert list(steps[5].deltas()) == [(1, [11])]


def test_a_request_s_plain_tokens_stand_before_its_news(ledger):
    end = StepOutput((0, 1), [11], finish=Finish("length", Usage()))
    step = steps_of(ledger, end, plain=PlainTokens([(0, 1)], [10]))[0]
    assert (list(step.deltas()), list(step.finished)) == ([(1, [10]), (1, [11])], [1])


def test_steps_that_pile_up_share_a_frame_in_order(ledger):
    encoder = StepEncoder(7, ledger, KEY)
    encoder.add(3, [StepOutput((0, 1), [10])], PlainTokens([(0, 2)], [20]))
    encoder.add(4, [], PlainTokens([(0, 1), (0, 2)], [11, 21]))
    encoder.add(5, [StepOutput((0, 1), [12, 13]), StepOutput((0, 2), [22], finish=Finish("length", Usage()))])
    encoder.add(6, [], PlainTokens([(0, 1), (5, 1)], [14, 30]))
    frames = [split(data) for data in encoder.take()]
    assert [consumer for consumer, _ in frames] == [0, 5]
    step = decode_step(frames[0][1])
    rows = list(step.deltas())
    assert [token for number, tokens in rows if number == 1 for token in tokens] == [10, 11, 12, 13, 14]
    assert [token for number, tokens in rows if number == 2 for token in tokens] == [20, 21, 22]
    assert step.number == 3 and list(step.finished) == [2]
    assert encoder.take() == []


def test_a_step_with_log_probs_travels_alone(ledger):
    encoder, chosen = StepEncoder(7, ledger, KEY), [[TokenLogprob(11, -0.5, 3)]]
    encoder.add(3, [], PlainTokens([(0, 1)], [10]))
    encoder.add(4, [StepOutput((0, 1), [11], chosen)], PlainTokens([(0, 2)], [20]))
    encoder.add(5, [], PlainTokens([(0, 1)], [12]))
    steps = [decode_step(payload) for _, payload in map(split, encoder.take())]
    assert [step.tokens for step in steps] == [[10], [20, 11], [12]]
    assert [step.logprobs for step in steps] == [None, {1: chosen}, None]


def test_two_tokens_of_one_request_in_a_step_keep_their_own_log_probs(ledger):
    first, second = [[TokenLogprob(10, -0.5)]], [[TokenLogprob(11, -1.5)]]
    encoder = StepEncoder(7, ledger, KEY)
    encoder.add(3, [StepOutput((0, 1), [10], first), StepOutput((0, 1), [11], second)])
    steps = [decode_step(payload) for _, payload in map(split, encoder.take())]
    assert [(token, step.logprobs[1]) for step in steps for token in step.tokens] == [(10, first), (11, second)]


def test_prompt_log_probs_without_a_token_arrive(ledger):
    entries = [[TokenLogprob(4, -0.5)]]
    step = steps_of(ledger, StepOutput((0, 1), prompt_logprobs=entries, finish=Finish("stop", Usage())))[0]
    assert list(step.deltas()) == [(1, [])]
    assert step.prompt_logprobs == {1: entries}


def test_news_of_muted_and_unknown_requests_go_nowhere(ledger):
    ledger.get((0, 1)).is_discarded = True
    assert steps_of(ledger, StepOutput((0, 1), [10]), StepOutput((0, 99), [11])) == {}
    assert steps_of(ledger, plain=PlainTokens([(0, 1), (0, 99)], [10, 11])) == {}


def test_a_finish_ends_the_entry_also_of_a_muted_request(ledger):
    ledger.get((0, 1)).is_discarded = True
    steps_of(ledger, StepOutput((0, 1), finish=Finish("cancelled", Usage())))
    assert ledger.get((0, 1)) is None


def test_exported_params_are_signed_with_the_digest_of_the_prompt(ledger):
    exported = DisaggregatedParams(worker="prefill", life=7, lease_id=1, generation=1, num_tokens=3)
    step = steps_of(ledger, StepOutput((0, 1), [10], finish=Finish("not_finished", Usage()), exported=exported))[0]
    assert unseal(step.finished[1].disaggregated_params, KEY).prompt_digest == "digest"
