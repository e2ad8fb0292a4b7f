"""Observations of a deployment that runs: what they are made of, and everything that is not believed."""

import math

import pytest

from bireme.scaling.observer import LiveObserver, Targets
from tests.scaling.played_deployment import PlayedDeployment


@pytest.fixture
def played():
    return PlayedDeployment()


@pytest.fixture
def observer(played):
    made = LiveObserver(played, 60.0, lambda: played.now, lambda: played.clock)
    assert "the first look" in made.observe().doubt
    return made


def test_an_interval_is_the_difference_of_two_looks(played, observer):
    played.totals["cached"] += 30 * 400
    played.levels |= {"waiting": 3, "kv_used": 250, "running": 7}
    played.serve(30)
    found = observer.observe()
    assert found.doubt == "" and found.problem(played.now, 120.0) == ""
    assert (found.num_requests, found.prompt_tokens, found.output_tokens) == (30, 600.0, 100.0)
    assert found.cached_tokens == 400.0 and found.decode.num_running == 7
    assert found.ttft_ms == pytest.approx(110.0) and found.itl_ms == pytest.approx(11.0)
    assert (found.decode.num_ready, found.decode.num_waiting, found.decode.kv_usage) == (1, 3, 0.25)
    played.serve(0)
    assert observer.observe().num_requests == 0


def test_without_prefill_what_decode_found_in_its_cache_is_not_computed(played):
    played.counts = played.asked = {"prefill": 0, "decode": 2}
    observer = LiveObserver(played, 60.0, lambda: played.now, lambda: played.clock, ("decode",))
    played.more = 'bireme_cached_prompt_tokens_total{worker="decode"} 0'
    observer.observe()
    played.serve(10)
    played.more = 'bireme_cached_prompt_tokens_total{worker="decode"} 4000'
    assert observer.observe().prompt_tokens == 600.0
    assert observer.engines().keys() == {"decode"} and observer.unplanned() == []
    played.counts = {"prefill": 1, "decode": 2}
    observer.observe()
    assert observer.unplanned() == ["prefill"]


def test_requests_under_way_have_come_and_are_counted_once(played, observer):
    played.levels["active"] = 5
    played.serve(10)
    assert observer.observe().num_requests == 15
    played.levels["active"] = 0
    played.serve(5)
    assert observer.observe().num_requests == 5  # decode has ended so many, whatever entries had counted before


def test_clients_of_decode_itself_are_load_as_well(played, observer):
    played.serve(0)
    played.totals["prompt"] += 4000
    played.more = 'bireme_prompt_tokens_count{worker="decode_9"} 4'  # the frontend has counted none
    found = observer.observe()
    assert (found.num_requests, found.prompt_tokens) == (4, 1000.0)


def test_while_no_decode_worker_serves_those_that_entries_keep_wait(played, observer):
    played.counts["decode"] = played.asked["decode"] = 0
    played.levels["active"] = 7
    played.serve(0)
    found = observer.observe()
    assert (found.decode.num_ready, found.decode.num_waiting) == (0, 7)


def test_a_door_that_answers_late_is_not_one_whose_clock_is_apart(played, observer):
    def late():
        found = PlayedDeployment.sizes(played)
        played.pass_s(20)
        return found

    played.serve(30, seconds=40)
    played.sizes = late
    assert observer.observe().doubt == ""
    played.page_at = played.now + 26  # the look will end at 20
    assert observer.observe().doubt == "clocks apart: launch is 6 s ahead of this host"


def test_limits_of_0_as_a_worker_that_sleeps_has_them_are_not_what_it_can_do(played, observer):
    played.num_up = {"decode": 0}
    limits = ("engine_max_num_tokens", "engine_max_batch_size", "kv_blocks_total", "kv_block_tokens")
    played.more = "\n".join(f'bireme_{name}{{worker="decode"}} 0' for name in limits)
    observer.observe()
    assert observer.engines().keys() == {"prefill"}


def test_shares_that_missed_a_target_are_exact_where_a_bucket_ends_at_it(played, observer):
    played.ttft_s = {"0.25": 0.5, "0.5": 0.9, "1.0": 0.95, "+Inf": 1.0}
    played.mean_gap_s = {"0.025": 0.75, "0.05": 1.0, "+Inf": 1.0}
    played.serve(40)
    found = observer.observe(Targets(500.0, 25.0))
    assert (found.late_share, found.slow_share) == (pytest.approx(0.1), 0.25) and observer.inexact == []
    played.serve(0)
    found = observer.observe(Targets(500.0, 25.0))
    assert (found.doubt, found.late_share, found.slow_share) == ("", None, None)


