"""/v1/batches over fake workers: lines checked, run behind everybody else, cancelled, taken over, put into files."""

import asyncio
import contextlib
import json
import sqlite3
import time

import pytest
from openai.types import Batch

from bireme.errors import ResourceExhaustedError, UnavailableError
from bireme.openai import store_thread
from bireme.openai.batch import batches, line_gate
from bireme.openai.batch.batch_lines import MAX_PROBLEMS
from bireme.openai.batch.batch_store import BatchStore, StoredBatch
from bireme.openai.batch.line_gate import LineGate
from bireme.pipelines.chat_service import ChatService
from tests.openai.api_keys import bearer, keys_of
from tests.openai.batch.forms import FILES, ask, upload

BATCHES = "/v1/batches"
CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES = {
    CHAT: {"model": "test", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    COMPLETION: {"model": "test", "prompt": "hi", "max_tokens": 4},
    RESPONSE: {"model": "test", "input": "hi", "max_output_tokens": 4},
}
ENDED = ("completed", "failed", "expired", "cancelled")
ONE_HOUR = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}


def line(number, url=CHAT, **fields):
    body = {**BODIES[url], **fields}
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}).encode() + b"\n"


def lines(count, url=CHAT):
    return b"".join(line(number, url) for number in range(count))


async def create(bench, content, endpoint=CHAT, headers=None, window="24h", expiry=None, **fields):
    """Upload an input and return the reply to the batch's creation. `expiry`: fields of the upload."""
    file = (await upload(bench, content, headers=headers, **(expiry or {}))).json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": window, **fields}
    return await bench.call("POST", BATCHES, body, headers).end()


async def shown(bench, batch_id, headers=None):
    return Batch.model_validate_json((await ask(bench, f"{BATCHES}/{batch_id}", headers=headers)).data, strict=True)


async def until(bench, batch_id, *statuses, headers=None):
    for _ in range(6000):
        batch = await shown(bench, batch_id, headers)
        if batch.status in (statuses or ENDED):
            return batch
        await asyncio.sleep(0.01)
    raise AssertionError(batch)


async def results(bench, file_id, headers=None):
    """Return a file's lines by their custom_id; none is there twice."""
    if file_id is None:
        return {}
    data = (await ask(bench, f"{FILES}/{file_id}/content", headers=headers)).data
    rows = [json.loads(row) for row in data.splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows) == len({row["id"] for row in rows})
    return found


async def ended(bench, content, **more):
    """Run a batch; return it, its answers and its errors."""
    reply = await create(bench, content, **more)
    batch = await until(bench, reply.json()["id"])
    return batch, await results(bench, batch.output_file_id), await results(bench, batch.error_file_id)


@contextlib.asynccontextmanager
async def generating(bench):
    """Let the workers make tokens all the time; yields what they have run, and how many at once."""

    async def emit():
        while True:
            bench.most = max(getattr(bench, "most", 0), len(bench.workers.running))
            for generation in list(bench.workers.running):
                generation.emit()
            await asyncio.sleep(0)

    task = asyncio.ensure_future(emit())
    try:
        yield
    finally:
        task.cancel()


@pytest.fixture
async def idle(frontend, tmp_path):
    """A frontend whose workers make no tokens by themselves."""
    return await frontend(
        files_folder=tmp_path,
        frontend={"batches": {"max_concurrency": 3, "max_lines": 100, "max_unfinished": 2}, "max_body_bytes": 10_000},
    )


@pytest.fixture
async def bench(idle):
    async with generating(idle):
        yield idle


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION, RESPONSE])
async def test_a_line_is_answered_as_a_live_request_is(bench, endpoint):
    batch, answers, errors = await ended(bench, line(0, endpoint), endpoint=endpoint, metadata={"a": "b"})
    live = (await bench.call("POST", endpoint, BODIES[endpoint]).end()).json()
    response = answers["line-0"]["response"]
    changing = {"id", "created", "created_at", "completed_at", "system_fingerprint", "service_tier"}
    assert response["status_code"] == 200 and response["request_id"] and answers["line-0"]["error"] is None
    assert {key for key in live if response["body"][key] != live[key]} <= changing | {"output"}
    assert (response["body"].get("service_tier"), live.get("service_tier")) in [(None, None), ("flex", "default")]
    assert (batch.status, batch.metadata, errors) == ("completed", {"a": "b"}, {})
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at


