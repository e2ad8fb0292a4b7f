"""The torch engine's step records add up to what was asked, and tell what each step computed."""

from __future__ import annotations

import pytest
import torch

from bireme.engines.torch.forward.forward import StepPath
from bireme.kv.transfer.fake import FakeNetwork
from bireme.kv.wire.step_records import NOTHING_QUEUED, StepRing
from tests.engines.torch.host_resident import HostResident
from tests.engines.torch.torch_harness import MIXED, Harness, make_prompts, request

PROMPTS = make_prompts(*MIXED)
PREEMPTING = {"queue": {"capacity_scheduler_policy": "MAX_UTILIZATION"}, "max_tokens": 320, "tokens_per_block": 8}
CASES = {
    "one step a prompt": {},
    "chunked": {"max_num_tokens": 40},
    "a row each": {"max_num_tokens": 40, "max_batch_size": 3},
    "preempted": {"max_num_tokens": 40} | PREEMPTING,
}


def recording(path, **settings):
    """Return an engine whose records are compared with a look at every row and every request that waits."""
    engine = Harness(path, context={"steps": StepRing(100_000)}, **settings)
    recorder, count = engine.core._recorder, engine.core._recorder.scheduled
    engine.num_prompts = 0  # that were computed to their end

    def compare(plan, ahead=0):
        told = count(plan, ahead)
        first = [one for one in plan.decodes if len(one.tokens) + ahead <= one.num_prompt + one.request.num_resumed]
        later = [len(one.tokens) - 1 + ahead for one in plan.decodes if one not in first]
        prompts = [one for one, _ in plan.chunks] + first
        assert (told.num_prefill_requests, told.num_decode_requests) == (len(prompts), len(later))
        assert told.sum_prefill_tokens == sum(count for _, count in plan.chunks) + len(first)
        assert told.sum_prefill_kv_tokens == sum(plan.begin_of(one) for one in prompts)
        assert told.var_prefill_length == pytest.approx(variance([len(one.tokens) for one in prompts]))
        assert told.sum_decode_kv_tokens == sum(later)
        assert told.var_decode_kv_tokens == pytest.approx(variance(later))
        engine.num_prompts += len(first) + sum(plan.begin_of(one) + num == len(one.tokens) for one, num in plan.chunks)
        compare_queue(recorder._queue.requests, list(engine.core.scheduler.waiting._members.values()))
        return told

    recorder.scheduled = compare
    return engine


def compare_queue(told, waiting):
    lengths = [[], []]
    for one in waiting:
        lengths[one.num_output > one.request.num_resumed or one.params is not None].append(len(one.tokens))
    prefill, decode = lengths
    assert (told.num_prefill_requests, told.sum_prefill_tokens) == (len(prefill), sum(prefill))
    assert (told.num_decode_requests, told.sum_decode_kv_tokens) == (len(decode), sum(decode))
    assert told.var_prefill_length == pytest.approx(variance(prefill))
    assert told.var_decode_kv_tokens == pytest.approx(variance(decode))


def variance(lengths):
    if not lengths:
        return 0.0
    mean = sum(lengths) / len(lengths)
    return sum((length - mean) ** 2 for length in lengths) / len(lengths)


def records_of(engine):
    engine.settle()
    records = engine.core._parts.steps.drain()
    assert [one.counter_id for one in records] == list(range(len(records)))
    assert all(one.wall_time > 0 for one in records)
    return [one.scheduled_requests for one in records], records


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("overlaps", [False, True])
def test_records_add_up_to_the_tokens_that_were_computed_and_generated(tiny, case, overlaps):
    with recording(tiny("llama").path, **CASES[case]) as engine:
        if overlaps:
            resident = HostResident.put_into(engine.core._parts)
        results = [engine.submit(request(prompt, 24)) for prompt in [*PROMPTS, *PROMPTS[:4]]]
        assert [result.finish.error for result in results] == [""] * len(results)
        steps, records = records_of(engine)
        again = engine.core.scheduler.num_preemptions
        assert bool(again) == (case == "preempted") and (not overlaps or resident.num_ahead > 5)
    asked = sum(one.finish.usage.prompt_tokens - one.finish.usage.cached_tokens for one in results)
    computed = sum(one.sum_prefill_tokens for one in steps)
    assert computed == asked if not again else computed > asked
    # A prompt's last token makes the first one; a preempted request is computed again as a prompt.
    decodes, generated = sum(one.num_decode_requests for one in steps), sum(len(result.tokens) for result in results)
    assert decodes == generated - engine.num_prompts and (again or engine.num_prompts == len(results))
    assert records[-1].queued_requests == NOTHING_QUEUED


def test_a_prefill_and_a_decode_engine_tell_each_what_it_did(tiny):
    network = FakeNetwork()
    transfers = [network.join("prefill"), network.join("decode")]
    prefill = recording(tiny("llama").path, transfer=transfers[0], worker="prefill", max_num_tokens=64)
    decode = recording(tiny("llama").path, transfer=transfers[1], worker="decode", max_num_tokens=64)
    with prefill, decode:
        firsts = [prefill.submit(request(prompt, request_type="context_only")) for prompt in PROMPTS]
        exported = [first.finish and first.exported for first in firsts]
        asked = [request(prompt, request_type="generation_only") for prompt in PROMPTS]
        results = [decode.submit(one, params) for one, params in zip(asked, exported, strict=True)]
        assert [result.finish.error for result in results] == [""] * len(PROMPTS)
        (at_prefill, _), (at_decode, _) = records_of(prefill), records_of(decode)
    for transfer in transfers:
        transfer.close()
    cached = sum(first.finish.usage.cached_tokens for first in firsts)
    assert sum(one.sum_prefill_tokens for one in at_prefill) == sum(map(len, PROMPTS)) - cached
    assert {one.kind for one in at_prefill} == {"prefill"}
    assert {one.kind for one in at_decode} == {"decode"}
    assert sum(one.num_decode_requests for one in at_decode) == sum(len(result.tokens) - 1 for result in results)


def test_a_request_that_moved_here_computes_its_tokens_as_a_prompt(tiny):
    prompt, resumed = PROMPTS[1], [7, 8, 9]
    with recording(tiny("llama").path, max_num_tokens=len(prompt) + len(resumed) - 1) as engine:
        result = engine.submit(request([*prompt, *resumed], 24, num_resumed=len(resumed)))
        assert result.finish.error == ""
        steps, records = records_of(engine)
    assert sum(one.sum_prefill_tokens for one in steps) == len(prompt) + len(resumed)
    assert sum(one.num_decode_requests for one in steps) == len(result.tokens) - 1
    assert {one.path for one in records} <= set(StepPath) and steps[1].sum_prefill_tokens == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there no step of decodes passes by what this makes fail")
def test_a_step_that_fails_has_no_record_and_the_sums_go_on(tiny):
    with recording(tiny("llama").path) as engine:
        forward, run = engine.core._parts.forward, engine.core._parts.forward.run
        lost = [engine.submit(request(PROMPTS[4], 200)) for _ in range(2)]
        assert all(one.has_tokens.wait(30) for one in lost)

        def fail(plan):
            forward.run = run
            raise RuntimeError("a kernel has failed")

        forward.run = fail
        assert all("a kernel has failed" in one.finish.error for one in lost)
        engine.run([request(prompt, 8) for prompt in PROMPTS])
        records_of(engine)


def test_what_nobody_asks_for_is_not_counted(tiny):
    with Harness(tiny("llama").path) as engine:
        engine.run([request(PROMPTS[1], 4)])
        assert engine.core._recorder is None and engine.core.scheduler.waiting.sums is None
