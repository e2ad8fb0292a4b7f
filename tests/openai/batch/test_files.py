"""/v1/files over fake workers: uploads to disk, lists, contents, and what is refused."""

import asyncio
import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai.types import FileObject

from bireme.config import FilesConfig
from bireme.openai.batch.upload import Upload
from bireme.openai.batch.upload_store import UploadStore
from bireme.openai.http.error_replies import HttpError
from tests.openai.api_keys import bearer, keys_of
from tests.openai.batch.forms import END, FILES, FORM, ask, form, part, post, upload

LIMITS = {"max_file_bytes": 1000, "max_files": 2, "max_bytes": 1500}


@pytest.fixture
async def bench(frontend, tmp_path):
    return await frontend(files_folder=tmp_path)


@pytest.fixture
async def small(frontend, tmp_path):
    return await frontend(files_folder=tmp_path, frontend={"files": LIMITS})


def contents(folder):
    return list((folder / "content").iterdir())


async def test_a_file_is_kept_as_it_was_sent(bench):
    content = bytes(range(256)) * 9000  # more than what is read at once
    told = FileObject.model_validate_json((await upload(bench, content)).data, strict=True)
    assert (told.filename, told.bytes, told.purpose, told.status) == ("in.jsonl", len(content), "batch", "processed")
    assert (await ask(bench, f"{FILES}/{told.id}")).json() == told.model_dump()
    reply = await ask(bench, f"{FILES}/{told.id}/content")
    assert reply.data == content and reply.headers["content-length"] == str(len(content))
    head = await ask(bench, f"{FILES}/{told.id}/content", method="HEAD")
    assert (head.data, head.headers["content-length"]) == (b"", str(len(content)))


async def test_a_body_that_comes_byte_by_byte_is_the_same_file(bench):
    content = b"line\n--xyz is no boundary\r\n--xy"
    body = form(content)
    told = (await post(bench, tuple(body[at : at + 1] for at in range(len(body)))).end()).json()
    assert (await ask(bench, f"{FILES}/{told['id']}/content")).data == content


async def test_files_are_listed_page_by_page(bench):
    ids = [(await upload(bench, filename=f"{number}.jsonl")).json()["id"] for number in range(3)]
    page = (await ask(bench, FILES, "limit=2&order=asc")).json()
    rest = (await ask(bench, FILES, f"order=asc&purpose=batch&after={page['last_id']}")).json()
    assert [file["id"] for file in page["data"] + rest["data"]] == ids
    assert page["has_more"] and not rest["has_more"]
    assert (await ask(bench, FILES, "limit=1")).json()["first_id"] == ids[2]
    assert (await ask(bench, FILES, "purpose=batch_output")).json()["data"] == []


WRONG_PAGES = ["limit=0", "limit=10001", "limit=0000000110001", "limit=00000001" + "0" * 30, "order=up",
               "after=file-1", "page=2"]  # fmt: skip


@pytest.mark.parametrize("query", WRONG_PAGES)
async def test_a_wrong_page_is_a_400(bench, query):
    assert (await ask(bench, FILES, query)).status == 400


async def test_a_deleted_file_is_gone_from_the_disk_as_well(bench, tmp_path):
    told = (await upload(bench)).json()
    assert (await ask(bench, f"{FILES}/{told['id']}", method="DELETE")).json()["deleted"] is True
    for path in ("", "/content"):
        assert (await ask(bench, f"{FILES}/{told['id']}{path}")).status == 404
    assert contents(tmp_path) == []


async def test_a_key_sees_its_own_files_alone(frontend, tmp_path):
    bench = await frontend(keys_of("alice", "bob"), files_folder=tmp_path)
    told = (await upload(bench, headers=bearer("alice"))).json()
    path = f"{FILES}/{told['id']}"
    assert (await ask(bench, path, headers=bearer("alice"))).status == 200
    for method, asked in (("GET", path), ("DELETE", path), ("GET", f"{path}/content")):
        assert (await ask(bench, asked, method=method, headers=bearer("bob"))).status == 404
    assert (await ask(bench, FILES, headers=bearer("bob"))).json()["data"] == []


