"""Load errors, unload, metrics and configuration, on a real tritonserver."""

from __future__ import annotations

import re
import time

import pytest

from bireme.errors import BiremeError
from bireme.triton.autocomplete import tensor_config
from tests.triton import adapter_stages

pytestmark = pytest.mark.server


def series(server, name, **labels):
    """Return one value of Triton's /metrics."""
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    for line in server.metrics_text().splitlines():
        match = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line)
        if match and match[1] == name and wanted <= set(match[2].split(",")):
            return float(match[3])
    return None


def wait_for_value(server, expected, name, **labels):
    deadline = time.monotonic() + 60
    while (value := series(server, name, **labels)) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


def test_a_stage_that_can_not_start_fails_the_load_with_its_own_words(server):
    with pytest.raises(BiremeError, match="max_seq_len: 9; at least 16 is needed"):
        server.admin.load("unstartable")


@pytest.mark.parametrize("stage", [adapter_stages.Echo, adapter_stages.Tokens], ids=lambda stage: stage.spec.name)
def test_triton_uses_the_tensors_of_the_spec(server, stage):
    config = server.admin.get_json(f"/v2/models/{stage.spec.name}/config")
    assert config["max_batch_size"] == 0
    assert bool(config.get("model_transaction_policy", {}).get("decoupled")) == stage.spec.decoupled
    assert [(item["name"], item["data_type"]) for item in config["output"]] == [
        (tensor.name, tensor_config(tensor)["data_type"]) for tensor in stage.spec.outputs
    ]


def test_metrics_hammered_from_16_threads_add_up(client, server):
    client.infer("measured", values={"threads": 16, "times": 5000})
    worker = {"worker": "measured"}
    assert wait_for_value(server, 160_000, "bireme_generated_tokens_total", **worker) == 160_000
    assert wait_for_value(server, 20_000, "bireme_requests_total", outcome="outcome3", **worker) == 20_000
    assert wait_for_value(server, 80_000, "bireme_queue_seconds_count", **worker) == 80_000
    assert series(server, "bireme_queue_seconds_bucket", le="0.001", **worker) == 0
    assert series(server, "bireme_queue_seconds_bucket", le="0.0025", **worker) == 80_000
    assert series(server, "bireme_queue_seconds_bucket", le="+Inf", **worker) == 80_000
    assert series(server, "bireme_queue_seconds_sum", **worker) == pytest.approx(160)
    assert series(server, "bireme_requests_running", **worker) == 4999


def test_cancelled_and_open_streams_are_counted(client, server):
    before = series(server, "bireme_cancellations_total", worker="tokens") or 0
    with client.call("tokens", count=100_000) as call:
        next(iter(call))
        assert wait_for_value(server, 1, "bireme_streams", worker="tokens") == 1
    assert wait_for_value(server, 0, "bireme_streams", worker="tokens") == 0
    assert wait_for_value(server, before + 1, "bireme_cancellations_total", worker="tokens") == before + 1


def test_unloading_ends_even_when_the_stage_does_not_stop(client, server):
    assert client.tokens("slow_stop", any=1) == [1]
    pid = server.stub_pid("slow_stop")
    began = time.monotonic()
    server.admin.unload("slow_stop")
    while pid in server.stub_pids("slow_stop"):
        assert time.monotonic() - began < 60
        time.sleep(0.1)
    server.admin.load("slow_stop")
    assert client.tokens("slow_stop", any=1) == [1]


def test_unload_lets_running_streams_finish(client, server):
    try:
        with client.call("tokens", count=50) as call:
            next(iter(call))
            server.admin.unload("tokens")
            assert call.tokens() == list(range(1, 50))
        deadline = time.monotonic() + 60
        while server.admin.index()["tokens"][0] != "UNAVAILABLE":
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:  # others use it, too
        server.admin.load("tokens")
    assert client.tokens("tokens", count=3) == [0, 1, 2]
