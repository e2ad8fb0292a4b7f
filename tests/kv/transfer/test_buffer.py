from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import RequestError
from bireme.kv.transfer.buffer import DEFAULT_LIMIT_BYTES, TransferBuffer
from bireme.kv.transfer.chunks import TransferPlan


@given(st.lists(st.integers(1, 100), max_size=50))
def test_everything_that_fits_is_admitted_in_order(sizes):
    buffer: TransferBuffer[int] = TransferBuffer(100, 1)
    for index, size in enumerate(sizes):
        buffer.enqueue(index, size)
    admitted, running = [], []
    while len(admitted) < len(sizes):
        while (item := buffer.admit()) is not None:
            admitted.append(item)
            running.append(sizes[item])
            assert buffer.used_bytes <= 100
        buffer.free(running.pop(0))
    assert admitted == list(range(len(sizes)))


def test_without_a_limit_of_its_own_a_huge_transfer_goes_alone():
    buffer: TransferBuffer[str] = TransferBuffer(None, 1)
    buffer.check(TransferPlan((), 3 * DEFAULT_LIMIT_BYTES, 1))
    buffer.enqueue("small", 1)
    buffer.enqueue("huge", 3 * DEFAULT_LIMIT_BYTES)
    buffer.enqueue("next", 1)
    assert buffer.admit() == "small" and buffer.admit() is None
    buffer.free(1)
    assert buffer.admit() == "huge" and buffer.admit() is None


def test_with_a_limit_a_larger_transfer_is_refused():
    with pytest.raises(RequestError, match=r"11 tokens \(22 bytes\); the buffer holds 10 tokens \(20 bytes\)"):
        TransferBuffer[str](10, 2).check(TransferPlan((), 22, 11))


def test_an_item_put_back_is_the_next_and_a_withdrawn_one_never_comes():
    buffer: TransferBuffer[str] = TransferBuffer(10, 1)
    for name in ("a", "b", "c"):
        buffer.enqueue(name, 6)
    assert buffer.admit() == "a"
    buffer.put_back("a", 6)
    buffer.withdraw("b")
    assert buffer.admit() == "a"
    buffer.free(6)
    assert buffer.admit() == "c"
