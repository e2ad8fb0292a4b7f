"""The threads of BLS calls: how many there are, and what becomes of calls that never end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bireme.errors import ConfigError, UnavailableError
from bireme.triton import daemon_threads


@pytest.fixture
def bls(triton_module):
    from bireme.triton import bls

    return bls


def test_threads_are_24_and_none_to_spare_unless_the_environment_says_so(bls, monkeypatch):
    monkeypatch.delenv("BIREME_BLS_THREADS", raising=False)
    monkeypatch.delenv("BIREME_BLS_SPARE_THREADS", raising=False)
    assert (bls.threads_from_environment(), bls.spares_from_environment()) == (24, 0)
    monkeypatch.setenv("BIREME_BLS_THREADS", "224")
    monkeypatch.setenv("BIREME_BLS_SPARE_THREADS", "30")
    assert (bls.threads_from_environment(), bls.spares_from_environment()) == (224, 30)


@pytest.mark.parametrize("text", ["0", "-1", "many", "99999"])
def test_a_senseless_number_of_threads_is_refused(bls, monkeypatch, text):
    monkeypatch.setenv("BIREME_BLS_THREADS", text)
    with pytest.raises(ConfigError, match="BIREME_BLS_THREADS"):
        bls.threads_from_environment()


@pytest.fixture
def client(bls, monkeypatch):
    """Two threads and one to spare; calls never return before the test's end."""
    returns = threading.Event()
    monkeypatch.setattr(daemon_threads, "LOST_S", 0.05)
    monkeypatch.setattr(bls, "_call", lambda model, inputs: returns.wait(30))
    monkeypatch.setenv("BIREME_BLS_THREADS", "2")
    monkeypatch.setenv("BIREME_BLS_SPARE_THREADS", "1")
    yield bls.BlsClient()
    returns.set()


async def begin(client, count=1):
    calls = [asyncio.ensure_future(client.call_async("prefill", {})) for _ in range(count)]
    await asyncio.sleep(0.05)
    return calls


async def lose(client, calls):
    """Give up calls under way, and wait until they count as lost."""
    num_lost = client.num_lost + len(calls)
    for call in calls:
        call.cancel()
    while client.num_lost < num_lost:
        client.look()
        await asyncio.sleep(0.01)


async def test_a_client_is_short_of_threads_when_more_are_lost_than_it_has_to_spare(client):
    await lose(client, await begin(client))
    assert not client.is_short
    await lose(client, await begin(client))
    assert client.is_short and not client.is_exhausted


async def test_a_client_without_a_thread_refuses_calls_and_names_the_remedy(client):
    await lose(client, await begin(client, 2))
    await lose(client, await begin(client))
    with pytest.raises(UnavailableError, match="3 calls to models whose stub has died .* unload and load this model"):
        await asyncio.wait_for(client.call_async("tokenizer", {}), 5)


async def test_a_call_that_waits_for_a_thread_is_refused_when_the_last_one_is_lost(client):
    await lose(client, await begin(client, 2))
    last, waiting = await begin(client, 2)
    await lose(client, [last])
    with pytest.raises(UnavailableError, match="no thread is left"):
        await asyncio.wait_for(waiting, 5)


async def test_an_answer_comes_back_while_other_calls_are_lost(client, bls, monkeypatch):
    await lose(client, await begin(client))
    monkeypatch.setattr(bls, "_call", lambda model, inputs: inputs)
    assert await asyncio.wait_for(client.call_async("tokenizer", {"text_input": 1}), 5) == {"text_input": 1}
