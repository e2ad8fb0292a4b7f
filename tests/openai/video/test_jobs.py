"""Jobs in SQLite: whose they are, in which order, and what outlives what."""

import multiprocessing

import pytest

from bireme.errors import NotFoundError
from bireme.openai.video.job_store import JobStore


@pytest.fixture
def store(tmp_path):
    store = JobStore(tmp_path)
    yield store
    store.close()


def add(store, name, tenant=""):
    return store.add(name, tenant, "tiny-video", "a prompt", "{}")


def test_a_job_goes_from_queued_to_completed(store):
    assert add(store, "a").status == "queued"
    store.report("a", "in_progress", 40)
    assert (store.find("a", "").status, store.find("a", "").progress) == ("in_progress", 40)
    store.complete("a", '{"fps": 8}', "file-1.mp4")
    done = store.find("a", "")
    assert (done.status, done.progress, done.file) == ("completed", 100, "file-1.mp4") and done.completed_at


def test_a_job_is_seen_by_its_key_alone(store):
    add(store, "a", "alice")
    for method in (store.find, store.remove):
        with pytest.raises(NotFoundError):
            method("a", "bob")
    assert store.page("bob", 10, None, False) == []


def test_pages_go_on_after_a_job_in_both_directions(store):
    d, b, a, c = (add(store, name) for name in "dbac")
    assert store.page("", 2, None, False) == [c, a]
    assert store.page("", 2, a, False) == [b, d]
    assert store.page("", 9, b, True) == [a, c]


def test_a_deleted_job_takes_no_more_news(store):
    add(store, "a")
    store.remove("a", "")
    assert not store.report("a", "in_progress", 50) and not store.complete("a", "{}", "f")


@pytest.mark.parametrize("end", ["complete", "fail"])
def test_a_report_that_comes_late_does_not_undo_the_end(store, end):
    add(store, "a")
    getattr(store, end)("a", "{}", "what it ended with")
    ended = store.find("a", "")
    assert not store.report("a", "in_progress", 50) and store.find("a", "") == ended


def test_old_and_surplus_jobs_leave_their_files(store):
    for name in "abc":
        add(store, name)
        store.complete(name, "{}", f"file-{name}")
    assert store.expire(3600, 2) == ["file-a"]
    assert store.expire(-1, 9) == ["file-b", "file-c"]


def _leave_jobs(folder):
    store = JobStore(folder)
    add(store, "running")
    add(store, "done")
    store.complete("done", "{}", "file-1")
    store.report("running", "in_progress", 30)


def test_jobs_of_a_process_that_ended_have_failed_and_finished_ones_stay(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=_leave_jobs, args=(tmp_path,))
    process.start()
    process.join(60)
    store = JobStore(tmp_path)
    assert store.find("done", "").status == "completed"
    assert store.find("running", "").status == "failed"
    assert "create the job again" in store.find("running", "").error_message
    store.close()


def test_jobs_of_another_living_process_are_left_alone(store, tmp_path):
    add(store, "a")
    other = JobStore(tmp_path)
    assert other.find("a", "").status == "queued"
    other.close()
