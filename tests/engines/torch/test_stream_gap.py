"""Steps beside running streams end within a bound, on a machine that a test makes up, and in an engine."""

from __future__ import annotations

import pytest

from bireme.config import EngineConfig, SchedulerConfig
from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
from bireme.engines.torch.scheduling.stream_gap import LEAST_TOKENS
from bireme.engines.torch.weights.limits import resolve_limits
from bireme.errors import ConfigError
from tests.engines.torch import tiny_models
from tests.engines.torch.scheduler_steps import Overlapping, Steps
from tests.engines.torch.test_limits import MODEL
from tests.engines.torch.test_step_costs import DECODE, FAST, prompt, seconds, visit
from tests.engines.torch.torch_harness import Harness, make_prompts, request


def bounded(kind=Steps, bound_s=0.012, machine=FAST):
    costs = StepCosts()
    for work in (DECODE, *(prompt(tokens) for tokens in (64, 130, 250, 500, 1000))):
        visit(costs, work, machine)
    steps = kind(max_num_tokens=2048, max_stream_gap_s=bound_s, costs=costs)
    return steps, costs


def streams(steps, count=4):
    made = [steps.add(300) for _ in range(count)]
    while not all(one.first_token_at for one in made):
        steps.step()
    return made


@pytest.mark.parametrize("kind", [Steps, Overlapping])
def test_a_step_beside_streams_ends_within_the_bound(kind):
    steps, _ = bounded(kind)
    streams(steps)
    long = steps.add(3000)
    works = []
    while not long.first_token_at:
        plan = steps.started or steps.scheduler.schedule() if kind is Overlapping else steps.scheduler.schedule()
        works.append(StepWork.of(plan))
        if kind is Overlapping:
            steps.started = steps.scheduler.follow(plan)
        steps.end(plan)
    chunks = [work.prefill_tokens for work in works if work.prefill_tokens]
    assert sum(chunks) == 3000 and len(chunks) < 13
    assert max(map(seconds, works)) < 0.013
    assert all(count % 32 == 0 for count in chunks[:-1])


def test_alone_a_prompt_takes_the_whole_budget():
    steps, _ = bounded()
    steps.add(3000)
    assert [count for _, count in steps.scheduler.schedule().chunks] == [2048]


def test_a_prompt_goes_on_where_streams_alone_exceed_the_bound():
    steps, _ = bounded(bound_s=0.001)
    streams(steps)
    first, second = steps.add(200), steps.add(200)
    parts = []
    while not second.first_token_at:
        plan = steps.scheduler.schedule()
        parts.append([(one.number, count) for one, count in plan.chunks])
        steps.end(plan)
    counts = [64, 64, 64, 8]
    assert parts == [[(one.number, count)] for one in (first, second) for count in counts] and LEAST_TOKENS == 64


def test_what_was_never_tried_is_tried_in_growing_chunks():
    costs = StepCosts()
    steps = Steps(max_num_tokens=2048, max_stream_gap_s=0.1, costs=costs)
    streams(steps)
    visit(costs, DECODE)
    long, counts = steps.add(4000), []
    while not long.first_token_at:
        plan = steps.scheduler.schedule()
        counts.append(StepWork.of(plan).prefill_tokens)
        costs.landed([StepWork.of(plan)], seconds(StepWork.of(plan)))
        steps.end(plan)
    assert counts == [64, 128, 256, 512, 1024, 2016]


def test_prompts_in_parts_are_needed():
    config = EngineConfig(scheduler_config=SchedulerConfig(max_stream_gap_ms=20), enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match=r"scheduler_config.max_stream_gap_ms: 20 .*enable_chunked_prefill"):
        resolve_limits(config, MODEL)


def test_an_engine_that_is_told_a_bound_computes_a_prompt_in_parts_beside_streams(tmp_path, monkeypatch):
    long, short = make_prompts(400, 20)
    path = tiny_models.save(tmp_path, "llama", max_position_embeddings=4096)
    with Harness(path, max_num_tokens=512) as engine:
        wanted = engine.run([request(long, 4)])[0]
    with Harness(path, max_num_tokens=512, queue={"max_stream_gap_ms": 1e-3}) as engine:
        assert engine.run([request(long, 4)])[0] == wanted
        num_alone = engine.core.num_steps
        assert engine.engine.progress().prices().prompt_ms[0] >= 0
        running = engine.submit(request(short, 3000))  # a GPU says 400 before the next lines are through
        assert running.has_tokens.wait(60)
        seen = []
        for name in ("schedule", "follow"):  # without a step under way, and behind one
            plans = getattr(engine.core.scheduler, name)
            monkeypatch.setattr(
                engine.core.scheduler, name, lambda *under_way, plans=plans: seen.append(plans(*under_way)) or seen[-1]
            )
        other = make_prompts(400, seed=3)[0]
        assert engine.submit(request(other, 2)).finish.error == ""
        engine.abort(running)
        engine.settle()
    assert num_alone < 8
    beside = [count for plan in seen if plan and plan.decodes for _, count in plan.chunks]
    assert set(beside) == {64, 16} and sum(beside) >= 336  # the stream may not be there yet, or no more, in one step
