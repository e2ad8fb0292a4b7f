"""Checkpoints in each published layout answer the same aggregated and disaggregated, in parts, in windows, with reuse,
preempted and after a migration: dequantized as transformers in float32, kept as they answer alone.

All of it on a GPU where there is one. Elsewhere kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bireme.config import QuantConfig
from bireme.engines.torch import kernels, storage
from bireme.engines.torch.storage import WeightForm
from tests.engines.torch import tiny_models
from tests.engines.torch.quantized_checkpoints import LAYOUTS, write
from tests.engines.torch.test_disaggregated import Pair
from tests.engines.torch.test_packed_decoder import library
from tests.engines.torch.torch_harness import make_prompts, request

PREEMPTING = {"queue": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}
PLAIN = {"quant_config": QuantConfig(quant_algo="NO_QUANT")}
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
SMALL_GPT_OSS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
SMALL_GPT_OSS |= {"intermediate_size": 32, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}


def kind_of(layout):
    """Return a family that has layers with windows and others without."""
    return "gpt_oss" if layout == "mxfp4" else "gemma3_text"


def assert_equal_everywhere(pair, prompts, num_tokens, expected=None):
    """Prefill computes all of it first, then both together, then decode alone, in a pool that does not hold all."""
    asked = [request(prompt, num_tokens) for prompt in prompts]
    alone = [pair.prefill.run([one])[0] for one in asked]
    expected = expected or alone
    assert alone == expected
    assert pair.run(prompts, max_tokens=num_tokens) == expected
    decode = pair.decode
    before = decode.core.scheduler.num_preemptions
    assert decode.run(asked, in_one_step=True) == expected and decode.core.scheduler.num_preemptions > before
    assert decode.run(asked[-1:]) == expected[-1:]  # whatever the others have left of its blocks
    again = decode.submit(asked[-1])
    assert again.finish.usage.cached_tokens > 0 and again.tokens == expected[-1]
    cut, moved = num_tokens // 2, zip(prompts, expected, strict=True)
    resumed = [request(prompt + tokens[:cut], num_tokens, num_resumed=cut) for prompt, tokens in moved]
    assert decode.run(resumed) == [tokens[cut:] for tokens in expected]
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_dequantized_says_what_transformers_does_in_float32(tmp_path, layout):
    path, model = write(tmp_path, LAYOUTS[layout], kind_of(layout))
    model.set_attn_implementation("eager")
    prompts = make_prompts(3, 20, 45, 70)
    expected = tiny_models.generate(model, prompts, 12)
    with Pair(path, 8, 8, max_num_tokens=24, max_tokens=160, **PREEMPTING, **PLAIN) as pair:
        assert pair.decode.core._parts.forward.form is WeightForm.PLAIN
        assert_equal_everywhere(pair, prompts, 12, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines here compute on the GPU")
@pytest.mark.parametrize("layout", ["awq", "gptq", "compressed int4"])
def test_groups_of_4_bits_that_stay_on_a_cpu_say_the_same_everywhere(tmp_path, layout):
    library()
    path, _ = write(tmp_path, LAYOUTS[layout], kind_of(layout))
    prompts = make_prompts(3, 20, 45, 70)
    with Pair(path, 8, 8, max_num_tokens=24, max_tokens=160, dtype="float32", **PREEMPTING) as pair:
        assert pair.decode.core._parts.forward.form is WeightForm.INT4_GROUPS
        assert_equal_everywhere(pair, prompts, 12)


ROWS = LAYOUTS["compressed fp8, channel"]
PARTLY = {"compressed fp8, attention plain": replace(ROWS, chooses=lambda name: "mlp." in name)}
KEPT = {
    "compressed fp8, channel": (WeightForm.FP8_CHANNEL, "llama", SMALL),
    "compressed fp8, attention plain": (WeightForm.FP8_CHANNEL, "llama", SMALL | {"num_hidden_layers": 2}),
    "awq": (WeightForm.INT4_GROUPS, "llama", SMALL | {"hidden_size": 64, "head_dim": 32}),
    "mxfp4": (WeightForm.MXFP4, "gpt_oss", SMALL_GPT_OSS),
}


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("layout", KEPT)
def test_what_stays_on_a_gpu_says_the_same_everywhere(tmp_path, monkeypatch, layout):
    pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    monkeypatch.setattr(storage, "MOST_EXACT_ROWS", 0)  # or a step of one row is computed in another way than others
    form, kind, changes = KEPT[layout]
    if form is WeightForm.FP8_CHANNEL and torch.cuda.is_available():
        pytest.skip("float32 keeps no 8-bit floats on a GPU")
    path, _ = write(tmp_path, PARTLY.get(layout) or LAYOUTS[layout], kind, **changes)
    sizes = {"max_seq_len": 24, "max_batch_size": 2, "max_num_tokens": 7, "max_tokens": 4 * 6}
    with Pair(path, 4, 4, **sizes, **PREEMPTING) as pair:
        forward = pair.decode.core._parts.forward
        assert forward.form is form and forward.resident is not None
        assert_equal_everywhere(pair, make_prompts(11, 9, seed=1), 4)
