"""The arithmetic of benchmarks/frontend.py and of its client."""

import pytest

from benchmarks.frontend import Run, combine, ratio, verdict
from benchmarks.load.sse_client import Tally

REPORT = {
    "requests_per_s": 1000.0, "tokens_per_s": 48_000.0, "ttft_p50_ms": 20.0, "ttft_p99_ms": 30.0, "itl_p50_ms": 5.2,
    "itl_p99_ms": 5.4, "errors": [], "num_hanging": 0,
}  # fmt: skip


def cell_of(contender, mode="fast", streams=256, **changes):
    return combine(contender, mode, streams, [Run(REPORT | changes, {"frontend": 0.6, "client": 9.0, "foreign": 1.0})])


def test_cpu_is_that_of_the_servers_alone():
    assert cell_of("bireme").cpu_us_per_request == pytest.approx(600)
    assert cell_of("bireme").cpu_us_per_token == pytest.approx(12.5)


def test_the_ratio_is_over_dynamo_at_the_same_load():
    cells = [cell_of("bireme"), cell_of("dynamo", tokens_per_s=16_000.0), cell_of("dynamo", streams=64)]
    assert [ratio(cell, cells) for cell in cells] == [3.0, None, None]


def test_too_small_a_ratio_or_share_is_said():
    fast = [cell_of("bireme"), cell_of("dynamo", tokens_per_s=30_000.0)]
    assert verdict(fast[0], fast).endswith("BELOW") and verdict(fast[1], fast) is None
    paced = cell_of("bireme", "paced")
    assert paced.share == pytest.approx(0.9375) and verdict(paced, [paced]).endswith("ok")


def test_another_endpoint_is_held_to_the_cpu_of_chats():
    runs = [Run(REPORT, {"frontend": 0.75})]
    cells = [
        combine("bireme", "fast", 64, [Run(REPORT, {"frontend": 0.6})]),
        combine("bireme", "fast", 64, runs, "kept"),
    ]
    assert verdict(cells[1], cells) == "aim: fast at 64 streams kept 1.25 x a chat's CPU, 1.15 at most: BELOW"
    assert verdict(cells[0], cells) is None


def test_a_request_that_reaches_over_the_end_counts_in_part():
    tally = Tally(10.0, 20.0)
    tally.count(8.0, 9.0, 11.0, 100)  # a third of the request, half of its tokens
    tally.count(19.0, 19.0, 21.0, 100)
    assert (tally.num_requests, tally.num_tokens) == (pytest.approx(1 / 3 + 1 / 2), pytest.approx(100.0))
    assert len(tally.ttft_ms) == 1


def test_an_answer_that_came_at_once_counts_whole():
    tally = Tally(10.0, 20.0)
    tally.count(11.0, 12.0, 12.0, 32)
    assert (tally.num_requests, tally.num_tokens) == (1.0, 32.0)
