"""What one router has sent to a worker."""

import numpy as np
import pytest

from bireme.kv.routing.active import ActiveRequests, SentRequest
from bireme.kv.routing.block_uses import BlockUses
from bireme.kv.routing.targets import StageTargets
from tests.kv.routing.router_fixtures import record


def blocks(*hashes):
    return np.array(hashes, np.uint64)


def test_blocks_that_requests_share_count_once_until_the_last_has_ended():
    """The figures are (blocks, tokens to compute), Dynamo's vectors of ActiveSequences with 4 tokens a block."""
    active, seen = ActiveRequests(BlockUses()), []
    first, second, third = (
        SentRequest(blocks(1, 2, 3), 12),
        SentRequest(blocks(4), 4),
        SentRequest(blocks(1, 2, 3, 4), 0),
    )
    for one in (first, second, third):
        active.add(one, 0.0)
        seen.append((active.num_blocks, active.prefill_tokens))
    for one in (second, third, first):
        active.free(one)
        seen.append((active.num_blocks, active.prefill_tokens))
    assert seen == [(3, 12), (4, 16), (4, 16), (4, 12), (3, 12), (0, 0)]


def test_a_prompt_is_computed_once_however_often_it_is_told():
    uses = BlockUses()
    active, one = ActiveRequests(uses), SentRequest(blocks(1), 4, blocks(1))
    active.add(one, 0.0)
    for _ in range(2):
        active.prefilled(one, 1.0)
    assert (active.prefill_tokens, active.num_blocks, uses.num_entries) == (0, 1, 1)
    for _ in range(2):
        active.free(one)
    assert (active.num_requests, active.num_blocks, uses.num_entries) == (0, 0, 0)


def test_prompts_that_end_in_one_step_share_its_rate():
    active = ActiveRequests(BlockUses())
    sent = [SentRequest(blocks(at), 100) for at in range(5)]
    for one in sent:
        active.add(one, 0.0)
    for one in sent:
        active.prefilled(one, 1.0)
    assert active.rate == pytest.approx(500)


def test_what_is_left_of_a_prompt_shrinks_at_the_measured_rate_and_stays_until_its_end_is_known():
    stage, first, second = StageTargets({}, BlockUses()), SentRequest(blocks(1), 100), SentRequest(blocks(2), 50)
    stage.set_workers({"decode": record("decode")})
    target = stage.targets[0]
    stage.add(target, first, 0.0)
    stage.prefilled(target, first, 1.0)
    stage.add(target, second, 2.0)
    left = [float(stage.waiting_tokens(now)[0]) for now in (2.0, 2.25, 9.0)]
    assert left == [50, pytest.approx(25), 0]
    assert target.active.prefill_tokens == 50
