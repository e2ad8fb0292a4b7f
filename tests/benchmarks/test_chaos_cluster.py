"""What must not be among several servers: a failure is excused by the death of its own frontend alone."""

import pytest

from benchmarks.chaos.cluster import remaining_decode
from benchmarks.chaos.cluster_campaign import judge_request
from benchmarks.chaos.memory import LASTING_S, lasting
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


WORKERS = {"decode@a:1": "ready", "decode@b:1": "ready", "decode_1@b:1": "its engine starts", "prefill@b:1": "ready"}


@pytest.mark.parametrize(
    ("server", "worker", "left"),
    [("a:1", "decode", ["decode@b:1"]), ("b:1", "", ["decode@a:1"]), ("b:1", "prefill", ["decode@a:1", "decode@b:1"])],
)
def test_what_remains_without_a_worker_or_a_server_is_what_is_ready(server, worker, left):
    assert remaining_decode(WORKERS, server, worker) == left


def samples(mb_of, seconds):
    return {("b.serve", 7): [(float(at), mb_of(at)) for at in range(0, seconds, 5)]}


def test_who_lasted_is_judged_by_its_first_warm_minute_and_its_last():
    (grown,) = lasting(samples(lambda at: 50.0 + at / 10, 600))
    assert (grown.first_mb, grown.last_mb) == (57.5, 106.5) and not grown.is_flat
    (flat,) = lasting(samples(lambda at: 50.0 + min(at, 45), 600))  # what comes in with the first requests
    assert flat.is_flat and str(flat) == "b.serve: 95.0 -> 95.0 MB (+0.0) in 595 s"


def test_who_was_killed_early_is_not_judged():
    assert lasting(samples(float, int(LASTING_S))) == []
