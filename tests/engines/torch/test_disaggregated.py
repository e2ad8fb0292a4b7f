"""Prefill and decode in two engines, KV moved by the in-process transfer: equal output, no block or lease left."""

from __future__ import annotations

import os

import msgspec
import pytest
import torch

from bireme.config import CacheTransceiverConfig
from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord, host_id
from bireme.errors import RequestError, UnavailableError
from bireme.kv.transfer.fake import FakeNetwork
from bireme.kv.transfer.host_pool import HostPool
from bireme.kv.transfer.leased import LeasedTransfer
from bireme.metrics import Registry
from tests.engines.torch.torch_harness import MIXED, Harness, make_prompts, request
from tests.kv.transfer.kv_side import backend_of
from tests.kv.transfer.needs import needs_cuda, needs_nixl

PROMPTS = make_prompts(*MIXED)


class Pair:
    """A prefill and a decode engine."""

    def __init__(
        self, path, prefill_size=32, decode_size=16, transfers=None, of_prefill=None, of_decode=None, **settings
    ):
        network = FakeNetwork()
        self.transfers = transfers or [network.join("prefill"), network.join("decode")]
        common = {"max_num_tokens": 64} | settings
        first, second = ({**common, **(own or {})} for own in (of_prefill, of_decode))
        self.prefill = Harness(path, self.transfers[0], "prefill", tokens_per_block=prefill_size, **first)
        self.decode = Harness(path, self.transfers[1], "decode", tokens_per_block=decode_size, **second)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for engine, transfer in zip((self.prefill, self.decode), self.transfers, strict=True):
            engine.engine.stop()
            transfer.close()

    def begin(self, prompt, max_tokens=48, **fields):
        result = self.prefill.submit(request(prompt, max_tokens, request_type="context_only", **fields))
        assert result.finish.error == ""
        return result

    def go_on(self, prompt, first, max_tokens=48, **fields):
        asked = request(prompt, max_tokens, request_type="generation_only", **fields)
        return self.decode.submit(asked, first.exported)

    def run(self, prompts, **fields):
        firsts = [self.begin(prompt, **fields) for prompt in prompts]
        results = [self.go_on(prompt, first, **fields) for prompt, first in zip(prompts, firsts, strict=True)]
        assert [result.finish.error for result in results] == [""] * len(prompts)
        return [result.tokens for result in results]

    def assert_nothing_is_held(self):
        self.transfers[0]._copier.close(5)  # releases have been called
        for engine in (self.prefill, self.decode):
            engine.engine.stop()
            for action in engine.engine._take():
                action()
            assert engine.manager.num_referenced == 0
        assert len(self.transfers[0].leases) == 0


SIZES = [(32, 16), (16, 32), (8, 24)]
PAIRS = [(name, *sizes) for name in ("llama", "gemma3") for sizes in SIZES]


@pytest.mark.parametrize(("name", "prefill_size", "decode_size"), [*PAIRS, ("gpt_oss", 8, 24)])
def test_disaggregated_output_equals_generate(tiny, name, prefill_size, decode_size):
    model = tiny(name)
    with Pair(model.path, prefill_size, decode_size) as pair:
        assert pair.run(PROMPTS) == model.expect(PROMPTS)
        pair.assert_nothing_is_held()


def transfer_by(backend, folder, worker):
    mover = backend_of(backend, folder, worker, 1)
    config = CacheTransceiverConfig(backend="DEFAULT")
    return LeasedTransfer(
        mover, run_dir=folder, worker=worker, life=1, config=config, metrics=Registry(worker), chunk_bytes=4096
    )


@pytest.fixture
def real_pair(tiny, tmp_path):
    """Return a function: the name of a model and a backend -> the two, with a transfer that copies."""
    opened = []

    def make(name, backend, *sizes):
        transfers = [transfer_by(backend, tmp_path, worker) for worker in ("prefill", "decode")]
        opened.append(Pair(tiny(name).path, *sizes, transfers=transfers))
        address = {"host": host_id(), "transfer_endpoint": transfers[0].endpoint}
        run_folder.publish(tmp_path, WorkerRecord(worker="prefill", life=1, pid=os.getpid(), **address))
        return opened[-1]

    yield make
    for pair in opened:
        pair.__exit__()


