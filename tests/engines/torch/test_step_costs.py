"""What steps take, learned from a machine that a test makes up."""

from __future__ import annotations

import json
import random

import pytest
import torch

from bireme.engines.torch.scheduling.pace import StepPace
from bireme.engines.torch.scheduling.step_costs import StepCosts, StepTime, StepWork
from bireme.engines.torch.scheduling.step_prices import prices_of
from bireme.engines.torch.scheduling.step_times import StepTimesFile
from bireme.sizing.step_times import StepTimes

DECODE = StepWork(16, 0, 16 * 300)
FAST, SLOW = 1.0, 40.0


def seconds(work, machine=FAST):
    """Nothing that a line through the origin fits: short prompts cost next to nothing."""
    rows, tokens, context, looks = work
    return machine * (0.005 + 1e-5 * rows + 2e-5 * max(0, tokens - 100) + 4e-8 * context + 2e-9 * looks)


def visit(costs, work, machine=FAST, times=20, noise=0.02):
    drawn = random.Random(1)
    for _ in range(times):
        costs.landed([work], seconds(work, machine) * drawn.uniform(1 - noise, 1 + noise))


def prompt(tokens, before=0):
    return DECODE.with_chunk(before, tokens)


@pytest.fixture(params=[FAST, SLOW], ids=["fast", "slow"])
def machine(request):
    return request.param


@pytest.fixture
def learned(machine):
    costs = StepCosts()
    for work in (DECODE, *(prompt(tokens) for tokens in (64, 130, 250, 500, 1000)), prompt(500, before=2000)):
        visit(costs, work, machine)
    return costs


@pytest.mark.parametrize("work", [DECODE, prompt(64), prompt(250), prompt(1000), prompt(500, before=2000)])
def test_what_was_seen_is_known(learned, machine, work):
    wanted = seconds(work, machine)
    assert learned.least_s(work) <= learned.usual_s(work) <= learned.most_s(work)
    assert learned.least_s(work) > 0.9 * wanted and learned.most_s(work) < 1.1 * wanted


@pytest.mark.parametrize("work", [prompt(90), prompt(350), prompt(700), StepWork(24, 250, 7000, 30_000)])
def test_between_what_was_seen_it_is_near(learned, machine, work):
    assert learned.usual_s(work) == pytest.approx(seconds(work, machine), rel=0.2)


@pytest.mark.parametrize("work", [prompt(4000), prompt(1000, before=8000), StepWork(200, 0, 60_000)])
def test_beyond_it_more_work_takes_longer(learned, machine, work):
    assert learned.usual_s(prompt(1000)) * 0.3 < learned.usual_s(work) < 4 * seconds(work, machine)
    assert learned.usual_s(work) < learned.usual_s(StepWork(*(2 * one for one in work)))
    assert learned.least_s(work) == 0.0  # nobody waits on a guess


def test_exceptions_do_not_count(learned, machine):
    usual = learned.usual_s(prompt(250))
    learned.landed([prompt(250)], 100 * usual)
    assert learned.most_s(prompt(250)) < 1.1 * usual


def test_the_first_steps_of_a_kind_may_all_be_exceptions():
    costs = StepCosts()
    visit(costs, DECODE)
    visit(costs, prompt(64))
    costs.landed([prompt(500)], 2.0)  # a kernel is compiled
    assert costs.most_s(prompt(500)) < 0.1


def test_a_cell_that_nobody_visits_since_it_was_slow_gets_another_chance():
    costs = StepCosts()
    visit(costs, DECODE)
    visit(costs, prompt(500), machine=10, times=3)
    visit(costs, prompt(500), times=2)
    slow = costs.most_s(prompt(500))
    visit(costs, DECODE, times=20_000)
    assert costs.most_s(prompt(500)) < 2 * seconds(prompt(500)) < slow


def test_a_single_step_that_was_slow_gets_another_chance():
    costs = StepCosts()
    visit(costs, DECODE)
    visit(costs, prompt(64))
    costs.landed([prompt(500)], 600.0)  # the machine was suspended
    assert costs.usual_s(prompt(500)) > 10
    visit(costs, DECODE, times=5_000)
    assert costs.usual_s(prompt(500)) < 1


