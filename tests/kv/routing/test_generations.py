"""Requests' shares among generations, and where the rest of a request goes."""

import random
from collections import Counter

import pytest

from bireme.config import BusyRule
from bireme.discovery.records import WorkerRecord
from bireme.kv.routing.generations import choose, shares_of, weights_of
from bireme.serving_options import RoutingChoice
from tests.kv.routing.router_fixtures import RouterBench, load, record

SESSIONS = [f"session {number}" for number in range(2000)]


def of(generation, weight=1.0, worker="decode", **facts):
    return record(worker, server=f"{'abc'[generation]}:1", generation=generation, weight=weight, **facts)


def bench_of(*records, mode="round_robin", **config):
    bench = RouterBench(mode=mode, **config)
    bench.router.set_workers({one.id: one for one in records})
    return bench


def shares(bench, count=2000, **fields):
    decoded = Counter(bench.place(**fields).decode for _ in range(count))
    return {worker: number / count for worker, number in decoded.items()}


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({0: 1.0, 1: 0.3}, {0: 0.7, 1: 0.3}),
        ({0: 0.0, 1: 0.3}, {0: 0.7, 1: 0.3}),  # the oldest takes the rest
        ({0: 1.0, 1: 0.0}, {0: 1.0}),
        ({0: 1.0, 1: 1.0}, {1: 1.0}),
        ({0: 1.0, 1: 0.5, 2: 0.2}, {0: 0.4, 1: 0.4, 2: 0.2}),
        ({4: 0.0}, {4: 1.0}),
    ],
)
def test_the_newest_takes_its_weight_the_next_its_weight_of_the_rest(weights, expected):
    draw = random.Random(0)
    assert {one: share for one, share in shares_of(weights).items() if share} == pytest.approx(expected)
    for chosen in (
        Counter(choose(weights, session, draw) for session in SESSIONS),
        Counter(choose(weights, "", draw) for _ in SESSIONS),
    ):
        assert {one: count / len(SESSIONS) for one, count in chosen.items()} == pytest.approx(expected, abs=0.04)


def test_sessions_only_move_to_the_newest_as_its_weight_grows():
    draw = random.Random(0)
    before = {session: choose({0: 1.0, 1: 0.5, 2: 0.2}, session, draw) for session in SESSIONS}
    after = {session: choose({0: 1.0, 1: 0.5, 2: 0.6}, session, draw) for session in SESSIONS}
    assert {after[session] for session in SESSIONS if after[session] != before[session]} == {2}


def test_a_generation_has_the_mean_of_what_those_carry_that_take_requests():
    records = [WorkerRecord(worker="decode", weight=weight, generation=1) for weight in (0.2, 0.4)]
    records.append(WorkerRecord(worker="decode", weight=1.0, generation=1, state="draining"))
    assert weights_of(records) == {1: pytest.approx(0.3)}


@pytest.mark.parametrize("mode", ["round_robin", "kv", "least_loaded", "power_of_two", "random"])
def test_each_mode_places_among_the_workers_of_the_generation(mode):
    old = [of(0, worker=name) for name in ("decode", "decode_1")]
    bench = bench_of(*old, of(1, weight=0.3), mode=mode)
    found = shares(bench)
    assert found["decode@b:1"] == pytest.approx(0.3, abs=0.04)
    assert set(found) == {"decode@a:1", "decode_1@a:1", "decode@b:1"}


def test_a_session_stays_while_the_weights_do():
    bench = bench_of(of(0), of(1, weight=0.5))
    first = {session: bench.place(session_id=session).decode for session in SESSIONS[:200]}
    other = bench_of(of(0), of(1, weight=0.5), mode="random")
    assert {session: other.place(session_id=session).decode for session in first} == first
    assert len(set(first.values())) == 2


def test_without_one_that_takes_requests_the_others_serve():
    bench = bench_of(of(0), of(1, weight=0.0))
    assert bench.place().generation == 0
    bench.router.note_down("decode@a:1")
    assert bench.place().decode == "decode@b:1"
    bench = bench_of(of(0, state="draining"), of(1, weight=0.0))
    assert (bench.place().decode, bench.place().generation) == ("decode@b:1", None)


def test_when_all_of_one_are_busy_the_others_serve():
    bench = bench_of(of(0), of(1, weight=1.0), mode="least_loaded", busy=(BusyRule(max_kv_usage=0.5),))
    bench.loads["decode@b:1"] = load(used=90)
    assert bench.place().decode == "decode@a:1"


def test_prefill_is_of_decode_s_generation_where_that_has_one():
    prefills = [of(generation, worker="prefill") for generation in (0, 1)]
    bench = bench_of(*prefills, of(0), of(1, weight=0.5), enforce=True)
    pairs = {(placed.prefill, placed.decode) for placed in (bench.place() for _ in range(100))}
    assert pairs == {("prefill@a:1", "decode@a:1"), ("prefill@b:1", "decode@b:1")}
    bench = bench_of(prefills[0], of(0), of(1, weight=0.5), enforce=True)
    assert {bench.place().prefill for _ in range(50)} == {"prefill@a:1"}


def test_a_generation_without_a_prefill_that_reaches_it_waits_where_prefill_must_be():
    records = [of(0, worker="prefill", revision="old"), of(0, revision="old"), of(1, weight=1.0, revision="new")]
    enforced, free = (bench_of(*records, enforce=enforce, transfer_ms=0) for enforce in (True, False))
    assert {enforced.place().decode for _ in range(20)} == {"decode@a:1"}
    placed = free.place()
    assert (placed.prefill, placed.decode) == (None, "decode@b:1")


def test_what_has_begun_goes_on_at_its_generation_where_it_can():
    bench = bench_of(of(0), of(1, weight=1.0))
    assert {bench.place(is_resumed=True, generation=0).decode for _ in range(20)} == {"decode@a:1"}
    bench.router.note_down("decode@a:1")
    assert bench.place(is_resumed=True, generation=0).decode == "decode@b:1"


def test_one_generation_alone_makes_no_choice():
    bench = bench_of(of(1, weight=0.0), of(1, worker="decode_1", weight=0.0))
    assert bench.place().generation is None and bench.router.choose_generation("a") is None
    assert bench_of(of(0), of(1, weight=1.0)).router.choose_generation("") == 1


def test_a_request_begins_at_the_generation_that_it_asks_for_whatever_the_weights_where_it_is_there():
    bench, only = bench_of(of(0), of(1, weight=0.0)), bench_of(of(0))
    assert {bench.place(routing=RoutingChoice(generation=wanted)).generation for wanted in (1, 1, 1, 1)} == {1}
    assert bench.place(routing=RoutingChoice(generation=7)).generation == 0
    assert only.place(routing=RoutingChoice(generation=1)).decode == "decode@a:1"
    assert [bench.router.choose_generation("", wanted) for wanted in (1, 7, None)] == [1, 0, 0]


def test_a_worker_that_a_request_names_serves_it_whatever_its_weight():
    bench = bench_of(of(0), of(1, weight=0.0))
    assert bench.place(routing=RoutingChoice(decode_worker="decode@b:1")).generation == 1