WRONG_FORMS = {
    "no purpose": (form(purpose=None), "purpose"),
    "another purpose": (form(purpose="fine-tune"), "purpose"),
    "an unknown field": (form(color="red"), "color"),
    "an anchor alone": (form(**{"expires_after[anchor]": "created_at"}), "expires_after[seconds]"),
    "another anchor": (form(**{"expires_after[anchor]": "now"}), "expires_after[anchor]"),
    "no file": (part("purpose", b"batch") + END, "file"),
    "two files": (part("file", b"a", "a") + form(), "file"),
    "a file of another name": (part("purpose", b"batch") + part("data", b"a", "a") + END, "data"),
    "a field that is no text": (part("purpose", b"\xff") + form(purpose=None), "purpose"),
    "a field sent twice": (part("purpose", b"batch") + form(), "purpose"),
    "a long field": (form(purpose="b" * 5000), "purpose"),
    "many fields": (b"".join(part(f"n{at}", b"") for at in range(20)) + form(), None),
    "a part without a name": (b"--xyz\r\nContent-Type: text/plain\r\n\r\nx\r\n" + form(), None),
    "a file name with a null": (form(filename="a\x00b"), "file"),
    "a long file name": (form(filename="a" * 256), "file"),
    "no end": (form().removesuffix(END), None),
    "no form": (b"hello", None),
    "nothing": (b"", None),
    "headers without end": (b"--xyz\r\n" + b"A: b\r\n" * 5000, None),
}


@pytest.mark.parametrize("name", WRONG_FORMS)
async def test_a_wrong_form_is_a_400_and_leaves_nothing_on_the_disk(bench, tmp_path, name):
    body, param = WRONG_FORMS[name]
    reply = await post(bench, body).end()
    assert (reply.status, reply.json()["error"]["param"]) == (400, param), reply.data
    assert contents(tmp_path) == []


async def test_a_part_s_headers_are_bounded_together(bench):
    headers = b"".join(b"X-%d: %b\r\n" % (number, b"a" * 3000) for number in range(3))
    reply = await post(bench, form().replace(b"--xyz\r\n", b"--xyz\r\n" + headers, 1)).end()
    assert reply.status == 400 and "headers have more than 8192 bytes" in reply.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "multipart/form-data; boundary="])
async def test_what_is_no_form_by_its_type_is_a_415(bench, kind):
    assert (await post(bench, form(), {"content-type": kind}).end()).status == 415


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..\\..\\x", "C:\\x\\..\\passwd", ".."])
async def test_a_file_s_name_is_shown_and_names_nothing_on_the_disk(bench, tmp_path, name):
    told = (await upload(bench, filename=name)).json()
    assert "/" not in told["filename"] and "\\" not in told["filename"]
    assert [path.name for path in contents(tmp_path)] == [told["id"]]


@pytest.mark.parametrize("name", ["..%2f..%2fetc", "../files.sqlite", "%2e%2e", "file-", "."])
async def test_a_path_that_is_no_id_finds_nothing(bench, name):
    assert (await ask(bench, f"{FILES}/{name}/content")).status == 404


async def test_a_large_file_is_refused_by_its_announced_length_unread(small):
    reply = small.call("POST", FILES, None, {**FORM, "content-length": str(1 << 31)}, is_body_coming=False)
    assert (await reply.end()).status == 413 and "frontend.files.max_file_bytes 1000" in reply.json()["error"][
        "message"
    ]


async def test_a_large_file_of_unknown_length_is_refused_as_soon_as_it_is_too_large(small, tmp_path):
    endless = (form(b"x" * 2000).removesuffix(END), *[b"x" * (1 << 20)] * 50)
    reply = await post(small, endless).end()
    assert (reply.status, reply.json()["error"]["code"]) == (413, "too_large")
    assert contents(tmp_path) == []


async def test_a_key_s_files_are_bounded_by_number_and_by_bytes(small):
    assert (await upload(small, b"x" * 900)).status == 200
    assert (await upload(small, b"x" * 900)).json()["error"]["code"] == "quota_exceeded"
    assert (await upload(small, b"x" * 500)).status == 200
    assert (await upload(small, b"x")).json()["error"]["code"] == "quota_exceeded"


async def test_an_upload_that_its_client_cancels_leaves_nothing(bench, tmp_path):
    reply = bench.call("POST", FILES, (form(b"x" * 5000)[:3000], b"x"), FORM, is_body_coming=False)
    reply.leave()
    await reply.end()
    assert reply.messages == [] and contents(tmp_path) == []


