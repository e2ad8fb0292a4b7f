"""A load's figures, by the definitions that published sweeps have."""

import pytest

from bireme.sizing.figures import Answered, of_requests


def test_figures_are_those_that_aiperf_would_tell():
    answered = [Answered(0.0, 0.5, 1.5, 100, 11), Answered(1.0, 1.2, 3.2, 300, 5)]
    found = of_requests(answered, failed=1)
    assert (found.requests, found.failed, found.seconds) == (2, 1, 3.2)
    assert (found.input_tokens, found.output_tokens) == (200, 8)
    assert found.tokens_per_s == pytest.approx(16 / 3.2)
    assert found.tokens_per_s_per_user == pytest.approx((1 / 0.1 + 1 / 0.5) / 2)
    assert (found.ttft_p50_ms, found.itl_p50_ms, found.latency_p50_ms) == pytest.approx((350, 300, 1850))


def test_one_answer_in_a_burst_moves_the_mean_and_not_the_median():
    answered = [Answered(0, 1, 2, 8, 11), Answered(0, 1, 2, 8, 11), Answered(0, 2, 2.002, 8, 11)]
    found = of_requests(answered, 0)
    assert found.tokens_per_s_per_user_p50 == pytest.approx(10)
    assert found.tokens_per_s_per_user > 1000


def test_an_answer_that_came_at_one_time_has_no_gap_and_where_most_did_so_nobody_knows_it():
    slow, burst = Answered(0, 1, 2, 8, 11), Answered(0, 2, 2.0003, 8, 11)  # 30 us: what reading a token takes
    found = of_requests([slow, slow, burst], 0)
    assert found.itl_p99_ms == pytest.approx(100) and found.tokens_per_s_per_user == pytest.approx(10)
    found = of_requests([slow, burst, burst], 0)
    assert (found.itl_p50_ms, found.tokens_per_s_per_user, found.tokens_per_s_per_user_p50) == (None, None, None)
    assert found.ttft_p50_ms == 2000


def test_answers_of_one_token_have_no_gap_and_so_no_speed():
    found = of_requests([Answered(0, 1, 1, 8, 1)], 0)
    assert (found.itl_p50_ms, found.tokens_per_s_per_user, found.tokens_per_s_per_user_p50) == (None, None, None)
    assert found.ttft_p50_ms == 1000
