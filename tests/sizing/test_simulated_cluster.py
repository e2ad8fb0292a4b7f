"""Prefill and decode in virtual time: transfers, who computes prompts, priorities, refusals, joins and leaves."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from bireme.config import BusyRule, MockerConfig, RouterConfig
from bireme.sizing.simulator.cluster import Cluster, ClusterSettings, simulate
from bireme.sizing.simulator.synthetic import day, poisson_chats, shared_prefix
from bireme.sizing.simulator.trace import SimulatedRequest
from bireme.sizing.simulator.worker import SimulatedEngine, SimulatedRun, SimulatedWorker
from bireme.sizing.step_times import FORMAT, StepPoint, StepTable, StepTimes, TransferTimes

MODEL = MockerConfig(step_ms=10, prefill_ms=5, prefill_ms_per_token=0.1)
TRANSFER = TransferTimes(start_ms=2, bytes_per_token=1000, bytes_per_s=1e9)  # 1 us a token
ENGINE = SimulatedEngine(StepTimes.of_mocker(MODEL, TRANSFER), tokens_per_block=100)
ALWAYS = RouterConfig(transfer_ms=0)
APART = ClusterSettings(1, 1, ENGINE, ENGINE, router=ALWAYS, lag_s=0)


def request(at, num_prompt, num_output, *blocks, priority=0.5):
    return SimulatedRequest(at, num_prompt, num_output, np.array(blocks, np.uint64), priority)


def served(requests, settings, mode="kv", scaler=None):
    """Return the requests' services in the order of their ends, and the outcome."""
    cluster, ended = Cluster(mode, settings, scaler), []
    finish = cluster._ended
    cluster._ended = lambda run, service, at: (ended.append(service), finish(run, service, at))
    return ended, cluster.run(requests, lambda done: None)


def test_prefill_computes_the_prompt_and_decode_goes_on_when_it_has_the_kv():
    (one,), outcome = served([request(1.0, 1000, 4)], APART)
    assert one.ttft_s == pytest.approx(0.010 + 0.005 + 0.100)  # decode stands still: it tells the first token at once
    assert one.end_s - one.first_token_s == pytest.approx(0.002 + 0.001 + 3 * 0.010)
    assert outcome.num_transferred == 1
    assert outcome.summary()["prefill_busy_share"] > 0


def test_a_hop_comes_before_each_worker():
    (one,), _ = served([request(1.0, 1000, 4)], replace(APART, hop_s=0.5))
    assert one.ttft_s == pytest.approx(0.5 + 0.115 + 0.5)


def test_decode_takes_a_prompt_in_at_the_end_of_the_step_under_way():
    first, second = request(0.0, 100, 100), request(0.5, 200, 3)
    ended, _ = served([first, second], APART)
    late = next(one for one in ended if one.request is second)
    other = next(one for one in ended if one.request is first)
    steps = (late.first_token_s - other.first_token_s - 0.0021) / 0.010
    assert steps == pytest.approx(round(steps), abs=1e-6)
    assert late.first_token_s - 0.010 <= 0.5 + 0.035 <= late.first_token_s + 1e-9
    assert late.end_s - late.first_token_s == pytest.approx(3 * 0.010)  # it has its KV within the next step


def test_a_short_prompt_is_decode_s_own_by_the_router_s_rule():
    ended, outcome = served([request(0, 100, 2), request(5, 1000, 2)], replace(APART, router=RouterConfig()))
    assert [one.placement.is_short for one in ended] == [True, False]
    assert outcome.num_transferred == 1


def test_one_token_needs_no_transfer_and_leaves_nothing():
    cluster = Cluster("kv", APART)
    outcome = cluster.run([request(0, 1000, 1, *range(10))] * 3, lambda done: None)
    assert len(outcome.ttft_s) == 3
    for member in cluster._members.values():
        assert member.worker.num_runs == 0 and member.worker.kv_usage == 0


def test_prefill_s_blocks_are_held_until_decode_has_them():
    small = replace(ENGINE, num_blocks=10)
    slow = replace(ENGINE, times=StepTimes.of_mocker(MODEL, TransferTimes(start_ms=1000)))
    settings = replace(APART, prefill=small, decode=slow)
    ended, _ = served([request(0, 1000, 2), request(0, 1000, 2)], settings)
    first, second = (one.first_token_s for one in ended)
    assert second - first == pytest.approx(1.0 + 0.115)


def test_a_higher_priority_comes_first_and_then_who_came_first():
    worker = SimulatedWorker("decode_0", replace(ENGINE, max_batch_size=1))
    runs = [SimulatedRun(request(0, 100, 2, priority=one)) for one in (0.5, 0.2, 0.5, 0.9)]
    for run in runs:
        worker.advance(0.0)
        worker.submit(run, 0.0)
        worker.advance(0.0)
    worker.advance(float("inf"))
    assert sorted(range(4), key=lambda at: runs[at].end_s) == [0, 3, 2, 1]


def test_who_is_busy_is_passed_by_and_all_busy_refuse_by_priority():
    rules = (BusyRule(up_to_priority=0.3, max_waiting_tokens=500), BusyRule(max_waiting_tokens=5000))
    settings = ClusterSettings(0, 2, decode=ENGINE, router=RouterConfig(busy=rules), lag_s=0)
    burst = [request(0.001 * at, 1000, 2, priority=0.2 if at % 2 else 0.5) for at in range(20)]
    ended, outcome = served(burst, settings)
    assert 0 < outcome.num_refused < 20 and len(ended) == 20 - outcome.num_refused
    assert sum(one.request.priority == 0.5 for one in ended) > sum(one.request.priority == 0.2 for one in ended)


