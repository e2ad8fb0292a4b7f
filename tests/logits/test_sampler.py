import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.errors import BiremeError, RequestError
from bireme.logits import registry
from bireme.logits.base import ProcessorContext
from bireme.logits.processors import BUILT_IN
from bireme.logits.random import BLOCK, draw_key, least_of_blocks, noise_of_ids
from bireme.logits.sampler import NO_TOKEN, Sampler
from bireme.messages import ProcessorCall, SamplingParams

torch.set_num_threads(1)
VOCAB, PROMPT, EOS = 60, [3, 7, 7, 11], [2]


def rows(num_rows, seed=0, scale=3.0):
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def one(params, output=(), logits=None, seed=0):
    """Sample a single row after these output tokens."""
    sampler = Sampler(VOCAB)
    sampler.add("r", params, PROMPT, output, EOS)
    return sampler.sample(rows(1, seed) if logits is None else logits, ["r"])


def generate(params, num_tokens, output=(), start=0):
    """Generate a stream whose logits depend on the position alone."""
    sampler, tokens = Sampler(VOCAB), list(output)
    sampler.add("r", params, PROMPT, tokens, EOS)
    for at in range(start, num_tokens):
        tokens += sampler.sample(rows(1, at), ["r"]).tokens
    return tokens


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([None, 0.0, 0.1, 0.7, 1.5]),
    top_k=st.sampled_from([None, 0, 1, 3, 20, 1000]),
    top_p=st.sampled_from([None, 0.0, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([None, 0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([None, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([None, 0.0, 0.6]),
    frequency_penalty=st.sampled_from([None, 0.0, 0.4, -0.2]),
    logit_bias=st.sampled_from([{}, {5: 8.0, 9: -100.0}]),
    bad_token_ids=st.sampled_from([(), ((4,),), ((7, 9), (20, 21))]),
    min_tokens=st.sampled_from([None, 2]),
    seed=st.integers(0, 2**64 - 1),
)


def expected_token(params, output, logits):
    """The plain way: processors one after the other, then noise for each token."""
    calls = [
        ("logit_bias", {"bias": params.logit_bias}, params.logit_bias),
        ("repetition_penalty", {"penalty": params.repetition_penalty}, params.repetition_penalty),
        ("frequency_penalty", {"penalty": params.frequency_penalty}, params.frequency_penalty),
        ("presence_penalty", {"penalty": params.presence_penalty}, params.presence_penalty),
        ("bad_words", {"sequences": params.bad_token_ids}, params.bad_token_ids),
        ("min_tokens", {"min_tokens": params.min_tokens}, params.min_tokens),
    ]
    asks = params.top_k or params.top_p is not None or params.min_p
    temperature = (1.0 if asks else 0.0) if params.temperature is None else params.temperature
    if params.top_k == 1 or params.top_p == 0:
        temperature = 0.0
    calls += [
        ("temperature", {"temperature": temperature}, temperature),
        ("top_k", {"top_k": params.top_k}, params.top_k and temperature),
        ("top_p", {"top_p": params.top_p}, params.top_p and temperature),
        ("min_p", {"min_p": params.min_p}, params.min_p and temperature),
    ]
    context, row = ProcessorContext("r", VOCAB, len(PROMPT), tuple(EOS)), logits.clone()
    for name, args, is_on in calls:
        if is_on:
            BUILT_IN[name](context, **args)(PROMPT + output, row)
    if not temperature:
        return int(row.argmax())
    key, ids = draw_key(params.seed, len(output)), np.arange(VOCAB, dtype=np.uint32)
    return int((row + torch.from_numpy(noise_of_ids(key, ids, least_of_blocks(key, ids // BLOCK)))).argmax())


@settings(deadline=None, max_examples=400)
@given(PARAMS, st.lists(st.integers(0, VOCAB - 1), max_size=6), st.integers(0, 1000))
def test_all_rows_at_once_give_what_the_processors_give_one_by_one(params, output, seed):
    logits = rows(1, seed)
    assert one(params, output, logits).tokens == [expected_token(params, output, logits[0])]


@settings(deadline=None, max_examples=100)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 1000), st.permutations(range(6)))
def test_a_row_does_not_depend_on_its_batch(params, seed, order):
    logits = rows(6, seed)
    alone = [one(each, logits=logits[at : at + 1]).tokens[0] for at, each in enumerate(params)]
    sampler, keys = Sampler(VOCAB), [at for at in order if at < len(params)]
    for key in keys:
        sampler.add(key, params[key], PROMPT, (), EOS)
    assert sampler.sample(logits[keys], keys).tokens == [alone[key] for key in keys]


@settings(deadline=None, max_examples=50)
@given(PARAMS, st.integers(0, 12))
def test_a_resumed_stream_goes_on_exactly(params, at):
    whole = generate(params, 12)
    assert generate(params, 12, output=whole[:at], start=at) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_rows_take_the_likeliest_and_leave_the_logits_alone(dtype):
    logits = rows(5).to(dtype)
    before, sampler = logits.clone(), Sampler(VOCAB)
    for key, params in enumerate([SamplingParams(), SamplingParams(temperature=0.0, logit_bias={1: 0.5})] * 2):
        sampler.add(key, params, PROMPT)
    sampler.add(4, SamplingParams(temperature=0.5, seed=1), PROMPT)
    tokens = sampler.sample(logits, range(5)).tokens
    assert tokens[0] == int(logits[0].float().argmax())
    assert torch.equal(logits, before)


def test_samples_follow_the_distribution():
    logits, num_draws = rows(1, scale=1.5), 8_000
    sampler = Sampler(VOCAB)
    for key in range(num_draws):
        sampler.add(key, SamplingParams(temperature=0.9, seed=key), [])
    tokens = torch.tensor(sampler.sample(logits.expand(num_draws, -1), range(num_draws)).tokens)
    expected = (logits[0] / 0.9).softmax(0) * num_draws
    counts = torch.bincount(tokens, minlength=VOCAB)
    common = expected > 5
    chi_square = (((counts - expected) ** 2 / expected)[common]).sum()
    assert chi_square < 2 * int(common.sum())  # about 1 a token, 1.5 at 1%


def test_one_seed_gives_the_distribution_over_positions():
    sampler, logits = Sampler(VOCAB), torch.zeros(1, VOCAB)
    sampler.add("r", SamplingParams(temperature=1.0, seed=42), [])
    tokens = [sampler.sample(logits, ["r"]).tokens[0] for _ in range(3000)]
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB).float()
    assert ((counts - 50) ** 2 / 50).sum() < 99  # 59 degrees of freedom, 0.1%


@pytest.mark.parametrize("temperature", [5e-324, 1e-50, 7e-46, 1e-40, 1e-30, 1e-6, 1e6])
def test_extreme_temperatures_do_not_overflow(temperature):
    sampled = one(SamplingParams(temperature=temperature, seed=1))
    assert not sampled.errors
    assert temperature > 1 or sampled.tokens == [int(rows(1)[0].argmax())]


def test_rows_that_can_not_be_used_fail_alone():
    logits, sampler = rows(5), Sampler(VOCAB)
    logits[0] = float("nan")
    logits[1, 5] = float("nan")
    logits[2] = float("-inf")
    every = tuple((token,) for token in range(VOCAB))
    greedy, drawn = SamplingParams(), SamplingParams(temperature=1.0, seed=1)
    for key, params in enumerate([greedy, drawn, drawn, SamplingParams(bad_token_ids=every), drawn]):
        sampler.add(key, params, PROMPT)
    sampled = sampler.sample(logits, range(5))
    assert sampled.tokens[:4] == [NO_TOKEN] * 4 and set(sampled.errors) == {0, 1, 2, 3}
    assert sampled.tokens[4] == one(drawn, logits=logits[4:]).tokens[0]
    assert "not finite" in str(sampled.errors[0])


class Failing:
    def __init__(self, context, after=0):
        self.until = context.num_prompt_tokens + after

    def __call__(self, token_ids, logits):
        if len(token_ids) >= self.until:
            raise KeyError("gone")
        logits[30] = 1000.0


@pytest.fixture
def failing():
    registry.register("failing", Failing)
    yield
    registry.unregister("failing")


def test_a_processor_that_raises_ends_its_own_request(failing):
    sampler = Sampler(VOCAB)
    sampler.add(0, SamplingParams(logits_processors=(ProcessorCall("failing", {"after": 1}),)), PROMPT)
    sampler.add(1, SamplingParams(), PROMPT)
    assert sampler.sample(rows(2), [0, 1]).tokens[0] == 30
    sampled = sampler.sample(rows(2), [0, 1])
    assert sampled.tokens[0] == NO_TOKEN and sampled.tokens[1] != NO_TOKEN
    assert str(sampled.errors[0]) == "logits processor Failing: KeyError: 'gone'"


class Slow:
    def __init__(self, context):
        pass

    def __call__(self, token_ids, logits):
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass


def test_processors_that_take_more_cpu_time_than_allowed_end_their_own_request():
    registry.register("slow", Slow)
    try:
        sampler = Sampler(VOCAB, max_processor_s=0.03)
        for key, count in enumerate([1, 3, 0]):
            sampler.add(key, SamplingParams(logits_processors=(ProcessorCall("slow"),) * count), PROMPT)
        sampled = sampler.sample(rows(3), range(3))
    finally:
        registry.unregister("slow")
    assert list(sampled.errors) == [1] and isinstance(sampled.errors[1], RequestError)
    assert "limits.max_processor_ms is 30" in str(sampled.errors[1])


COLD = (ProcessorCall("temperature", {"temperature": 1e-30}),) * 2
UNUSABLE = [
    SamplingParams(logits_processors=COLD),
    SamplingParams(logits_processors=(ProcessorCall("temperature", {"temperature": 5e-324}),)),
    SamplingParams(bad_token_ids=tuple((token,) for token in range(VOCAB))),
]


@pytest.mark.parametrize("params", UNUSABLE)
def test_logits_that_the_requests_own_parameters_make_unusable_are_its_callers_error(params):
    error = one(params).errors[0]
    assert isinstance(error, RequestError) and "the request's own" in str(error)


@pytest.mark.parametrize("params", [*UNUSABLE, SamplingParams()])
def test_logits_that_the_model_makes_unusable_are_never_the_callers_error(params):
    error = one(params, logits=torch.full((1, VOCAB), float("nan"))).errors[0]
    assert type(error) is BiremeError and "the model's logits are not finite" in str(error)


def test_end_of_sequence_and_stop_ids_wait_for_min_tokens():
    params = SamplingParams(min_tokens=2, stop_token_ids=(9,), logit_bias={2: 100.0, 9: 90.0, 20: 50.0})
    sampler = Sampler(VOCAB)
    sampler.add("r", params, PROMPT, (), EOS)
    assert [sampler.sample(rows(1), ["r"]).tokens[0] for _ in range(3)] == [20, 20, 2]


def test_placeholders_outside_the_vocabulary_are_not_penalized():
    sampler = Sampler(VOCAB)
    sampler.add("r", SamplingParams(repetition_penalty=1.5), [VOCAB + 10**9, -1, 3])
    assert sampler.sample(rows(1), ["r"]).tokens[0] >= 0


def test_a_padded_head_is_cut():
    logits = torch.cat([rows(1), torch.full((1, 4), 100.0)], 1)
    assert one(SamplingParams(), logits=logits).tokens == one(SamplingParams()).tokens
    assert one(SamplingParams(temperature=1.0, seed=3), logits=logits).tokens[0] < VOCAB


def test_log_probabilities_are_the_models_own():
    params = SamplingParams(temperature=0.2, seed=1, repetition_penalty=1.5, logit_bias={5: 50.0}, logprobs=3)
    sampled, expected = one(params), rows(1)[0].log_softmax(0)
    entry = sampled.logprobs[0]
    assert sampled.tokens == [5] and [item.token for item in entry] == [5, *expected.topk(3).indices.tolist()]
    assert [item.logprob for item in entry] == pytest.approx([expected[item.token].item() for item in entry], abs=1e-5)


def test_a_chosen_token_has_its_rank_among_all_however_unlikely_it_is():
    expected = rows(1)[0].argsort(descending=True).tolist()
    for rank, token in enumerate(expected, 1):
        (entry,) = Sampler(VOCAB).prompt_logprobs(rows(1), [token], 2)
        assert [item.rank for item in entry] == [rank, 1, 2]


@pytest.mark.parametrize(("logprobs", "length"), [(None, None), (0, 1), (2, 3)])
def test_as_many_log_probabilities_as_asked_for(logprobs, length):
    entry = one(SamplingParams(logprobs=logprobs)).logprobs[0]
    assert (None if entry is None else len(entry)) == length


def test_prompt_log_probabilities_are_of_the_tokens_that_followed():
    logits, following = rows(100), [at % VOCAB for at in range(100)]
    entries = Sampler(VOCAB).prompt_logprobs(logits, following, 1)
    expected = logits.log_softmax(-1)
    assert [entry[0][0] for entry in entries] == following
    assert [entry[0][1] for entry in entries] == pytest.approx([expected[i, t].item() for i, t in enumerate(following)])
    assert [entry[1][0] for entry in entries] == expected.argmax(-1).tolist()


def test_impossible_tokens_have_a_finite_log_probability():
    logits = rows(1)
    logits[0, 4] = float("-inf")
    assert Sampler(VOCAB).prompt_logprobs(logits, [4], 0) == [[(4, -9999.0, VOCAB)]]


def test_what_the_registry_lacks_is_refused():
    with pytest.raises(RequestError, match="did you mean top_"):
        Sampler(VOCAB).check(SamplingParams(logits_processors=(ProcessorCall("top_q"),)))


def test_a_seed_must_have_been_drawn():
    with pytest.raises(RequestError, match="seed is unset"):
        Sampler(VOCAB).add("r", SamplingParams(temperature=1.0), PROMPT)


def test_a_removed_sequence_is_forgotten():
    sampler = Sampler(VOCAB)
    sampler.add("r", SamplingParams(), PROMPT)
    sampler.remove("r")
    sampler.remove("r")
    with pytest.raises(KeyError):
        sampler.sample(rows(1), ["r"])
