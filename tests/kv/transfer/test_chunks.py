from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import RequestError
from bireme.kv.transfer.base import GroupLayout, KvLayout
from bireme.kv.transfer.chunks import plan_chunks

LAYOUT = KvLayout("m", "f", (GroupLayout(0, (3, 5)), GroupLayout(4, (7,))))


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200), st.integers(1, 300))
def test_chunks_cover_each_row_once_and_lie_end_to_end(num_tokens, first, second, chunk_bytes):
    firsts = (min(first, num_tokens), min(second, num_tokens))
    plan = plan_chunks(LAYOUT, firsts, num_tokens, chunk_bytes)
    for group, begin in enumerate(firsts):
        tokens = [t for chunk in plan.chunks if chunk.group == group for t in range(chunk.first, chunk.last)]
        assert tokens == list(range(begin, num_tokens))
    assert [chunk.begin for chunk in plan.chunks] == [0, *(chunk.end for chunk in plan.chunks)][: len(plan.chunks)]
    assert plan.num_bytes == (num_tokens - firsts[0]) * 8 + (num_tokens - firsts[1]) * 7


def test_a_layout_without_rows_has_nothing_to_copy():
    assert plan_chunks(KvLayout("m", "f", ()), (), 100).num_bytes == 0
    assert plan_chunks(KvLayout("m", "f", (GroupLayout(0, ()),)), (0,), 100).chunks == ()


def test_a_row_larger_than_a_chunk_is_a_chunk():
    chunks = plan_chunks(LAYOUT, (0, 3), 3, chunk_bytes=1).chunks
    assert [(chunk.first, chunk.last) for chunk in chunks] == [(0, 1), (1, 2), (2, 3)]


def test_a_missing_first_is_refused():
    with pytest.raises(RequestError, match="1 entries; the KV layout has 2 groups"):
        plan_chunks(LAYOUT, (0,), 10)
