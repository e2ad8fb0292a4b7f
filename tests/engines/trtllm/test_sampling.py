"""Sampling parameters as TensorRT-LLM takes them: what is unset stays unset, and the exceptions have reasons."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.engines.trtllm.sampling import sampling_fields, stop_ids
from bireme.logits.rows import Row
from bireme.messages import EngineRequest, SamplingParams, temperature_of
from bireme.sampling import with_seed

EOS = (2, 7)


def fields(request_type="context_and_generation", num_resumed=0, **sampling):
    params = SamplingParams(**({"max_tokens": 10} | sampling))
    prompt = np.arange(5, dtype=np.int32).tobytes()
    request = EngineRequest(prompt=prompt, sampling=params, request_type=request_type, num_resumed=num_resumed)
    return sampling_fields(request, EOS)


def test_what_is_unset_stays_unset():
    assert fields() == {"max_tokens": 10, "detokenize": False, "end_id": 2, "stop_token_ids": [7]}


def test_zero_is_a_value():
    found = fields(presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0, end_id=2)
    assert (found["presence_penalty"], found["frequency_penalty"], found["min_tokens"]) == (0, 0, 0)


def test_temperature_alone_gets_a_top_p_because_it_would_be_greedy_otherwise():
    assert fields(temperature=0.7)["top_p"] == 1.0
    assert fields(min_p=0.1)["top_p"] == 1.0
    assert "top_p" not in fields(temperature=0.7, top_k=5)


def is_greedy(given):
    """TensorRT-LLM's own rule, of the releases before 1.2 and since: they must agree."""
    temperature, top_k, top_p = (given.get(name) for name in ("temperature", "top_k", "top_p"))
    before = top_k in (None, 1) and top_p in (None, 0.0)
    since = (temperature is None and before) or top_k == 1 or top_p == 0 or temperature == 0
    assert before == since, given
    return since


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 0.7, 1.0]),
            "top_k": st.sampled_from([0, 1, 5]),
            "top_p": st.sampled_from([0.0, 0.9, 1.0]),
            "min_p": st.sampled_from([0.0, 0.1]),
            "seed": st.just(5),
        },
    )
)
def test_what_is_greedy_on_torch_is_greedy_here_and_needs_no_seed(sampling):
    drawn = with_seed(SamplingParams(**sampling))
    is_greedy_on_torch = Row(drawn, [1], [], [2], 100).temperature == 0
    found = fields(**sampling)
    assert is_greedy(found) == is_greedy_on_torch
    assert found.get("temperature", 1.0) == (temperature_of(drawn) or 1.0)
    assert (drawn.seed is None) == (is_greedy_on_torch and "seed" not in sampling)


def test_temperature_zero_leaves_out_what_would_make_it_random():
    assert fields(temperature=0.0, top_k=5, top_p=0.9, min_p=0.1, seed=1) == fields()


@pytest.mark.parametrize("asked, given", [(0, 1), (1, 1), (5, 5)])
def test_log_probabilities_are_a_number_of_at_least_one(asked, given):
    assert fields(logprobs=asked)["logprobs"] == given
    assert fields(prompt_logprobs=asked)["prompt_logprobs"] == given


def test_a_prefill_makes_one_token_and_resumed_tokens_count():
    assert fields("context_only", max_tokens=50)["max_tokens"] == 1
    assert fields(max_tokens=50, num_resumed=8)["max_tokens"] == 42
    assert fields(min_tokens=9, num_resumed=8, end_id=2)["min_tokens"] == 1
    assert fields("context_only", min_tokens=9, end_id=2)["min_tokens"] == 1


def test_min_tokens_is_left_out_where_it_would_hold_back_the_wrong_ids():
    assert "min_tokens" not in fields(min_tokens=3)  # two ids end it
    assert "min_tokens" not in fields(min_tokens=3, ignore_eos=True)
    assert "min_tokens" not in fields(min_tokens=3, ignore_eos=True, stop_token_ids=(9,))
    assert fields(min_tokens=3, end_id=2)["min_tokens"] == 3


def test_stop_strings_are_the_detokenizers():
    assert "stop" not in fields(stop=("END",))


def test_every_stop_id_is_given_because_without_a_tokenizer_there_is_none():
    assert fields(stop_token_ids=(9, 7))["stop_token_ids"] == [7, 9]
    assert fields(end_id=5)["end_id"] == 5
    assert "stop_token_ids" not in fields(end_id=5)
    assert sampling_fields(EngineRequest(prompt=b"\0" * 4, sampling=SamplingParams(max_tokens=1)), ())["end_id"] == -1


def test_ignore_eos_keeps_the_request_s_own_stop_ids():
    found = fields(ignore_eos=True, stop_token_ids=(9,))
    assert (found["ignore_eos"], found["stop_token_ids"]) == (True, [9])
    assert stop_ids(SamplingParams(ignore_eos=True, stop_token_ids=(9,)), EOS) == (9,)


def test_bad_words_of_one_token_are_passed_longer_ones_are_not_its():
    assert fields(bad_token_ids=((3,), (4, 5)))["bad_token_ids"] == [3]
