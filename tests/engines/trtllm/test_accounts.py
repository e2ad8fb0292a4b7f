"""What a request has cost, by what a release of TensorRT-LLM tells of it."""

from __future__ import annotations

import datetime
from types import SimpleNamespace

from bireme.disagg import DisaggregatedParams
from bireme.engines.trtllm.metrics import TrtllmMetrics
from bireme.engines.trtllm.request_state import GenerateArguments, RequestState
from bireme.errors import KvTransferError, to_message
from bireme.messages import EngineRequest, Finish, SamplingParams
from bireme.metrics import Registry

PARAMS = DisaggregatedParams(worker="prefill", life=1, lease_id=1, generation=1, num_tokens=80)


def usage(prompt_tokens=80, cached_tokens=0, **perf):
    """Return the usage of a request whose result has `cached_tokens` and request_perf_metrics."""
    request = EngineRequest(prompt=b"\0" * 4 * prompt_tokens, sampling=SamplingParams(max_tokens=9))
    run = RequestState(key=(0, 1), request=request, call=GenerateArguments([1] * prompt_tokens, None), stop_ids=())
    output = SimpleNamespace(request_perf_metrics=SimpleNamespace(**perf))
    run.result = SimpleNamespace(outputs=[output], cached_tokens=cached_tokens)
    return TrtllmMetrics(Registry("decode"), "decode", tokens_per_block=32).usage(run, run.arrived_at + 1.0)


def test_where_reused_tokens_are_not_told_reused_blocks_are_counted():
    reused = SimpleNamespace(num_reused_blocks=2)
    assert usage(kv_cache_metrics=reused).cached_tokens == 64
    assert usage(kv_cache_metrics=reused, cached_tokens=40).cached_tokens == 40
    assert usage(kv_cache_metrics=reused, prompt_tokens=64).cached_tokens == 63  # one is always computed


def test_times_are_timedeltas_of_a_steady_clock_and_may_be_missing():
    first, last = (datetime.timedelta(seconds=value) for value in (5.0, 5.25))
    times = SimpleNamespace(arrival_time=first, first_scheduled_time=last)
    assert usage(timing_metrics=times).queue_ms == 250.0
    assert usage(timing_metrics=SimpleNamespace(arrival_time=first, first_scheduled_time=None)).queue_ms == 0.0
    assert usage().queue_ms == 0.0


def ended(error="", **timing):
    """Return the transfer series of a request whose KV came from a prefill."""
    registry = Registry("decode")
    request = EngineRequest(prompt=b"\0" * 320, sampling=SamplingParams(max_tokens=9), request_type="generation_only")
    run = RequestState(key=(0, 1), request=request, call=GenerateArguments([1] * 80, None), stop_ids=(), params=PARAMS)
    run.first_token_at = 0.0 if error else run.arrived_at + 1.0
    perf = SimpleNamespace(timing_metrics=SimpleNamespace(**timing)) if timing else None
    run.result = SimpleNamespace(outputs=[SimpleNamespace(request_perf_metrics=perf)], cached_tokens=0)
    accounts = TrtllmMetrics(registry, "decode", tokens_per_block=32)
    usage = accounts.usage(run, run.arrived_at + 1.0)
    accounts.finished(run, Finish("error" if error else "stop", usage, error), run.arrived_at + 2.0)
    delta = registry.take_delta()
    counters = {name: value for name, _, value in delta.counters if "transfer" in name}
    return counters, {name: total for name, _, _, total in delta.histograms if "transfer" in name}


def test_a_transfer_has_the_bytes_and_the_time_that_tensorrt_llm_tells():
    first, last = (datetime.timedelta(seconds=value) for value in (5.0, 5.25))
    counters, seconds = ended(kv_cache_transfer_start=first, kv_cache_transfer_end=last, kv_cache_size=4096)
    assert counters == {"bireme_kv_transfer_bytes_total": 4096.0} and seconds == {"bireme_kv_transfer_seconds": 0.25}


def test_without_perf_metrics_a_transfer_lasts_until_the_first_token():
    assert ended()[1] == {"bireme_kv_transfer_seconds": 1.0}


def test_kv_that_did_not_arrive_is_a_failed_transfer():
    error = to_message(KvTransferError("KV of the prefill did not arrive: timeout"))
    assert ended(error) == ({"bireme_kv_transfer_failures_total": 1.0}, {})


def test_a_canary_is_counted_apart_from_load():
    registry = Registry("decode")
    request = EngineRequest(prompt=b"\0" * 320, sampling=SamplingParams(max_tokens=2))
    run = RequestState(key=(0, 1), request=request, call=GenerateArguments([1] * 80, None), stop_ids=(), is_canary=True)
    accounts = TrtllmMetrics(registry, "decode", tokens_per_block=32)
    accounts.accepted(run)
    accounts.delivered(run, 2, is_first=True)
    accounts.finished(run, Finish("length", accounts.usage(run, run.arrived_at)), run.arrived_at)
    delta = registry.take_delta()
    counted = [row for row in delta.counters if row[2]]
    assert counted == [("bireme_canaries_total", ("decode", "length"), 1.0)] and not delta.histograms
