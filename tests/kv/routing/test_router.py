"""Placements: costs, modes, and which workers take part."""

from collections import Counter

import numpy as np
import pytest

from bireme.discovery.records import WorkerRecord
from bireme.errors import RequestError, UnavailableError
from bireme.kv.blocks.events import DISK, HOST
from bireme.kv.routing.router import DOWN_S, draw_cost
from bireme.serving_options import RoutingChoice
from tests.kv.routing.router_fixtures import RouterBench, capacity, load, record, request


def drawn(costs, temperature=0.0, times=50):
    bench = RouterBench()
    names, values = list(costs), np.array(list(costs.values()), float)
    even, everyone = np.zeros(len(names)), np.ones(len(names), bool)
    return Counter(names[draw_cost(values, everyone, even, temperature, bench.router._draw)] for _ in range(times))


# costs


def three_workers():
    """Workers 1, 2 and 3 of Dynamo's selector example: they hold 2, 5 and 8 of a prompt's 10 blocks."""
    bench = RouterBench("decode_1", "decode_2", "decode_3")
    for worker, num_blocks in (("decode_1", 2), ("decode_2", 5), ("decode_3", 8)):
        bench.held.give(worker, 40, num_blocks)
    bench.held.predict = lambda target, hashes: None  # as there: holdings stay what they are
    return bench


def test_costs_are_those_of_dynamos_selector():
    """Six reservations of one prompt: each costs what its prefill and the blocks in use come to."""
    bench, costs, chosen = three_workers(), [], []
    for _ in range(6):
        costs.append(bench.costs())
        chosen.append(bench.place().decode)
    assert [round(min(each.values())) for each in costs] == [12, 14, 15, 16, 18, 18]
    assert chosen[:4] == ["decode_3", "decode_3", "decode_2", "decode_3"]
    assert set(chosen[4:]) == {"decode_1", "decode_3"}


def test_what_a_request_computes_is_what_its_worker_does_not_hold():
    bench = three_workers()
    placed = [bench.place() for _ in range(4)]
    assert [40 - one.cached_tokens for one in placed] == [8, 8, 20, 8]


def test_a_prefix_that_requests_share_counts_once_where_they_run():
    bench = three_workers()
    for _ in range(6):
        bench.place()
    _, candidates = bench.router.preview(request(40))
    assert {one.worker: (one.num_blocks, one.num_requests) for one in candidates} == {
        "decode_1": (10, 1),
        "decode_2": (10, 1),
        "decode_3": (10, 4),
    }


@pytest.mark.parametrize(("prompt", "held", "cost"), [(160, 0, 20), (160, 10, 10), (192, 10, 14), (3, 0, 0.1875)])
def test_cost_is_blocks_to_compute_and_blocks_in_use(prompt, held, cost):
    bench = RouterBench()
    bench.router.set_workers({"decode": WorkerRecord(worker="decode", tokens_per_block=16)})
    bench.held.give("decode", prompt, held, tokens_per_block=16)
    assert bench.costs(prompt) == {"decode": cost}


def test_what_waits_and_what_is_in_use_have_prices_of_their_own():
    bench = RouterBench("decode", "decode_1", prefill_weight=1.0, waiting_weight=0.5, decode_weight=0.25)
    bench.loads["decode"] = load(running=1, used=8, tokens=80)
    assert bench.costs() == {"decode": 10 + 20 / 2 + 18 / 4, "decode_1": 10 + 10 / 4}


def test_host_memory_saves_its_credit_of_a_block():
    bench = RouterBench("decode", "decode_1")
    bench.held.give("decode", 40, 8, tier=HOST)
    bench.held.give("decode_1", 40, 7)
    assert bench.costs() == {"decode": 10 - 6 + 10, "decode_1": 3 + 10}


def test_a_disk_saves_less_than_host_memory():
    bench = RouterBench("decode", "decode_1", disk_credit=0.5)
    bench.held.give("decode", 40, 4, tier=HOST)
    bench.held.give("decode", 40, 8, tier=DISK)
    bench.held.give("decode_1", 40, 6, tier=DISK)
    assert bench.costs() == {"decode": 10 - 3 - 2 + 10, "decode_1": 10 - 3 + 10}


def test_a_whole_prompt_in_the_cache_still_has_its_last_token_computed():
    bench = RouterBench("decode", "decode_1")
    bench.held.give("decode", 40, 10)
    assert bench.place().cached_tokens == 36


