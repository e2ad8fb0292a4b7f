"""Placements of the round-robin router."""

import numpy as np
import pytest

from bireme.errors import UnavailableError
from bireme.kv.router import DOWN_S, Placement, RoundRobin, RoutingRequest

REQUEST = RoutingRequest(np.array([1], np.int32))


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_replicas_are_taken_in_turn():
    router = RoundRobin(["p"], ["d", "d_1"])
    assert [router.place(REQUEST) for _ in range(3)] == [
        Placement("p", "d"),
        Placement("p", "d_1"),
        Placement("p", "d"),
    ]


def test_without_prefill_workers_it_is_aggregated():
    assert RoundRobin([], ["d"]).place(REQUEST) == Placement(None, "d")


def test_a_worker_that_was_lost_is_passed_by_for_a_while():
    clock = Clock()
    router = RoundRobin([], ["d", "d_1"], clock)
    router.note_down("d")
    assert {router.place(REQUEST).decode for _ in range(3)} == {"d_1"}
    clock.now += DOWN_S + 0.1
    assert {router.place(REQUEST).decode for _ in range(2)} == {"d", "d_1"}


def test_a_worker_that_answers_is_up_at_once():
    router = RoundRobin([], ["d", "d_1"], Clock())
    router.note_down("d")
    router.note_up("d")
    assert {router.place(REQUEST).decode for _ in range(2)} == {"d", "d_1"}


def test_the_only_decode_worker_is_tried_even_when_it_is_down():
    router = RoundRobin(["p"], ["d"], Clock())
    router.note_down("d")
    assert router.place(REQUEST).decode == "d"


def test_prefill_that_is_down_means_aggregated():
    router = RoundRobin(["p"], ["d"], Clock())
    router.note_down("p")
    assert router.place(REQUEST).prefill is None


def test_workers_to_avoid_are_avoided():
    router = RoundRobin([], ["d", "d_1"])
    assert {router.place(REQUEST, avoid=["d_1"]).decode for _ in range(3)} == {"d"}


def test_without_decode_workers_nothing_can_be_placed():
    with pytest.raises(UnavailableError, match=r"workers\.decode"):
        RoundRobin(["p"], []).place(REQUEST)