@pytest.mark.parametrize(
    "backend", ["shm", "files", pytest.param("nixl", marks=needs_nixl), pytest.param("cuda", marks=needs_cuda)]
)
def test_output_over_a_real_transfer_equals_generate(tiny, real_pair, backend, monkeypatch):
    if backend == "files":  # what goes where prefill's memory can't be mapped
        monkeypatch.setattr(HostPool, "shared", lambda pool: None)
    pair = real_pair("gemma3", "shm" if backend == "files" else backend)
    assert pair.run(PROMPTS) == tiny("gemma3").expect(PROMPTS)
    if not torch.cuda.is_available() and backend == "nixl":  # straight out of prefill's pool
        assert pair.transfers[0]._backend.can_read(pair.prefill.engine._loaded.core._parts.exporter._store)
    elif not torch.cuda.is_available():
        assert len(pair.transfers[1]._backend._mapped) == (backend == "shm")


@pytest.mark.parametrize(
    "backend", ["shm", pytest.param("nixl", marks=[needs_nixl, needs_cuda]), pytest.param("cuda", marks=needs_cuda)]
)
@pytest.mark.parametrize(
    ("name", "prefill_size", "decode_size"), [("llama", 16, 32), ("gemma3", 8, 24), ("qwen3", 32, 8)]
)
def test_many_requests_and_prefix_hits_over_a_real_transfer_equal_generate(
    tiny, real_pair, backend, name, prefill_size, decode_size
):
    expected = tiny(name).expect(PROMPTS)
    pair = real_pair(name, backend, prefill_size, decode_size)
    assert pair.decode.run([request(prompt) for prompt in PROMPTS[::2]]) == expected[::2]
    assert pair.run(PROMPTS) == expected  # half of them hit what decode holds
    assert pair.run(PROMPTS) == expected


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_that_decode_holds_are_not_fetched(tiny, name):
    model = tiny(name)
    with Pair(model.path) as pair:
        expected = pair.decode.run([request(prompt) for prompt in PROMPTS])
        asked = []
        fetch = pair.transfers[1].fetch
        pair.transfers[1].fetch = lambda params, firsts, *rest: asked.append(firsts[0]) or fetch(params, firsts, *rest)
        assert pair.run(PROMPTS) == expected == model.expect(PROMPTS)
        assert asked == [len(prompt) // 16 * 16 for prompt in PROMPTS]
        pair.assert_nothing_is_held()


def test_a_resumed_request_is_disaggregated_like_any_other(tiny):
    model = tiny("gemma3")
    expected = model.expect(PROMPTS[:4])
    with Pair(model.path) as pair:
        for prompt, tokens in zip(PROMPTS, expected, strict=False):
            first = pair.begin(prompt + tokens[:9], num_resumed=9)
            result = pair.go_on(prompt + tokens[:9], first, num_resumed=9)
            assert (result.finish.error, result.tokens) == ("", tokens[9:])
            assert result.finish.usage.completion_tokens == 48


def test_prefill_answers_with_one_token_and_its_cost(tiny):
    model = tiny("llama")
    with Pair(model.path) as pair:
        first = pair.begin(PROMPTS[2], logprobs=2)
        assert (first.finish.reason, first.tokens) == ("not_finished", model.expect([PROMPTS[2]])[0][:1])
        assert first.exported is not None and first.exported.num_tokens == 45
        result = pair.go_on(PROMPTS[2], first, logprobs=2)
        assert result.finish.usage.prefill_worker == "prefill" and result.finish.usage.transfer_ms > 0
        assert len(result.logprobs) == 48 and result.logprobs[0] == first.logprobs[0]


def test_sampling_goes_on_from_prefill_exactly(tiny):
    model = tiny("llama")
    fields = {"temperature": 0.8, "seed": 11, "frequency_penalty": 0.5}
    with Pair(model.path) as pair:
        whole = pair.decode.run([request(PROMPTS[6], **fields)])
        assert pair.run([PROMPTS[6]], **fields) == whole


def test_a_first_token_that_is_the_last_needs_no_transfer(tiny):
    model = tiny("llama")
    token = model.expect([PROMPTS[2]])[0][0]
    with Pair(model.path) as pair:
        pair.transfers[1].fail_with = UnavailableError("no transfer may be needed")
        first = pair.begin(PROMPTS[2], stop_token_ids=(token,))
        assert (first.finish.reason, first.finish.stop_token_id, first.tokens) == ("stop", token, [])
        result = pair.go_on(PROMPTS[2], first, stop_token_ids=(token,))
        assert (result.finish.reason, result.finish.stop_token_id, result.tokens) == ("stop", token, [])
        once = pair.begin(PROMPTS[3], max_tokens=1)
        assert (once.finish.reason, pair.go_on(PROMPTS[3], once, max_tokens=1).finish.reason) == ("length", "length")
        pair.assert_nothing_is_held()


def test_params_of_another_prompt_are_refused(tiny):
    with Pair(tiny("llama").path) as pair:
        first = pair.begin(PROMPTS[2])
        with pytest.raises(RequestError, match="another prompt"):
            pair.go_on(PROMPTS[2][::-1], first)
        with pytest.raises(RequestError, match="another prompt"):
            pair.go_on(PROMPTS[2], first, cache_salt="x")


def test_a_lease_serves_once(tiny):
    with Pair(tiny("llama").path) as pair:
        first = pair.begin(PROMPTS[2])
        assert pair.go_on(PROMPTS[2], first).finish.reason == "length"
        again = pair.go_on(PROMPTS[2], first)
        assert again.finish.error.startswith("NOT_FOUND")
        pair.assert_nothing_is_held()


def test_an_expired_lease_frees_its_blocks_and_decode_says_so(tiny):
    with Pair(tiny("llama").path) as pair:
        first = pair.begin(PROMPTS[2])
        assert pair.prefill.manager.num_referenced == 2
        pair.transfers[0].expire_leases()
        assert pair.go_on(PROMPTS[2], first).finish.error.startswith("NOT_FOUND")
        pair.assert_nothing_is_held()


def test_an_abort_of_a_finished_prefill_ends_its_lease(tiny):
    with Pair(tiny("llama").path) as pair:
        first = pair.begin(PROMPTS[2])
        pair.prefill.abort(first)
        pair.prefill.settle()
        assert pair.go_on(PROMPTS[2], first).finish.error.startswith("NOT_FOUND")
        pair.assert_nothing_is_held()


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.8, "seed": 11, "frequency_penalty": 0.5}])
def test_the_first_token_does_not_wait_for_the_rows(tiny, fields):
    model = tiny("llama")
    with Pair(model.path) as pair:
        (whole,) = pair.decode.run([request(PROMPTS[2], **fields)])
        pair.transfers[1].hold()
        result = pair.go_on(PROMPTS[2], pair.begin(PROMPTS[2], **fields), **fields)
        assert result.has_tokens.wait(30)
        assert result.tokens == whole[:1]
        pair.transfers[1].resume()
        assert result.finish.error == "" and result.tokens == whole


