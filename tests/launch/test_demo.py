"""The demo's arithmetic."""

import demo


def test_the_speed_counts_the_tokens_after_the_first_piece():
    pieces = [demo.Piece("a", 1, 10.5), demo.Piece("b", 4, 10.7), demo.Piece("c", 6, 11.5), demo.Piece("", 0, 12.0)]
    assert demo.figures_of(pieces, 10.0) == demo.Figures(num_tokens=11, ttft_ms=500.0, tokens_per_s=10.0)


def test_an_empty_completion_has_no_speed():
    assert demo.figures_of([], 1.0).num_tokens == 0
