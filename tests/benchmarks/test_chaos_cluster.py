"""What must not be among several servers: a failure is excused by the death of its own frontend alone."""

import pytest

from benchmarks.chaos.cluster import judge_request
from benchmarks.chaos.records import Request

DOWN = [(100.0, 110.0)]


def judged(outcome, began, ended, error="connection reset"):
    found = judge_request(Request("chat", began, ended, outcome, error), DOWN)
    return found.kind if found is not None else ""


@pytest.mark.parametrize(("began", "ended"), [(95.0, 101.0), (105.0, 106.0), (110.5, 111.0)])
def test_what_fails_while_its_frontend_is_dead_is_excused(began, ended):
    assert judged("failed", began, ended) == ""


@pytest.mark.parametrize(("began", "ended"), [(90.0, 99.0), (112.0, 113.0)])
def test_what_fails_before_or_after_is_not(began, ended):
    assert judged("failed", began, ended) == "failed"


def test_a_failure_must_be_an_honest_one():
    assert judged("failed", 105.0, 106.0, "KeyError: 7") == "dishonest"


@pytest.mark.parametrize("outcome", ["wrong", "hung"])
def test_a_wrong_token_and_a_hang_are_never_excused(outcome):
    assert judged(outcome, 105.0, 106.0) == outcome


@pytest.mark.parametrize("outcome", ["ok", "dropped"])
def test_what_ends_well_is_well(outcome):
    assert judged(outcome, 105.0, 106.0) == ""
