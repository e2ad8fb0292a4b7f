"""Attention in plain torch on a CPU: what it does not write out at once changes nothing."""

from __future__ import annotations

import pytest
import torch

from bireme.engines.torch.forward import attention
from bireme.engines.torch.forward.attention import Extras, PagedStep, attend
from bireme.engines.torch.step import DecodeView
from tests.engines.torch.kernel_references import cap


def by_hand(query, key, value, mask, scaling, softcap=None, sinks=None):
    repeats = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeats, 1).transpose(-1, -2) * scaling
    scores = (scores if softcap is None else cap(scores, softcap)).masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value.repeat_interleave(repeats, 1)


@pytest.fixture
def rows():
    """Return query, key, value (a head of keys is wider than one of values), and what each of 40 tokens sees of 60."""
    torch.manual_seed(3)
    mask = torch.ones(40, 60, dtype=torch.bool).tril(20)
    return torch.randn(1, 6, 40, 24), torch.randn(1, 2, 60, 24), torch.randn(1, 2, 60, 16), mask


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_scores_of_some_rows_at_a_time_are_those_of_all(rows, monkeypatch, softcap, has_sinks):
    sinks = torch.randn(1, 6, 1, 1) if has_sinks else None
    given = (*rows, Extras(0.2, softcap), sinks)
    whole = attend(*given)
    torch.testing.assert_close(whole, by_hand(*rows, 0.2, softcap, sinks))
    monkeypatch.setattr(attention, "MOST_SCORES", 17 * 6 * 60)  # the last part has six rows
    torch.testing.assert_close(attend(*given), whole)


def test_sinks_of_each_row_follow_their_rows(rows, monkeypatch):
    """As in decode steps, whose rows are the heads of a group."""
    query, key, value, mask = rows
    sinks, extras = torch.randn(1, 1, 40, 1), Extras(0.2)
    whole = attend(query, key, value, mask[:1], extras, sinks)
    monkeypatch.setattr(attention, "MOST_SCORES", 0)
    torch.testing.assert_close(attend(query, key, value, mask[:1], extras, sinks), whole)


def decoded(step, view, query):
    """Return the attention of decode rows, and how many blocks were copied at a time."""
    copied, gather = [], attention._gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attention, "_gather", lambda pool, blocks, size: copied.append(len(blocks)) or gather(pool, blocks, size)
        )
        return step._decode(view, query, 2, step.keys[0], step.values[0], Extras(0.2)), copied


@pytest.mark.parametrize("lengths", [(60, 33, 7), (60, 60, 60)])
def test_decode_rows_that_take_turns_are_what_all_at_once_are(monkeypatch, lengths):
    torch.manual_seed(4)
    keys, values, query = torch.randn(128, 2 * 24), torch.randn(128, 2 * 16), torch.randn(1, 6, 3, 24)
    seen = torch.arange(64) < torch.tensor(lengths)[:, None]
    mask = None if seen[0].equal(seen[2]) else seen[:, None, None]
    view = DecodeView(torch.tensor([1, 2, 3, 4, 5, 6, 7, 0, 1, 3, 5, 7]), 3, 4, 0, 60, mask)
    step = PagedStep([keys], [values], [], 16)
    whole, _ = decoded(step, view, query)
    monkeypatch.setattr(attention, "MOST_GATHERED_BYTES", 2 * 64 * 2 * (24 + 16 + 24) * 4)  # of two rows
    in_turns, copied = decoded(step, view, query)
    torch.testing.assert_close(in_turns, whole)
    assert copied == [8, 8, 4, 4]
