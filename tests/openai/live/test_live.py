"""GET /v1/live: what it shows, who may watch, how many, and what it costs while nobody does."""

import asyncio
import json
import math

import msgspec
import pytest

from bireme.discovery import plan_notes
from bireme.discovery.plan_notes import PlanNote
from bireme.discovery.records import WorkerRecord
from bireme.errors import EngineLostError
from bireme.kv.routing.placement import Flow
from bireme.openai.live import feed, source
from bireme.openai.live.state import LiveState, merged
from bireme.pipelines.faults import MAX_FAULTS, FaultLog
from tests.kv.routing.router_fixtures import capacity
from tests.openai.test_keys import bearer, keys


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(feed, "INTERVAL_S", 0.01)


async def states(reply, number=1):
    """Return the states that a viewer has got, once they are so many."""
    async with asyncio.timeout(60):
        while len(found := [one for one in reply.events() if one != "[DONE]"]) < number:
            assert not reply.task.done(), reply.messages
            await asyncio.sleep(0.005)
    return found


async def watched(bench, number=1):
    reply = bench.call("GET", "/v1/live")
    found = await states(reply, number)
    reply.leave()
    await reply.end()
    return found


async def test_workers_models_and_counters_are_shown(frontend):
    bench = await frontend(workers={"decode": {"engine": "mocker"}, "prefill": {"engine": "mocker"}})
    await bench.answered(bench.chat())
    state = (await watched(bench))[0]
    model = state["models"][0]
    assert (state["object"], model["name"], model["requests"]) == ("bireme.live", "test", 0)
    assert [(one["id"], one["stage"], one["state"]) for one in model["workers"]] == [
        ("prefill", "prefill", "unknown"),
        ("decode", "decode", "unknown"),
    ]
    assert state["counters"]["requests"] == {"length": 1} and state["processes"] == {"count": 1, "answered": 1}


async def test_a_worker_s_longest_draft_is_shown(frontend):
    bench = await frontend()
    members = next(iter(bench.app._models)).services.members
    members["decode"] = WorkerRecord(worker="decode", life=1, capacity=capacity(nextn=6))
    assert (await watched(bench))[0]["models"][0]["workers"][0]["nextn"] == 6


async def test_ways_of_requests_are_counted_while_somebody_watches(frontend):
    bench = await frontend(workers={"decode": {"engine": "mocker"}, "prefill": {"engine": "mocker"}})
    await bench.answered(bench.chat())
    reply = bench.call("GET", "/v1/live")
    assert (await states(reply))[0]["models"][0]["flows"] == []
    await bench.answered(bench.chat())
    found = (await states(reply, len(reply.events()) + 2))[-1]["models"][0]["flows"]
    assert [(one["prefill"], one["decode"], one["requests"]) for one in found] == [("prefill", "decode", 1)]
    assert found[0]["prompt_tokens"] > 0
    reply.leave()
    await reply.end()


async def test_while_nobody_watches_nothing_runs_and_nothing_is_counted(frontend, monkeypatch):
    monkeypatch.setattr(source, "WATCHED_S", 0.02)
    bench = await frontend()
    await watched(bench)
    router = next(iter(bench.app._models)).services.router
    while router.flows is not None:
        await asyncio.sleep(0.005)
    assert bench.app._live_feed._task is None


async def test_one_state_serves_all_who_watch(frontend, monkeypatch):
    bench = await frontend()
    asked = []
    monkeypatch.setattr(source, "_counters", lambda totals, ask=source._counters: asked.append(1) or ask(totals))
    viewers = [bench.call("GET", "/v1/live") for _ in range(8)]
    for viewer in viewers:
        await states(viewer, 3)
    assert len(asked) <= 3 + 2
    for viewer in viewers:
        viewer.leave()
        await viewer.end()


async def test_a_slow_viewer_gets_the_newest_and_holds_nobody_up(frontend):
    bench = await frontend()
    slow, other = bench.call("GET", "/v1/live"), bench.call("GET", "/v1/live")
    await states(slow)
    slow.stop_reading()
    seen = len(slow.events())
    last = (await states(other, len(other.events()) + 20))[-1]
    slow.go_on_reading()
    found = await states(slow, seen + 3)
    assert found[seen + 2]["at"] >= last["at"]  # one was on its way, one had been begun; those between are left out
    for viewer in (slow, other):
        viewer.leave()
        await viewer.end()


async def test_a_viewer_that_never_reads_is_dropped(frontend, monkeypatch):
    monkeypatch.setattr("bireme.openai.http.call._READ_TIMEOUT_S", 0.05)
    bench = await frontend()
    reply = bench.call("GET", "/v1/live")
    await states(reply)
    reply.stop_reading()
    await reply.end()
    assert bench.app._live_feed._num_viewers == 0


