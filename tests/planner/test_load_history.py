"""What arrivals of the last intervals say: rates, bursts, and how long a pause may be."""

import numpy as np
import pytest

from bireme.planner.load_history import LoadHistory


def arrivals(counts):
    found = LoadHistory(60.0, 180.0, 600.0, 7200.0)
    for count in counts:
        found.observe(count / 60)
    return found


def bursts(seed, size):
    """In the mean 30 requests an interval, `size` at once."""
    return (size * np.random.default_rng(seed).poisson(30 / size, 120)).tolist()


@pytest.mark.parametrize("size", [1, 10, 30])
def test_dispersion_is_the_size_of_bursts(size):
    assert 0.6 * size < arrivals(bursts(3, size)).dispersion < 1.6 * size


def test_requests_under_way_have_a_dispersion_of_their_own():
    found = LoadHistory(60.0, 180.0, 600.0, 7200.0)
    for number in range(60):
        found.observe(0.5, 20 * (number % 2))  # sampled: 20 under way, or none
    assert found.dispersion == 1.0 and found.busy_dispersion == pytest.approx(20.0)


def test_a_load_that_grows_or_that_rises_and_falls_once_is_no_burst():
    assert arrivals(range(0, 120, 4)).dispersion == pytest.approx(1.0, abs=0.2)
    assert arrivals([30] * 20 + [900] * 20 + [30] * 20).dispersion == 1.0


def test_a_rise_counts_at_once_but_for_one_that_is_like_the_bursts_before():
    assert arrivals([30] * 20 + [90] * 3).per_s == pytest.approx(1.5)
    mean = arrivals([*([0, 0, 90] * 20), 90, 0, 90]).per_s
    assert mean == pytest.approx((3 * 90 + 2 * 90) / 600, rel=0.2)
    assert arrivals([300, 2400]).per_s == pytest.approx(22.5)


def test_pauses_are_longer_where_requests_are_few_or_come_in_bursts():
    assert arrivals([30] * 60).longest_pause_s < 60 < arrivals([1] * 60).longest_pause_s
    assert arrivals(bursts(5, 30)).longest_pause_s > 120 > arrivals(bursts(5, 1)).longest_pause_s
    assert arrivals([30, 30, 0, 0, 0, 0, 30]).longest_pause_s >= 240


def test_the_pause_that_lasts_is_none_of_a_load_s_own():
    found = arrivals([*([30] * 20), *([0] * 30)])
    assert found.longest_pause_s < 60 and arrivals([0, 0]).longest_pause_s == 0
