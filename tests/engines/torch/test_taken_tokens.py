"""Steps that choose tokens themselves: what they verified is taken before the next one is planned, the rest later."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.engines.torch.host_resident import HostResident
from tests.engines.torch.known_answers import NGRAM
from tests.engines.torch.test_speculation import FEW, PROMPTS, num_accepted, said, stored, without_drafts
from tests.engines.torch.torch_harness import WAIT_S, Harness, request

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it draws on the host what a GPU has drawn itself")


class Held(HostResident):
    """A step with drafts ends when it is let go."""

    def __init__(self, parts):
        super().__init__(parts)
        self.started = []  # of each step, whether it has drafts, and prompts
        self.fails_with = None  # the next start
        self.is_held, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def start(self, plan, row_of, ahead=0):
        if (error := self.fails_with) is not None:
            self.fails_with = None
            raise error
        flight = super().start(plan, row_of, ahead)
        read, has_drafts = flight.read, bool(plan.drafts)
        self.started.append((has_drafts, bool(plan.chunks)))

        def held():
            if has_drafts and not self.goes_on.is_set():
                self.is_held.set()
                assert self.goes_on.wait(WAIT_S)
            return read()

        flight.read = held
        return flight

    def hold(self):
        """Have the next step with drafts not end; return how many steps have been started when one is held."""
        self.is_held.clear()
        self.goes_on.clear()
        assert self.is_held.wait(WAIT_S)
        return len(self.started)


@pytest.fixture(scope="module")
def opened(tiny):
    settings = {"max_num_tokens": 64, "tokens_per_block": 4, "event_buffer_max_size": 10000}
    with Harness(tiny("llama").path, speculative_config=NGRAM, **settings) as engine:
        yield engine, Held.put_into(engine.core._parts)


def counted(engine):
    engine.settle()
    found = {}
    for name, _, value in engine.metrics.take_delta().counters:
        found[name] = found.get(name, 0) + value
    return found


def test_a_request_ends_anywhere_in_a_burst_and_its_tokens_are_counted(opened):
    engine, resident = opened
    requests = [request(prompt, count) for prompt, count in zip(PROMPTS, range(1, 14), strict=False)]
    before = without_drafts(engine, requests)
    counted(engine)
    results = [engine.submit(one) for one in requests]
    assert said(results) == said(before) and resident.num_verified > 2
    found, drafted = counted(engine), sum(one.finish.usage.drafted_tokens for one in results)
    assert found["bireme_generated_tokens_total"] == sum(range(1, 14))
    assert found["bireme_draft_tokens_total"] == drafted > num_accepted(results) > 20
    assert found["bireme_accepted_draft_tokens_total"] == num_accepted(results)


def test_a_stop_ends_a_burst_where_it_stands(opened):
    engine, _ = opened
    whole = without_drafts(engine, [request(prompt) for prompt in FEW])
    stops = [one.tokens[at] for one, at in zip(whole, (5, 9, 14, 20, 27, 40), strict=True)]
    requests = [request(prompt, stop_token_ids=(stop,)) for prompt, stop in zip(FEW, stops, strict=True)]
    expected = [one.tokens[: one.tokens.index(stop)] for one, stop in zip(whole, stops, strict=True)]
    results = [engine.submit(one) for one in requests]
    assert [(one.finish.reason, one.finish.stop_token_id, one.tokens) for one in results] == [
        ("stop", stop, tokens) for stop, tokens in zip(stops, expected, strict=True)
    ]
    assert all(one.finish.usage.completion_tokens == len(one.tokens) for one in results)
    assert all(one.finish.usage.accepted_tokens <= len(one.tokens) for one in results) and num_accepted(results) > 12


def test_who_comes_while_a_step_with_drafts_is_under_way_takes_part_in_the_next(opened):
    engine, resident = opened
    expected = [one.tokens for one in without_drafts(engine, [request(prompt, 40) for prompt in FEW[:2]])]
    first = engine.submit(request(FEW[0], 40))
    count = resident.hold()
    second = engine.submit(request(FEW[1], 40))
    resident.goes_on.set()
    assert [one.finish.error or one.tokens for one in (first, second)] == expected
    assert resident.started[count][1]


def test_who_goes_while_its_draft_is_verified_changes_nothing_for_others(opened):
    engine, resident = opened
    expected = [one.tokens for one in without_drafts(engine, [request(prompt, 40) for prompt in FEW[:3]])]
    results = [engine.submit(request(prompt, 40)) for prompt in FEW[:3]]
    assert all(one.has_tokens.wait(WAIT_S) for one in results)
    resident.hold()
    engine.abort(results[0])
    resident.goes_on.set()
    assert results[0].finish.reason == "cancelled"
    assert [one.finish.error or one.tokens for one in results[1:]] == expected[1:]
    engine.settle()
    assert engine.manager.num_referenced == 0


def test_blocks_of_bursts_are_offered_and_told_as_those_of_single_tokens(opened):
    engine, _ = opened
    prompt = [*FEW[3][:30], 11, 12, 13]
    engine.engine.kv_events()
    (answer,) = [one.tokens for one in without_drafts(engine, [request(prompt, cache_salt="one")])]
    engine.settle()
    before = stored(engine.engine.kv_events())
    result = engine.submit(request(prompt, cache_salt="two"))
    assert result.finish.error or result.tokens == answer
    engine.settle()
    assert stored(engine.engine.kv_events()) == before and result.finish.usage.accepted_tokens > 10
    again = engine.submit(request([*prompt, *answer, 7], 4, cache_salt="two"))
    assert again.finish.usage.cached_tokens == (len(prompt) + len(answer) - 1) // 4 * 4


def test_tokens_that_were_taken_go_out_before_a_step_that_is_waited_for(opened, monkeypatch):
    """One more of a request whose first token was among them came before it where both went out together."""
    engine, resident = opened
    monkeypatch.setattr(engine.core._parts.forward, "mixed", None)  # a prompt's step is waited for
    requests = [request(FEW[0], 40), request(FEW[1][:17], 20), request(FEW[2][:30], 10)]
    expected = [one.tokens for one in without_drafts(engine, requests)]
    results = [engine.submit(requests[0])]
    resident.hold()
    results.append(engine.submit(requests[1]))  # all of its prompt but a token is cached: it is a decode
    resident.goes_on.set()
    resident.hold()
    results.append(engine.submit(requests[2]))
    resident.goes_on.set()
    assert [one.finish.error or one.tokens for one in results] == expected


def test_what_was_verified_is_counted_though_the_next_step_fails(opened):
    engine, resident = opened
    without_drafts(engine, [request(FEW[0], 40)])
    result = engine.submit(request(FEW[0], 40))
    counted(engine)
    resident.hold()
    resident.fails_with = RuntimeError("no launch")
    resident.goes_on.set()
    assert "no launch" in result.finish.error and result.finish.usage.drafted_tokens > 0
    assert counted(engine)["bireme_draft_tokens_total"] == result.finish.usage.drafted_tokens


def test_without_an_account_of_drafts_requests_are_served_without_them(opened, monkeypatch):
    engine, _ = opened
    (expected,) = without_drafts(engine, [request(FEW[0], 40)])
    speculation = engine.core._parts.speculation
    monkeypatch.setattr(speculation.lengths, "paid", lambda *_: 1 / 0)
    result = engine.submit(request(FEW[0], 40))
    assert result.finish.error or result.tokens == expected.tokens
    assert not speculation.is_on
