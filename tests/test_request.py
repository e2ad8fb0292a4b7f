"""What becomes of a client's values: sources, precedence, checks and the two contracts."""

import json

import numpy as np
import pytest

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.errors import ConfigError, RequestError
from bireme.messages import SamplingParams
from bireme.pipelines.chat_request import parse_chat
from bireme.request import check_ids, parse_generate
from bireme.sampling import Sampling, check_defaults, expand, with_seed
from bireme.specs import GENERATE
from bireme.stages.requests import parse_stage_request
from bireme.types import Inputs, RequestInfo

NUMPY = {"BYTES": object, "INT32": np.int32, "FP32": np.float32, "BOOL": bool, "UINT64": np.uint64}


def recipe(**tree):
    workers = {"decode": {"engine": "mocker"}}
    return convert({"model": "none", "workers": workers, "name": "test"} | tree, Recipe, "test")


def tensors(values):
    return {
        name: np.array(value if isinstance(value, list) else [value], _dtype(name)) for name, value in values.items()
    }


def _dtype(name):
    spec = GENERATE.input(name)
    return NUMPY[spec.data_type] if spec else None


def parse(parameters=None, settings=None, **values):
    inputs = Inputs(tensors({"text_input": b"hi"} | values), RequestInfo(parameters=parameters or {}))
    return parse_generate(inputs, GENERATE, recipe(**(settings or {})))


def sampling(**values):
    return parse(**values).sampling.params


def vllm(settings=None, **values):
    return sampling(settings=settings, sampling_parameters=json.dumps(values).encode())


def test_unset_stays_unset():
    assert sampling() == SamplingParams()


def test_zero_and_false_are_values():
    params = sampling(temperature=0.0, top_k=0, skip_special_tokens=False, logprobs=0)
    assert (params.temperature, params.top_k, params.skip_special_tokens, params.logprobs) == (0, 0, False, 0)


def test_tensor_beats_json_beats_parameter_beats_recipe():
    settings = {"sampling": {"max_tokens": 1, "top_k": 1, "seed": 1, "min_tokens": 1}}
    parameters = {"max_tokens": 2, "top_k": 2, "seed": 2}
    params = sampling(
        settings=settings, parameters=parameters, sampling_parameters=b'{"max_tokens": 3, "top_k": 3}', max_tokens=4
    )
    assert (params.max_tokens, params.top_k, params.seed, params.min_tokens) == (4, 3, 2, 1)


def test_vllm_makes_16_tokens_unless_request_or_recipe_say_how_many():
    assert (vllm().max_tokens, sampling(return_finish_reason=True).max_tokens) == (16, 16)
    assert (sampling().max_tokens, vllm(max_tokens=40).max_tokens) == (None, 40)
    assert (vllm(settings={"sampling": {"max_tokens": 40}}).max_tokens, sampling(max_tokens=40).max_tokens) == (40, 40)
    assert vllm(settings={"limits": {"max_tokens": 10}}).max_tokens == 10


def test_json_numbers_may_come_as_strings():
    params = vllm(max_tokens="100", temperature="0.5", ignore_eos="true", top_k="-1")
    assert (params.max_tokens, params.temperature, params.ignore_eos, params.top_k) == (100, 0.5, True, 0)


def test_names_of_both_peers_mean_the_same():
    assert sampling(random_seed=7, num_return_sequences=2, stop_words=[b"a"], max_tokens=9) == vllm(
        seed=7, n=2, stop="a", max_tokens=9
    )


def test_names_that_contradict_each_other_are_refused():
    with pytest.raises(RequestError, match="contradicts random_seed: 7"):
        sampling(random_seed=7, seed=8)


def test_foreign_request_parameters_are_left_alone():
    assert sampling(parameters={"traceparent": "00-1", "max_tokens": 5}).max_tokens == 5


def test_empty_stop_words_mean_none():
    assert sampling(stop_words=[b""], bad_words=[b""]).stop == ()


def test_trtllm_top_p_zero_beside_top_k_is_off():
    assert sampling(top_k=5, top_p=0.0).top_p is None
    assert sampling(top_p=0.0).top_p == 0


def test_negative_end_id_is_none_at_all():
    assert sampling(end_id=-1).ignore_eos
    assert sampling(end_id=2).end_id == 2


def test_negative_seeds_are_taken_as_unsigned():
    assert vllm(seed=-1).seed == 2**64 - 1


def test_return_log_probs_asks_for_the_chosen_tokens_only():
    assert sampling(return_log_probs=True).logprobs == 0
    assert sampling(return_log_probs=True, logprobs=3).logprobs == 3


def test_guides_of_trtllm_become_one_object():
    pair = {"guided_decoding_guide_type": b"regex", "guided_decoding_guide": b"a+"}
    assert sampling(**pair).guided_decoding == {"regex": "a+"}
    assert sampling(guided_decoding_guide_type=b"json").guided_decoding == {"json_object": True}


def test_processors_are_named_with_arguments():
    params = sampling(logits_processors=b'[{"name": "ban", "args": {"ids": [1]}}]')
    assert params.logits_processors[0].name == "ban"


