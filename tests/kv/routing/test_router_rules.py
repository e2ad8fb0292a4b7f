"""What overrides costs: sessions, busy workers, and prompts that are not worth their transfer."""

import pytest

from bireme.config import BusyRule
from bireme.errors import ResourceExhaustedError
from bireme.serving_options import RoutingChoice
from tests.kv.routing.router_fixtures import RouterBench, capacity, load, record, request

# sessions


def test_requests_of_a_session_stay_with_one_worker():
    bench = RouterBench("decode", "decode_1", "decode_2", mode="round_robin")
    placed = [bench.place(session_id="a") for _ in range(5)]
    assert len({one.decode for one in placed}) == 1
    assert {one.reason for one in placed} == {"session"}


def test_a_session_leaves_a_worker_that_is_lost():
    bench = RouterBench("decode", "decode_1", mode="round_robin")
    first = bench.place(session_id="a").decode
    bench.router.note_down(first)
    second = bench.place(session_id="a").decode
    assert second != first
    bench.router.note_up(first)
    assert bench.place(session_id="a").decode == second


def test_a_worker_that_the_request_names_goes_before_its_session():
    bench = RouterBench("decode", "decode_1")
    bench.place(session_id="a")
    for worker in ("decode", "decode_1"):
        assert bench.place(session_id="a", routing=RoutingChoice(decode_worker=worker)).decode == worker


# busy workers


def test_a_busy_worker_is_passed_by():
    bench = RouterBench("decode", "decode_1", mode="round_robin", busy=(BusyRule(max_kv_usage=0.5),))
    bench.loads["decode"] = load(used=60)
    assert {bench.place().decode for _ in range(3)} == {"decode_1"}


def test_when_all_are_busy_a_request_is_refused():
    bench = RouterBench("decode", "decode_1", busy=(BusyRule(max_waiting_tokens=1000),))
    bench.loads |= {"decode": load(tokens=1001), "decode_1": load(tokens=5000)}
    with pytest.raises(ResourceExhaustedError, match=r"decode: all 2 workers are busy \(router\.busy\); try again"):
        bench.place()


@pytest.mark.parametrize(("waiting", "retry_s"), [(101, 1), (380, 3), (100_000, 60)])
def test_a_refusal_says_when_the_first_worker_has_computed_what_is_too_much(waiting, retry_s):
    """At 100 tokens a second, and a minute at the most."""
    bench = RouterBench("decode", busy=(BusyRule(max_waiting_tokens=100),))
    placement = bench.place(40)
    bench.clock.now += 0.4
    bench.router.prefilled(placement)
    bench.loads["decode"] = load(tokens=waiting)
    with pytest.raises(ResourceExhaustedError, match=f"try again in {retry_s} s") as refusal:
        bench.place(range(1000, 1040))
    assert refusal.value.retry_after_s == retry_s


def test_lower_priorities_are_refused_earlier():
    rules = (BusyRule(max_kv_usage=0.9), BusyRule(up_to_priority=0.3, max_kv_usage=0.5))
    bench = RouterBench("decode", "decode_1", busy=rules)
    bench.loads |= {"decode": load(used=60), "decode_1": load(used=60)}
    assert bench.place(priority=0.5)
    with pytest.raises(ResourceExhaustedError):
        bench.place(priority=0.2)


def test_what_this_router_has_sent_makes_workers_busy_before_they_say_so():
    bench = RouterBench("decode", "decode_1", busy=(BusyRule(max_waiting_tokens=100),))
    for at in range(6):
        bench.place(list(range(1000 * at, 1000 * at + 40)))
    with pytest.raises(ResourceExhaustedError):
        bench.place(list(range(9000, 9040)))


def test_a_stream_that_moved_is_not_refused():
    bench = RouterBench("decode", busy=(BusyRule(max_kv_usage=0.5),))
    bench.loads["decode"] = load(used=60)
    assert bench.place(is_resumed=True).decode == "decode"


def test_busy_prefill_workers_refuse_only_what_would_go_there():
    bench = RouterBench("prefill", "decode", busy=(BusyRule(max_waiting_tokens=1000),))
    bench.loads["prefill"] = load(tokens=5000)
    assert bench.place(20).prefill is None
    with pytest.raises(ResourceExhaustedError, match="prefill: all 1 workers are busy"):
        bench.place(2000)


# prompts that are not worth their transfer


@pytest.mark.parametrize(("num_tokens", "prefill"), [(20, None), (142, None), (143, "prefill"), (4000, "prefill")])
def test_a_prompt_goes_to_prefill_when_that_saves_more_than_the_transfer_costs(num_tokens, prefill):
    """143 tokens: 4.29 ms of decode's time at 0.03 ms a token, against 4 ms and 0.002 a token."""
    bench = RouterBench("prefill", "decode", mode="round_robin")
    placed = bench.place(num_tokens)
    assert (placed.prefill, placed.is_short) == (prefill, prefill is None)


def test_what_decode_holds_of_a_prompt_need_not_be_computed():
    bench = RouterBench("prefill", "decode", "decode_1")
    bench.held.give("decode_1", 1000, 245)
    placed = bench.place(1000)
    assert (placed.prefill, placed.decode, placed.cached_tokens) == (None, "decode_1", 980)


@pytest.mark.parametrize("settings", [{"enforce": True}, {"transfer_ms": 0.0}])
def test_a_recipe_may_have_every_prompt_transferred(settings):
    bench = RouterBench("prefill", "decode", mode="round_robin", **settings)
    assert bench.place(1).prefill == "prefill"


def test_a_request_that_names_its_prefill_worker_is_transferred():
    bench = RouterBench("prefill", "prefill_1", "decode", mode="round_robin")
    assert bench.place(20, routing=RoutingChoice(prefill_worker="prefill_1")).prefill == "prefill_1"


def test_decode_is_given_no_prompt_longer_than_one_of_its_steps():
    bench = RouterBench(mode="round_robin", transfer_ms=1000.0)
    bench.router.set_workers(
        {"prefill": record("prefill"), "decode": record("decode", capacity=capacity(max_num_tokens=64))}
    )
    assert [bench.place(num).prefill for num in (64, 65)] == [None, "prefill"]


def test_prefill_and_decode_are_chosen_each_by_their_own_cost():
    bench = RouterBench("prefill", "prefill_1", "decode", "decode_1", transfer_ms=0.0)
    bench.held.give("prefill_1", 400, 90)
    bench.loads |= {"decode": load(used=50), "prefill": load(used=90)}
    placed = bench.place(400)
    assert (placed.prefill, placed.decode, placed.cached_tokens) == ("prefill_1", "decode_1", 360)


def test_a_decode_worker_that_holds_the_prompt_saves_its_transfer():
    bench = RouterBench("prefill", "decode", "decode_1", enforce=True)
    bench.held.give("decode_1", 400, 100)
    assert {bench.place(400).decode for _ in range(1)} == {"decode_1"}


def test_after_a_transfer_that_failed_decode_computes_the_prompt_unless_the_recipe_forbids_it():
    assert RouterBench("prefill", "decode").place(4000, has_transfer=False).prefill is None
    assert RouterBench("prefill", "decode", enforce=True).place(4000, has_transfer=False).prefill == "prefill"


def test_prefills_part_ends_with_the_prompt():
    bench = RouterBench("prefill", "prefill_1", "decode")
    placed = bench.place(400)
    bench.router.prefilled(placed)
    assert {one.worker: one.num_requests for one in bench.router.preview(request(4))[1]} == {
        "prefill": 0, "prefill_1": 0, "decode": 1,
    }  # fmt: skip
