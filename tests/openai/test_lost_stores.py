"""A frontend serves with a disk that is full or read-only, a locked database, or a damaged file."""

import asyncio
import contextlib
import os
import shutil
import sqlite3
import subprocess

import pytest

from bireme.openai import store_thread
from tests.openai.batch.forms import ask, upload
from tests.openai.lost_disks import another_program, fill, report, until

FILES, BATCHES, RESPONSES = "/v1/files", "/v1/batches", "/v1/responses"
BODY = {"model": "test", "input": "hi", "max_output_tokens": 4}
GARBAGE = bytes(range(256)) * 32
pytestmark = pytest.mark.usefixtures("short_waits")


@pytest.fixture
def start(frontend):
    """Return a function that starts a frontend which keeps what it keeps in a folder."""
    return lambda folder: frontend(files_folder=folder, responses_folder=folder)


async def told(bench, reply):
    await bench.workers.emit(4)
    return (await reply.end()).json()


async def respond(bench, **fields):
    return await told(bench, bench.call("POST", RESPONSES, {**BODY, **fields}))


async def check_serving(bench, reason):
    """Chats are answered, what is not kept is told, and what needs the store is refused with the reason."""
    assert (await told(bench, bench.chat()))["choices"]
    assert (await respond(bench))["store"] is False
    replies = [await upload(bench), await bench.call("POST", RESPONSES, {**BODY, "background": True}).end()]
    assert [reply.status for reply in replies] == [503, 503]
    assert all(reason in reply.json()["error"]["message"] for reply in replies)


async def check_keeping(bench):
    assert (await upload(bench)).status == 200
    kept = await respond(bench)
    assert "store" not in kept and (await ask(bench, f"{RESPONSES}/{kept['id']}")).status == 200


async def test_a_damaged_file_is_put_aside_and_nothing_is_deleted(start, tmp_path):
    (tmp_path / "content").mkdir()
    (tmp_path / "content" / "file-1").write_bytes(b"a line\n")
    for name in ("responses.sqlite", "files.sqlite"):
        (tmp_path / name).write_bytes(GARBAGE)
    bench = await start(tmp_path)
    await check_keeping(bench)
    assert [path.read_bytes() for path in tmp_path.glob("*.sqlite.damaged-*")] == [GARBAGE] * 2
    assert [path.read_bytes() for path in tmp_path.glob("content.damaged-*/*")] == [b"a line\n"]
    assert (await report(bench))["status"] == "ready"


async def test_a_file_that_is_damaged_while_it_is_used_is_put_aside_by_whichever_process_meets_it(start, tmp_path):
    one, other = await start(tmp_path), await start(tmp_path)
    kept = [await respond(bench, metadata={"much": "x" * 500}) for bench in (one, other) * 20]
    sqlite3.connect(tmp_path / "responses.sqlite").execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = (tmp_path / "responses.sqlite").stat().st_size
    with (tmp_path / "responses.sqlite").open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    statuses = [(await ask(one, f"{RESPONSES}/{response['id']}")).status for response in kept]
    assert set(statuses) <= {404, 503} and 503 in statuses
    for bench in (one, other):
        await until(bench, "ready")
        await check_keeping(bench)
    files = [path for path in tmp_path.glob("responses.sqlite.damaged-*") if not path.name.endswith(("-wal", "-shm"))]
    assert [path.stat().st_size for path in files] == [size]


async def test_a_full_disk_costs_no_chat_and_is_used_again_once_it_has_room(start, disk):
    fill(disk)
    bench = await start(disk)
    assert str(disk) not in str(await until(bench, "degraded", "files", "responses"))
    await check_serving(bench, "can't be opened")
    (disk / "filler").unlink()
    await until(bench, "ready")
    await check_keeping(bench)


async def test_a_disk_that_fills_up_leaves_what_is_kept_readable(start, disk):
    bench = await start(disk)
    kept = await respond(bench)
    fill(disk)
    for _ in range(200):
        if "store" in await respond(bench, metadata={"much": "x" * 500}):
            break
    assert "full" in (await until(bench, "degraded", "responses"))["stores"]["responses"]
    assert (await ask(bench, f"{RESPONSES}/{kept['id']}")).status == 200
    (disk / "filler").unlink()
    await until(bench, "ready")
    await check_keeping(bench)


async def test_a_read_only_disk_costs_no_chat_and_is_used_again_once_it_can_be_written(start, disk):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    bench = await start(disk)
    assert "Read-only" in (await until(bench, "degraded", "files", "responses"))["stores"]["files"]
    await check_serving(bench, "Read-only")
    assert (await ask(bench, BATCHES)).status == (await ask(bench, f"{RESPONSES}/resp_1")).status == 503
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    await until(bench, "ready")
    await check_keeping(bench)


async def test_a_database_that_another_program_holds_at_the_start_keeps_no_chat_waiting(start, tmp_path):
    for name in ("responses.sqlite", "files.sqlite"):
        sqlite3.connect(tmp_path / name).execute("CREATE TABLE own (id)")
    with contextlib.ExitStack() as held:
        for name in ("responses.sqlite", "files.sqlite"):
            held.enter_context(another_program(tmp_path / name, what="c.execute('BEGIN EXCLUSIVE')"))
        bench = await start(tmp_path)
        await check_serving(bench, "locked")
        assert "locked" in (await until(bench, "degraded", "responses"))["stores"]["responses"]
    await until(bench, "ready")
    await check_keeping(bench)


async def test_reads_do_not_wait_for_writes_that_another_program_holds_up(start, tmp_path):
    bench = await start(tmp_path)
    file = (await upload(bench)).json()
    with another_program(tmp_path / "files.sqlite", what="c.execute('BEGIN IMMEDIATE')"):
        writes = [asyncio.ensure_future(upload(bench)) for _ in range(5)]
        await asyncio.sleep(0.05)
        for path in (FILES, BATCHES, f"{FILES}/{file['id']}", f"{FILES}/{file['id']}/content"):
            assert (await ask(bench, path)).status == 200
        assert not any(write.done() for write in writes)
        await asyncio.wait(writes)
    await until(bench, "ready")


async def test_a_folder_that_can_t_be_made_is_told(start, tmp_path):
    (tmp_path / "kept").write_text("")
    bench = await start(tmp_path / "kept")
    assert "File exists" in (await until(bench, "degraded", "files"))["stores"]["files"]
    (tmp_path / "kept").unlink()
    await until(bench, "ready")


async def test_a_store_is_tried_again_after_a_try_that_failed_otherwise(start, tmp_path, monkeypatch):
    (tmp_path / "kept").write_text("")
    bench = await start(tmp_path / "kept")
    await until(bench, "degraded", "files", "responses")
    with monkeypatch.context() as patched:
        tries = []
        patched.setattr(store_thread.StoreThread, "_check", lambda store: tries.append(store.name) or 1 / 0)
        while set(tries) != {"files", "responses"}:
            await asyncio.sleep(0.01)
    (tmp_path / "kept").unlink()
    await until(bench, "ready")


async def test_a_folder_that_was_removed_is_made_again(start, tmp_path):
    bench = await start(tmp_path / "kept")
    await check_keeping(bench)
    shutil.rmtree(tmp_path / "kept")
    await check_keeping(bench)
