"""bf16 is judged by its error against fp32, not by strings: near ties make those differ by chance."""

from __future__ import annotations

import pytest
import torch

from tests.engines.torch.torch_harness import Harness, make_prompts, request

PROMPTS = make_prompts(*range(60, 160, 10), seed=4)


def logprobs(model, prompt):
    """Return the log probability of every prompt token after the first."""
    with torch.inference_mode():
        rows = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    return rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_error_in_bfloat16_is_that_of_transformers(tiny, name):
    from tests.engines.torch import tiny_models

    kinds = {"llama": ("llama", {}), "gemma3": ("gemma3_text", tiny_models.WINDOW)}
    theirs = tiny_models.build(kinds[name][0], **kinds[name][1]).to(torch.bfloat16)
    exact = torch.cat([logprobs(tiny(name).module, prompt) for prompt in PROMPTS])
    rounded = torch.cat([logprobs(theirs, prompt) for prompt in PROMPTS])
    with Harness(tiny(name).path, dtype="bfloat16", max_num_tokens=64) as engine:
        results = [engine.submit(request(prompt, 1, prompt_logprobs=0)) for prompt in PROMPTS]
        assert [result.finish.error for result in results] == [""] * len(PROMPTS)
    ours = torch.tensor([entry[0][1] for result in results for entry in result.prompt_logprobs or []])
    error, reference = float((ours - exact).norm()), float((rounded - exact).norm())
    assert len(ours) == len(exact) and 0 < error <= 1.05 * reference, f"{error} against {reference}"
