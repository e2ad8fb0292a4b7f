"""Steps that choose tokens themselves: what they verified is taken before the next one is planned, the rest later."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.engines.torch.host_resident import HostResident
from tests.engines.torch.known_answers import NGRAM
from tests.engines.torch.test_speculation import FEW, PROMPTS, num_accepted, said, stored, without_drafts
from tests.engines.torch.torch_harness import WAIT_S, Harness, request

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it draws on the host what a GPU has drawn itself")


class Held(HostResident):
    """From `hold` on no step with drafts ends before it is let go."""

    def __init__(self, parts):
        super().__init__(parts)
        self.started = []  # of each step, whether it has drafts, and prompts
        self.fails_with = None  # the next start
        self._holds, self._is_held, self._permits = False, threading.Event(), threading.Semaphore(0)

    def start(self, plan, row_of, ahead=0):
        if (error := self.fails_with) is not None:
            self.fails_with = None
            raise error
        flight = super().start(plan, row_of, ahead)
        read, waiting = flight.read, [True] if plan.drafts else []
        self.started.append((bool(plan.drafts), bool(plan.chunks)))

        def held():
            if self._holds and waiting:
                waiting.clear()
                self._is_held.set()
                assert self._permits.acquire(timeout=WAIT_S)
            return read()

        flight.read = held
        return flight

    def hold(self):
        self._holds = True

    def held(self):
        """Wait until a step is held; return how many have been started."""
        assert self._is_held.wait(WAIT_S)
        return len(self.started)

    def go_on(self, holds=False):
        """Let the step go that is held. `holds`: the next one is held."""
        self._holds = holds
        self._is_held.clear()
        self._permits.release()


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
    resident.hold()
    first = engine.submit(request(FEW[0], 40))
    count = resident.held()
    second = engine.submit(request(FEW[1], 40))
    resident.go_on()
    assert [one.finish.error or one.tokens for one in (first, second)] == expected
    assert resident.started[count][1]


def test_who_goes_while_its_draft_is_verified_changes_nothing_for_others(opened):
    engine, resident = opened
    expected = [one.tokens for one in without_drafts(engine, [request(prompt, 40) for prompt in FEW[:3]])]
    resident.hold()
    results = [engine.submit(request(prompt, 40)) for prompt in FEW[:3]]
    resident.held()
    resident.go_on(holds=True)
    resident.held()  # of all three
    engine.abort(results[0])
    resident.go_on()
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
    resident.hold()
    results = [engine.submit(requests[0])]
    resident.held()
    results.append(engine.submit(requests[1]))  # all of its prompt but a token is cached: it is a decode
    resident.go_on(holds=True)
    resident.held()
    results.append(engine.submit(requests[2]))
    resident.go_on()
    assert [one.finish.error or one.tokens for one in results] == expected


def test_what_was_verified_is_counted_though_the_next_step_fails(opened):
    engine, resident = opened
    without_drafts(engine, [request(FEW[0], 40)])
    counted(engine)
    resident.hold()
    result = engine.submit(request(FEW[0], 40))
    resident.held()
    resident.fails_with = RuntimeError("no launch")
    resident.go_on()
    assert "no launch" in result.finish.error and result.finish.usage.drafted_tokens > 0
    assert counted(engine)["bireme_draft_tokens_total"] == result.finish.usage.drafted_tokens


def test_a_deadline_that_passes_during_a_step_takes_no_token_of_it(opened):
    engine, resident = opened
    without_drafts(engine, [request(FEW[0], 40)])
    resident.hold()
    result = engine.submit(request(FEW[0], 40))
    resident.held()
    (sequence,), count = engine.core.requests.running.values(), len(result.tokens)
    engine.core.requests.deadlines.add(time.monotonic(), sequence, "late")
    resident.go_on()
    assert result.finish.reason == "timeout" and len(result.tokens) > count


def test_without_an_account_of_drafts_requests_are_served_without_them(opened, monkeypatch):
    engine, _ = opened
    (expected,) = without_drafts(engine, [request(FEW[0], 40)])
    speculation = engine.core._parts.speculation
    monkeypatch.setattr(speculation.lengths, "paid", lambda *_: 1 / 0)
    result = engine.submit(request(FEW[0], 40))
    assert result.finish.error or result.tokens == expected.tokens
    assert not speculation.is_on
