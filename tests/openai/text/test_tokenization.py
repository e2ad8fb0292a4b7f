"""POST /detokenize: the text of ids that one context may hold, made while others are served."""

import asyncio
import threading

import pytest

from bireme.messages import Capacity
from bireme.text.tokenizer import TextTokenizer

CAPACITY = Capacity(
    max_seq_len=8, max_batch_size=1, max_num_tokens=8, max_queue_size=1, tokens_per_block=0, num_blocks=0,
    vocab_size=1000,
)  # fmt: skip


def detokenize(bench, count):
    return bench.call("POST", "/detokenize", {"model": "test", "tokens": [ord("a")] * count})


async def test_ids_become_text(frontend):
    assert (await detokenize(await frontend(), 3).end()).json() == {"prompt": "aaa"}


@pytest.mark.parametrize(("capacity", "limit"), [(CAPACITY, 8), (None, 1_000_000)])
async def test_more_ids_than_a_context_holds_are_refused(frontend, capacity, limit):
    bench = await frontend()
    if capacity is not None:
        bench.workers.capacities["decode"] = capacity
    reply = await detokenize(bench, limit + 1).end()
    message = f"tokens: {limit + 1} ids; the context is {limit}, send fewer"
    assert (reply.status, reply.json()["error"]["message"]) == (400, message)


async def test_others_are_served_meanwhile(frontend, monkeypatch):
    bench, started, may_end = await frontend(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def decode(own, ids, skip_special_tokens):
        loop.call_soon_threadsafe(started.set)
        assert may_end.wait(60)
        return "text"

    monkeypatch.setattr(TextTokenizer, "decode", decode)
    reply = detokenize(bench, 3)
    await asyncio.wait_for(started.wait(), 60)
    assert (await bench.call("GET", "/health/live").end()).status == 200
    may_end.set()
    assert (await reply.end()).json() == {"prompt": "text"}
