"""The demo: its arithmetic, and how it leaves a server."""

import pytest

from bireme.errors import RequestError
from bireme.launch.tritonserver import start_server
from tools import demo


def test_the_speed_counts_the_tokens_after_the_first_piece():
    pieces = [demo.Piece("a", 1, 10.5), demo.Piece("b", 4, 10.7), demo.Piece("c", 6, 11.5), demo.Piece("", 0, 12.0)]
    assert demo.figures_of(pieces, 10.0) == demo.Figures(num_tokens=11, ttft_ms=500.0, tokens_per_s=10.0)


def test_an_empty_completion_has_no_speed():
    assert demo.figures_of([], 1.0).num_tokens == 0


@pytest.mark.server
async def test_a_server_whose_streams_have_ended_ends_at_once():
    """Triton 2.51 goes on counting a stream that was cancelled after its end, and waits for it in vain."""
    with start_server("recipes/mocker") as server:
        for _ in range(40):
            assert sum([piece.num_tokens async for piece in demo.stream(server.grpc, "Hello", 4)]) == 4
            with pytest.raises(RequestError, match="max_tokens"):
                [piece async for piece in demo.stream(server.grpc, "Hello", -4)]
        assert server.stop() == 0