def test_logit_bias_has_token_ids_as_keys():
    assert vllm(logit_bias={"5": 1.5}).logit_bias == {5: 1.5}


def test_words_become_ids_at_the_entry():
    chosen = parse(bad_words=[b"ab"], embedding_bias_words=[b"c"], embedding_bias_weights=[2.0]).sampling
    params = chosen.resolve(lambda text: [ord(character) for character in text])
    assert set(params.bad_token_ids) == {(97, 98), (32, 97, 98)}
    assert params.logit_bias == {99: 2.0}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_tokens": 0}, "max_tokens: 0; the range is 1 to 2147483647, leave it out"),
        ({"max_tokens": -5}, "max_tokens: -5"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens: 9; at most max_tokens, 3"),
        ({"temperature": float("nan")}, "temperature: nan; send a finite number"),
        ({"temperature": float("inf")}, "temperature: inf; send a finite number"),
        ({"temperature": -0.5}, "temperature: -0.5; the range is from 0"),
        ({"top_p": 1.5}, "top_p: 1.5; the range is from 0 to 1"),
        ({"top_k": -2}, "top_k: -2"),
        ({"min_p": 2.0}, "min_p: 2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0; the range is above 0"),
        ({"presence_penalty": 3.0}, "presence_penalty: 3.0; the range is from -2 to 2"),
        ({"priority": 2.0}, "priority: 2.0"),
        ({"beam_width": 2}, "beam_width: 2; .*beam search is not served"),
        ({"num_return_sequences": 17}, "num_return_sequences: 17; .*limits.max_n"),
        ({"logprobs": 21}, "logprobs: 21; .*limits.max_logprobs"),
        ({"stop_words": [b"x"] * 17}, "stop_words: 17 strings; limits.max_stop_strings is 16"),
        ({"stop_words": [b"x" * 2000]}, "a string of 2000 bytes; limits.max_stop_string_bytes is 1024"),
        ({"stop_words": [b"\xff"]}, "stop_words: not UTF-8"),
        ({"stop_token_ids": [1] * 300}, "300 ids; limits.max_stop_token_ids is 256"),
        ({"bad_words": [b"x"] * 200}, "limits.max_bad_words is 128"),
        ({"sampling_parameters": b"{"}, "not valid JSON"),
        ({"sampling_parameters": b"[1]"}, "send a JSON object"),
        ({"sampling_parameters": b"[" * 100000}, "not valid JSON"),
        ({"sampling_parameters": b'{"max_token": 1}'}, "unknown key; did you mean max_tokens"),
        ({"sampling_parameters": b'{"max_tokens": 1e400}'}, "sampling_parameters.max_tokens: inf"),
        ({"sampling_parameters": b'{"temperature": NaN}'}, "temperature: nan"),
        ({"sampling_parameters": b'{"seed": 1e300}'}, "sampling_parameters.seed"),
        ({"sampling_parameters": b'{"logit_bias": {"1": NaN}}'}, "logit_bias.1: nan"),
        ({"sampling_parameters": b'{"logit_bias": {"x": 1}}'}, "logit_bias: the key 'x'"),
        ({"sampling_parameters": b'{"best_of": 3}'}, "best_of: 3"),
        ({"sampling_parameters": b'{"stop": ["\\ud800"]}'}, "lone surrogate"),
        ({"sampling_parameters": b'{"guided_decoding": {"json": 1, "regex": 2}}'}, "exactly one of"),
        ({"guided_decoding_guide": b"a+"}, "without guided_decoding_guide_type"),
        ({"guided_decoding_guide_type": b"regex"}, "regex without guided_decoding_guide"),
        ({"guided_decoding_guide_type": b"sql"}, "send one of json, json_schema"),
        ({"logits_processors": b'{"name": 1}'}, "logits_processors"),
        ({"logits_processors": b'[{"name": "x"}' + b', {"name": "x"}' * 8 + b"]"}, "9 of them; limits.max_logits_p"),
        ({"embedding_bias_words": [b"a"]}, "1 words, 0 embedding_bias_weights"),
        ({"max_token": 3}, "max_token: generate has no such input; did you mean max_tokens"),
        ({"max_tokens": [1, 2]}, r"max_tokens: shape \[2\]; send exactly one value"),
        ({"text_input": b""}, "text_input: empty"),
        ({"text_input": b"\xff"}, "text_input: not UTF-8"),
        ({"text_input": b"x" * 65}, "65 bytes; limits.max_prompt_bytes is 64"),
        ({"input_ids": [1]}, "both of text_input and input_ids"),
    ],
)
def test_bad_values_name_field_value_and_remedy(values, text):
    with pytest.raises(RequestError, match=text):
        parse(settings={"limits": {"max_prompt_bytes": 64}}, **values)


def test_a_wrong_data_type_is_named():
    with pytest.raises(RequestError, match="temperature: data type int64; send FP32"):
        parse_generate(Inputs({"temperature": np.array([1])}), GENERATE, recipe())


