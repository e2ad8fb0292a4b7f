"""Whether decode or prefill computes a prompt, by what an H100's engines of an 8B model have measured."""

from __future__ import annotations

import msgspec
import pytest

from bireme.kv.routing.prompt_prices import PromptSide, Transfer, added_ms, believed, is_decode_cheaper
from bireme.kv.wire.event_wire import PRICED_TOKENS, WorkerPrices
from tests.kv.routing.router_fixtures import RouterBench, capacity, load, record

# What a prompt of 32, 128, 512, 2,048, 8,192 tokens adds to a step: alone, and beside 64 streams.
ALONE = WorkerPrices(5.4, (2.0, 2.5, 8.6, 48.0, 235.0), 2048, 1.2, 0.0004)
BUSY = WorkerPrices(7.5, (3.0, 3.1, 9.0, 46.0, 240.0), 2048, 1.2, 0.0004)
OVER_NVLINK, HOP = Transfer(4.0, 1.2, 0.0004), Transfer(4.0, 0.0, 0.002)


def side(prices, num_new, waiting=0.0):
    return PromptSide(prices, num_new, waiting, 2048)


@pytest.mark.parametrize("num_new", [1, 16, 128, 256, 512, 2048, 8192, 30_000])
@pytest.mark.parametrize("transfer", [OVER_NVLINK, HOP])
def test_on_an_idle_launch_every_prompt_is_decodes(num_new, transfer):
    assert is_decode_cheaper(side(ALONE, num_new), 0, side(ALONE, num_new), transfer)


@pytest.mark.parametrize("num_new", [16, 235, 4000])
def test_beside_many_streams_every_prompt_is_prefills(num_new):
    assert not is_decode_cheaper(side(BUSY, num_new), 60, side(ALONE, num_new), OVER_NVLINK)


@pytest.mark.parametrize(
    ("num_new", "num_running", "waiting_here", "waiting_there", "is_decode"),
    [
        (16, 1, 0, 0, True),  # one stream waits 2 ms, a hop takes 5
        (16, 5, 0, 0, False),
        (512, 1, 0, 0, False),
        (2048, 0, 4096, 0, False),  # a prompt is being computed at decode
        (2048, 0, 4096, 4096, True),  # and at prefill
        (235, 20, 0, 16_000, True),  # half a second of prompts waits at prefill
        (235, 60, 0, 4000, False),
        (4000, 8, 0, 16_000, False),
    ],
)
def test_who_waits_decides(num_new, num_running, waiting_here, waiting_there, is_decode):
    here = side(BUSY if num_running > 4 else ALONE, num_new, waiting_here)
    there = side(ALONE, num_new, waiting_there)
    assert is_decode_cheaper(here, num_running, there, OVER_NVLINK) is is_decode


def test_what_decode_has_never_computed_is_believed_to_take_as_long_as_at_prefill():
    guessed = msgspec.structs.replace(BUSY, prompt_ms=(3.0, 4.0, 20.0, 90.0, 400.0), measured_tokens=64)
    assert believed(guessed, ALONE, 2048).prompt_ms == (3.0, 4.0, 8.6, 48.0, 235.0)
    measured = msgspec.structs.replace(guessed, measured_tokens=1024)
    assert believed(measured, ALONE, 2048).prompt_ms == guessed.prompt_ms
    bench = bench_with(msgspec.structs.replace(guessed, step_ms=5.4), ALONE)
    assert bench.place(2048).prefill is None


def test_what_prefill_holds_it_need_not_compute():
    here = side(BUSY, 4000)
    assert not is_decode_cheaper(here, 0, side(ALONE, 100), OVER_NVLINK)
    assert is_decode_cheaper(here, 0, side(ALONE, 4000), OVER_NVLINK)


def test_prices_lie_on_lines_between_the_lengths_that_are_told():
    assert [added_ms(BUSY, tokens) for tokens in (0, 1, *PRICED_TOKENS)] == pytest.approx([0.0, 3.0, *BUSY.prompt_ms])
    assert added_ms(BUSY, 320) == pytest.approx((3.1 + 9.0) / 2)
    assert added_ms(BUSY, 2 * 8192) == pytest.approx(240 + (240 - 46) * 8192 / (8192 - 2048))


def bench_with(decode, prefill, running=0, **config):
    bench = RouterBench(mode="least_loaded", **config)
    bench.router.set_workers({name: record(name, capacity=capacity()) for name in ("prefill", "decode")})
    bench.loads |= {"decode": load(running, prices=decode), "prefill": load(prices=prefill)}
    return bench


@pytest.mark.parametrize(("running", "prefill"), [(0, None), (60, "prefill")])
def test_a_router_goes_by_what_engines_tell(running, prefill):
    bench = bench_with(BUSY if running else ALONE, ALONE, running)
    for num_tokens in (20, 300, 4500):
        placed = bench.place(num_tokens)
        assert (placed.prefill, placed.is_short) == (prefill, prefill is None)
        bench.router.finished(placed)


def test_requests_that_were_just_sent_count_as_running():
    bench = bench_with(ALONE, ALONE)
    placed = [bench.place(20) for _ in range(6)]
    assert placed[0].prefill is None and placed[-1].prefill == "prefill"


@pytest.mark.parametrize(("decode", "prefill"), [(None, ALONE), (ALONE, None), (None, None)])
def test_without_both_prices_the_recipes_are_taken(decode, prefill):
    bench = bench_with(decode, prefill)
    assert [bench.place(num_tokens).prefill for num_tokens in (142, 143)] == [None, "prefill"]


@pytest.mark.parametrize("config", [{"transfer_ms": 0.0}, {"enforce": True}])
def test_a_recipe_may_have_every_prompt_transferred_whatever_is_told(config):
    assert bench_with(ALONE, ALONE, **config).place(20).prefill == "prefill"


def test_the_recipes_hop_counts_beside_a_measured_transfer():
    bench = bench_with(BUSY, ALONE, 60, transfer_ms=1e6)
    assert bench.place(4000).prefill is None
