"""What layers give is kept of each row of a step, by every decoder, as transformers' own model has it."""

from __future__ import annotations

import pytest
import torch

from bireme.engines.torch import kernels
from bireme.engines.torch.forward.modules import layers_of
from bireme.engines.torch.forward.tapped import TappedPlaces, TappedRows
from bireme.settings import SpeculativeConfig
from tests.engines.torch import tiny_models
from tests.engines.torch.eagle_heads import write_head
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
        forward, tapped = engine.core._parts.forward, TappedRows(taps)
        forward.tap(tapped)
        (tokens,) = engine.run([request(PROMPT, 1)])
        engine.settle()
        of_chunk = tapped.rows(3)
        engine.run([request(PROMPT, 2)])
        engine.settle()
        of_decode = tapped.rows(1)
        assert forward.paths == [path]
    expected = outputs(tiny_models.build(family, **changes), [*PROMPT, *tokens], taps)
    torch.testing.assert_close(of_chunk.cpu(), expected[8:11], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of_decode.cpu(), expected[11:], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="paths of a CPU")
@pytest.mark.parametrize(
    ("family", "path", "taps"),
    [("mistral", "packed", (0, 1, 2)), ("gpt2", "modules", (0, 1)), ("olmo2", "modules", (0, 2))],
)
def test_rows_of_layers_are_those_of_the_model_itself(tmp_path, family, path, taps):
    check(tmp_path, family, path, taps, **SETTINGS[family])


@pytest.mark.usefixtures("few_programs")
def test_the_fused_decoder_keeps_them_by_row_where_there_is_a_prompt_and_else_by_place(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    of_model, taps, prompt = SMALL | {"vocab_size": 50}, (0, 1, 2), [token % 50 for token in PROMPT]
    model = tiny_models.save(tmp_path / "base", "llama", **of_model)
    head = write_head(tmp_path / "head", eagle_config={"eagle_aux_hidden_state_layer_ids": taps})
    config = SpeculativeConfig(decoding_type="Eagle3", max_draft_len=2, speculative_model=str(head))
    limits = {"max_num_tokens": 8, "max_batch_size": 2, "tokens_per_block": 4}
    with Harness(model, **limits, speculative_config=config) as engine:
        tapped = engine.core._parts.forward.tapped
        engine.core._parts.speculation.is_on = False
        (tokens,) = engine.run([request(prompt, 4)])
        engine.settle()
        assert {"resident", "verify", "mixed"} <= set(engine.capacity.step_paths)
        of_chunk, places = tapped.rows(3), [tapped.places.rows[at] for at in tapped.places.slices(0, 11, 3)]
    expected = outputs(tiny_models.build("llama", **of_model), [*prompt, *tokens], taps)
    torch.testing.assert_close(of_chunk.cpu(), expected[8:11], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(places).cpu(), expected[11:14], rtol=1e-4, atol=1e-4)


def test_places_of_a_sequence_follow_each_other_round_and_round():
    places = TappedPlaces(2, 3, 5, 4, torch.float32, torch.device("cpu"))
    for first, count in ((0, 5), (3, 4), (9, 1), (12, 5)):
        cells = [cell for own in places.slices(2, first, count) for cell in range(own.start, own.stop)]
        assert cells == places.cells(2, torch.arange(first, first + count)).tolist()
    places.put(1, torch.tensor([11, 3]), torch.ones(2, 4))
    assert places.rows.sum(1).nonzero().flatten().tolist() == [3, 11] and places.rows[3].tolist() == [0] * 4 + [1] * 4
    assert places.nothing not in places.cells(3, torch.zeros(1, dtype=torch.int64))
