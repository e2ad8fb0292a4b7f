"""Pages of metrics that somebody asks for again and again."""

import asyncio
import time

from bireme.openai.metrics_page import KeptPages


class Writer:
    """Writes a page in so many milliseconds of CPU, and numbers it."""

    def __init__(self, cost_ms):
        self.cost_ms, self.count = cost_ms, 0

    async def gather(self):
        await asyncio.sleep(0)
        return self.write

    def write(self):
        self.count += 1
        end = time.thread_time() + self.cost_ms / 1e3
        while time.thread_time() < end:
            pass
        return b"page %d" % self.count


async def test_a_long_page_is_written_once_for_all_who_ask_at_a_time():
    pages, writer = KeptPages(), Writer(cost_ms=50)
    answers = await asyncio.gather(*(pages.get(None, writer.gather) for _ in range(100)))
    assert set(answers) == {b"page 1"} and writer.count == 1


async def test_a_long_page_takes_a_twentieth_of_the_time_however_often_it_is_asked_for():
    pages, writer, began = KeptPages(), Writer(cost_ms=5), time.monotonic()
    while time.monotonic() - began < 0.55:
        await pages.get(None, writer.gather)
    assert 1 <= writer.count <= 6


async def test_a_short_page_is_written_anew():
    pages, writer = KeptPages(), Writer(cost_ms=0)
    assert [await pages.get(None, writer.gather) for _ in range(2)] == [b"page 1", b"page 2"]


async def test_nobody_is_given_another_key_s_page():
    pages, alice, bob = KeptPages(), Writer(cost_ms=20), Writer(cost_ms=20)
    await pages.get("alice", alice.gather)
    await pages.get("bob", bob.gather)
    assert (alice.count, bob.count) == (1, 1)