def test_steps_that_read_more_take_longer():
    points = [
        StepPoint(decode_rows=rows, prefill_tokens=tokens, context_tokens=context, ms=10 + 0.01 * context + tokens)
        for rows, tokens, context in (
            (1, 0, 0),
            (2, 0, 0),
            (1, 0, 500),
            (2, 0, 900),
            (0, 10, 0),
            (0, 20, 0),
            (1, 10, 0),
        )
    ]
    times = StepTimes.of(StepTable(format=FORMAT, engine="", machine="", points=points))
    worker = SimulatedWorker("decode_0", replace(ENGINE, times=times))
    run = SimulatedRun(request(0, 20, 101))
    worker.submit(run, 0.0)
    worker.advance(0.0)
    while worker.next_at < float("inf"):
        worker.advance(worker.next_at)
    assert run.first_token_s == pytest.approx(0.030)
    assert run.end_s - run.first_token_s == pytest.approx(sum(10 + 0.01 * (20 + at) for at in range(100)) / 1e3)


def test_who_comes_after_the_plan_of_the_next_step_waits_for_the_one_after():
    table = msgspec.structs.replace(ENGINE.times.table, plan_ahead_ms=4.0)
    worker = SimulatedWorker("decode_0", replace(ENGINE, times=replace(ENGINE.times, table=table)))
    runs = [SimulatedRun(request(at, 100, 20)) for at in (0.0, 0.030, 0.042)]
    for run in runs:
        worker.advance(run.request.arrival_s)
        worker.submit(run, run.request.arrival_s)
    worker.advance(float("inf"))
    # steps end at 25, 35, then one of 25 ms with the second; planned by 31 ms
    assert [run.first_token_s for run in runs] == pytest.approx([0.025, 0.060, 0.085])


class Following:
    """As many decode workers as it is told for each interval; keeps what it saw."""

    def __init__(self, *counts):
        self.counts, self.seen = list(counts), []

    def on_interval(self, figures):
        self.seen.append(figures)
        return self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]


def test_workers_join_after_their_start_and_leave_when_they_are_done():
    scaler = Following((1, 3), (1, 3), (1, 3), (0, 1))
    settings = replace(APART, interval_s=10, start_s=15)
    requests = [request(0.2 * at, 500, 20) for at in range(400)]
    ended, outcome = served(requests, settings, scaler=scaler)
    assert len(ended) == 400 and outcome.num_refused == 0
    seen = [(one.decode.num_ready, one.decode.num_starting, one.prefill.num_ready) for one in scaler.seen[:6]]
    assert seen == [(1, 0, 1), (1, 2, 1), (3, 0, 1), (3, 0, 1), (1, 0, 0), (1, 0, 0)]
    joined = {one.placement.decode for one in ended if 25 <= one.request.arrival_s < 40}
    assert joined == {"decode_0", "decode_1", "decode_2"}
    assert {one.placement.prefill for one in ended if one.request.arrival_s > 41} == {None}
    assert sum(outcome.decode.up_s) == pytest.approx(outcome.duration_s + 2 * 30, abs=1.5)


def test_a_prefill_worker_leaves_when_decode_has_its_prompts_though_answers_go_on():
    settings = replace(APART, num_prefill=2, interval_s=10)
    requests = [request(0.02 * at, 2000, 400) for at in range(1000)]  # prompts wait when one is to go
    _, outcome = served(requests, settings, scaler=Following((1, 1)))
    first, last = sorted(outcome.prefill.up_s)
    assert 10 < first < last - 3 and last == pytest.approx(outcome.duration_s, abs=0.1)


def test_an_interval_s_figures_are_of_what_happened_in_it():
    scaler = Following((1, 1))
    requests = [request(0.5 * at, 500, 20, *range(5)) for at in range(60)]
    served(requests, replace(APART, interval_s=10), scaler=scaler)
    first = scaler.seen[0]
    assert (first.at_s, first.num_arrived, first.prompt_tokens) == (10, 20, 10_000)
    assert len(first.ttft_s) == 20 and first.num_ended == len(first.itl_s) <= 20
    assert first.output_tokens == 20 * first.num_ended and first.cached_tokens == 19 * 400
    assert [one.num_arrived for one in scaler.seen] == [20, 20]  # all have ended before the third is over


def test_nobody_is_lost_while_workers_come_and_go_and_it_is_the_same_every_time():
    made = shared_prefix(5, 400, 20, 0.5)
    settings = ClusterSettings(2, 2, num_routers=2, interval_s=2, start_s=1, router=ALWAYS)
    counts = ((0, 1), (3, 4), (1, 2), (2, 1), (0, 3), (2, 2))
    first, again = (simulate(made, "kv", settings, scaler=Following(*counts)) for _ in range(2))
    assert first == again and len(first.ttft_s) == 400
    assert len(first.decode.up_s) > 4 and min(first.decode.up_s) > 0


def test_a_day_has_its_peak_in_the_afternoon():
    hours = np.bincount([int(one.arrival_s // 3600) for one in day(1, 4000, 4000 / 86_400)], minlength=24)
    assert hours[14:18].sum() > 6 * hours[2:6].sum()
    assert hours.sum() == pytest.approx(4000, rel=0.05)


def test_chats_have_the_lengths_that_are_said():
    chats = list(poisson_chats(np.random.default_rng(1), 20.0, 300.0))
    assert np.mean([chat[1] for chat in chats]) == pytest.approx(235, rel=0.1)
    assert np.mean([chat[2] for chat in chats]) == pytest.approx(200, rel=0.1)
    assert len(chats) == pytest.approx(6000, rel=0.05)