def test_between_two_bounds_a_share_is_what_certainly_missed_the_target_and_what_may_have_is_told(played, observer):
    played.ttft_s = {"0.25": 0.5, "0.5": 0.7, "1.0": 0.9, "+Inf": 1.0}
    played.serve(40)
    assert observer.observe(Targets(600.0, 50.0)).late_share == pytest.approx(0.1)
    assert observer.inexact == [
        "late_share 10% to 30%: no bucket of bireme_time_to_first_token_seconds ends at 600 ms (metrics.buckets)"
    ]
    played.serve(40)
    assert observer.observe(Targets(5000.0, 50.0)).late_share == 0.0  # above the last bound nothing is certain


@pytest.mark.parametrize(("ttft_s", "what"), [({}, "time_to_first_token"), ({"+Inf": 1.0}, "time_per_output_token")])
def test_a_histogram_that_is_not_there_is_missing_once_there_are_requests(played, observer, ttft_s, what):
    played.ttft_s, played.mean_gap_s = ttft_s, {}
    played.serve(0)
    assert observer.observe(Targets(500.0, 50.0)).doubt == ""
    played.serve(5)
    assert observer.observe(Targets(500.0, 50.0)).doubt.startswith(f"missing: bireme_{what}_seconds_bucket of entries")
    played.serve(5)
    assert observer.observe().doubt == ""  # who has no targets needs none


def test_metrics_that_can_t_be_read_are_missing(played, observer):
    played.failure = "http://a:8004: no admin door answers there"
    assert observer.observe().doubt == "missing: http://a:8004: no admin door answers there"
    played.failure = ""
    played.serve(20)
    assert observer.observe().num_requests == 20


def test_figures_of_an_engine_that_works_and_makes_no_step_are_stale(played, observer):
    played.levels["running"] = 2
    played.serve(20)
    assert observer.observe().doubt == ""
    played.pass_s(60)
    assert observer.observe().doubt == "stale: decode launch has 2 requests and told no step for 60 s"


def test_counters_that_begin_anew_are_a_gap_for_one_interval(played, observer):
    played.serve(20)
    observer.observe()
    played.totals = dict.fromkeys(played.totals, 0.0)
    played.serve(3)
    assert observer.observe().doubt == "gap: counters of launch began anew (ended), as after a restart"
    played.serve(4)
    assert (found := observer.observe()).doubt == "" and found.num_requests == 4


def test_two_looks_too_far_apart_are_a_gap(played, observer):
    played.serve(20, seconds=250)
    assert observer.observe().doubt == "gap: 250 s since the look before, 60 are usual"


def test_sizes_and_metrics_that_contradict_each_other_twice_are_doubted(played, observer):
    played.num_up = {"decode": 0}
    played.serve(20)
    assert observer.observe().doubt == ""  # one is read after the other
    played.serve(20)
    assert observer.observe().doubt == "contradictory: 1 decode workers are ready, by metrics 0 are up"


@pytest.mark.parametrize(("ahead_s", "way"), [(600.0, "600 s ahead of"), (-42.0, "42 s behind")])
def test_another_host_s_clock_is_told(played, observer, ahead_s, way):
    played.serve(20)
    played.page_at = played.now + ahead_s
    assert observer.observe().doubt == f"clocks apart: launch is {way} this host"


def test_a_clock_that_is_set_meanwhile_is_told(played, observer):
    played.serve(20)
    played.now -= 3600
    assert observer.observe().doubt == "clocks apart: this host's clock was set by -3600 s"


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-500", "1e400"])
def test_absurd_values_are_no_load(played, observer, value):
    played.serve(20)
    played.more = f'bireme_requests_total{{worker="generate",outcome="stop"}} {value}'
    assert observer.observe().doubt.startswith("absurd: launch tells ended ")
    played.more = ""
    played.serve(20)
    assert observer.observe().num_requests == 40  # since what was believed


def test_a_value_that_is_no_number_is_told(played, observer):
    played.more = 'bireme_engine_up{worker="decode"} up'
    assert observer.observe().doubt == "absurd: a metrics page has could not convert string to float: 'up'"


def test_a_load_of_kv_that_can_t_be_is_absurd(played, observer):
    played.serve(20)
    played.levels["kv_used"] = math.inf
    assert observer.observe().doubt == "absurd: launch tells decode kv_used inf"


def test_what_engines_can_do_is_read_once_they_tell_it(played):
    fresh = LiveObserver(played, 60.0, lambda: played.now, lambda: played.clock)
    assert fresh.engines() == {}
    fresh.observe()
    assert fresh.engines()["decode"].max_num_tokens == 8192
