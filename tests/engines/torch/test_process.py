"""The torch engine in real engine processes: disaggregated over shared memory, and healed after a kill."""

from __future__ import annotations

import json
import logging
import os
import signal

import pytest

from bireme.engines.stub.client import EngineClient
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
    supervisor = {"restart_backoff_s": 0.01}
    (folder / "recipe.yaml").write_text(json.dumps({"model": model, "workers": workers, "supervisor": supervisor}))
    recipe = load_recipe(folder, override="")
    run_dir = folder / "run"
    run_dir.mkdir(exist_ok=True)
    client = EngineClient(recipe, worker, Registry(worker), logging.getLogger("test"), run_dir=run_dir)
    client.start()
    return client


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    clients = [start(folder, tiny("gemma3").path, worker, {}) for worker in ("prefill", "decode")]
    yield clients[0], clients[1]
    for client in clients:
        client.stop()


def submit(client, what):
    sink = Collector()
    client.submit(what, sink)
    return sink


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
def test_a_killed_engine_serves_again_with_the_same_tokens(pair, tiny):
    _, decode = pair
    lost = submit(decode, request(PROMPTS[0], 400))
    wait_for(lambda: lost.tokens, 60)
    life = decode.life
    os.kill(decode.pid, signal.SIGKILL)
    assert lost.wait(60).error.startswith("UNAVAILABLE")
    wait_for(lambda: decode.life != life and decode.is_ready, 60)
    resumed = request(PROMPTS[0] + lost.tokens, num_resumed=len(lost.tokens), max_tokens=48)
    expected = tiny("gemma3").expect([PROMPTS[0]])[0]
    if len(lost.tokens) < 48:
        sink = submit(decode, resumed)
        assert sink.wait(60).error == ""
        assert lost.tokens + sink.tokens == expected
    assert decode.capacity.tokens_per_block == 16


def test_the_end_of_a_process_reports_no_leaks(tiny, tmp_path, capfd):
    start(tmp_path, tiny("llama").path, "decode", {"guided_decoding_backend": "xgrammar"}).stop()
    said = capfd.readouterr().err
    assert "engine_stopped" in said and "leaked" not in said