@pytest.mark.parametrize(
    ("costs", "likely"), [({1: 5, 2: 3, 3: 7, 4: 3.5}, {2}), ({1: 5, 2: 3, 5: 3, 6: 7}, {2, 5}), ({3: 1.0}, {3})]
)
def test_without_temperature_one_of_the_lowest_costs_is_drawn(costs, likely):
    assert set(drawn(costs)) == likely


def test_temperature_draws_dearer_workers_more_rarely():
    counts = drawn({"cheap": 1.0, "dear": 2.0}, temperature=1.0, times=4000)
    assert counts["cheap"] / counts["dear"] == pytest.approx(np.e, rel=0.15)


def test_with_temperature_even_costs_are_equally_likely():
    counts = drawn({1: 2.0, 2: 2.0}, temperature=0.5, times=2000)
    assert 0.9 < counts[1] / counts[2] < 1.1


def test_of_even_costs_the_worker_with_fewer_requests_gets_it():
    bench = RouterBench("decode", "decode_1", decode_weight=0.0, prefill_weight=0.0)
    assert {bench.place().decode for _ in range(2)} == {"decode", "decode_1"}


# what is in use


def test_a_burst_of_one_new_prefix_goes_where_it_is_being_computed():
    bench = RouterBench(*(f"decode_{at}" for at in range(4)))
    prefix = list(range(4000))
    placed = Counter(bench.place([*prefix, 5000 + at, 6000]).decode for at in range(80))
    assert len(placed) == 1


def test_new_prompts_go_to_idle_workers():
    bench = RouterBench("decode", "decode_1", "decode_2")
    placed = Counter(bench.place(list(range(at, at + 40))).decode for at in range(0, 600, 50))
    assert set(placed.values()) == {4}


def test_what_has_ended_counts_no_more():
    bench = RouterBench("decode", "decode_1")
    cold = bench.costs()
    placed = bench.place()
    assert bench.costs() != cold
    bench.router.prefilled(placed)
    bench.router.finished(placed)
    bench.router.finished(placed)
    bench.held.tiers[0].clear()
    assert bench.costs() == cold


def test_load_that_a_worker_reports_is_another_routers():
    bench = RouterBench("decode", "decode_1")
    bench.loads["decode"] = load(running=2, used=30, tokens=20)
    assert bench.costs() == {"decode": (20 + 40) / 4 + 40, "decode_1": 20}


def test_reported_load_does_not_count_this_routers_own_requests_twice():
    bench = RouterBench("decode", "decode_1", mode="kv")
    placed = bench.place()
    before = bench.costs(list(range(100, 140)))[placed.decode]
    bench.loads[placed.decode] = load(running=1, used=10, tokens=40)
    assert bench.costs(list(range(100, 140)))[placed.decode] == before


def test_a_prefix_that_another_router_uses_costs_its_worker_nothing_more():
    bench = RouterBench("decode", "decode_1")
    bench.held.give("decode", 40, 10)
    bench.loads["decode"] = load(running=1, used=12)
    assert bench.costs() == {"decode": 12, "decode_1": 20}


def test_requests_of_a_burst_that_wait_for_their_prefix_are_no_other_routers():
    bench = RouterBench("decode", "decode_1")
    first = bench.place(400)
    for _ in range(5):
        assert bench.place(400).decode == first.decode
    bench.loads[first.decode] = load(running=1, waiting=5, tokens=6 * 400, used=100)
    assert bench.place(400).decode == first.decode


def test_after_the_report_a_request_that_ends_makes_room_at_once():
    bench = RouterBench("decode")
    bench.router.set_workers({"decode": record("decode"), "decode_1": record("decode_1")})
    placed = bench.place()
    bench.loads[placed.decode] = load(running=3, used=25, tokens=40)
    cold = list(range(100, 140))
    assert bench.costs(cold)[placed.decode] == 20 + 35
    bench.router.finished(placed)
    assert bench.costs(cold)[placed.decode] == 10 + 25


def test_prompts_are_expected_to_be_computed_at_the_rate_seen():
    bench = RouterBench("decode", "decode_1")
    first = bench.place()
    bench.clock.now += 1.0  # 40 tokens a second
    bench.router.prefilled(first)
    second = bench.router.place(request(list(range(100, 500)), routing=RoutingChoice(decode_worker=first.decode)))
    bench.clock.now += 5.0
    waiting = {one.worker: one.waiting_tokens for one in bench.router.preview(request(40))[1]}
    assert waiting[second.decode] == pytest.approx(400 - 5 * 40)