def test_an_abort_during_the_transfer_ends_after_it(tiny):
    with Pair(tiny("llama").path) as pair:
        pair.transfers[1].hold()
        result = pair.go_on(PROMPTS[2], pair.begin(PROMPTS[2]))
        assert result.has_tokens.wait(30)
        pair.decode.abort(result)
        assert (result.finish.reason, len(result.tokens)) == ("cancelled", 1)
        pair.transfers[0].expire_leases()
        pair.assert_nothing_is_held()


def test_a_deadline_during_the_transfer_ends_as_timeout(tiny):
    with Pair(tiny("llama").path) as pair:
        pair.transfers[1].hold()
        result = pair.go_on(PROMPTS[2], pair.begin(PROMPTS[2]), timeout_ms=50)
        assert result.finish.reason == "timeout" and len(result.tokens) <= 1
        pair.transfers[0].expire_leases()
        pair.assert_nothing_is_held()


def test_a_lost_prefill_worker_ends_as_unavailable(tiny):
    with Pair(tiny("llama").path) as pair:
        first = pair.begin(PROMPTS[2])
        pair.transfers[1].fail_with = UnavailableError("prefill is gone")
        assert pair.go_on(PROMPTS[2], first).finish.error == "UNAVAILABLE: KV transfer failed: prefill is gone"


