"""Nothing that is put waits for something else to be put."""

import threading

from bireme.inbox import Inbox


def test_the_reader_is_called_once_for_all_that_waits():
    calls = []
    inbox = Inbox(lambda: calls.append(len(inbox)))
    for item in range(3):
        inbox.put(item)
    assert calls == [1] and len(inbox) == 3
    assert list(inbox.drain()) == [0, 1, 2]
    inbox.put(3)
    assert calls == [1, 1] and list(inbox.drain()) == [3]


def test_the_reader_is_called_for_what_comes_as_a_drain_finds_nothing_more():
    calls = []
    inbox = Inbox(lambda: calls.append(None))
    inbox.put("first")
    for item in inbox.drain():
        assert item == "first"
        break  # the reader has taken the last one, and looks no further
    inbox.put("second")
    assert len(calls) == 2 and list(inbox.drain()) == ["second"]


def test_of_many_threads_items_each_is_read():
    called, read = threading.Semaphore(0), []
    inbox = Inbox(called.release)

    def write(first):
        for item in range(first, first + 5000):
            inbox.put(item)

    threads = [threading.Thread(target=write, args=(first,)) for first in range(0, 20_000, 5000)]
    for thread in threads:
        thread.start()
    while len(read) < 20_000:
        assert called.acquire(timeout=60), "items wait, and nobody was called"
        read += inbox.drain()
    assert sorted(read) == list(range(20_000))
