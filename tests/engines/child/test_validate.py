"""What an engine process lets in."""

from __future__ import annotations

import msgspec
import pytest

from bireme import disagg
from bireme.config import Limits
from bireme.engines.child.validate import Gate
from bireme.errors import RequestError
from bireme.messages import Capacity, ProcessorCall, SamplingParams
from tests.engines.engine_fixtures import PROMPT, make_request

KEY = b"k" * 32
CAPACITY = Capacity(
    max_seq_len=128,
    max_batch_size=8,
    max_num_tokens=64,
    max_queue_size=8,
    tokens_per_block=32,
    num_blocks=16,
    vocab_size=2000,
)


def gate(stage="decode", **fields):
    return Gate(stage, CAPACITY, fields.pop("limits", Limits()), KEY, fields.pop("has_transfer", True), **fields)


def params_for(request, **fields):
    digest = disagg.prompt_digest(request.prompt, request.options.cache_salt, request.options.lora_name)
    values = {"worker": "prefill", "life": 1, "lease_id": 1, "generation": 1, "num_tokens": len(request.prompt) // 4}
    return disagg.seal(disagg.DisaggregatedParams(**(values | {"prompt_digest": digest} | fields)), KEY)


def test_unset_max_tokens_is_what_is_left_of_the_context():
    admitted = gate().admit(make_request(max_tokens=None))
    assert admitted.max_tokens == 128 - len(PROMPT)


def test_huge_max_tokens_is_clamped_to_the_context():
    admitted = gate().admit(make_request(max_tokens=1 << 40))
    assert admitted.max_tokens == 128 - len(PROMPT)


def test_a_small_pool_limits_the_context():
    small = msgspec.structs.replace(CAPACITY, num_blocks=2).within_pool()
    admitted = Gate("decode", small, Limits(), KEY).admit(make_request(max_tokens=None))
    assert (small.max_seq_len, admitted.max_tokens) == (64, 64 - len(PROMPT))
    assert CAPACITY.within_pool() is CAPACITY


def test_resumed_tokens_count_as_generated():
    admitted = gate().admit(make_request(max_tokens=None, num_resumed=10))
    assert admitted.max_tokens == 128 - len(PROMPT) + 10


def test_min_tokens_follows_a_clamped_max_tokens():
    sampling = SamplingParams(max_tokens=500, min_tokens=400)
    admitted = gate().admit(make_request(sampling=sampling))
    assert admitted.request.sampling.min_tokens == admitted.max_tokens == 78


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        (SamplingParams(max_tokens=-5), "max_tokens: -5; 1 or more"),
        (SamplingParams(min_tokens=9, max_tokens=8), "min_tokens: 9; max_tokens is 8"),
        (SamplingParams(temperature=-0.1), "temperature: -0.1; 0 to"),
        (SamplingParams(temperature=float("inf")), "temperature: inf; a finite number"),
        (SamplingParams(top_p=1.5), "top_p: 1.5; 0 to 1"),
        (SamplingParams(top_p=float("nan")), "top_p: nan; a finite number"),
        (SamplingParams(min_p=2.0), "min_p: 2.0; 0 to 1"),
        (SamplingParams(top_k=-1), "top_k: -1; 0 or more; 0 turns it off"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty: 0; more than 0"),
        (SamplingParams(presence_penalty=float("nan")), "presence_penalty: nan"),
        (SamplingParams(seed=1 << 64), "seed: 18446744073709551616; 0 to 18446744073709551615"),
        (SamplingParams(n=2), "n: 2; an engine runs one"),
        (SamplingParams(logprobs=21), "logprobs: 21; 0 to 20"),
        (SamplingParams(prompt_logprobs=-1), "prompt_logprobs: -1; 0 to 20"),
        (SamplingParams(stop_token_ids=(2000,)), "stop_token_ids: token id 2000; ids of this model are 0 to 1999"),
        (SamplingParams(stop_token_ids=tuple(range(300))), "limits.max_stop_token_ids is 256"),
        (SamplingParams(bad_token_ids=((5, -1),)), "bad_token_ids: token id -1"),
        (SamplingParams(bad_token_ids=((),)), "bad_token_ids: an empty sequence"),
        (SamplingParams(bad_token_ids=((1,),) * 129), "bad_token_ids: 129 entries; limits.max_bad_words is 128"),
        (
            SamplingParams(logits_processors=(ProcessorCall("x"),) * 9),
            "logits_processors: 9 entries; limits.max_logits",
        ),
        (SamplingParams(logit_bias={5000: 1.0}), "logit_bias: token id 5000"),
        (SamplingParams(logit_bias={5: float("inf")}), "logit_bias: inf"),
        (SamplingParams(end_id=-1), "end_id: -1; to generate past the end, set ignore_eos"),
        (SamplingParams(end_id=2000), "end_id: token id 2000"),
        (SamplingParams(stop=("x",) * 17), "stop: 17 entries; limits.max_stop_strings is 16"),
    ],
)
def test_a_sampling_value_out_of_range_is_named_with_its_limit(sampling, text):
    with pytest.raises(RequestError) as refusal:
        gate().admit(make_request(sampling=sampling))
    assert text in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": [1] * 128}, "prompt: 128 tokens; this worker takes 127"),
        ({"prompt": []}, "prompt: no tokens"),
        ({"num_resumed": 50}, "prompt: no tokens"),
        ({"num_resumed": 51}, "num_resumed: 51; the prompt has 50 tokens"),
        ({"num_resumed": -1}, "num_resumed: -1"),
        ({"num_resumed": 20, "max_tokens": 20}, "nothing is left to generate"),
        ({"priority": float("nan")}, "priority: nan; 0 to 1"),
        ({"timeout_ms": -1}, "timeout_ms: -1"),
        ({"cache_salt": "x" * 1025}, "cache_salt: 1025 characters; the limit is 1024"),
        ({"multimodal": b"[]"}, "multimodal: this worker's model takes text only"),
        ({"disaggregated_params": b"x"}, "takes no disaggregated_params"),
        ({"request_type": "generation_only"}, "generation_only needs disaggregated_params"),
    ],
)
def test_a_bad_request_is_named_with_its_limit(fields, text):
    with pytest.raises(RequestError) as refusal:
        gate().admit(make_request(**fields))
    assert text in str(refusal.value)