# modes


def test_round_robin_takes_workers_in_turn():
    bench = RouterBench("prefill", "decode", "decode_1", mode="round_robin", enforce=True)
    assert [(one.prefill, one.decode) for one in (bench.place() for _ in range(3))] == [
        ("prefill", "decode"),
        ("prefill", "decode_1"),
        ("prefill", "decode"),
    ]


def test_random_takes_all():
    bench = RouterBench("decode", "decode_1", "decode_2", mode="random")
    counts = Counter(bench.place().decode for _ in range(600))
    assert min(counts.values()) > 150


def test_least_loaded_takes_the_worker_with_the_fewest_requests():
    bench = RouterBench("decode", "decode_1", "decode_2", mode="least_loaded")
    bench.loads |= {"decode": load(running=3), "decode_1": load(running=1, waiting=1), "decode_2": load(running=3)}
    assert bench.place().decode == "decode_1"


def test_power_of_two_never_takes_the_busiest():
    bench = RouterBench("decode", "decode_1", "decode_2", mode="power_of_two")
    bench.loads["decode"] = load(running=90)
    counts = Counter(bench.place().decode for _ in range(60))
    assert counts["decode"] == 0 and min(counts["decode_1"], counts["decode_2"]) > 20


def test_direct_takes_the_worker_that_the_request_names():
    bench = RouterBench("decode", "decode_1", mode="direct")
    placed = bench.place(routing=RoutingChoice(decode_worker="decode_1"))
    assert (placed.decode, placed.reason) == ("decode_1", "direct")
    with pytest.raises(RequestError, match=r"routing\.decode_worker: missing"):
        bench.place()


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (RoutingChoice(decode_worker="decode_7"), "no worker 'decode_7'; there are decode, decode_1"),
        (RoutingChoice(prefill_worker="prefill_3"), "no worker 'prefill_3'; there are prefill"),
        (RoutingChoice(decode_dp_rank=2), "routing.decode_dp_rank: 2; no such rank of any worker"),
        (RoutingChoice(mode="kv"), "does not follow what workers hold"),
        (RoutingChoice(mode="least_loaded"), "does not follow workers' load"),
    ],
)
def test_a_choice_that_can_t_be_met_is_refused_by_name(choice, text):
    bench = RouterBench("prefill", "decode", "decode_1", mode="round_robin", enforce=True)
    with pytest.raises(RequestError, match=text):
        bench.place(routing=choice)


def test_a_request_may_choose_the_mode():
    bench = RouterBench("decode", "decode_1")
    bench.held.give("decode", 40, 10)
    placed = [bench.place(routing=RoutingChoice(mode="round_robin")) for _ in range(4)]
    assert Counter(one.decode for one in placed) == {"decode": 2, "decode_1": 2}
    assert {one.reason for one in placed} == {"round_robin"}


def test_a_stream_that_moved_is_not_held_to_its_first_worker():
    bench = RouterBench("decode", "decode_1")
    bench.router.note_down("decode")
    assert bench.place(routing=RoutingChoice(decode_worker="decode"), is_resumed=True).decode == "decode_1"


def test_a_query_counts_nothing():
    bench = RouterBench("decode", "decode_1")
    assert bench.costs() == bench.costs()
    assert bench.held.predicted == []


# ranks


def test_each_rank_of_a_worker_is_chosen_by_what_it_holds():
    bench = RouterBench()
    bench.router.set_workers(
        {name: record(name, capacity=capacity(attention_dp_size=2)) for name in ("decode", "decode_1")}
    )
    bench.held.give("decode_1", 40, 9, rank=1)
    placed = bench.place()
    assert (placed.decode, placed.decode_dp_rank) == ("decode_1", 1)


def test_a_request_may_choose_the_rank():
    bench = RouterBench()
    bench.router.set_workers({"decode": record("decode", capacity=capacity(attention_dp_size=4))})
    assert bench.place(routing=RoutingChoice(decode_dp_rank=3)).decode_dp_rank == 3


# who takes part


def test_without_prefill_workers_decode_computes_prompts():
    assert RouterBench("decode").place().prefill is None


def test_a_worker_that_was_lost_is_passed_by_for_a_while():
    bench = RouterBench("decode", "decode_1", mode="round_robin")
    bench.router.note_down("decode")
    assert {bench.place().decode for _ in range(3)} == {"decode_1"}
    bench.clock.now += DOWN_S + 0.1
    assert {bench.place().decode for _ in range(2)} == {"decode", "decode_1"}