@pytest.mark.parametrize("turns", range(5))
async def test_a_viewer_that_leaves_just_when_a_state_went_out_ends(frontend, turns):
    bench = await frontend()
    leaving, other = bench.call("GET", "/v1/live"), bench.call("GET", "/v1/live")
    await states(leaving)
    leaving.stop_reading()
    await states(other, len(other.events()) + 3)  # so one for the other is on its way
    leaving.go_on_reading()
    for _ in range(turns):
        await asyncio.sleep(0)
    leaving.leave()
    await leaving.end()
    assert bench.app._live_feed._num_viewers == 1
    other.leave()
    await other.end()


async def test_one_viewer_too_many_is_told_the_limit(frontend):
    bench = await frontend(frontend={"live_viewers": 1})
    first = bench.call("GET", "/v1/live")
    await states(first)
    refused = await bench.call("GET", "/v1/live").end()
    assert refused.status == 503 and "frontend.live_viewers" in refused.json()["error"]["message"]
    first.leave()
    await first.end()
    assert await watched(bench)


async def test_a_viewer_whose_body_does_not_end_counts(frontend, monkeypatch):
    monkeypatch.setattr("bireme.openai.http.call._NO_BODY_S", 600)
    bench = await frontend(frontend={"live_viewers": 1})
    first = bench.call("GET", "/v1/live", is_body_coming=False)
    await asyncio.sleep(0)
    assert (await bench.call("GET", "/v1/live").end()).status == 503
    first.leave()
    await first.end()
    assert await watched(bench)


async def test_a_viewer_whose_body_does_not_end_is_told_so_after_a_time(frontend, monkeypatch):
    monkeypatch.setattr("bireme.openai.http.call._NO_BODY_S", 0.01)
    bench = await frontend(frontend={"live_viewers": 1})
    assert (await bench.call("GET", "/v1/live", is_body_coming=False).end()).status == 408
    assert await watched(bench)


async def test_only_operators_may_watch_where_keys_are(frontend):
    bench = await frontend(keys())
    assert (await bench.call("GET", "/v1/live").end()).status == 401
    refused = await bench.call("GET", "/v1/live", headers=bearer()).end()
    assert (refused.status, refused.json()["error"]["code"]) == (403, "not_an_operator")
    seen = (await frontend(keys(operator=True))).call("GET", "/v1/live", headers=bearer())
    assert await states(seen)
    seen.leave()
    await seen.end()


async def test_another_sites_page_may_not_watch(frontend):
    refused = await (await frontend()).call("GET", "/v1/live", headers={"origin": "http://evil.example"}).end()
    assert refused.status == 403


async def test_it_can_be_switched_off(frontend):
    assert (await (await frontend(frontend={"live_viewers": 0})).call("GET", "/v1/live").end()).status == 404


async def test_a_process_that_drains_ends_its_streams(frontend):
    bench = await frontend()
    reply = bench.call("GET", "/v1/live")
    await states(reply)
    bench.app.readiness.is_draining = True
    assert (await reply.end()).events()[-1] == "[DONE]"


async def test_head_is_answered_without_a_stream(frontend):
    reply = await (await frontend()).call("HEAD", "/v1/live").end()
    assert (reply.status, reply.data) == (200, b"")


# Faults


async def test_a_migration_is_a_fault_with_worker_and_reason(frontend):
    bench = await frontend()
    await watched(bench)
    bench.workers.errors.append(EngineLostError("decode: its engine died"))
    await bench.answered(bench.chat())
    fault = (await watched(bench))[0]["faults"][0]
    assert (fault["kind"], fault["worker"], fault["count"]) == ("migration", "decode", 1)
    assert "its engine died" in fault["reason"]


async def test_a_refusal_because_of_too_many_requests_is_one(frontend):
    bench = await frontend(limits={"max_concurrent_requests": 1})
    services = next(iter(bench.app._models)).services
    with services.admitted():
        assert (await bench.chat().end()).status == 503
    fault = (await watched(bench))[0]["faults"][0]
    assert (fault["kind"], fault["worker"]) == ("busy", "") and "limits.max_concurrent_requests" in fault["reason"]


async def test_engines_that_end_and_workers_that_leave_are_faults(frontend):
    bench = await frontend()
    services = next(iter(bench.app._models)).services

    def see(**lives):
        services.set_workers({name: WorkerRecord(worker=name, life=life) for name, life in lives.items()})

    see(decode=7, decode_1=8)
    see(decode=0, decode_1=9)
    see(decode=10)
    found = {(one["worker"], one["kind"]) for one in (await watched(bench))[0]["faults"]}
    assert found == {("decode", "engine_lost"), ("decode_1", "engine_restarted"), ("decode_1", "worker_left")}