def test_nobody_waits_as_long_as_one_step_took():
    costs, pace = StepCosts(), StepPace(StepCosts())
    pace.landed(DECODE, 100.0, 700.0)
    assert pace.starts_next_at(DECODE, 700.0) == 0.0
    costs.landed([DECODE], 600.0)
    costs.landed([DECODE], 0.02)
    assert costs.least_s(DECODE) == pytest.approx(0.02)


def test_steps_whose_ends_nobody_saw_share_the_time_by_their_work():
    costs, chunks = StepCosts(), [StepWork(0, 512, 0, 0).with_chunk(512 * at, 0) for at in range(3)]
    costs.landed(chunks, 0.09)
    assert sum(map(costs.usual_s, chunks)) == pytest.approx(0.09, rel=0.01)


def test_memory_is_bounded():
    costs, drawn = StepCosts(), random.Random(2)
    for _ in range(3000):
        costs.landed([StepWork(*(int(2 ** drawn.uniform(0, 16)) for _ in range(4)))], 0.01)
    assert len(costs.points()) <= 256


# None of them may keep an engine from starting, or teach it that steps take no time.
_IMPOSSIBLE = ({"ms": 0}, {"ms": -1.0}, {"ms": 1e300}, {"decode_rows": -1}, {"prefill_tokens": 1 << 60})


def _with_point(told, values):
    return json.dumps(told | {"points": [told["points"][0] | values]}).encode()


def test_the_file_is_read_by_the_next_start_of_the_same_engine_and_the_simulator(learned, machine, tmp_path, caplog):
    path, device = tmp_path / "decode.step_times.json", torch.device("cpu")
    kept = StepTimesFile(path, device, "model")
    assert kept.read() == []
    kept.start(learned)
    kept.close()
    told = json.loads(path.read_bytes())
    assert told["format"] == "bireme.step_times.v1" and told["engine"] == "torch" and told["machine"]
    assert {"decode_rows", "prefill_tokens", "context_tokens", "ms"} < told["points"][0].keys()
    assert StepTimes.read(str(path)).step_ms(16, context=16 * 300) == pytest.approx(
        1e3 * seconds(DECODE, machine), rel=0.1
    )
    again = StepCosts(StepTimesFile(path, device, "model").read())
    for work in (DECODE, prompt(64), prompt(700), prompt(500, before=2000)):
        assert again.usual_s(work) == pytest.approx(learned.usual_s(work), rel=0.1)
    assert StepTimesFile(path, device, "another model").read() == []
    for damaged in (
        b"{",
        b'{"x":' + b"[" * 100_000,
        b" " * (2 << 20),
        *(_with_point(told, one) for one in _IMPOSSIBLE),
    ):
        caplog.clear()
        path.write_bytes(damaged)
        assert StepTimesFile(path, device, "model").read() == [] and "step_times_not_read" in caplog.text


def test_a_router_is_told_what_prompts_add(machine):
    costs = StepCosts()
    assert prices_of(costs, DECODE, 2048, None) is None
    visit(costs, DECODE, machine, noise=0.0)
    assert prices_of(costs, DECODE, 2048, None) is None  # it has computed no prompt
    for tokens in (64, 130, 250, 500, 1000, 2000):
        visit(costs, prompt(tokens), machine, noise=0.0)
    prices = prices_of(costs, DECODE, 2048, (1.2, 0.0004))
    assert (prices.transfer_start_ms, prices.transfer_ms_per_token) == (1.2, 0.0004)
    assert prices.step_ms == pytest.approx(1e3 * seconds(DECODE, machine), rel=0.02)
    added = 1e3 * (seconds(prompt(512), machine) - seconds(DECODE, machine))
    assert prices.prompt_ms[2] == pytest.approx(added, rel=0.3)
    assert sorted(prices.prompt_ms) == list(prices.prompt_ms)
    assert prices.prompt_ms[4] > 3.5 * prices.prompt_ms[3]  # four steps, and the later ones look back


def test_points_are_what_others_read():
    costs = StepCosts([StepTime(8, 0, 2400, 6.0), StepTime(0, 512, 0, 14.0)])
    assert costs.usual_s(StepWork(8, 0, 2400)) == pytest.approx(0.006, rel=0.02)
    assert costs.usual_s(StepWork(0, 512, 0)) == pytest.approx(0.014, rel=0.02)
