from __future__ import annotations

import threading

import pytest

from bireme.kv.transfer.copier import Copier
from bireme.kv.wire.mailbox import Mailbox


@pytest.fixture
def copier():
    copier = Copier("test-copier")
    copier.start()
    yield copier
    copier.close(5)


def counting(name, steps, seen, ended=None):
    for _ in range(steps):
        seen.append(name)
        yield
    if ended:
        ended.set()


def test_two_copies_take_turns(copier):
    seen, gate, ended = [], threading.Event(), threading.Event()
    copier.call(gate.wait)
    copier.submit(counting("a", 3, seen))
    copier.submit(counting("b", 3, seen, ended))
    gate.set()
    assert ended.wait(5)
    assert seen == list("ababab")


def test_callbacks_overtake_copies_and_keep_their_order(copier):
    seen, gate, ended = [], threading.Event(), threading.Event()
    copier.call(gate.wait)
    copier.submit(counting("copy", 1, seen, ended))
    for name in ("first", "second"):
        copier.call(lambda name=name: seen.append(name))
    gate.set()
    assert ended.wait(5)
    assert seen == ["first", "second", "copy"]


def test_a_callback_or_copy_that_raises_ends_alone(copier, caplog):
    ended = threading.Event()
    copier.call(lambda: 1 / 0)
    copier.submit(counting("bad", 1, None))
    copier.submit(counting("good", 2, [], ended))
    assert ended.wait(5)
    assert "callback_failed" in caplog.text and "copy_failed" in caplog.text


def test_close_finishes_what_is_queued(copier):
    seen = []
    copier.submit(counting("a", 50, seen))
    copier.call(lambda: seen.append("call"))
    assert copier.close(5)
    assert seen.count("a") == 50 and "call" in seen


def test_after_close_a_callback_runs_at_once(copier):
    copier.close(5)
    seen = []
    copier.call(lambda: seen.append(1))
    assert seen == [1]


def test_close_reports_a_callback_that_hangs(copier):
    gate = threading.Event()
    copier.call(gate.wait)
    assert not copier.close(0.05)
    gate.set()


def test_a_mailbox_refuses_letters_once_closed():
    mailbox, seen = Mailbox(), []
    assert mailbox.post(lambda: seen.append(1))
    for letter in mailbox.take():
        letter()
    assert seen == [1] and mailbox.take() == []
    mailbox.close()
    mailbox.close()
    assert not mailbox.post(lambda: seen.append(2))