def test_many_alike_are_one_with_their_number():
    now = [1000.0]
    log = FaultLog("m", lambda: now[0])
    for _ in range(100):
        log.note("busy", "", "all busy")
        now[0] += 1
    assert [(one.count, one.at) for one in log.faults()] == [(61, 1000.0), (39, 1061.0)]


def test_the_log_is_bounded_and_forgets_after_an_hour():
    now = [0.0]
    log = FaultLog("m", lambda: now[0])
    for number in range(1000):
        log.note("worker_left", f"decode@host:{number}", "x" * 5000)
    assert len(log.faults()) == MAX_FAULTS and len(log._newest) <= MAX_FAULTS
    assert max(len(one.reason) for one in log.faults()) < 300
    now[0] = 3601.0
    assert log.faults() == []


# States of workers, and of several processes


async def state_of(frontend, tmp_path, record, **work):
    bench = await frontend()
    model = next(iter(bench.app._models))
    model.run_folder = tmp_path
    model.services.set_workers({record.worker: record})
    router = model.services.router
    if "skip" in work:
        router.note_down(record.worker)
    return source._model(model).workers[0]


@pytest.mark.parametrize(
    ("record", "work", "state"),
    [
        (WorkerRecord(worker="decode", life=3), {}, "ready"),
        (WorkerRecord(worker="decode", life=3, state="draining"), {}, "draining"),
        (WorkerRecord(worker="decode"), {}, "down"),
        (WorkerRecord(worker="decode", life=3), {"skip": True}, "skipped"),
    ],
)
async def test_a_worker_has_the_state_that_its_record_and_its_losses_tell(frontend, tmp_path, record, work, state):
    shown = await state_of(frontend, tmp_path, record, **work)
    assert shown.state == state and bool(shown.reason) == (state != "ready")


async def test_a_worker_that_sleeps_is_asleep(frontend, tmp_path):
    (tmp_path / "decode.sleep").touch()
    assert (await state_of(frontend, tmp_path, WorkerRecord(worker="decode"))).state == "asleep"


async def test_a_silent_host_is_told(frontend, tmp_path):
    bench = await frontend()
    model = next(iter(bench.app._models))
    model.services.set_workers({"decode@far:1": WorkerRecord(worker="decode", server="far:1", life=2)})
    model.services.router.note_silence("far:1", True)
    shown = source._model(model).workers[0]
    assert (shown.state, shown.server) == ("skipped", "far:1") and "does not answer" in shown.reason
    assert math.isinf(model.services.router.work_of("decode@far:1").skip_s)


async def test_what_several_processes_have_sent_and_seen_is_added(frontend):
    parts = []
    for _ in range(3):
        bench = await frontend()
        model = next(iter(bench.app._models))
        await watched(bench)
        model.services.router.flows[("", "decode")] = Flow(2, 20, 4)
        model.services.note_fault("busy", "", "all busy")
        model.services.faults.note("worker_left", "decode_1", "gone")
        await bench.answered(bench.chat())
        parts.append(feed._decode_part(bench.app._live_feed.part()))
    whole = json.loads(feed._encode(merged(parts[0], parts[1:], 4)))
    flow = whole["models"][0]["flows"][0]
    assert (flow["requests"], flow["prompt_tokens"], flow["cached_tokens"]) >= (6, 60, 12)
    assert {one["kind"]: one["count"] for one in whole["faults"]} == {"busy": 3, "worker_left": 1}
    assert whole["counters"]["requests"] == {"length": 3} and whole["processes"] == {"count": 4, "answered": 3}


def test_what_is_no_state_counts_as_no_answer():
    assert feed._part(b"\xff\x00") is None and feed._part(b"") is None
    assert issubclass(LiveState, object)


async def test_what_a_planner_has_decided_stands_in_the_state(frontend, tmp_path):
    bench = await frontend()
    assert (await watched(bench))[0]["plans"] == []
    note = PlanNote(at=1000.0, result="up", acts=True, text="prefill 1 -> 2 of 4 GPUs; 12.00 requests/s need 2+1")
    next(iter(bench.app._models)).run_folder = tmp_path
    plan_notes.add(tmp_path, note)
    assert (await watched(bench))[0]["plans"] == [msgspec.to_builtins(note)]
    (tmp_path / plan_notes.FILE_NAME).write_text("no notes")
    assert (await watched(bench))[0]["plans"] == []
