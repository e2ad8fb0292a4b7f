"""GET /v1/requests/{id}/timeline: by which ids, for whom, of which requests."""

import json
from hashlib import sha256

import msgspec
import pytest

from bireme.errors import EngineLostError
from bireme.observability.timeline import Timeline
from bireme.openai.http.members import Member
from bireme.openai.keys import ApiKeys, KeyEntry
from tests.openai.test_call_traces import APIS
from tests.openai.test_keys import bearer, keys

KEPT = {"observability": {"timelines": {"max_entries": 8}}}


async def answered(bench, headers=None, path="/v1/chat/completions", **fields):
    return await bench.answered(bench.call("POST", path, {"model": "test"} | APIS[path] | fields, headers))


async def asked(bench, request_id, headers=None):
    return await bench.call("GET", f"/v1/requests/{request_id}/timeline", headers=headers).end()


async def timeline(bench, request_id, headers=None):
    reply = await asked(bench, request_id, headers)
    assert reply.status == 200, reply.data
    return msgspec.json.decode(reply.data, type=Timeline)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
async def test_both_the_requests_id_and_the_answers_lead_to_it(frontend, path, stream):
    bench = await frontend(**KEPT)
    reply = await answered(bench, {"x-request-id": "mine"}, path, stream=stream)
    by_request = await timeline(bench, "mine")
    shown = json.loads(reply.data.partition(b"data: ")[2].splitlines()[0]) if stream else reply.json()
    shown = shown.get("response") or shown.get("message") or shown
    assert by_request.response_id == shown["id"]
    assert (await timeline(bench, shown["id"])) == by_request
    assert (by_request.path, by_request.model, by_request.state) == (f"POST {path}", "test", "done")
    assert by_request.generated_tokens == 4 and (by_request.delivery is not None) == stream


async def test_what_happened_is_told_in_its_order(frontend):
    bench = await frontend(**KEPT, workers={"decode": {"engine": "mocker"}, "prefill": {"engine": "mocker"}})
    await answered(bench, {"x-request-id": "mine"})
    found = await timeline(bench, "mine")
    [attempt] = found.attempts
    assert (attempt.prefill.worker, attempt.decode.worker) == ("prefill", "decode")
    assert {one.worker for one in attempt.placement.candidates} <= {"prefill", "decode"}
    times = [found.steps[0].end_ms, attempt.placement.start_ms, attempt.prefill.start_ms, attempt.decode.start_ms]
    assert times == sorted(times) and times[-1] <= found.tokens[0].first_ms <= found.duration_ms
    assert sum(count for _, count in found.tokens[0].deliveries) == 4
    assert sum(one.share for one in found.causes) == pytest.approx(1.0, abs=0.01)


async def test_a_request_that_runs_tells_what_is_known_so_far(frontend):
    bench = await frontend(**KEPT)
    reply = bench.chat({"x-request-id": "mine"}, stream=True)
    await bench.workers.emit(2)
    found = await timeline(bench, "mine")
    assert (found.state, found.generated_tokens, found.attempts[0].decode.end_ms) == ("running", 2, None)
    assert found.response_id.startswith("chatcmpl-") and (await timeline(bench, found.response_id)).id == "mine"
    await bench.workers.emit(2)
    await reply.end()
    assert (await timeline(bench, "mine")).state == "done"


async def test_a_migration_is_an_attempt_with_what_ended_the_one_before(frontend):
    bench = await frontend(**KEPT)
    bench.workers.errors.append(EngineLostError("decode: its engine died"))
    await answered(bench, {"x-request-id": "mine"})
    found = await timeline(bench, "mine")
    assert [one.number for one in found.attempts] == [1, 2]
    assert "its engine died" in found.attempts[0].error and "its engine died" in found.attempts[1].after


async def test_a_refused_request_has_one_too(frontend):
    bench = await frontend(**KEPT)
    await bench.chat({"x-request-id": "mine"}, max_tokens=-1).end()
    found = await timeline(bench, "mine")
    assert found.state == "failed" and "max_tokens" in found.error and found.attempts == []


async def test_another_keys_timeline_is_as_if_it_were_not(frontend):
    both = ApiKeys(tuple(KeyEntry(name=name, sha256=sha256(name.encode()).hexdigest()) for name in ("alice", "bob")))
    bench = await frontend(both, **KEPT)
    await answered(bench, {"x-request-id": "mine", **bearer("alice")})
    assert (await timeline(bench, "mine", bearer("alice"))).id == "mine"
    theirs, none = await asked(bench, "mine", bearer("bob")), await asked(bench, "other", bearer("bob"))
    assert (theirs.status, theirs.json()) == (404, none.json())
    assert (await asked(bench, "mine")).status == 401


@pytest.mark.parametrize("request_id", ["none", "chatcmpl-none", "a b", "\n", "x" * 5000, "%00", "../../v1/models"])
async def test_an_id_that_is_none_is_not_found(frontend, request_id):
    bench = await frontend(**KEPT)
    reply = await asked(bench, request_id)
    assert (reply.status, reply.json()["error"]["code"]) == (404, "not_found")


async def test_the_oldest_make_room(frontend):
    bench = await frontend(**KEPT)
    for number in range(9):
        await answered(bench, {"x-request-id": f"mine-{number}"})
    assert (await asked(bench, "mine-0")).status == 404 and (await asked(bench, "mine-1")).status == 200


async def test_switched_off_it_says_so_and_traces_nothing(frontend):
    bench = await frontend()
    reply = await answered(bench, {"x-request-id": "mine"})
    assert "traceresponse" not in reply.headers and bench.app._traces is None
    refused = await asked(bench, "mine")
    assert refused.status == 404 and "observability.timelines.max_entries" in refused.json()["error"]["message"]


async def test_other_processes_are_asked_for_what_is_theirs(frontend, tmp_path):
    one, other = await frontend(**KEPT), await frontend(**KEPT)
    await answered(other, {"x-request-id": "mine"})
    server = await Member(1, 2, tmp_path).tell(lambda: None, {"timeline": other.app._timelines.answer})
    one.app._timelines._member = Member(0, 2, tmp_path)
    assert (await timeline(one, "mine")).id == "mine"
    assert (await asked(one, "none")).status == 404
    server.close()


async def test_head_and_post_are_answered_as_elsewhere(frontend):
    bench = await frontend(keys(), **KEPT)
    assert (await bench.call("POST", "/v1/requests/a/timeline", {}, bearer()).end()).status == 405
    assert (await bench.call("HEAD", "/v1/requests/a/timeline", headers=bearer()).end()).status == 404
    assert json.loads((await asked(bench, "a", bearer())).data)["error"]["type"]
