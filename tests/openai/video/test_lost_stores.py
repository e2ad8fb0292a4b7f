"""A frontend with videos serves with a disk that is full or read-only, a locked database, or a damaged file."""

import sqlite3
import subprocess

import pytest

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.metrics import Registry
from bireme.openai.text.served_model import ServedModel
from bireme.workers.fake import FakeWorkers
from tests.openai.batch.forms import ask
from tests.openai.conftest import letters
from tests.openai.lost_disks import another_program, fill, until
from tests.openai.video.test_videos import create, job, until_status

pytestmark = pytest.mark.usefixtures("short_waits")
STORE, VIDEOS, GENERATIONS, IMAGES = "videos-clips", "/v1/videos", "/v1/videos/generations", "/v1/images/generations"


@pytest.fixture
async def serve(start, disk):
    """Return a function that starts a frontend of a text model and a video model, and its text workers."""

    async def serve_both():
        workers = FakeWorkers()
        tree = {"model": "none", "workers": {"decode": {"engine": "mocker"}}, "name": "test"}
        recipe = convert(tree | {"router": {"transfer_ms": 0}}, Recipe, "test")
        return await start(first=disk, texts=[ServedModel(recipe, workers, letters(), Registry("frontend"))]), workers

    return serve_both


async def check_serving(bench, workers, reason):
    """Chats and videos within the answer are served; what needs the folder is refused with the reason."""
    chat = bench.chat()
    await workers.emit(4)
    assert (await chat.end()).json()["choices"]
    replies = [
        await bench.call("POST", VIDEOS, {"prompt": "x"}).end(),
        await bench.call("POST", GENERATIONS, {"prompt": "x", "response_format": "url"}).end(),
        await bench.call("POST", IMAGES, {"prompt": "x", "response_format": "url"}).end(),
    ]
    assert [(reply.status, reason in reply.json()["error"]["message"]) for reply in replies] == [(503, True)] * 3
    within = bench.call("POST", GENERATIONS, {"prompt": "x", "response_format": "b64_json"})
    await end_one(bench)
    assert (await within.end()).status == 200


async def end_one(bench):
    await bench.workers.begun()
    bench.workers.ends.pop().set_result(b"clip")


async def check_keeping(bench):
    made = await create(bench)
    await end_one(bench)
    await until_status(bench, made, "completed")
    assert (await ask(bench, f"{VIDEOS}/{made}/content")).data == b"clip"
    return made


async def test_a_full_disk_costs_no_chat_and_is_used_again_once_it_has_room(serve, disk):
    fill(disk)
    bench, workers = await serve()
    assert "No space" in (await until(bench, "degraded", STORE))["stores"][STORE]
    await check_serving(bench, workers, "No space")
    assert (await ask(bench, VIDEOS)).status == (await ask(bench, f"{VIDEOS}/video_1")).status == 503
    (disk / "filler").unlink()
    await until(bench, "ready")
    await check_keeping(bench)


async def test_a_disk_that_fills_up_leaves_what_is_kept_readable(serve, disk):
    bench, workers = await serve()
    kept = await check_keeping(bench)
    fill(disk)
    while (await bench.call("POST", VIDEOS, {"prompt": "x" * 1000}).end()).status != 503:
        pass
    assert "full" in (await until(bench, "degraded", STORE))["stores"][STORE]
    for end in bench.workers.ends:
        end.cancel()
    bench.workers.ends.clear()
    await check_serving(bench, workers, "try again")
    assert (await ask(bench, f"{VIDEOS}/{kept}/content")).data == b"clip"
    (disk / "filler").unlink()
    await until(bench, "ready")
    await check_keeping(bench)


async def test_a_read_only_disk_at_the_start_costs_no_chat(serve, disk):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    bench, workers = await serve()
    assert "Read-only" in (await until(bench, "degraded", STORE))["stores"][STORE]
    await check_serving(bench, workers, "Read-only")
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    await until(bench, "ready")
    await check_keeping(bench)


async def test_a_database_that_another_program_holds_at_the_start_costs_no_chat(serve, disk):
    sqlite3.connect(disk / "jobs.sqlite").execute("CREATE TABLE own (id)")
    with another_program(disk / "jobs.sqlite", what="c.execute('BEGIN EXCLUSIVE')"):
        bench, workers = await serve()
        assert "locked" in (await until(bench, "degraded", STORE))["stores"][STORE]
        await check_serving(bench, workers, "locked")
    await until(bench, "ready")
    await check_keeping(bench)


async def test_a_damaged_file_is_put_aside(serve, disk):
    (disk / "jobs.sqlite").write_bytes(bytes(range(256)) * 32)
    bench, _ = await serve()
    await check_keeping(bench)
    assert list(disk.glob("jobs.sqlite.damaged-*"))


async def test_the_end_of_a_job_is_noted_once_it_can_be(serve, disk):
    bench, _ = await serve()
    made = await create(bench)
    with another_program(disk / "jobs.sqlite", what="c.execute('BEGIN IMMEDIATE')"):
        await end_one(bench)
        await until(bench, "degraded", STORE)
        assert (await job(bench, made))["status"] == "in_progress"
    await until_status(bench, made, "completed")
