"""What one router has sent to a worker."""

import pytest

from bireme.kv.active import ActiveRequests, SentRequest


def test_blocks_that_requests_share_count_once_until_the_last_has_ended():
    """The figures are (blocks, tokens to compute), Dynamo's vectors of ActiveSequences with 4 tokens a block."""
    active, seen = ActiveRequests(), []
    first, second, third = SentRequest([1, 2, 3], 12), SentRequest([4], 4), SentRequest([1, 2, 3, 4], 0)
    for one in (first, second, third):
        active.add(one, 0.0)
        seen.append((active.num_blocks, active.prefill_tokens))
    for one in (second, third, first):
        active.free(one)
        seen.append((active.num_blocks, active.prefill_tokens))
    assert seen == [(3, 12), (4, 16), (4, 16), (4, 12), (3, 12), (0, 0)]


@pytest.mark.parametrize(("prompt", "shared"), [([1, 2, 3, 9], 3), ([1, 8], 1), ([1, 2, 3], 3), ([7], 0), ([], 0)])
def test_a_prompts_blocks_in_use_are_found_from_its_start(prompt, shared):
    active = ActiveRequests()
    active.add(SentRequest([1, 2, 3], 0), 0.0)
    assert active.shared(prompt) == shared


@pytest.mark.parametrize(("num_held", "computing"), [(5, 3), (3, 1), (2, 0), (0, 0)])
def test_held_blocks_that_are_only_being_computed_are_told_apart(num_held, computing):
    active = ActiveRequests()
    active.add(SentRequest([1, 2, 3, 4, 5], 12, [3, 4, 5]), 0.0)
    assert active.computing([1, 2, 3, 4, 5], num_held) == computing


def test_a_prompt_is_computed_once_however_often_it_is_told():
    active, one = ActiveRequests(), SentRequest([1], 4, [1])
    active.add(one, 0.0)
    for _ in range(2):
        active.prefilled(one, 1.0)
    assert (active.prefill_tokens, active.computing([1], 1), active.num_blocks) == (0, 0, 1)
    for _ in range(2):
        active.free(one)
    assert (active.num_requests, active.num_blocks) == (0, 0)


def test_prompts_that_end_in_one_step_share_its_rate():
    active = ActiveRequests()
    sent = [SentRequest([at], 100) for at in range(5)]
    for one in sent:
        active.add(one, 0.0)
    for one in sent:
        active.prefilled(one, 1.0)
    assert active.rate == pytest.approx(500)


def test_what_is_left_of_a_prompt_shrinks_at_the_measured_rate_and_stays_until_its_end_is_known():
    active, first, second = ActiveRequests(), SentRequest([1], 100), SentRequest([2], 50)
    active.add(first, 0.0)
    active.prefilled(first, 1.0)
    active.add(second, 2.0)
    assert [active.prefill_left(now) for now in (2.0, 2.25, 9.0)] == [50, pytest.approx(25), 0]
    assert active.prefill_tokens == 50
