"""A campaign that could not fail would show nothing: planted faults of a launch are found, excused ones are not."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.chaos.faults import KINDS, Fault, plan
from benchmarks.chaos.launch import Launch
from benchmarks.chaos.records import Delay, Hit, Probe, Readiness, Request, Seen, ServerDeath
from benchmarks.chaos.topologies import TOPOLOGIES
from benchmarks.chaos.verdict import down_spans, judge, judge_drain, ready_spans
from benchmarks.chaos.ways import ways_of

WAYS = ways_of(num_decode=2)
TOPOLOGY = TOPOLOGIES["mocker-2+2"]
GONE = "UNAVAILABLE: engine lost: decode"


def hit(kind, victim="", began=100.0, recovered=110.0):
    return Hit(Fault(kind, victim, 3.0, 1), began, began, recovered)


def request(way, outcome="failed", error=GONE, began=101.0, ended=102.0):
    return Request(way, began, ended, outcome, error)


def probes(way, down, end=130.0):
    """One probe a second from 90 on, failed between two moments."""
    moments = [90.0 + n for n in range(int(end - 90))]
    return [Probe(way, at, at + 0.1, GONE if down[0] <= at < down[1] else "") for at in moments]


def told(status="ready", is_ready=True, begin=90.0, end=130.0):
    return [Readiness(begin + n / 4, status, is_ready) for n in range(int(end - begin) * 4)]


def kinds(seen, *hits, ways=WAYS):
    return sorted({item.kind for item in judge(seen, hits, ways)})


def test_a_request_that_fails_under_no_fault_is_found():
    assert kinds(Seen(requests=[request("chat")])) == ["failed"]
    assert kinds(Seen(requests=[request("chat", began=150, ended=151)]), hit("server_killed", "server")) == ["failed"]


def test_a_wrong_token_is_found_under_every_fault():
    wrong = Seen(requests=[request("decode", "wrong", "a token came again or late")])
    assert kinds(wrong, hit("server_killed", "server")) == ["wrong"]
    assert kinds(Seen(probes=[Probe("chat", 101, 102, "WRONG: a text")]), hit("server_killed", "server")) == ["wrong"]


@pytest.mark.parametrize("kind", ["engine_killed", "engine_ended", "engine_hung", "log_unread"])
def test_an_engine_that_comes_back_excuses_only_who_called_it_directly(kind):
    fault = hit(kind, "decode.engine")
    assert kinds(Seen(requests=[request("decode"), request("bus")]), fault) == []
    assert kinds(Seen(requests=[request("decode_1")]), fault) == ["failed"]
    assert kinds(Seen(requests=[request("grpc_stream")]), fault) == ["failed"]
    assert kinds(Seen(requests=[request("chat_stream")]), fault) == ["failed"]


def test_the_only_decode_engine_that_is_back_too_late_excuses_the_pipelines_too():
    seen = Seen(requests=[request("grpc_stream", ended=140.0)])
    late = hit("engine_killed", "decode.engine", recovered=145.0)
    assert kinds(seen, late, ways=ways_of(num_decode=1)) == []
    assert kinds(seen, late) == ["failed"]  # the other decode worker lives
    assert kinds(seen, hit("engine_killed", "prefill.engine", recovered=145.0), ways=ways_of(num_decode=1)) == [
        "failed"
    ]


def test_a_stub_excuses_the_ways_that_meet_it():
    fault = hit("stub_killed", "generate.stub")
    assert kinds(Seen(requests=[request("grpc_stream"), request("http_stream")]), fault) == []
    assert kinds(Seen(requests=[request("chat")]), fault) == ["failed"]
    assert kinds(Seen(requests=[request("grpc_unary")]), fault) == ["failed"]


def test_an_error_that_is_no_honest_refusal_is_found_though_the_fault_excuses_a_failure():
    seen = Seen(requests=[request("chat", error="HTTP 500: Internal Server Error")])
    assert kinds(seen, hit("server_killed", "server")) == ["dishonest"]


def test_who_called_a_dead_stub_may_hang_and_nobody_else():
    fault = hit("stub_killed", "decode.stub")
    assert kinds(Seen(requests=[request("decode", "hung", "")]), fault) == []
    assert kinds(Seen(requests=[request("grpc_stream", "hung", "")]), fault) == ["hung"]
    assert kinds(Seen(requests=[request("chat", "hung", "")]), fault) == ["hung"]


@pytest.mark.parametrize("kind", [name for name in KINDS if name.startswith(("clients", "cpu"))])
def test_clients_and_load_from_outside_excuse_nothing(kind):
    assert kinds(Seen(requests=[request(way) for way in WAYS]), hit(kind)) == ["failed"]


def test_readiness_that_lies_for_more_than_five_seconds_is_found():
    fault = hit("stub_killed", "decode.stub")
    assert kinds(Seen(probes=probes("chat", (100, 107)), readiness=told()), fault) == ["lie"]
    assert kinds(Seen(probes=probes("chat", (100, 104)), readiness=told()), fault) == []
    assert kinds(Seen(probes=probes("chat", (100, 107)), readiness=told("not_ready", False)), fault) == []


def test_readiness_that_tells_the_truth_in_time_does_not_lie():
    samples = [*told(end=103.0), *told("not_ready", False, begin=103.0, end=120.0)]
    seen = Seen(probes=probes("grpc_stream", (100, 112)), readiness=samples)
    assert kinds(seen, hit("run_folder_deleted", recovered=113.0)) == []


def test_degraded_is_the_truth_about_one_worker_and_a_lie_about_a_pipeline():
    fault = hit("stub_killed", "decode.stub")
    assert kinds(Seen(probes=probes("decode", (100, 110)), readiness=told("degraded")), fault) == []
    assert kinds(Seen(probes=probes("chat", (100, 110)), readiness=told("degraded")), fault) == ["lie"]


def test_time_that_the_machine_did_not_run_the_observer_is_nobodys():
    seen = Seen(probes=probes("chat", (100, 107)), readiness=told(), delays=[Delay(102.0, 3.0)])
    assert kinds(seen, hit("cpu_hog")) == []


def test_a_fault_that_does_not_heal_is_found():
    assert kinds(Seen(), hit("frontend_hung", "frontend", recovered=None)) == ["not_recovered"]


def test_a_stub_may_take_the_server_along_seconds_later_and_no_engine_may():
    seen = Seen(requests=[request("chat", began=118, ended=119)], deaths=[ServerDeath(118.5)])
    assert kinds(seen, hit("stub_paused", "tokenizer.stub")) == []
    assert kinds(seen, hit("engine_killed", "decode.engine")) == ["failed", "server_died"]


def test_a_stop_in_order_loses_nothing_that_was_under_way():
    lost, refused = request("chat", began=99.0), request("chat", error="HTTP 503: stopping", began=101.0)
    assert [item.kind for item in judge_drain([lost, refused], signaled=100.0)] == ["stop"]
    assert judge_drain([refused], signaled=100.0) == []


def test_a_way_is_down_from_its_first_failed_probe_to_the_next_that_is_answered():
    assert down_spans(probes("chat", (100, 103))) == [(100.0, 103.0)]
    assert ready_spans([*told(end=92.0), *told("not_ready", False, 92.0, 93.0)], is_strict=False) == [(90.0, 91.75)]


def test_the_same_seed_draws_the_same_faults_and_every_kind_comes():
    def draw(seed):
        return list(itertools.islice(plan(seed, TOPOLOGY), 60))

    assert draw(7) == draw(7) != draw(8)
    assert {fault.kind for fault in draw(7)} == set(KINDS)


def test_a_process_and_a_file_that_stay_behind_are_found(tmp_path):
    launch = Launch(TOPOLOGY, tmp_path)
    assert launch.left_over() == []
    (launch.runtime / "forgotten").touch()
    mark = {"BIREME_CHAOS_MARK": launch.mark}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=os.environ | mark) as process:
        found = launch.left_over()
        process.communicate(b"\n")
    assert any(f"process {process.pid}" in text for text in found)
    assert any("forgotten" in text for text in found)
    shutil.rmtree(launch.runtime.parent)