async def test_every_line_is_answered_once_and_few_at_a_time(idle):
    batch_id = (await create(idle, lines(40))).json()["id"]
    while len(idle.workers.running) < 3:
        await asyncio.sleep(0.001)
    async with generating(idle):
        batch = await until(idle, batch_id)
    answers, errors = await results(idle, batch.output_file_id), await results(idle, batch.error_file_id)
    assert sorted(answers) == sorted(f"line-{number}" for number in range(40)) and not errors
    assert batch.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
    assert idle.most == 3


@pytest.mark.parametrize(
    ("engine", "most", "beside"), [("trtllm", None, 1), ("mocker", None, 3), ("mocker", 2, 2), ("mocker", 0, 0)]
)
async def test_beside_a_live_request_as_many_lines_are_begun_as_its_engine_bears_and_all_once_it_has_gone(
    frontend, tmp_path, monkeypatch, engine, most, beside
):
    monkeypatch.setattr(line_gate, "QUIET_S", 0.05)
    settings = {"batches": {"max_concurrency": 3, "max_beside_live": most}}
    bench = await frontend(files_folder=tmp_path, frontend=settings, workers={"decode": {"engine": engine}})
    live = bench.chat(max_tokens=100)
    await bench.workers.reached("decode")
    batch_id = (await create(bench, lines(10))).json()["id"]
    await until(bench, batch_id, "in_progress")
    while len(bench.workers.running) < 1 + beside:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.1)
    assert len(bench.workers.running) == 1 + beside
    live.leave()
    await live.end()
    while len(bench.workers.running) < 3:
        await asyncio.sleep(0.001)


async def test_a_line_that_is_cancelled_as_its_turn_comes_passes_it_on():
    gate = LineGate(1, 1)
    first, second = asyncio.ensure_future(gate.__aenter__()), asyncio.ensure_future(gate.__aenter__())
    third = asyncio.ensure_future(gate.__aenter__())
    await first
    await gate.__aexit__(None, None, None)
    second.cancel()
    await asyncio.wait_for(third, 60)


async def test_a_line_gives_way_to_all_live_requests(idle):
    await create(idle, line(0, bireme={"priority": 1}))
    while not idle.workers.running:
        await asyncio.sleep(0.001)
    assert idle.workers.running[0].request.options.priority == 0


async def test_a_refused_line_is_in_the_error_file_and_the_others_are_answered(bench):
    batch, answers, errors = await ended(bench, line(0) + line(1, temperature=9) + line(2, color="red") + line(3))
    assert sorted(answers) == ["line-0", "line-3"] and batch.request_counts.failed == 2
    told = [errors[f"line-{number}"]["response"] for number in (1, 2)]
    assert [response["status_code"] for response in told] == [400, 400]
    assert [response["body"]["error"]["param"] for response in told] == ["temperature", "color"]


WRONG_LINES = {
    "no JSON": (b"{\n", "invalid_request", None),
    "a list": (b"[]\n", "invalid_request", None),
    "not UTF-8": (b'{"custom_id": "\xff"}\n', "invalid_request", None),
    "nested deeply": (b'{"custom_id":"x","method":"POST","url":"u","body":' + b"[" * 9000, "invalid_request", None),
    "too long": (b" " * 20_000 + b"\n", "invalid_request", None),
    "no custom_id": (line(9).replace(b"custom_id", b"id"), "invalid_request", "id"),
    "an empty custom_id": (line(9).replace(b"line-9", b""), "invalid_request", "custom_id"),
    "another method": (line(9).replace(b"POST", b"GET"), "invalid_request", "method"),
    "another url": (line(9, COMPLETION), "mismatched_endpoint", "url"),
    "an earlier custom_id": (line(1), "duplicate_custom_id", "custom_id"),
    "an unknown field": (line(9).replace(b'"url"', b'"b": 1, "url"'), "invalid_request", "b"),
    "a body of text": (line(9).replace(b'"body"', b'"body": "x"}\n', 1), "invalid_request", "body"),
    "another model": (line(9, model="other"), "model_not_found", None),
    "no model": (line(9).replace(b'"model"', b'"modell"'), "missing_model", "model"),
    "a model that is no text": (line(9, model=5), "invalid_request", "body.model"),
    "a stream": (line(9, stream=True), "invalid_request", "body.stream"),
    "the background": (line(9, background=True), "invalid_request", "body.background"),
}


