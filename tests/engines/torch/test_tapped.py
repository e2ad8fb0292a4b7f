"""What layers give is kept of each row of a step, by every decoder, as transformers' own model has it."""

from __future__ import annotations

import pytest
import torch

from bireme.engines.torch import kernels
from bireme.engines.torch.forward.modules import layers_of
from tests.engines.torch import tiny_models
from tests.engines.torch.tiny_models import SETTINGS
from tests.engines.torch.torch_harness import Harness, make_prompts, request

PROMPT = make_prompts(11, seed=3)[0]
SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}


def outputs(model, ids, taps):
    """Return what each layer gave, (tokens, layers * hidden): of the last one `hidden_states` has the normed rows."""
    found = {}
    for tap in taps:
        layers_of(model)[tap].register_forward_hook(
            lambda _, __, made, tap=tap: found.update({tap: made[0] if isinstance(made, tuple) else made})
        )
    with torch.inference_mode():
        model(torch.tensor([ids]))
    return torch.cat([found[tap].view(len(ids), -1) for tap in taps], -1)


def check(folder, family, path, taps, **changes):
    """Of a prompt in two chunks, and of the decode step behind it."""
    with Harness(
        tiny_models.save(folder, family, **changes), max_num_tokens=8, max_batch_size=2, tokens_per_block=4
    ) as engine:
        forward = engine.core._parts.forward
        tapped = forward.tap(taps)
        (tokens,) = engine.run([request(PROMPT, 1)])
        engine.settle()
        of_chunk = tapped.rows()
        engine.run([request(PROMPT, 2)])
        engine.settle()
        of_decode = tapped.rows()
        assert forward.paths == [path]
    expected = outputs(tiny_models.build(family, **changes), [*PROMPT, *tokens], taps)
    torch.testing.assert_close(of_chunk.cpu(), expected[8:11], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of_decode.cpu(), expected[11:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tapped.rows(torch.tensor([0])).cpu(), expected[11:], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="paths of a CPU")
@pytest.mark.parametrize(
    ("family", "path", "taps"),
    [("mistral", "packed", (0, 1, 2)), ("gpt2", "modules", (0, 1)), ("olmo2", "modules", (0, 2))],
)
def test_rows_of_layers_are_those_of_the_model_itself(tmp_path, family, path, taps):
    check(tmp_path, family, path, taps, **SETTINGS[family])


@pytest.mark.usefixtures("few_programs")
def test_the_fused_decoder_keeps_them_too_and_takes_no_graph_that_would_not(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    check(tmp_path, "llama", "fused", (0, 2), **SMALL)
