"""Masks of many rows, filled on several threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from bireme.errors import BiremeError, RequestError
from bireme.logits.guided.filling import MaskFiller

WAIT_S = 60.0


class Fake:
    """A guide that allows the words of its own number, once as many threads work as have to."""

    def __init__(self, number, num_threads=1, error=None):
        self.number, self.num_threads, self.error = number, num_threads, error
        self.threads, self.changed = set(), threading.Condition()

    def of(self, threads, changed):
        self.threads, self.changed = threads, changed
        return self

    def fill(self, bitmask, row):
        with self.changed:
            self.threads.add(threading.current_thread())
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(self.threads) >= self.num_threads, WAIT_S)
        if self.error is not None:
            raise self.error
        bitmask[row] = self.number


def guides(count, num_threads, errors=()):
    threads, changed = set(), threading.Condition()
    found = [Fake(at, num_threads, dict(errors).get(at)).of(threads, changed) for at in range(count)]
    return found, threads


@pytest.mark.parametrize(("count", "allowed", "working"), [(32, 4, 4), (9, 4, 2), (7, 4, 1), (32, 1, 1), (40, 99, 4)])
def test_rows_are_shared_among_threads_where_there_are_enough(count, allowed, working):
    made, threads = guides(count, working)
    bitmask, filler = np.full((count, 3), -1, dtype=np.int32), MaskFiller(allowed)
    for _ in range(2):  # the second time its threads are there
        assert filler.fill(made, bitmask) == {}
        assert bitmask.tolist() == [[at] * 3 for at in range(count)]
    assert len(threads) == working and threading.current_thread() in threads


def test_what_fails_on_any_thread_is_its_own_rows_error():
    errors = {at: (RequestError if at % 2 else ValueError)(f"of {at}") for at in (0, 5, 11, 31)}
    made, _ = guides(32, 4, errors)
    bitmask = np.full((32, 3), -1, dtype=np.int32)
    found = MaskFiller(4).fill(made, bitmask)
    assert sorted(found) == [0, 5, 11, 31]
    assert found[5] is errors[5] and type(found[0]) is BiremeError
    assert str(found[0]) == "guided_decoding: ValueError: of 0"
    assert [at for at in range(32) if not bitmask[at].any()] == sorted(found)
