"""The torch engine in real engine processes: disaggregated over shared memory, healed after a kill, put to sleep.

Both engines share their weights by a memory service.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path

import pytest
import torch

from bireme.discovery import run_folder
from bireme.engines.memory.service import MemoryService
from bireme.engines.memory.wire import socket_path
from bireme.engines.stub.client import EngineClient
from bireme.errors import UnavailableError
from bireme.metrics import Registry
from bireme.recipe_files import load_recipe
from tests.engines.engine_fixtures import Collector, wait_for
from tests.engines.torch.torch_harness import make_prompts, request

PROMPTS = make_prompts(3, 20, 45, 70, 150, 33, seed=3)


def start(folder, model, worker, config):
    common = {"max_batch_size": 8, "max_num_tokens": 64, "cache_transceiver_config": {"backend": "DEFAULT"}}
    workers = {
        name: {"engine": "torch", "engine_config": common | {"kv_cache_config": {"tokens_per_block": size}} | config}
        for name, size in (("prefill", 32), ("decode", 16))
    }
    recipe = {
        "model": model,
        "workers": workers,
        "supervisor": {"restart_backoff_s": 0.01},
        "memory_service": {"enabled": True},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    run_dir = folder / "run"
    run_dir.mkdir(exist_ok=True)
    client = EngineClient(
        load_recipe(folder, override=""), worker, Registry(worker), logging.getLogger("test"), run_dir
    )
    client.start()
    return client


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def pair(tiny, folder):
    run_dir = folder / "run"
    run_dir.mkdir()
    service = MemoryService(socket_path(run_dir), run_folder.deployment_key(run_dir))
    service.start()
    clients = [start(folder, tiny("gemma3").path, worker, {}) for worker in ("prefill", "decode")]
    yield clients[0], clients[1]
    for client in clients:
        client.stop()
    service.stop()


def sources(client):
    """Return where the weights of the engine that has just started came from."""
    found = []

    def look():
        counters = client.metrics.take_delta().counters
        found.extend(labels[-1] for name, labels, _ in counters if name == "bireme_weights_loads_total")
        return found

    wait_for(look, 20)
    return found


def mapped_file(client):
    """Return the inode of the shared weights that the engine has mapped."""
    lines = Path(f"/proc/{client.pid}/maps").read_text().splitlines()
    (inode,) = {line.split()[4] for line in lines if "bireme-weights" in line}
    return inode


def test_numba_is_loaded_by_the_engine_that_takes_kv_and_not_by_the_one_that_gives_it(pair):
    pytest.importorskip("numba")
    prefill, decode = (Path(f"/proc/{client.pid}/maps").read_text() for client in pair)
    assert torch.cuda.is_available() or "/numba/" in decode
    assert "/numba/" not in prefill


def submit(client, what):
    sink = Collector()
    client.submit(what, sink)
    return sink


class Killing(Collector):
    """Kills the engine at its first tokens: whoever waits for them may come behind the answer's end."""

    def __init__(self, pid):
        super().__init__()
        self.pid = pid

    def push(self, *news):
        is_first = not self.tokens
        super().push(*news)
        if is_first:
            os.kill(self.pid, signal.SIGKILL)


def test_the_second_engine_maps_what_the_first_has_read(pair):
    prefill, decode = pair
    assert [sources(client) for client in pair] == [["checkpoint"], ["memory_service"]]
    assert torch.cuda.is_available() or mapped_file(prefill) == mapped_file(decode)


def test_two_processes_say_what_generate_says(pair, tiny):
    prefill, decode = pair
    firsts = [submit(prefill, request(prompt, request_type="context_only")) for prompt in PROMPTS]
    sinks = []
    for prompt, first in zip(PROMPTS, firsts, strict=True):
        finish = first.wait(60)
        assert (finish.reason, finish.error) == ("not_finished", "")
        asked = request(prompt, request_type="generation_only", disaggregated_params=finish.disaggregated_params)
        sinks.append(submit(decode, asked))
    assert [sink.wait(60).error for sink in sinks] == [""] * len(PROMPTS)
    assert [sink.tokens for sink in sinks] == tiny("gemma3").expect(PROMPTS)


@pytest.mark.flaky(reruns=1)
def test_a_killed_engine_serves_again_with_the_same_tokens(pair, tiny, capfd):
    _, decode = pair
    wait_for(lambda: decode.is_ready, 60)  # after a first try whose kill came behind the answer's end
    capfd.readouterr()
    life, lost = decode.life, Killing(decode.pid)
    decode.submit(request(PROMPTS[0], 400), lost)
    assert lost.wait(60).error.startswith("UNAVAILABLE")
    wait_for(lambda: decode.life != life and decode.is_ready, 60)
    resumed = request(PROMPTS[0] + lost.tokens, num_resumed=len(lost.tokens), max_tokens=48)
    expected = tiny("gemma3").expect([PROMPTS[0]])[0]
    if len(lost.tokens) < 48:
        sink = submit(decode, resumed)
        assert sink.wait(60).error == ""
        assert lost.tokens + sink.tokens == expected
    assert decode.capacity.tokens_per_block == 16
    assert sources(decode) == ["memory_service"] and "findings_read layers=" in capfd.readouterr().err


@pytest.mark.flaky(reruns=1)
def test_an_engine_that_sleeps_has_ended_and_serves_again_when_it_is_woken(pair, folder, tiny):
    _, decode = pair
    pid, running = decode.pid, submit(decode, request(PROMPTS[1], 48))
    run_folder.ask_sleep(folder / "run", "decode", free_weights=True)
    assert running.wait(60).error == ""
    wait_for(lambda: "asleep" in decode.state, 60)
    with pytest.raises(UnavailableError, match=r"tools/sleep.py decode --wake"):
        submit(decode, request(PROMPTS[1], 48))
    assert not Path(f"/proc/{pid}").exists()
    assert run_folder.wake(folder / "run", "decode")
    wait_for(lambda: decode.is_ready, 60)
    sink = submit(decode, request(PROMPTS[1], 48))
    assert sink.wait(60).error == "" and sink.tokens == tiny("gemma3").expect([PROMPTS[1]])[0]
    assert sources(decode) == ["memory_service"]  # prefill has them, so they were not freed


def test_the_end_of_a_process_reports_no_leaks(tiny, tmp_path, capfd):
    start(tmp_path, tiny("llama").path, "decode", {"guided_decoding_backend": "xgrammar"}).stop()
    said = capfd.readouterr().err
    assert "engine_stopped" in said and "leaked" not in said