def test_an_odd_prompt_is_refused():
    with pytest.raises(RequestError, match="prompt: 3 bytes"):
        gate().admit(msgspec.structs.replace(make_request(), prompt=b"abc"))


def test_the_recipes_limits_are_errors_not_clamps():
    limits = Limits(max_tokens=10, max_prompt_tokens=20)
    with pytest.raises(RequestError, match="max_tokens: 11; limits.max_tokens is 10"):
        gate(limits=limits).admit(make_request([1], 11))
    with pytest.raises(RequestError, match="prompt: 50 tokens; limits.max_prompt_tokens is 20"):
        gate(limits=limits).admit(make_request())
    assert gate(limits=limits).admit(make_request([1], None)).max_tokens == 10
    with pytest.raises(RequestError, match="max_input_len is 8"):
        gate(max_input_len=8).admit(make_request())


def test_an_unknown_adapter_is_refused():
    with pytest.raises(RequestError, match="no adapter 'x'"):
        gate().admit(make_request(lora_name="x"))


def test_signed_params_of_the_same_prompt_are_opened():
    request = make_request(request_type="generation_only")
    request = msgspec.structs.replace(request, disaggregated_params=params_for(request, first_gen_tokens=(5,)))
    params = gate().admit(request).params
    assert params is not None
    assert params.first_gen_tokens == (5,)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_tokens": 7}, "they belong to another prompt"),
        ({"prompt_digest": ""}, "they belong to another prompt"),
        ({"request_type": "context_only"}, "made for context_only"),
        ({"first_gen_tokens": (2000,)}, "first_gen_tokens: token id 2000"),
    ],
)
def test_params_that_do_not_fit_are_refused(fields, text):
    request = make_request(request_type="generation_only")
    request = msgspec.structs.replace(request, disaggregated_params=params_for(request, **fields))
    with pytest.raises(RequestError, match=text):
        gate().admit(request)


def test_ids_at_both_ends_of_the_vocabulary_pass():
    admitted = gate().admit(make_request([0, 1999]))
    assert admitted.ids.tolist() == [0, 1999]


def test_a_disaggregated_request_is_hashed_once_and_others_never(monkeypatch):
    hashed = []
    digest = disagg.prompt_digest
    monkeypatch.setattr(disagg, "prompt_digest", lambda *parts: hashed.append(parts) or digest(*parts))
    gate().admit(make_request())
    assert hashed == []
    admitted = gate("prefill").admit(make_request(request_type="context_only"))
    assert admitted.digest == digest(admitted.request.prompt, "", "") and len(hashed) == 1


def test_resumed_tokens_are_among_the_ids_and_not_of_the_prompt():
    admitted = gate().admit(make_request(max_tokens=None, num_resumed=10))
    assert (admitted.ids.tolist(), admitted.num_prompt) == (PROMPT, len(PROMPT) - 10)
