"""The sampler on a real model, step by step, against transformers' generate."""

import pytest
import torch

from bireme.logits.sampler import Sampler
from bireme.messages import SamplingParams

CASES = [
    ({}, SamplingParams()),
    ({"repetition_penalty": 1.3}, SamplingParams(repetition_penalty=1.3)),
    (
        {"min_new_tokens": 30, "bad_words_ids": [[100], [7, 9]]},
        SamplingParams(min_tokens=30, bad_token_ids=((100,), (7, 9))),
    ),
    ({"sequence_bias": [[[50], 4.0]]}, SamplingParams(logit_bias={50: 4.0})),
]


@pytest.fixture(scope="module")
def model(sample_model):
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(sample_model("llama")).eval()


@pytest.mark.parametrize(("theirs", "ours"), CASES)
@torch.no_grad()
def test_greedy_output_is_that_of_generate(model, theirs, ours):
    prompt, eos = [1, 200, 300, 400, 200], model.generation_config.eos_token_id
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=80, do_sample=False, **theirs)[0].tolist()
    sampler, tokens = Sampler(model.config.vocab_size), list(prompt)
    sampler.add("r", ours, prompt, (), [eos])
    while len(tokens) < len(expected):
        tokens += sampler.sample(model(torch.tensor([tokens])).logits[:, -1], ["r"]).tokens
    assert tokens == expected and len(set(tokens)) > 40
