"""The frontend's videos over a worker that a test drives: keys, ends, and what leaves with a client."""

import asyncio
import time

import pytest

from bireme.errors import EngineLostError, RequestError, UnavailableError
from bireme.metrics import Registry
from bireme.observability.traces import Traces
from bireme.openai.openapi import OPERATIONS
from bireme.openai.video.job_store import JobStore
from tests.observability.span_trees import check_tree, shown
from tests.openai.api_keys import bearer, keys_of


async def create(bench, headers=None, **fields):
    reply = await bench.call("POST", "/v1/videos", {"prompt": "x", **fields}, headers).end()
    assert reply.status == 200, reply.data
    return reply.json()["id"]


async def job(bench, job_id, headers=None):
    return (await bench.call("GET", f"/v1/videos/{job_id}", headers=headers).end()).json()


async def until_status(bench, job_id, status, headers=None):
    for _ in range(3000):
        found = await job(bench, job_id, headers)
        if found["status"] == status:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(found)


async def test_a_job_belongs_to_the_key_that_made_it(start):
    bench = await start(keys_of("alice", "bob"))
    made = await create(bench, bearer("alice"))
    assert (await job(bench, made, bearer("alice")))["id"] == made
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert (await bench.call(method, f"/v1/videos/{made}{path}", headers=bearer("bob")).end()).status == 404
    assert (await bench.call("GET", "/v1/videos", headers=bearer("bob")).end()).json()["data"] == []
    assert (await bench.call("GET", f"/v1/videos/{made}").end()).status == 401


async def test_a_job_counts_as_a_request_of_its_key_until_it_ends(start):
    bench = await start(keys_of("alice", "bob", max_concurrent_requests=1))
    made = await create(bench, bearer("alice"))
    refused = await bench.call("POST", "/v1/videos", {"prompt": "x"}, bearer("alice")).end()
    assert refused.status == 429
    await create(bench, bearer("bob"))
    bench.workers.ends[0].set_result(b"clip")
    await until_status(bench, made, "completed", bearer("alice"))
    await create(bench, bearer("alice"))


async def test_a_finished_job_gives_its_file_whole_and_in_parts(start):
    bench = await start()
    made = await create(bench)
    assert (await bench.call("GET", f"/v1/videos/{made}/content").end()).status == 409
    await bench.workers.begun()
    bench.workers.ends[0].set_result(b"0123456789")
    await until_status(bench, made, "completed")
    whole = await bench.call("GET", f"/v1/videos/{made}/content").end()
    assert (whole.data, whole.headers["content-type"]) == (b"0123456789", "video/mp4")
    for given, status, data in (("bytes=2-4", 206, b"234"), ("bytes=-3", 206, b"789"), ("bytes=7-", 206, b"789")):
        part = await bench.call("GET", f"/v1/videos/{made}/content", headers={"range": given}).end()
        assert (part.status, part.data) == (status, data)
    beyond = await bench.call("GET", f"/v1/videos/{made}/content", headers={"range": "bytes=10-"}).end()
    assert beyond.status == 416 and beyond.headers["content-range"] == "bytes */10"


async def test_an_engine_that_dies_fails_the_job_with_a_reason(start):
    bench = await start()
    made = await create(bench)
    await bench.workers.begun()
    bench.workers.ends[0].set_exception(EngineLostError("the engine process has ended"))
    failed = await until_status(bench, made, "failed")
    assert failed["error"] == {"code": "unavailable", "message": "the engine process has ended"}


async def test_what_the_worker_refuses_is_refused_and_leaves_no_job(start):
    bench = await start()
    bench.workers.refusal = RequestError("size: 9x9; too small")
    reply = await bench.call("POST", "/v1/videos", {"prompt": "x"}).end()
    assert (reply.status, reply.json()["error"]["param"]) == (400, "size")
    assert (await bench.call("GET", "/v1/videos").end()).json()["data"] == []


async def test_a_progress_that_can_t_be_kept_ends_no_generation(start, monkeypatch):
    bench, kept = await start(), JobStore.report
    failures = [UnavailableError("the disk is full")]

    def report(*arguments):
        if failures:
            raise failures.pop()
        return kept(*arguments)

    monkeypatch.setattr(JobStore, "report", report)
    made = await create(bench)
    await bench.workers.begun()
    while failures:
        await asyncio.sleep(0.01)
    bench.workers.ends[0].set_result(b"video")
    await until_status(bench, made, "completed")


async def test_a_job_that_can_t_be_kept_is_refused_with_the_reason(start, monkeypatch):
    def add(*_):
        raise UnavailableError("the disk is full")

    bench = await start()
    monkeypatch.setattr(JobStore, "add", add)
    reply = await bench.call("POST", "/v1/videos", {"prompt": "x"}).end()
    assert reply.status == 503 and "the disk is full" in reply.json()["error"]["message"]
    while not bench.workers.num_left:
        await asyncio.sleep(0.01)


async def test_deleting_a_job_under_way_ends_its_generation(start):
    bench = await start()
    made = await create(bench)
    await bench.workers.begun()
    assert (await bench.call("DELETE", f"/v1/videos/{made}").end()).json()["deleted"]
    await asyncio.sleep(0.1)
    assert bench.workers.num_left == 1


