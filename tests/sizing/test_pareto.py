"""Fronts of tokens/s a GPU against tokens/s a user, and where which of two is better."""

import pytest

from bireme.sizing.pareto import OperatingPoint, best_at, compare, front, most_apart
from bireme.sizing.verdict import Way, verdict


def points(*pairs):
    return [OperatingPoint(user, gpu, f"{user}/{gpu}") for user, gpu in pairs]


def test_a_front_has_what_no_point_equals_or_beats_in_both():
    found = front(points((10, 100), (20, 80), (20, 70), (15, 80), (5, 100), (30, 10)))
    assert [(point.per_user, point.per_gpu) for point in found] == [(10, 100), (20, 80), (30, 10)]


def test_equal_points_all_stay_on_a_front():
    assert len(front(points((10, 100), (10, 100), (20, 50)))) == 3


def test_a_promise_is_kept_by_the_point_that_gets_most_out_of_a_gpu_among_those_as_fast():
    found = points((10, 100), (20, 80), (30, 10))
    assert best_at(found, 10).per_gpu == 100
    assert best_at(found, 10.1).per_gpu == 80
    assert best_at(found, 31) is None


def test_the_ratio_of_points_next_to_each_other_is_that_of_the_widest_apart():
    first, second, ratio = most_apart(points((10, 100), (30, 90)), points((12, 80), (28, 30)))
    assert (first.per_user, second.per_user, ratio) == (30, 28, 3.0)


def test_points_below_what_a_user_must_get_do_not_count_for_the_ratio():
    first, second, ratio = most_apart(points((10, 100), (30, 60)), points((12, 10), (28, 40)), from_per_user=20)
    assert (first.per_user, second.per_user, ratio) == (30, 28, 1.5)
    assert most_apart(points((10, 100)), points((12, 10)), from_per_user=20) is None


def test_where_which_is_better_is_told_from_the_smallest_promise_to_the_largest():
    found = compare(points((10, 200), (20, 100), (40, 20)), points((12, 100), (25, 99), (30, 40)))
    assert [(one.above, one.up_to, one.winner) for one in found] == [
        (0, 10, "first"), (10, 21, "equal"), (21, 30, "second"), (30, 31.5, "equal"), (31.5, 40, "first_only"),
    ]  # fmt: skip
    assert (found[0].ratio_low, found[0].ratio_high) == (2.0, 2.0)
    assert (found[2].ratio_low, found[2].ratio_high) == pytest.approx((2.0, 99 / 20))
    assert found[2].points == ("25/99", "30/40")


def test_a_promise_that_is_missed_by_little_makes_nobody_better():
    """Of two alike the one whose user was a little faster would else win by the whole step of the staircase."""
    (found,) = compare(points((187, 620), (199, 96)), points((195, 614), (197, 95)))
    assert found.winner == "equal"
    (found,) = compare(points((187, 620), (199, 96)), points((195, 714), (197, 95)))[:1]
    assert (found.winner, found.points) == ("second", ("195/714",))


def test_one_that_makes_nothing_does_not_break_the_comparison():
    (found,) = compare(points((10, 0)), points((10, 5)))
    assert (found.winner, found.ratio_high) == ("second", float("inf"))


def test_each_stretch_is_a_sentence_that_names_who_is_better_by_how_much_and_by_what():
    told = verdict(
        Way("aggregated", points((10, 200), (20, 100), (40, 20))),
        Way("disaggregated", points((12, 100), (25, 99), (30, 40))),
    )
    assert told == [
        "Up to 10.0 tokens/s for each user: aggregated is better, 2.00 times the tokens/s a GPU of disaggregated"
        " (10/200).",
        "Above 10.0, up to 21.0 tokens/s for each user: aggregated and disaggregated are equal within 5%.",
        "Above 21.0, up to 30.0 tokens/s for each user: disaggregated is better, 2.00 to 4.95 times the tokens/s a GPU"
        " of aggregated (25/99; 30/40).",
        "Above 30.0, up to 31.5 tokens/s for each user: aggregated and disaggregated are equal within 5%.",
        "Above 31.5, up to 40.0 tokens/s for each user: only aggregated is as fast (40/20); disaggregated never was.",
    ]


def test_a_way_without_a_point_is_not_compared():
    (told,) = verdict(Way("aggregated", points((10, 200))), Way("disaggregated", []))
    assert told == "disaggregated has no point that counts, so aggregated can't be compared with it."
