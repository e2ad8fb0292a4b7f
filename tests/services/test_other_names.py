"""What others scrape and ask, of a running deployment by Debian's Prometheus.

Queries are as their sources have them, but for the windows, which are short here, and labels that a cluster's scrape
adds (`namespace`, `pod`).
"""

import contextlib
import http.client
import json
import math
import re
import threading
import urllib.request

import pytest

from bireme.metric_aliases import OF_WORKERS
from tests.server.openai_served import five_ports, served, wait_for
from tests.services.prometheus import Prometheus
from tools.advising.measured_load import of_prometheus

LIMIT_S = 180
MODEL, TTFT = "mocker-disagg", "bireme_time_to_first_token_seconds"
OVERRIDE = {
    "metrics": {"aliases": ["triton_trtllm", "vllm", "dynamo"], "buckets": {TTFT: [0.01, 0.5]}},
    "workers": {"decode": {"engine_config": {"max_batch_size": 4}}},
}
# https://github.com/kubernetes-sigs/gateway-api-inference-extension docs/proposals/003-model-server-protocol/README.md
# and https://github.com/llm-d/llm-d-router, defaults of its core-metrics-extractor for vllm and triton-tensorrt-llm
GATEWAY = [
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    'vllm:cache_config_info{block_size=~".+",num_gpu_blocks=~".+"}',
    "nv_trt_llm_request_metrics{request_type=waiting}",
    "nv_trt_llm_request_metrics{request_type=scheduled}",
    "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}",
    "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}",
    "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}",
]
# https://github.com/llm-d/llm-d docs/monitoring/example-promQL-queries.md
LLM_D = [
    "histogram_quantile(0.99, sum by(le, model_name) (rate(vllm:time_to_first_token_seconds_bucket[5m])))",
    "histogram_quantile(0.99, sum by(le, model_name) (rate(vllm:inter_token_latency_seconds_bucket[5m])))",
    "avg by(pod, model_name) (vllm:kv_cache_usage_perc)",
    "sum by(pod, model_name) (vllm:num_requests_waiting)",
    "sum by(model_name, pod) (rate(vllm:prompt_tokens_total[5m]) + rate(vllm:generation_tokens_total[5m]))",
    "sum by(model_name, pod) (rate(vllm:generation_tokens_total[5m]))",
    "avg by(pod) (vllm:num_requests_running)",
    "sum(rate(vllm:prefix_cache_hits_total[5m])) / sum(rate(vllm:prefix_cache_queries_total[5m]))",
    "avg by(pod, model_name) (vllm:kv_cache_usage_perc * 100)",
]
# https://github.com/vllm-project/vllm examples/observability/prometheus_grafana/grafana.json
VLLM = [
    "histogram_quantile(0.99, sum by(le)"
    ' (rate(vllm:e2e_request_latency_seconds_bucket{model_name="$model_name"}[5m])))',
    'rate(vllm:e2e_request_latency_seconds_sum{model_name="$model_name"}[5m])'
    ' / rate(vllm:e2e_request_latency_seconds_count{model_name="$model_name"}[5m])',
    'rate(vllm:prompt_tokens_total{model_name="$model_name"}[5m])',
    'rate(vllm:generation_tokens_total{model_name="$model_name"}[5m])',
    'histogram_quantile(0.5, sum by(le) (rate(vllm:inter_token_latency_seconds_bucket{model_name="$model_name"}[5m])))',
]
# https://github.com/ai-dynamo/dynamo docs/observability/metrics.md, and deploy/observability/grafana_dashboards/
# disagg-dashboard.json without its join with the pods' phase
DYNAMO = [
    'sum(dynamo_frontend_stage_requests{stage=~"preprocess|route|dispatch"})',
    'sum(dynamo_component_inflight_requests{dynamo_component="backend",dynamo_endpoint="generate"})',
    'sum(dynamo_frontend_active_requests) - sum(dynamo_frontend_stage_requests{stage=~"preprocess|route|dispatch"})',
    "rate(dynamo_frontend_requests_total[30s])",
    "1000 * (rate(dynamo_frontend_time_to_first_token_seconds_sum[5m])"
    " / rate(dynamo_frontend_time_to_first_token_seconds_count[5m]))",
    "1000 * (rate(dynamo_frontend_request_duration_seconds_sum[5m])"
    " / rate(dynamo_frontend_request_duration_seconds_count[5m]))",
    "1000 * (rate(dynamo_frontend_inter_token_latency_seconds_sum[5m])"
    " / rate(dynamo_frontend_inter_token_latency_seconds_count[5m]))",
    "rate(dynamo_frontend_input_sequence_tokens_sum[5m]) / rate(dynamo_frontend_input_sequence_tokens_count[5m])",
    "rate(dynamo_frontend_output_sequence_tokens_sum[5m]) / rate(dynamo_frontend_output_sequence_tokens_count[5m])",
    "dynamo_frontend_queued_requests",
    "dynamo_component_gpu_cache_usage_percent",
    "dynamo_component_total_blocks",
    'rate(dynamo_component_requests_total{dynamo_component="prefill"}[5m])',
    'rate(dynamo_component_request_duration_seconds_sum{dynamo_component="backend"}[5m])'
    ' / rate(dynamo_component_request_duration_seconds_count{dynamo_component="backend"}[5m])',
    "dynamo_frontend_model_context_length",
    "dynamo_frontend_model_max_num_seqs",
]
SERIES = re.compile(r"^([\w:]+)\{(.*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
LOOSE_LABEL = re.compile(r"=(\w+)(?=[,}])")  # the picker's form, without quotes


class Scraped:
    """A deployment under load, and the Prometheus that scrapes it."""

    def __init__(self, ports, prometheus):
        self.ports, self.prometheus = ports, prometheus

    def complete(self):
        body = {"model": MODEL, "prompt": "Two banks of oars, one captain. " * 20, "max_tokens": 16}
        url = f"http://127.0.0.1:{self.ports['openai']}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            return json.load(reply)

    def hold(self):
        """Return the connection of a stream that goes on until it is closed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["openai"], timeout=LIMIT_S)
        body = {"model": MODEL, "prompt": "Two banks", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        return connection

    def samples(self, page):
        """Return name, labels and value of each series; prometheus_client's parser would call buckets _total."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[page]}/metrics", timeout=30) as reply:
            found = SERIES.findall(reply.read().decode())
        return [(name, dict(LABEL.findall(labels)), float(value)) for name, labels, value in found]

    def answer(self, query):
        """Return the values once there are some and all are numbers."""
        query = LOOSE_LABEL.sub(r'="\1"', query.replace("$model_name", MODEL))
        query = re.sub(r"\[\d+[ms]\]", "[3s]", query)

        def finite():
            values = [value for _, value in self.prometheus.ask(query)]
            return values if values and all(map(math.isfinite, values)) else None

        return wait_for(finite)


@pytest.fixture(scope="module")
def scraped(sample_model, tmp_path_factory):
    sample_model("llama")
    folder, ports = tmp_path_factory.mktemp("names"), five_ports()
    targets = [f"127.0.0.1:{ports[name]}" for name in ("metrics", "openai")]
    override = f"--override={json.dumps(OVERRIDE)}"
    with (
        served(f"recipes/{MODEL}", folder / "log", override, ports=ports),
        Prometheus(folder, targets) as prometheus,
    ):
        running, has_ended = Scraped(ports, prometheus), threading.Event()

        def load():
            while not has_ended.is_set():
                running.complete()

        thread = threading.Thread(target=load)
        thread.start()
        try:
            yield running
        finally:
            has_ended.set()
            thread.join()


@pytest.mark.parametrize("query", [*GATEWAY, *LLM_D, *VLLM, *DYNAMO])
def test_what_others_ask_has_an_answer(scraped, query):
    assert scraped.answer(query)


def test_a_queue_is_told_to_gateways_as_long_as_it_is(scraped):
    """Four are in the batch, of ten and the load's own."""

    def waiting(name, **labels):
        found = [one for one in scraped.samples("metrics") if one[0] == name]
        (length,) = [value for _, own, value in found if labels.items() <= own.items()]
        return length in (6, 7)

    with contextlib.ExitStack() as held:
        for _ in range(10):
            held.enter_context(contextlib.closing(scraped.hold()))
        wait_for(lambda: waiting("vllm:num_requests_waiting", engine="decode"))
        wait_for(lambda: waiting("nv_trt_llm_request_metrics", model="decode", request_type="waiting"))


def test_a_gateway_reads_one_series_a_name_beside_the_probes(scraped):
    names = [name for name, _, _ in scraped.samples("health")]
    once = [name for name in names if name.startswith("vllm:")]
    assert len(once) == len(set(once)) and {query.partition("{")[0] for query in GATEWAY} <= set(names)


def test_advice_takes_the_load_that_prometheus_has_seen(scraped):
    usage = scraped.complete()["usage"]
    wait_for(lambda: scraped.prometheus.ask("sum(increase(bireme_prompt_tokens_count[20s])) > 20"))
    found = of_prometheus(f"http://{scraped.prometheus.address}", 1 / 60, 20.0)
    assert found.requests_per_s > 0.5
    assert found.prompt_tokens == pytest.approx(usage["prompt_tokens"], rel=0.25)  # pages are written while it goes on
    assert found.output_tokens == pytest.approx(16, rel=0.25)


def test_blocks_add_up_under_every_name(scraped):
    found = {}
    for name, labels, value in scraped.samples("metrics"):
        if name == "nv_trt_llm_kv_cache_block_metrics" and labels["model"] == "decode":
            found[labels["kv_cache_block_type"]] = value
        elif name == "vllm:cache_config_info" and labels["engine"] == "decode":
            blocks, tokens = float(labels["num_gpu_blocks"]), float(labels["block_size"])
    assert found["used"] + found["free"] == found["max"] == blocks and found["tokens_per"] == tokens
    assert 0 <= found["fraction"] <= 1


def test_every_name_of_the_table_is_published_and_none_besides(scraped):
    published = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _, _ in scraped.samples("metrics")}
    others = {
        name
        for name in published
        if not name.startswith(("bireme_", "nv_inference", "nv_cpu", "nv_energy", "nv_gpu", "nv_pinned", "nv_model"))
    }
    names = {alias.name for own in OF_WORKERS.values() for alias in own}
    seldom = {"vllm:num_preemptions_total", "dynamo_component_kv_cache_hit_rate"}  # a mocker has neither
    seldom |= {"dynamo_component_errors_total", "dynamo_component_cancellation_total"}
    seldom |= {f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted")}  # it drafts nothing
    assert others - names == set()
    assert {name for name in names if name not in published} <= seldom


def test_buckets_of_the_recipe_hold_on_both_pages_and_under_every_name(scraped):
    for page, names in (
        ("metrics", (TTFT, "vllm:time_to_first_token_seconds")),
        ("openai", (TTFT, "dynamo_frontend_time_to_first_token_seconds")),
    ):
        for name in names:
            bounds = {labels["le"] for one, labels, _ in scraped.samples(page) if one == f"{name}_bucket"}
            assert bounds == {"0.01", "0.5", "+Inf"}, (page, name)