def test_a_worker_that_answers_is_up_at_once():
    bench = RouterBench("decode", "decode_1", mode="round_robin")
    bench.router.note_down("decode")
    bench.router.note_up("decode")
    assert {bench.place().decode for _ in range(2)} == {"decode", "decode_1"}


def skipped_s(bench, worker):
    """Lose a worker; return for how long it is passed by."""
    bench.router.note_down(worker)
    began = bench.clock.now
    while worker not in {bench.place().decode for _ in range(2)}:
        bench.clock.now += 0.25
    return bench.clock.now - began


def test_a_worker_that_is_lost_again_and_again_is_passed_by_for_longer_and_answers_shorten_that():
    bench = RouterBench("decode", "decode_1", mode="round_robin")
    assert [skipped_s(bench, "decode") for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, 8.0]
    for _ in range(2):
        bench.router.note_up("decode")
    assert skipped_s(bench, "decode") == 2.0


def test_requests_that_are_lost_together_count_once():
    bench = RouterBench("decode", "decode_1", mode="round_robin")
    for _ in range(9):
        bench.router.note_down("decode")
    assert skipped_s(bench, "decode") == 1.0


def test_a_worker_whose_engine_was_started_again_is_passed_by_no_longer():
    bench = RouterBench("decode", "decode_1", mode="round_robin")
    for _ in range(3):
        skipped_s(bench, "decode")
    bench.router.note_down("decode")
    bench.router.set_workers({"decode": record("decode", life=2), "decode_1": record("decode_1")})
    assert {bench.place().decode for _ in range(2)} == {"decode", "decode_1"}
    assert skipped_s(bench, "decode") == 1.0


def test_all_workers_of_a_silent_host_are_passed_by_until_it_has_answered_for_a_while():
    bench = RouterBench(mode="round_robin")
    bench.router.set_workers(
        view(*(record(name, server="a") for name in ("decode", "decode_1")), record("decode", server="b"))
    )
    bench.router.note_silence("a", True)
    bench.clock.now += 60.0
    assert {bench.place().decode for _ in range(4)} == {"decode@b"}
    bench.router.note_silence("a", False)
    assert {bench.place().decode for _ in range(4)} == {"decode@b"}
    bench.clock.now += DOWN_S + 0.1
    assert len({bench.place().decode for _ in range(6)}) == 3


def test_the_only_decode_worker_is_tried_even_when_it_is_down():
    bench = RouterBench("decode")
    bench.router.note_down("decode")
    assert bench.place().decode == "decode"


def test_prefill_that_is_down_means_aggregated_unless_the_recipe_forbids_it():
    for enforce, prefill in ((False, None), (True, "prefill")):
        bench = RouterBench("prefill", "decode", enforce=enforce, transfer_ms=0.0)
        bench.router.note_down("prefill")
        assert bench.place().prefill == prefill


def test_workers_to_avoid_are_avoided():
    bench = RouterBench("decode", "decode_1", mode="round_robin")
    assert {bench.router.place(request(40), avoid=["decode_1"]).decode for _ in range(3)} == {"decode"}


def test_without_decode_workers_nothing_can_be_placed():
    with pytest.raises(UnavailableError, match="no decode worker takes requests now"):
        RouterBench("prefill").place()


def view(*records):
    return {f"{record.worker}@{record.server}": record for record in records}


def test_workers_that_join_get_requests_and_those_that_leave_get_none():
    bench = RouterBench("decode", mode="round_robin")
    bench.router.set_workers({"decode": record("decode"), **view(record("decode_1", server="b:1"))})
    assert {bench.place().decode for _ in range(2)} == {"decode", "decode_1@b:1"}
    bench.router.set_workers({"decode": record("decode")})
    assert {bench.place().decode for _ in range(2)} == {"decode"}


def test_a_worker_that_comes_back_as_another_engine_has_nothing_to_do():
    bench = RouterBench()
    bench.router.set_workers({"decode": record("decode", life=1), "decode_1": record("decode_1", life=1)})
    placed = bench.place(routing=RoutingChoice(decode_worker="decode"))
    bench.router.set_workers({"decode": record("decode", life=2), "decode_1": record("decode_1", life=1)})
    bench.held.tiers[0].clear()
    bench.router.finished(placed)
    assert bench.costs() == {"decode": 20, "decode_1": 20}