@pytest.mark.parametrize("name", WRONG_LINES)
async def test_a_wrong_line_fails_the_batch_by_its_number_before_any_is_run(idle, name):
    wrong, code, param = WRONG_LINES[name]
    batch, _, _ = await ended(idle, line(0) + line(1) + wrong)
    problem = batch.errors.data[0]
    assert (batch.status, problem.line, problem.code, problem.param) == ("failed", 3, code, param), problem
    assert "line 3: " in problem.message and not idle.workers.log and batch.failed_at


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [(b"", "empty_file", 1), (b"\n\n", "empty_file", 1), (b"x\n" * 150, "invalid_request", MAX_PROBLEMS)],
)
async def test_a_file_without_a_right_line_fails_the_batch(idle, content, code, number):
    batch, _, _ = await ended(idle, content)
    assert (batch.status, batch.errors.data[-1].code, len(batch.errors.data)) == ("failed", code, number)


async def test_too_many_lines_fail_the_batch(idle):
    batch, _, _ = await ended(idle, lines(101))
    assert [problem.code for problem in batch.errors.data] == ["too_many_lines"]


WRONG_BATCHES = {
    "endpoint": {"endpoint": "/v1/messages"},
    "completion_window": {"completion_window": "8d"},
    "metadata": {"metadata": {"a": "x" * 600}},
    "color": {"color": "red"},
    "output_expires_after.seconds": {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
    "output_expires_after.anchor": {"output_expires_after": {"anchor": "now", "seconds": 5000}},
}


@pytest.mark.parametrize("param", WRONG_BATCHES)
async def test_a_wrong_field_of_a_batch_is_refused_by_its_name(idle, param):
    file = (await upload(idle, line(0))).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h", **WRONG_BATCHES[param]}
    reply = await idle.call("POST", BATCHES, body).end()
    assert (reply.status, reply.json()["error"]["param"]) == (400, param), reply.data


async def test_a_batch_of_no_file_and_one_that_does_not_exist_are_404(idle):
    body = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
    assert (await idle.call("POST", BATCHES, body).end()).status == 404
    for method, path in (("GET", "batch_1"), ("POST", "batch_1/cancel"), ("GET", "batch_1/x")):
        assert (await ask(idle, f"{BATCHES}/{path}", method=method)).status == 404


async def test_results_are_no_input(bench):
    batch, _, _ = await ended(bench, line(0))
    body = {"input_file_id": batch.output_file_id, "endpoint": CHAT, "completion_window": "24h"}
    assert (await bench.call("POST", BATCHES, body).end()).json()["error"]["param"] == "input_file_id"


async def test_a_cancelled_batch_ends_with_what_was_answered(idle):
    batch_id = (await create(idle, lines(10))).json()["id"]
    async with generating(idle):
        while (await shown(idle, batch_id)).request_counts.completed < 3:
            await asyncio.sleep(0)
    told = (await ask(idle, f"{BATCHES}/{batch_id}/cancel", method="POST")).json()
    batch = await until(idle, batch_id)
    answers, errors = await results(idle, batch.output_file_id), await results(idle, batch.error_file_id)
    assert (told["status"], batch.status) == ("cancelling", "cancelled") and batch.cancelled_at
    assert len(answers) >= 3 and len(answers) + len(errors) == 10 and not answers.keys() & errors.keys()
    assert {row["error"]["code"] for row in errors.values()} == {"batch_cancelled"}
    while idle.workers.running:
        await asyncio.sleep(0.001)


async def test_an_ended_batch_can_t_be_cancelled(bench):
    batch, _, _ = await ended(bench, line(0))
    reply = await ask(bench, f"{BATCHES}/{batch.id}/cancel", method="POST")
    assert (reply.status, reply.json()["error"]["code"]) == (409, "invalid_status")


async def test_a_batch_whose_window_has_passed_ends_with_what_was_answered(idle):
    batch, answers, errors = await ended(idle, lines(4), window="1s")
    assert (batch.status, answers) == ("expired", {}) and batch.expired_at
    assert [row["error"]["code"] for row in errors.values()] == ["batch_expired"] * 4
    assert batch.request_counts.failed == 4


async def test_what_may_pass_is_tried_again(bench):
    bench.workers.errors.extend([ResourceExhaustedError("the queue is full")] * 5)
    batch, answers, _ = await ended(bench, lines(3))
    assert len(answers) == 3 and batch.request_counts.completed == 3


def refuse(monkeypatch, times):
    """Let the first `times` runs of a chat fail with what may pass, and tries follow each other quickly."""
    run, refusals = ChatService.run, iter(range(times))

    async def fail(*values):
        if next(refusals, None) is not None:
            raise ResourceExhaustedError("the queue is full")
        return await run(*values)

    monkeypatch.setattr(ChatService, "run", fail)
    monkeypatch.setattr(batches, "_RETRY_S", 0.2)
    monkeypatch.setattr(batches, "_FIRST_PAUSE_S", 0.01)


async def test_the_time_for_tries_begins_with_the_first_failure(bench, monkeypatch):
    refuse(monkeypatch, 1)
    gate = bench.app._files.gate
    for _ in range(3):
        await gate.__aenter__()
    batch_id = (await create(bench, lines(1))).json()["id"]
    while not gate._waiting:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    for _ in range(3):
        await gate.__aexit__(None, None, None)
    assert (await until(bench, batch_id)).request_counts.completed == 1


async def test_a_line_that_fails_for_too_long_has_failed(bench, monkeypatch):
    refuse(monkeypatch, 10**6)
    batch, _, errors = await ended(bench, lines(1))
    assert batch.request_counts.failed == 1 and errors["line-0"]["response"]["status_code"] == 503


async def test_a_disk_that_is_full_for_a_while_loses_no_line_and_is_told_once(bench, monkeypatch, caplog):
    monkeypatch.setattr(batches, "_LONGEST_PAUSE_S", 0.01)
    keep, refusals = BatchStore.answer, iter(range(5))

    def answer(*values):
        if next(refusals, None) is not None:
            raise UnavailableError("the database of batches can't be written (disk is full)")
        keep(*values)

    monkeypatch.setattr(BatchStore, "answer", answer)
    batch, answers, _ = await ended(bench, lines(6))
    assert (batch.status, len(answers), next(refusals, None)) == ("completed", 6, None)
    assert caplog.text.count("batch_waits_for_disk") == 1


async def test_another_process_goes_on_with_what_a_dead_one_has_left(idle, frontend, tmp_path):
    batch_id = (await create(idle, lines(20))).json()["id"]
    async with generating(idle):
        while (await shown(idle, batch_id)).request_counts.completed < 5:
            await asyncio.sleep(0)
    await idle.app._files.stop()
    other = await frontend(files_folder=tmp_path)
    async with generating(other):
        batch = await until(other, batch_id)
    answers = await results(other, batch.output_file_id)
    assert len(answers) == 20 and batch.status == "completed"
    assert len([entry for entry in other.workers.log if entry.startswith("decode")]) <= 15


async def test_a_row_that_can_t_be_read_ends_no_watch(idle, frontend, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(store_thread, "_LOOK_S", 0.01)
    batch_id = (await create(idle, lines(2))).json()["id"]
    rows = sqlite3.connect(tmp_path / "files.sqlite", isolation_level=None)
    rows.execute("INSERT INTO batches SELECT 9, 'odd', '', status, x'00', 0, 0, '', '', x'' FROM batches")
    await idle.app._files.stop()
    other = await frontend(files_folder=tmp_path)
    while caplog.text.count("batches_not_watched") < 2:
        await asyncio.sleep(0.01)
    rows.execute("DELETE FROM batches WHERE id = 'odd'")
    async with generating(other):
        assert (await until(other, batch_id)).status == "completed"


def test_of_batches_of_dead_processes_all_are_taken_in_their_order_or_none(tmp_path):
    first, store = BatchStore(tmp_path), BatchStore(tmp_path)
    for name in "bac":
        first.add(StoredBatch(name, "", "validating", None, 0, 0, "file", CHAT, b"{}"), 9)
    first.close()
    write = store.database.write
    write("CREATE TRIGGER full BEFORE UPDATE ON batches WHEN OLD.id = 'c' BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.raises(UnavailableError, match="written .full"):
        store.take_orphans()
    write("DROP TRIGGER full")
    assert [batch.id for batch in store.take_orphans()] == ["b", "a", "c"] and not store.take_orphans()
    store.close()


async def test_batches_asked_for_side_by_side_stay_within_their_number_together(idle):
    replies = await asyncio.gather(*(create(idle, lines(10)) for _ in range(6)))
    assert sorted(reply.status for reply in replies) == [200, 200, 429, 429, 429, 429]


def pass_an_hour(monkeypatch):
    now = time.time() + 3700
    monkeypatch.setattr(time, "time", lambda: now)


async def test_a_batch_cancelled_after_its_input_expired_has_a_line_for_all_that_was_not_run(idle, monkeypatch):
    batch_id = (await create(idle, lines(10), expiry=ONE_HOUR)).json()["id"]
    await until(idle, batch_id, "in_progress")
    pass_an_hour(monkeypatch)
    await ask(idle, f"{BATCHES}/{batch_id}/cancel", method="POST")
    batch = await until(idle, batch_id)
    errors = await results(idle, batch.error_file_id)
    assert (batch.status, batch.request_counts.failed) == ("cancelled", 10)
    assert [row["error"]["code"] for row in errors.values()] == ["batch_cancelled"] * 10


@pytest.mark.parametrize(("window", "status", "num_answers"), [("24h", "completed", 5), ("1h", "expired", 0)])
async def test_another_process_goes_on_with_an_input_that_has_expired(
    idle, frontend, tmp_path, monkeypatch, window, status, num_answers
):
    batch_id = (await create(idle, lines(5), window=window, expiry=ONE_HOUR)).json()["id"]
    await until(idle, batch_id, "in_progress")
    await idle.app._files.stop()
    pass_an_hour(monkeypatch)
    other = await frontend(files_folder=tmp_path)
    async with generating(other):
        batch = await until(other, batch_id)
    answers, errors = await results(other, batch.output_file_id), await results(other, batch.error_file_id)
    assert (batch.status, len(answers), len(errors)) == (status, num_answers, 5 - num_answers)


async def test_a_cancel_reaches_the_process_that_runs_the_batch(idle, frontend, tmp_path):
    batch_id = (await create(idle, lines(20))).json()["id"]
    await until(idle, batch_id, "in_progress")
    other = await frontend(files_folder=tmp_path)
    assert (await ask(other, f"{BATCHES}/{batch_id}/cancel", method="POST")).json()["status"] == "cancelling"
    assert (await until(other, batch_id)).status == "cancelled"


async def test_batches_are_one_key_s_alone(frontend, tmp_path):
    bench = await frontend(keys_of("alice", "bob"), files_folder=tmp_path)
    alice, bob = bearer("alice"), bearer("bob")
    told = (await create(bench, line(0), headers=alice)).json()
    assert (await create(bench, b"", headers=bob)).status == 200
    other = {"input_file_id": told["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
    assert (await bench.call("POST", BATCHES, other, bob).end()).status == 404
    for method, path in (("GET", told["id"]), ("POST", f"{told['id']}/cancel")):
        assert (await ask(bench, f"{BATCHES}/{path}", method=method, headers=bob)).status == 404
    assert told["id"] not in (await ask(bench, BATCHES, headers=bob)).data.decode()
    async with generating(bench):
        batch = await until(bench, told["id"], headers=alice)
    assert (await ask(bench, f"{FILES}/{batch.output_file_id}", headers=bob)).status == 404
    assert len(await results(bench, batch.output_file_id, alice)) == 1


async def test_batches_are_listed_page_by_page_and_bounded(idle):
    ids = [(await create(idle, lines(1))).json()["id"] for _ in range(2)]
    page = (await ask(idle, BATCHES, "limit=1")).json()
    rest = (await ask(idle, BATCHES, f"limit=1&after={page['last_id']}")).json()
    assert [batch["id"] for batch in page["data"] + rest["data"]] == ids[::-1]
    assert page["has_more"] and not rest["has_more"]
    assert (await ask(idle, BATCHES, "after=batch_1")).status == 400
    assert (await create(idle, lines(1))).status == 429


async def test_the_input_of_a_running_batch_can_t_be_deleted(idle):
    told = (await create(idle, lines(1))).json()
    reply = await ask(idle, f"{FILES}/{told['input_file_id']}", method="DELETE")
    assert (reply.status, reply.json()["error"]["code"]) == (409, "file_in_use")


async def test_answers_that_are_too_large_end_the_batch_and_those_that_came_are_kept(frontend, tmp_path):
    bench = await frontend(
        files_folder=tmp_path, frontend={"files": {"max_bytes": 10_000}, "batches": {"max_concurrency": 1}}
    )
    async with generating(bench):
        batch, answers, errors = await ended(bench, lines(40))
    assert (batch.status, batch.errors.data[0].code) == ("failed", "output_too_large")
    assert answers and errors and len(answers) + len(errors) == 40
