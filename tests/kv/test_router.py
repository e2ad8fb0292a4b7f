"""Placements of the round-robin router."""

import numpy as np
import pytest

from bireme.discovery.run import WorkerRecord
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
    with pytest.raises(UnavailableError, match="no decode worker takes requests now"):
        RoundRobin(["p"], []).place(REQUEST)


def view(*records):
    return {f"{record.worker}@{record.server}": record for record in records}


def test_workers_that_join_get_requests_and_those_that_leave_get_none():
    router = RoundRobin([], ["decode"])
    router.set_workers({"decode": WorkerRecord(worker="decode"), **view(WorkerRecord(worker="decode_1", server="b:1"))})
    assert {router.place(REQUEST).decode for _ in range(2)} == {"decode", "decode_1@b:1"}
    router.set_workers({"decode": WorkerRecord(worker="decode")})
    assert {router.place(REQUEST).decode for _ in range(2)} == {"decode"}


def test_a_worker_that_drains_gets_nothing_new():
    router = RoundRobin([], [])
    ready, draining = WorkerRecord(worker="decode"), WorkerRecord(worker="decode_1", state="draining")
    router.set_workers({"decode": ready, "decode_1": draining})
    assert {router.place(REQUEST).decode for _ in range(3)} == {"decode"}
    router.set_workers({"decode_1": draining})
    with pytest.raises(UnavailableError):
        router.place(REQUEST)


def test_prefill_stays_where_shared_memory_reaches_the_decode_worker():
    router = RoundRobin([], [])
    router.set_workers(
        view(
            WorkerRecord(worker="prefill", server="a:1", host="a"),
            WorkerRecord(worker="decode", server="a:1", host="a"),
            WorkerRecord(worker="prefill", server="b:1", host="b"),
            WorkerRecord(worker="decode", server="c:1", host="c"),
        )
    )
    placements = {(placed.prefill, placed.decode) for placed in (router.place(REQUEST) for _ in range(6))}
    assert placements == {("prefill@a:1", "decode@a:1"), (None, "decode@c:1")}


def test_kv_that_its_engine_moves_itself_goes_to_any_host():
    router = RoundRobin([], [])
    prefill = WorkerRecord(worker="prefill", server="a:1", host="a", moves_own_kv=True)
    router.set_workers(view(prefill, WorkerRecord(worker="decode", server="b:1", host="b")))
    assert router.place(REQUEST) == Placement("prefill@a:1", "decode@b:1")