async def test_a_full_disk_is_a_503_that_may_pass(bench, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Upload, "feed", fail)
    reply = await upload(bench)
    assert reply.status == 503 and "No space left" in reply.json()["error"]["message"]
    assert contents(tmp_path) == []


async def test_a_file_goes_when_its_time_has_come(bench, tmp_path, monkeypatch):
    told = (await upload(bench, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})).json()
    assert told["expires_at"] - told["created_at"] == 3600
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3700)
    assert (await ask(bench, f"{FILES}/{told['id']}")).status == 404
    store = UploadStore(tmp_path, bench.app._config.files)
    assert store.sweep(used=frozenset({told["id"]})) == 0
    assert store.sweep(used=frozenset()) == 1 and contents(tmp_path) == []
    store.close()


async def test_without_room_for_files_there_are_no_such_paths(frontend):
    bench = await frontend(frontend={"files": {"max_files": 0}})
    for path in (FILES, f"{FILES}/file-1", "/v1/batches"):
        assert (await ask(bench, path)).status == 404


async def test_an_upload_has_its_room_before_its_bytes_are_here(frontend, tmp_path):
    bench = await frontend(files_folder=tmp_path, frontend={"files": {"max_bytes": 150_000}})
    body = form(b"x" * 100_000 * 2)
    first = bench.call(
        "POST", FILES, (body[:5],), {**FORM, "content-length": str(len(body) - 60_000)}, is_body_coming=False
    )
    second = bench.call("POST", FILES, None, {**FORM, "content-length": str(len(body))}, is_body_coming=False)
    assert (await second.end()).json()["error"]["code"] == "quota_exceeded"
    first.leave()
    await first.end()
    assert (await upload(bench, b"x" * 150_000)).status == 200


async def test_an_upload_that_fails_while_the_store_is_down_leaves_no_bytes_behind(bench, tmp_path):
    body = form(b"x" * 5000)
    headers = {**FORM, "content-length": str(len(body))}
    reply = bench.call("POST", FILES, (body[:4000],), headers, is_body_coming=False)
    while not list(tmp_path.glob("content/*.part")):
        await asyncio.sleep(0.001)
    bench.app._files.store.problem = "the disk is full"
    reply.leave()
    await reply.end()
    assert contents(tmp_path) == []


async def test_uploads_side_by_side_stay_within_the_bytes_of_a_key(small, tmp_path):
    content, begins = form(b"x" * 900), []
    for _ in range(2):
        begins.append(post(small, (content[:700], content[700:])))
    replies = [await reply.end() for reply in begins]
    assert sorted(reply.status for reply in replies) == [200, 400]
    assert len(contents(tmp_path)) == 1
    assert (await upload(small, b"x" * 500)).status == 200, "what was refused counts no more"


@pytest.fixture
def store(tmp_path):
    store = UploadStore(tmp_path, FilesConfig(max_files=3, max_bytes=1000))
    yield store
    store.close()


def test_an_upload_counts_from_its_beginning_to_its_end(store):
    first, second = store.new_part(), store.new_part()
    store.set_aside(first, "alice", 800)
    with pytest.raises(HttpError, match="800 bytes of this key"):
        store.set_aside(second, "alice", 300)
    store.set_aside(second, "bob", 300)
    with pytest.raises(HttpError, match="frontend.files.max_bytes"):
        store.set_aside(first, "alice", 1001)
    store.set_aside(first, "alice", 1000)
    store.give_up(first)
    store.set_aside(second, "alice", 1000)


def test_uploads_under_way_count_as_files(store):
    for _ in range(3):
        store.set_aside(store.new_part(), "alice", 1)
    with pytest.raises(HttpError, match="frontend.files.max_files"):
        store.set_aside(store.new_part(), "alice", 1)


def test_two_stores_of_a_folder_never_give_the_same_room_twice(store, tmp_path):
    other = UploadStore(tmp_path, store._config)

    def ask(one):
        try:
            one.set_aside(one.new_part(), "alice", 400)
        except HttpError:
            return 0
        return 400

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, [store, other] * 8)) == 800
    other.close()


def test_what_a_killed_frontend_was_sent_counts_for_an_hour(store, monkeypatch):
    store.set_aside(store.new_part(), "alice", 1000)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3700)
    store.sweep(used=frozenset())
    store.set_aside(store.new_part(), "alice", 1000)