def test_decode_claims_only_when_it_has_room(tiny):
    model = tiny("llama")
    with Pair(model.path, max_batch_size=1) as pair:
        busy = pair.decode.submit(request(PROMPTS[3], 400))
        assert busy.has_tokens.wait(30)
        result = pair.go_on(PROMPTS[2], pair.begin(PROMPTS[2]))
        assert [state.value for state, count in pair.transfers[0].leases.counts().items() if count] == ["exported"]
        pair.decode.abort(busy)
        assert (result.finish.error, [result.tokens]) == ("", model.expect([PROMPTS[2]]))


def test_preempted_imports_are_computed_again_and_equal(tiny):
    model = tiny("gemma3")
    queue = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    with Pair(model.path, max_tokens=320, queue=queue) as pair:
        results = []
        for prompt in PROMPTS:
            results.append(pair.go_on(prompt, pair.begin(prompt)))
        assert [result.finish.error for result in results] == [""] * len(PROMPTS)
        assert [result.tokens for result in results] == model.expect(PROMPTS)
        pair.assert_nothing_is_held()


def test_params_must_hold_exactly_one_token(tiny):
    with Pair(tiny("llama").path) as pair:
        first = pair.begin(PROMPTS[2])
        first.exported = msgspec.structs.replace(first.exported, first_gen_tokens=())
        with pytest.raises(RequestError, match="one token with it"):
            pair.go_on(PROMPTS[2], first)


def test_a_key_may_be_used_again_while_its_first_lease_is_out(tiny):
    with Pair(tiny("llama").path) as pair:
        firsts = []
        for prompt in PROMPTS[2:4]:
            firsts.append(pair.begin(prompt))
            pair.prefill.results.clear()  # so that the harness numbers from 1 again
        for prompt, first in zip(PROMPTS[2:4], firsts, strict=True):
            assert pair.go_on(prompt, first).finish.error == ""
        pair.assert_nothing_is_held()


def test_stopping_decode_during_a_transfer_ends_the_request(tiny):
    with Pair(tiny("llama").path) as pair:
        pair.transfers[1].hold()
        result = pair.go_on(PROMPTS[2], pair.begin(PROMPTS[2]))
        pair.decode.settle()
        pair.decode.engine.stop()
        assert result.finish.error.startswith("UNAVAILABLE")
        assert pair.decode.manager.num_referenced == 0


def test_a_window_block_that_was_fetched_in_part_is_not_reused(tiny):
    model = tiny("gemma3")
    prompt = PROMPTS[4]  # 150 tokens: window rows come from 119 on, in the middle of a block
    with Pair(model.path) as pair:
        assert pair.run([prompt]) == model.expect([prompt])
        assert pair.decode.run([request(prompt[:147])]) == model.expect([prompt[:147]])


def test_a_traced_request_tells_of_chunks_transfer_and_steps(tiny):
    traceparent, prompt = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", make_prompts(150)[0]
    with Pair(tiny("llama").path) as pair:
        first = pair.begin(prompt, max_tokens=5, traceparent=traceparent)
        chunks = [span.attributes["tokens"] for span in first.finish.spans if span.name == "prefill_chunk"]
        assert chunks == [64, 64, 22] and {span.name for span in first.finish.spans} == {"queue", "prefill_chunk"}
        second = pair.go_on(prompt, first, max_tokens=5, traceparent=traceparent)
        spans = {span.name: span for span in second.finish.spans}
        assert spans["transfer"].attributes == {"bytes": 0, "way": "fake"}
        assert spans["generate"].attributes == {"tokens": 5, "steps": 4}
        assert spans["queue"].end_us == spans["transfer"].start_us <= spans["generate"].end_us
        assert pair.begin(prompt, max_tokens=5).finish.spans is None
