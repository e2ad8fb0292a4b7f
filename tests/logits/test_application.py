"""The logits_processor model's computation against the engine's own path: the sampler."""

import numpy as np
import pytest
import torch

from bireme.errors import BiremeError, RequestError
from bireme.logits import registry
from bireme.logits.application import LogitsJob, apply
from bireme.logits.base import ProcessorContext
from bireme.logits.processors import BUILT_IN
from bireme.logits.sampler import Sampler
from bireme.messages import ProcessorCall, SamplingParams

VOCAB, EOS = 50, (2,)
PROMPTS = [[3, 7, 7, 11], [5], []]
OUTPUTS = [[7, 7, 20, 21], [], [9, 9]]
ARGUMENTS = {
    "temperature": {"temperature": 0.3},
    "repetition_penalty": {"penalty": 1.3},
    "presence_penalty": {"penalty": 0.5},
    "frequency_penalty": {"penalty": 0.25},
    "logit_bias": {"bias": {"4": 2.5, "9": -100.0}},
    "bad_words": {"sequences": [[5], [20, 21, 8]]},
    "min_tokens": {"min_tokens": 3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.1},
    "allowed_tokens": {"token_ids": [4, 9, 30]},
    "forced_sequence": {"token_ids": [10, 11]},
}


def rows(seed=0):
    return np.random.default_rng(seed).normal(0, 3, (len(PROMPTS), VOCAB)).astype(np.float32)


def job(logits, *calls):
    histories = [np.array(p + o, np.int32).tobytes() for p, o in zip(PROMPTS, OUTPUTS, strict=True)]
    return LogitsJob(
        processors=tuple(calls),
        logits=logits.tobytes(),
        vocab_size=VOCAB,
        histories=tuple(histories),
        num_prompt_tokens=tuple(len(prompt) for prompt in PROMPTS),
        eos_ids=EOS,
    )


def in_engine(logits, calls):
    """Return what the sampler's rows do with their logits, and the tokens it then chooses."""
    sampler = Sampler(VOCAB)
    params = SamplingParams(max_tokens=9, logits_processors=tuple(calls))
    for key, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        sampler.add(key, params, prompt, output, EOS)
    return sampler.sample(torch.from_numpy(logits.copy()), range(len(PROMPTS))).tokens


def test_every_processor_is_compared():
    assert set(ARGUMENTS) == set(BUILT_IN)


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("seed", range(3))
def test_the_model_changes_logits_exactly_as_the_class_in_the_engine_does(name, seed):
    call, logits = ProcessorCall(name, ARGUMENTS[name]), rows(seed)
    expected = torch.from_numpy(logits.copy())
    for at, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        (processor,) = registry.create([call], ProcessorContext("r", VOCAB, len(prompt), EOS))
        processor(prompt + output, expected[at])
    assert np.array_equal(apply(job(logits, call)), expected.numpy())


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("seed", range(3))
def test_the_engine_chooses_the_likeliest_of_what_the_model_returns(name, seed):
    call, logits = ProcessorCall(name, ARGUMENTS[name]), rows(seed)
    assert apply(job(logits, call)).argmax(-1).tolist() == in_engine(logits, [call])


def test_processors_work_in_the_order_of_the_list():
    calls = [
        ProcessorCall(name, ARGUMENTS[name]) for name in ("repetition_penalty", "temperature", "top_p", "bad_words")
    ]
    logits = rows()
    step = logits
    for call in calls:
        step = apply(job(step, call))
    assert np.array_equal(apply(job(logits, *calls)), step)
    assert not np.array_equal(apply(job(logits, *calls[::-1])), step)


def test_rows_do_not_depend_on_each_other():
    call, logits = ProcessorCall("repetition_penalty", {"penalty": 1.3}), rows()
    other = logits.copy()
    other[1:] = 0
    assert np.array_equal(apply(job(logits, call))[0], apply(job(other, call))[0])


def test_a_wrong_argument_names_processor_and_argument():
    with pytest.raises(RequestError, match="logits processor top_k: missing a required argument: 'top_k'"):
        apply(job(rows(), ProcessorCall("top_k")))


def test_what_a_processor_raises_is_said_as_the_engine_says_it(monkeypatch):
    class Broken:
        def __init__(self, context):
            pass

        def __call__(self, token_ids, logits):
            raise KeyError("oops")

    monkeypatch.setitem(registry._registered, "broken", Broken)
    sampler = Sampler(VOCAB)
    sampler.add(0, SamplingParams(max_tokens=1, logits_processors=(ProcessorCall("broken"),)), [1])
    engine = sampler.sample(torch.zeros(1, VOCAB), [0]).errors[0]
    with pytest.raises(BiremeError) as failed:
        apply(job(rows(), ProcessorCall("broken")))
    assert str(failed.value) == str(engine) and failed.value.code == "INTERNAL"
