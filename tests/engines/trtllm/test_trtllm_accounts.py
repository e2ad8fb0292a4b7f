"""What a request has cost, by what a release of TensorRT-LLM tells of it."""

from __future__ import annotations

import datetime
from types import SimpleNamespace

from bireme.engines.trtllm.accounts import Accounts
from bireme.engines.trtllm.run import Call, Run
from bireme.messages import EngineRequest, SamplingParams
from bireme.metrics import Registry


def usage(prompt_tokens=80, cached_tokens=0, **perf):
    """Return the usage of a request whose result has `cached_tokens` and request_perf_metrics."""
    request = EngineRequest(prompt=b"\0" * 4 * prompt_tokens, sampling=SamplingParams(max_tokens=9))
    run = Run(key=(0, 1), request=request, call=Call([1] * prompt_tokens, None), stop_ids=())
    output = SimpleNamespace(request_perf_metrics=SimpleNamespace(**perf))
    run.result = SimpleNamespace(outputs=[output], cached_tokens=cached_tokens)
    return Accounts(Registry("decode"), "decode", tokens_per_block=32).usage(run, run.arrived_at + 1.0)


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
