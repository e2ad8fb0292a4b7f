"""Best-effort requests (priority 0) beside others: they rest, go on exactly, give up their place, and end."""

from __future__ import annotations

import time

import pytest

from bireme.best_effort import LONGEST_REST_S, QUIET_S, BestEffortShare
from bireme.engines.torch.step import SequenceStatus
from tests.engines.engine_fixtures import wait_for
from tests.engines.torch.scheduler_steps import STEP_S, Overlapping, Steps
from tests.engines.torch.torch_harness import MIXED, Harness, make_prompts, request

PROMPTS = make_prompts(*MIXED)


def test_alone_they_run_as_any_others():
    steps = Steps()
    lines = [steps.line() for _ in range(3)]
    for _ in range(20):
        assert steps.step() == lines


def test_a_step_with_a_prompt_of_others_is_without_them_and_they_keep_their_blocks():
    steps = Steps()
    line = steps.line()
    for _ in range(5):
        steps.step()
    held, live = list(line.table.blocks[0]), steps.add(num_prompt=150)
    for _ in range(3):  # 150 tokens, 64 a step
        assert steps.step() == [live]
    assert live.first_token_at and line.table.blocks[0] == held and line.state is SequenceStatus.RUNNING


def test_a_prompt_of_one_token_is_a_prompt():
    steps = Steps(share=1)
    steps.line()
    steps.step()
    live = steps.add(num_prompt=1)
    assert steps.step() == [live]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_beside_others_they_get_their_share_of_the_steps(share):
    steps = Steps(share=share)
    line, live = steps.line(), steps.add()
    taken = [line in steps.step() for _ in range(1000)]
    assert 0.8 * share <= sum(taken) / len(taken) <= 1.1 * share and not line.table.blocks[0] == []
    assert steps.scheduler.best_effort.num_rests == taken.count(False) and len(live.tokens) > 1000


def test_with_a_share_of_one_they_rest_for_prompts_alone():
    steps = Steps(share=1)
    line, live = steps.line(), steps.add()
    assert steps.step() == [live]
    for _ in range(20):
        assert steps.step() == [live, line]


def test_once_the_others_have_been_gone_for_a_while_they_run_in_every_step():
    steps = Steps()
    line, live = steps.line(), steps.add(max_tokens=3)
    while live.state is not SequenceStatus.FINISHED:
        steps.step()
    began, gaps = steps.now, 0
    while steps.now < began + QUIET_S:
        gaps += not steps.step()
    assert gaps > 50
    assert all(steps.step() == [line] for _ in range(20))


def test_an_engine_that_has_nothing_else_to_do_is_told_when_to_plan_again():
    steps = Steps()
    line, live = steps.line(), steps.add(max_tokens=1)
    while live.state is not SequenceStatus.FINISHED:
        steps.step()
    while line in steps.step():
        pass
    wakes_at = steps.scheduler.wakes_at
    assert steps.now < wakes_at <= steps.now + 10 * STEP_S
    steps.now = wakes_at
    assert steps.step() == [line] and steps.scheduler.wakes_at is None


def test_they_go_on_though_every_step_has_a_prompt_of_others():
    steps, waits = Steps(), 0
    line = steps.line(num_prompt=20, max_tokens=5)
    while line.state is not SequenceStatus.FINISHED:
        steps.add(max_tokens=1)
        waits = 0 if line in steps.step() else waits + 1
        assert waits * STEP_S < 1.2
    assert line.num_output == 5


def test_beside_others_their_prompts_are_computed_in_small_chunks():
    steps = Steps()
    line = steps.line(num_prompt=100)
    steps.step()
    assert line.computed == 64
    steps, before, chunks = Steps(), 0, []
    line, _ = steps.line(num_prompt=100), steps.add()
    while not line.first_token_at:
        steps.step()
        chunks.append(line.computed - before)
        before = line.computed
    assert max(chunks) == 2 and steps.scheduler.num_prefill_tokens == 0


def test_what_their_prompts_have_left_is_told_while_they_rest():
    steps = Steps()
    steps.line(num_prompt=100)
    steps.step()
    steps.add(num_prompt=80)
    steps.step()
    assert steps.scheduler.num_prefill_tokens == 36 + 16


def test_a_rest_ends_before_an_engine_is_taken_for_one_that_hangs():
    share = BestEffortShare(0.01)
    share.plan(0.0, has_others=True)
    assert share.may_run(0.0)
    share.ran(0.0)
    share.plan(5.0, has_others=True)
    share.plan(14.9, has_others=True)
    assert not share.may_run(5.0 + LONGEST_REST_S - 0.1)
    assert share.may_run(5.0 + LONGEST_REST_S)


@pytest.mark.parametrize("limits", [{"max_batch_size": 3}, {"num_blocks": 30}, {"num_blocks": 16, "may_preempt": True}])
def test_a_request_that_finds_no_place_gets_that_of_the_last_of_them(limits):
    steps = Steps(**limits)
    lines = [steps.line(num_prompt=8, max_tokens=32) for _ in range(3)]
    for _ in range(3):
        steps.step()
    live = steps.add(num_prompt=40, max_tokens=1)
    assert steps.step() == [live] and live.first_token_at
    assert [line.state for line in lines] == [SequenceStatus.RUNNING] * 2 + [SequenceStatus.WAITING]
    while not all(line.state is SequenceStatus.FINISHED for line in lines):
        steps.step()
    assert [line.num_output for line in lines] == [32] * 3 and steps.manager.num_referenced == 0


