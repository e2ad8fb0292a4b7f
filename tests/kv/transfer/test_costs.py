"""What transfers take is learned from those that have ended."""

from __future__ import annotations

import random

import pytest

from bireme.kv.transfer.costs import TransferCosts


def filled(points, start_ms=1.2, slope=0.0004):
    costs, drawn = TransferCosts(), random.Random(1)
    for tokens in points:
        costs.add(tokens, (start_ms + slope * tokens) * drawn.uniform(0.97, 1.03) / 1e3)
    return costs


def test_start_and_price_of_a_token_are_found():
    costs = filled([tokens for _ in range(10) for tokens in (64, 300, 2048, 8192)])
    costs.add(100, 5.0)  # one that waited for something
    start, slope = costs.line_ms
    assert start == pytest.approx(1.2, rel=0.1) and slope == pytest.approx(0.0004, rel=0.3)


def test_prompts_of_one_length_tell_a_start_alone():
    start, slope = filled([512] * 8).line_ms
    assert start == pytest.approx(1.4, rel=0.1) and slope == 0.0


def test_a_few_tell_nothing():
    assert filled([64, 512, 8192]).line_ms is None


def test_a_line_never_begins_below_zero():
    costs = filled([100] * 4 + [1000] * 4, start_ms=0.0, slope=0.01)
    costs.add(1000, 0.013)
    start, slope = costs.line_ms
    assert start >= 0 and start + 1000 * slope == pytest.approx(10, rel=0.1)