def test_a_prompt_is_needed():
    with pytest.raises(RequestError, match="neither of text_input and input_ids"):
        parse_generate(Inputs({}), GENERATE, recipe())


def test_max_tokens_beyond_the_context_is_left_to_it_but_not_what_no_context_holds():
    assert vllm(max_tokens=2**31 - 1).max_tokens == 2**31 - 1
    with pytest.raises(RequestError, match="max_tokens: 2147483648; the range is 1 to 2147483647"):
        vllm(max_tokens=2**31)


def test_max_tokens_above_the_recipes_limit_is_refused():
    with pytest.raises(RequestError, match="max_tokens: 20; the range is 1 to 10, limits.max_tokens"):
        parse(settings={"limits": {"max_tokens": 10}}, max_tokens=20)


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(RequestError, match="token id 10; valid ids are 0 to 9"):
        check_ids("input_ids", np.array([1, 10]), 10)


def test_a_column_of_ids_is_refused_and_a_row_is_fine():
    row = parse_generate(Inputs({"input_ids": np.array([[1, 2]], np.int32)}), GENERATE, recipe())
    assert row.input_ids.tolist() == [1, 2]
    with pytest.raises(RequestError, match="send one row"):
        parse_generate(Inputs({"input_ids": np.array([[1], [2]], np.int32)}), GENERATE, recipe())


def test_recipe_defaults_are_checked_at_start():
    with pytest.raises(ConfigError, match="top_p: 7"):
        check_defaults(recipe(sampling={"top_p": 7}))
    with pytest.raises(ConfigError, match="did you mean top_p"):
        check_defaults(recipe(sampling={"topp": 1}))


@pytest.mark.parametrize(
    "values",
    [{"sampling_parameters": b"{}"}, {"return_finish_reason": True}, {"return_logprobs": True}],
)
def test_inputs_of_vllm_alone_choose_its_contract(values):
    request = parse(**values)
    assert (request.contract, request.echo) == ("vllm", True)


def test_inputs_that_both_peers_have_choose_trtllms():
    request = parse(return_num_input_tokens=True, exclude_input_in_output=True)
    assert (request.contract, request.echo) == ("trtllm", False)


def test_vllm_refuses_the_echo_when_streaming():
    with pytest.raises(RequestError, match="When streaming, `exclude_input_in_output` = False is not allowed"):
        parse(sampling_parameters=b"{}", stream=True, exclude_input_in_output=False)


def test_lora_of_vllm_comes_in_its_json():
    assert parse(sampling_parameters=b'{"lora_name": "a"}').options.lora_name == "a"
    assert parse(sampling_parameters=b'{"lora_name": "a"}', lora_name=b"b").options.lora_name == "b"


def test_an_adapter_is_named_by_a_text_request_or_by_the_tensor():
    made, ids = recipe(sampling={"lora_name": "a"}), np.array([1], np.int32)
    assert parse(settings={"sampling": {"lora_name": "a"}}).options.lora_name == "a"
    assert (
        parse_chat(b'{"model": "test", "messages": [{"role": "user", "content": "hi"}]}', made).options.lora_name == ""
    )
    for values, adapter in (({}, ""), ({"lora_name": "b"}, "b")):
        inputs = Inputs({}, RequestInfo(parameters={"lora_name": "b"}))
        request = parse_stage_request({"input_ids": ids, **values}, inputs, made, lambda text: [])
        assert request.engine.options.lora_name == adapter


def test_the_clients_timeout_beats_the_recipes():
    settings = {"pipeline": {"request_timeout_s": 2.0}}
    inputs = Inputs(tensors({"text_input": b"hi"}), RequestInfo(timeout_ms=50))
    assert parse_generate(inputs, GENERATE, recipe(**settings)).timeout_ms == 50
    assert parse(settings=settings).timeout_ms == 2000


def test_greedy_requests_need_no_seed_and_random_ones_get_one():
    assert with_seed(SamplingParams()).seed is None
    assert with_seed(SamplingParams(temperature=0.0, top_k=5)).seed is None
    assert with_seed(SamplingParams(temperature=0.7, top_k=1)).seed is None
    assert with_seed(SamplingParams(top_k=0, min_p=0.0)).seed is None
    assert with_seed(SamplingParams(temperature=1.0)).seed is not None
    assert with_seed(SamplingParams(top_p=0.9)).seed is not None


def test_sequences_have_seeds_of_their_own_that_the_first_seed_decides():
    params = SamplingParams(temperature=1.0, seed=5, n=3)
    seeds = [one.seed for one in expand(params)]
    assert seeds[0] == 5 and len(set(seeds)) == 3
    assert seeds == [one.seed for one in expand(params)]
    assert all(one.n == 1 for one in expand(params))
    assert [one.n for one in expand(SamplingParams(n=2))] == [1, 1]  # greedy ones as well


def test_priority_defaults_to_the_middle():
    assert parse().sampling == Sampling(SamplingParams())
    assert parse().options.priority == 0.5