def test_none_of_them_gives_way_to_another_of_them():
    steps = Steps(max_batch_size=1)
    first, second = steps.line(), steps.line()
    assert [steps.step() for _ in range(5)] == [[first]] * 5 and second.state is SequenceStatus.WAITING


def test_steps_that_are_started_ahead_leave_them_out_and_take_them_in_again():
    steps = Overlapping()
    line, live = steps.line(), steps.add()
    steps.line()  # waits or rests beside it
    taken, ahead = [], 0
    for _ in range(1000):
        taken.append(line in steps.step())
        ahead += steps.started is not None
        if steps.started is not None:
            assert live in steps.started.decodes
    assert 0.06 <= sum(taken) / len(taken) <= 0.11
    assert ahead > 700  # while they rest, the others' steps are started ahead as ever


def test_a_request_that_finds_no_place_ends_steps_that_are_started_ahead():
    steps = Overlapping(max_batch_size=2)
    lines = [steps.line(), steps.line()]
    for _ in range(5):
        steps.step()
    live = steps.add()
    for _ in range(3):
        steps.step()
    assert live.first_token_at and lines[1].state is SequenceStatus.WAITING


SAMPLED = {"temperature": 0.9, "seed": 7, "top_p": 0.95, "repetition_penalty": 1.2, "logprobs": 1}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_batch_size": 4}, {"max_tokens": 256, "queue": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}],
    ids=["they rest", "they are preempted for a place", "they are preempted for blocks"],
)
def test_what_rested_goes_on_exactly(tiny, name, settings):
    model = tiny(name)
    expected = model.expect(PROMPTS)
    with Harness(model.path, max_num_tokens=40) as engine:
        drawn = engine.submit(request(PROMPTS[4], **SAMPLED))
        assert not drawn.finish.error
    # On a busy machine lines may have ended before a live request is there that would need their time or place.
    seen = (run_both(model, expected, drawn, settings) for _ in range(8))
    assert any(rests > 0 and (preemptions > 0) == bool(settings) for rests, preemptions in seen)


def run_both(model, expected, drawn, settings):
    """Run lines and live requests, check what each gets, and return how often lines rested and gave up their place."""
    with Harness(model.path, max_num_tokens=40, **settings) as engine:
        lines = [engine.submit(request(prompt, priority=0.0)) for prompt in PROMPTS[:8]]
        lines.append(engine.submit(request(PROMPTS[4], priority=0.0, **SAMPLED)))
        assert lines[0].has_tokens.wait(30)
        for number, prompt in enumerate(PROMPTS[8:]):
            live = engine.submit(request(prompt))
            assert live.finish.error == "" and live.tokens == expected[8 + number]
        for line, tokens in zip(lines, [*expected[:8], drawn.tokens], strict=True):
            assert line.finish.error == "" and line.tokens == tokens
        for (one, *_), (other, *_) in zip(lines[-1].logprobs, drawn.logprobs, strict=True):
            assert one == (other.token, pytest.approx(other.logprob, abs=1e-4), other.rank)
        assert engine.manager.num_referenced == 0
        return engine.core.scheduler.best_effort.num_rests, engine.core.scheduler.num_preemptions


@pytest.fixture
def resting(tiny):
    """An engine with a live request and one that rests beside it for seconds after each step."""
    with Harness(tiny("llama").path, queue={"best_effort_share": 1e-4}) as engine:
        live = engine.submit(request(PROMPTS[1], 480))
        assert live.has_tokens.wait(30)
        yield engine, live
        engine.abort(live)


def test_a_first_token_does_not_wait_for_one_that_rests(resting):
    engine, live = resting
    line = engine.submit(request(PROMPTS[2], 400, priority=0.0))
    assert line.has_tokens.wait(30)  # it has had its step
    assert engine.submit(request(PROMPTS[0], 2)).finish.error == ""
    assert not live.is_over.is_set() and len(line.tokens) < 5


def test_one_that_rests_can_be_cancelled_and_its_time_runs_out(resting):
    engine, live = resting
    cancelled = engine.submit(request(PROMPTS[2], 400, priority=0.0))
    late = engine.submit(request(PROMPTS[3], 400, priority=0.0, timeout_ms=150))
    assert cancelled.has_tokens.wait(30)
    engine.abort(cancelled)
    assert cancelled.finish.reason == "cancelled" and late.finish.reason == "timeout"
    engine.abort(live)
    assert live.finish.reason in ("cancelled", "length")  # a GPU may have made all of it by now
    wait_for(lambda: engine.manager.num_referenced == 0)


def test_an_idle_engine_wakes_for_those_that_rest(tiny):
    with Harness(tiny("llama").path, queue={"best_effort_share": 0.01}) as engine:
        live = engine.submit(request(PROMPTS[1], 40))
        line = engine.submit(request(PROMPTS[2], 40, priority=0.0))
        assert live.finish.error == ""
        ended = time.monotonic()
        assert line.finish.error == "" and len(line.tokens) == 40
        assert time.monotonic() - ended < 10


def test_steps_without_them_are_counted(resting):
    engine, live = resting
    engine.submit(request(PROMPTS[2], 400, priority=0.0))
    wait_for(lambda: len(live.tokens) > 60)
    engine.settle()
    counters = {name: value for name, _, value in engine.metrics.take_delta().counters}
    assert counters["bireme_best_effort_rests_total"] > 20