async def test_a_client_that_leaves_a_generation_ends_it(start):
    bench = await start()
    reply = bench.call("POST", "/v1/videos/generations", {"prompt": "x", "stream": True})
    await bench.workers.begun()
    reply.leave()
    await reply.end()
    assert bench.workers.num_left == 1


async def test_a_url_needs_no_key_and_a_generation_does(start):
    bench = await start(keys_of("alice", "bob"))
    body = {"prompt": "x", "response_format": "url"}
    assert (await bench.call("POST", "/v1/videos/generations", body).end()).status == 401
    reply = bench.call("POST", "/v1/videos/generations", body, bearer("alice"))
    await bench.workers.begun()
    bench.workers.ends[0].set_result(b"clip")
    url = (await reply.end()).json()["data"][0]["url"]
    assert (await bench.call("GET", url.removeprefix("http://here")).end()).data == b"clip"
    assert (await bench.call("GET", "/files/file-0.mp4").end()).status == 404


async def test_jobs_under_way_at_a_stop_have_failed_at_the_next_start(start, tmp_path):
    bench = await start()
    made = await create(bench)
    await bench.app.stop()
    store = JobStore(tmp_path)
    assert (store.find(made, "").status, store.find(made, "").error_code) == ("failed", "server_error")
    store.close()


WRONG_LISTINGS = ["limit=0", "limit=x", "limit=0000000011099999", "limit=00000001" + "0" * 30, "limit=%D9%A1",
                  "order=up", "after=nobody", "page=2"]  # fmt: skip


@pytest.mark.parametrize("query", WRONG_LISTINGS)
async def test_a_listing_with_wrong_parameters_is_refused(start, query):
    bench = await start()
    again = await bench.call("GET", "/v1/videos", query=query).end()
    assert again.status in (400, 404)


async def walk(bench, order, limit=2):
    """Return the ids of all pages, and what each says of more."""
    ids, more, after = [], [], ""
    while not more or more[-1]:
        query = f"limit={limit}&order={order}{after}"
        page = (await bench.call("GET", "/v1/videos", query=query).end()).json()
        ids += [one["id"] for one in page["data"]]
        more.append(page["has_more"])
        after = f"&after={page['last_id']}"
    return ids, more


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_the_jobs_of_two_models_are_one_list_by_age(start, monkeypatch, order):
    bench, made, now = await start(names=("clips", "films")), [], int(time.time())
    monkeypatch.setattr(time, "time", lambda: now + len(made))
    for model in ("clips", "films", "films", "clips", "films", "clips"):
        made.append(await create(bench, model=model))
    assert await walk(bench, order) == (made if order == "asc" else made[::-1], [True, True, False])


async def test_jobs_of_one_second_are_each_listed_once(start, monkeypatch):
    bench, now = await start(names=("clips", "films")), time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    made = [await create(bench, model=model) for model in ("films", "clips", "films", "films", "clips")]
    oldest_first, _ = await walk(bench, "asc", 1)
    newest_first, _ = await walk(bench, "desc", 1)
    assert sorted(oldest_first) == sorted(made) and newest_first == oldest_first[::-1]


async def test_a_page_after_another_key_s_job_is_a_404(start):
    bench = await start(keys_of("alice", "bob"), names=("clips", "films"))
    made = await create(bench, bearer("alice"), model="films")
    for key, status in (("alice", 200), ("bob", 404)):
        reply = await bench.call("GET", "/v1/videos", query=f"after={made}", headers=bearer(key)).end()
        assert reply.status == status


async def test_every_path_of_videos_is_described_with_its_methods(start):
    app = (await start()).app
    for path in {one.path for one in OPERATIONS if "video" in one.path or "images" in one.path}:
        methods = app._methods(path.replace("{id}", "x"))
        assert set(methods) == {one.method for one in OPERATIONS if one.path == path}, path


async def test_a_video_model_says_that_it_makes_videos_of_text(start):
    bench = await start()
    [model] = (await bench.call("GET", "/v1/models").end()).json()["data"]
    assert model["bireme"] == {"input_modalities": ["text"], "output_modalities": ["video", "image"]}
    assert (await bench.call("GET", "/v1/models/clips").end()).json() == model


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_a_video_model_asked_for_text_says_what_it_makes_and_where(start, path):
    bench = await start()
    text = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    reply = await bench.call("POST", path, {"model": "clips", **text}).end()
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "wrong_endpoint", "model")
    assert "clips makes videos" in error["message"] and "/v1/videos" in error["message"]


async def test_a_traced_request_names_its_worker(start):
    traces, read = Traces(Registry("frontend"), 1.0), []
    traces.subscribe(read.append)
    bench = await start(traces=traces)
    reply = bench.call("POST", "/v1/videos/generations", {"prompt": "x"})
    await bench.workers.begun()
    bench.workers.ends[0].set_result(b"film")
    assert (await reply.end()).status == 200
    check_tree(read[0])
    assert shown(read[0]) == ["POST /v1/videos/generations", "  video"]
    assert read[0].spans[1].attributes == {"worker": "video_diffusion"}
