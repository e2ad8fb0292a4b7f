"""The database of responses: what goes on from what, what is removed, and who works on what."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest

from bireme.config import StoredResponsesConfig
from bireme.errors import UnavailableError
from bireme.openai.database import DatabaseError
from bireme.openai.text.response_store import NewResponse, ResponseStore

ITEMS = [{"id": "msg_1", "type": "message"}]


@pytest.fixture
def open_store(tmp_path):
    stores = []

    def get(**limits):
        stores.append(ResponseStore(tmp_path, StoredResponsesConfig(**limits)))
        return stores[-1]

    yield get
    for store in stores:
        store.close()


def add(store, name, previous=None, tenant="", size=0, request=None):
    store.add(NewResponse(name, tenant, previous, b'{"output":[],"pad":"%b"}' % (b"x" * size), ITEMS, request))


def names(rows):
    return rows and [row.id for row in rows]


def test_a_history_is_what_a_response_goes_on_from(open_store):
    store = open_store()
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("d", "b")):
        add(store, name, previous)
    assert names(store.history("d", "", 1 << 20)) == ["a", "b", "d"]
    assert store.history("d", "", 100) is None and store.history("d", "bob", 1 << 20) is None
    store.remove("a", "")
    assert store.history("d", "", 1 << 20) is None


def test_a_turn_ends_and_is_added_to_its_conversation_at_once_or_not_at_all(open_store):
    store, output = open_store(), [{"id": "msg_é", "type": "message"}]
    add(store, "conv_a")
    for name, conversation, is_ended in (("a", "conv_a", True), ("b", "conv_b", False)):
        add(store, name, conversation, request=b"{}")
        assert store.end_turn(name, b'{"output":[]}', output) == is_ended
        assert not store.end_turn(name, b"{}", output)  # as a second process might
        assert (store.find(name, "").process is None) == is_ended
    assert store.find("conv_a", "").input == [*ITEMS, *ITEMS, *output]


def test_items_are_added_behind_those_of_others(open_store):
    store = open_store()
    store.add(NewResponse("conv_a", "", None, b"{}", []))
    assert store.add_items("conv_a", "", ITEMS) and store.add_items("conv_a", "", [{"id": "\0,]"}])
    assert store.find("conv_a", "").input == [*ITEMS, {"id": "\0,]"}] and not store.add_items("conv_a", "bob", ITEMS)


def test_of_responses_that_are_kept_together_all_are_or_none(open_store):
    store = open_store()
    first, second = (NewResponse(name, "", None, b'{"output":[]}', ITEMS) for name in "ab")
    store.add(first, second)
    assert store.find("a", "") and store.find("b", "")
    with pytest.raises(UnavailableError, match="UNIQUE"):
        store.add(NewResponse("c", "", None, b'{"output":[]}', ITEMS), first)
    assert store.find("c", "") is None
    add(store, "d")  # the next ones are kept
    assert store.find("d", "")


def test_the_longest_unused_are_removed_when_there_are_too_many(open_store):
    store = open_store(max_responses=2)
    add(store, "a")
    add(store, "b")
    store.history("a", "", 1 << 20)
    add(store, "c")
    add(store, "d", tenant="bob")
    assert [name for name in "abc" if store.find(name, "")] == ["a", "c"] and store.find("d", "bob")


def test_the_longest_unused_are_removed_when_they_are_too_large(open_store):
    store = open_store(max_bytes=5000)
    for name in "abc":
        add(store, name, size=2000)
    assert [name for name in "abc" if store.find(name, "")] == ["b", "c"]


def test_what_is_too_old_is_removed_unless_it_has_not_ended(open_store, monkeypatch):
    store = open_store(max_age_s=10)
    monkeypatch.setattr("time.time", lambda: 1e9)
    add(store, "a")
    add(store, "b", request=b"{}")
    monkeypatch.setattr("time.time", lambda: 1e9 + 11)
    assert store.sweep() == 1 and store.find("b", "")


def test_a_file_shrinks_when_much_is_removed(open_store, tmp_path):
    store = open_store(max_bytes=1 << 20)
    for number in range(64):
        add(store, str(number), size=100_000)
    assert sum(path.stat().st_size for path in tmp_path.iterdir() if path.is_file()) < 8 << 20


def test_of_a_key_s_unfinished_responses_so_many_begin_and_no_more(open_store):
    stores = [open_store(), open_store()]

    def begin(name, tenant="alice"):
        return stores[len(name) % 2].begin(NewResponse(name, tenant, None, b"{}", ITEMS, b"{}"), 2)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(begin, ["a" * length for length in range(1, 17)])) == 2
    assert begin("b", "bob")
    for store in stores:
        for name in store.own_unfinished():
            store.end(name, b'{"output":[]}')
    assert begin("c")


def test_an_end_counts_once(open_store):
    store = open_store()
    add(store, "a", request=b"{}")
    row = store.find("a", "")
    assert store.own_unfinished() == {"a"}
    assert store.cancel(row, b'{"output":[]}') and not store.end("a", b"{}")
    assert store.find("a", "").request is None and not store.own_unfinished()


def leave(folder):
    store = ResponseStore(folder, StoredResponsesConfig())
    add(store, "a", request=b"{}")
    add(store, "b")


def test_unfinished_responses_of_a_dead_process_are_taken_once(open_store, tmp_path):
    process = multiprocessing.get_context("fork").Process(target=leave, args=(tmp_path,))
    process.start()
    process.join()
    first, second = open_store(), open_store()
    assert names(first.take_orphans(9)) == ["a"] and not second.take_orphans(9)
    assert not second.end("a", b"{}") and first.end("a", b"{}")


def leave_two(folder):
    store = ResponseStore(folder, StoredResponsesConfig())
    for name in "ab":
        add(store, name, request=b"{}")


def test_of_unfinished_responses_of_a_dead_process_all_are_taken_or_none(open_store, tmp_path):
    process = multiprocessing.get_context("fork").Process(target=leave_two, args=(tmp_path,))
    process.start()
    process.join()
    store = open_store()
    write = store.database.write
    write("CREATE TRIGGER full BEFORE UPDATE ON responses WHEN OLD.id = 'b' BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.raises(UnavailableError, match="written .full"):
        store.take_orphans(9)
    assert not store.own_unfinished()
    write("DROP TRIGGER full")
    assert names(store.take_orphans(1)) == ["a"] and names(store.take_orphans(9)) == ["b"]
    assert not store.take_orphans(9) and store.own_unfinished() == {"a", "b"}


def test_a_folder_that_cannot_be_used_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DatabaseError, match="the database of responses can't be opened .File exists"):
        ResponseStore(tmp_path / "file", StoredResponsesConfig())
