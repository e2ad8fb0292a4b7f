"""A launch's levels as one server's: what a gateway reads."""

import json
import threading
import time
import urllib.error
import urllib.request

import pytest

from bireme.config import MetricsConfig, Recipe, WorkerEntry
from bireme.errors import UnavailableError
from bireme.launch.health_server import HealthServer
from bireme.launch.whole_page import WholePage, gateways_page, whole_levels
from bireme.metric_aliases import aliases_of_launch

PAGE = """\
# TYPE bireme_requests_waiting gauge
bireme_requests_waiting{worker="decode"} 2
bireme_requests_waiting{worker="decode_1"} 3
bireme_requests_waiting{worker="prefill"} 4
bireme_requests_waiting{worker="video_diffusion"} 100
bireme_requests_running{worker="decode"} 8
bireme_requests_total{outcome="stop",worker="decode"} 5
bireme_kv_blocks_used{worker="decode"} 90
bireme_kv_blocks_total{worker="decode"} 100
bireme_kv_blocks_used{worker="decode_1"} 50
bireme_kv_blocks_total{worker="decode_1"} 100
bireme_kv_block_tokens{worker="decode"} 32
bireme_kv_blocks_used{worker="prefill"} 10
bireme_kv_blocks_total{worker="prefill"} 50
bireme_kv_block_tokens{worker="prefill"} 64
"""


def recipe(*names):
    workers = {"decode": WorkerEntry(engine="mocker")}
    return Recipe(model="m", workers=workers, name="galley", metrics=MetricsConfig(aliases=names))


def page_of(read, *names):
    return WholePage(aliases_of_launch(recipe(*names)), read)


def test_queues_add_up_and_the_pool_is_as_full_as_the_fullest_stage():
    levels = whole_levels(PAGE)
    assert (levels["bireme_requests_waiting"], levels["bireme_requests_running"]) == (9, 8)
    assert levels["bireme_kv_blocks_used"] / levels["bireme_kv_blocks_total"] == pytest.approx(0.7)
    assert (levels["bireme_kv_blocks_total"], levels["bireme_kv_block_tokens"]) == (50, 64)  # of who computes prompts


def test_a_server_of_embeddings_has_a_queue_and_no_pool():
    page = """\
bireme_requests_waiting{worker="embedding"} 2
bireme_requests_waiting{worker="embedding_1"} 3
bireme_engine_max_batch_size{worker="embedding"} 64
bireme_kv_block_tokens{worker="embedding"} 32
"""
    assert whole_levels(page) == {
        "bireme_requests_waiting": 5, "bireme_requests_running": 0, "bireme_engine_max_batch_size": 64
    }  # fmt: skip


def test_an_engine_that_has_told_nothing_leaves_the_pool_out():
    assert whole_levels("") == {}
    assert "bireme_kv_blocks_used" not in whole_levels('bireme_requests_waiting{worker="decode"} 2')


def test_a_gateway_finds_one_series_a_name():
    lines = page_of(lambda: PAGE, "vllm", "triton_trtllm").text().decode().splitlines()
    shown = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert shown['vllm:num_requests_waiting{model_name="galley",engine="all"}'] == "9"
    assert shown['vllm:kv_cache_usage_perc{model_name="galley",engine="all"}'] == "0.7"
    (pool,) = [series for series in shown if series.startswith("vllm:cache_config_info")]
    assert 'block_size="64",num_gpu_blocks="50"' in pool
    assert shown['nv_trt_llm_request_metrics{model="all",version="1",request_type="waiting"}'] == "9"
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))


def test_who_asks_often_gets_the_same_page_and_triton_is_asked_once():
    asked = []

    def read():
        asked.append(time.monotonic())
        return PAGE

    page, began = page_of(read, "vllm"), time.monotonic()
    texts = {page.text() for _ in range(100)}
    assert len(texts) == 1 and len(asked) <= 1 + (time.monotonic() - began) / 0.25


def test_those_who_wait_for_a_triton_that_hangs_wait_together():
    asked, refused = [], []

    def read():
        asked.append(1)
        time.sleep(0.3)
        raise UnavailableError("no answer")

    page = page_of(read, "vllm")

    def ask():
        with pytest.raises(UnavailableError, match="no answer"):
            page.text()
        refused.append(1)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 20 and len(asked) < 5


@pytest.fixture
def serving():
    running = []

    def start(page):
        server = HealthServer("127.0.0.1", 0, lambda: (True, {}), lambda: (True, {}), page)
        server.start()
        running.append(server)
        return f"http://127.0.0.1:{server.port}/metrics"

    yield start
    for server in running:
        server.stop()


def refusal(url):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, timeout=10)
    return caught.value.code, json.load(caught.value)["error"]


def test_the_page_is_beside_the_probes(serving):
    with urllib.request.urlopen(serving(page_of(lambda: PAGE, "vllm").text), timeout=10) as reply:
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4") and b"vllm:" in reply.read()


def test_without_names_there_is_no_page_and_before_triton_there_is_none_yet(serving):
    assert gateways_page(recipe(), lambda: None) is None
    assert refusal(serving(None)) == (404, "known paths: /health/live, /health/ready, /health")
    assert refusal(serving(gateways_page(recipe("vllm"), lambda: None))) == (503, "tritonserver has not started yet")