def test_a_worker_that_drains_gets_nothing_new():
    bench = RouterBench(mode="round_robin")
    ready, draining = record("decode"), record("decode_1", state="draining")
    bench.router.set_workers({"decode": ready, "decode_1": draining})
    assert {bench.place().decode for _ in range(3)} == {"decode"}
    with pytest.raises(UnavailableError, match="decode_1 takes no new requests"):
        bench.place(routing=RoutingChoice(decode_worker="decode_1"))
    bench.router.set_workers({"decode_1": draining})
    with pytest.raises(UnavailableError):
        bench.place()


def test_prefill_stays_where_shared_memory_reaches_the_decode_worker():
    bench = RouterBench(mode="round_robin", enforce=True)
    bench.router.set_workers(
        view(
            record("prefill", server="a:1", host="a"),
            record("decode", server="a:1", host="a"),
            record("prefill", server="b:1", host="b"),
            record("decode", server="c:1", host="c"),
        )
    )
    placements = {(placed.prefill, placed.decode) for placed in (bench.place() for _ in range(6))}
    assert placements == {("prefill@a:1", "decode@a:1"), (None, "decode@c:1")}


@pytest.fixture
def two_hosts():
    bench = RouterBench(mode="round_robin", enforce=True)
    workers = [record(worker, server=f"{host}:1", host=host) for host in "abc" for worker in ("prefill", "decode")]
    bench.router.set_workers(view(*workers[:4], workers[5]))
    return bench


def test_a_prefill_worker_that_a_request_names_gets_a_decode_worker_in_its_reach(two_hosts):
    choice = RoutingChoice(prefill_worker="prefill@b:1")
    placed = {(one.prefill, one.decode) for one in (two_hosts.place(routing=choice) for _ in range(4))}
    assert placed == {("prefill@b:1", "decode@b:1")}


@pytest.mark.parametrize("decode", ["decode@a:1", "decode@c:1"])
def test_two_workers_that_no_kv_can_go_between_are_refused_by_name(two_hosts, decode):
    with pytest.raises(RequestError, match=r"routing.prefill_worker: the KV of prefill@b:1 can't get to"):
        two_hosts.place(routing=RoutingChoice(prefill_worker="prefill@b:1", decode_worker=decode))


def of_two_revisions():
    """Two servers of one host with another model's content each."""
    servers = {"a:1": "old", "b:1": "new"}
    return [
        record(worker, server=server, host="h", revision=revision)
        for server, revision in servers.items()
        for worker in ("prefill", "decode")
    ]


def test_prefill_and_decode_of_unlike_revisions_are_never_paired():
    bench = RouterBench(mode="round_robin", enforce=True)
    bench.router.set_workers(view(*of_two_revisions()))
    pairs = {(placed.prefill, placed.decode) for placed in (bench.place() for _ in range(6))}
    assert pairs == {("prefill@a:1", "decode@a:1"), ("prefill@b:1", "decode@b:1")}


def test_one_whose_revision_is_not_known_works_with_any():
    bench = RouterBench(mode="round_robin", enforce=True)
    bench.router.set_workers(view(record("prefill", server="a:1"), record("decode", server="b:1", revision="new")))
    assert bench.place().prefill == "prefill@a:1"


@pytest.mark.parametrize("mode", ["round_robin", "kv", "least_loaded", "power_of_two", "random"])
def test_a_stream_goes_on_where_its_revision_is(mode):
    bench = RouterBench(mode=mode)
    bench.router.set_workers(view(*of_two_revisions()))
    assert {bench.place(is_resumed=True, revision="old").decode for _ in range(6)} == {"decode@a:1"}


def test_also_on_a_worker_that_was_lost_lately_and_nowhere_else():
    bench = RouterBench(mode="round_robin")
    bench.router.set_workers(view(*of_two_revisions()))
    bench.router.note_down("decode@a:1")
    assert bench.place(is_resumed=True, revision="old").decode == "decode@a:1"
    bench.router.set_workers(view(*of_two_revisions()[2:]))
    with pytest.raises(UnavailableError, match="no decode worker of the model's revision old takes requests now"):
        bench.place(is_resumed=True, revision="old")


def test_kv_that_its_engine_moves_itself_goes_to_any_host():
    bench = RouterBench(mode="round_robin", enforce=True)
    prefill = WorkerRecord(worker="prefill", server="a:1", host="a", moves_own_kv=True)
    bench.router.set_workers(view(prefill, record("decode", server="b:1", host="b")))
    assert bench.place().prefill == "prefill@a:1"
