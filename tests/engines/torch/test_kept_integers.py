"""AWQ's, GPTQ's and compressed-tensors' groups of 4 bits stay as in the file on a CPU: what is served is their
dequantized forward with rows of x rounded to 8 bits."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from bireme.config import QuantConfig
from bireme.errors import ConfigError
from tests.engines.torch import quantized_checkpoints as checkpoints
from tests.engines.torch.quantized_checkpoints import LAYOUTS, Layout, write
from tests.engines.torch.test_kept_blocks import decoder_of, modules_logprobs, prompt_logprobs, rounded_inputs
from tests.engines.torch.test_packed_decoder import library
from tests.engines.torch.torch_harness import Harness, make_prompts, request

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="engines here compute on the GPU")
PROMPTS = make_prompts(*range(60, 160, 20), seed=4)
WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
AWQ_128 = Layout({**LAYOUTS["awq"].config, "group_size": 128}, checkpoints.awq(128))
KEPT = {
    "awq of 128": AWQ_128,
    "gptq of 64": Layout({**LAYOUTS["gptq"].config, "group_size": 64}, checkpoints.gptq(4, 64)),
    "gptq, whole rows": Layout({**LAYOUTS["gptq"].config, "group_size": -1}, checkpoints.gptq(4, -1)),
    "gptq v2": LAYOUTS["gptq v2"],
    "compressed int4": LAYOUTS["compressed int4"],
}


@pytest.fixture(autouse=True, scope="module")
def compiled():
    library()


@pytest.mark.parametrize("layout", KEPT)
def test_logits_are_those_of_the_dequantized_forward_with_rounded_rows(tmp_path, layout):
    path, model = write(tmp_path, KEPT[layout], "qwen2", **WIDE)
    with rounded_inputs(model.model):
        expected = modules_logprobs(model, PROMPTS)
    with Harness(path, max_num_tokens=64, dtype="float32") as engine:
        assert decoder_of(engine).form == "int4_groups" and engine.capacity.step_paths == ("quantized",)
        assert decoder_of(engine)._step is not None  # the layers of a decode step are one call
        found = prompt_logprobs(engine, PROMPTS)
    assert float((found - expected).norm() / expected.norm()) < 2e-2


def test_attention_that_a_checkpoint_has_plain_is_computed_plain_beside_groups(tmp_path):
    mlps = replace(LAYOUTS["awq"], chooses=lambda name: "mlp." in name)
    path, model = write(tmp_path, mlps, "qwen2", **WIDE)
    with ExitStack() as rounding:
        for layer in model.model.layers:
            rounding.enter_context(rounded_inputs(layer.mlp))
        expected = modules_logprobs(model, PROMPTS)
    with Harness(path, max_num_tokens=64, dtype="float32") as engine:
        assert decoder_of(engine).form == "int4_groups"
        found = prompt_logprobs(engine, PROMPTS)
    assert float((found - expected).norm() / expected.norm()) < 2e-2


def test_the_log_tells_the_form_and_no_quant_has_them_dequantized(tmp_path, caplog):
    caplog.set_level("INFO")
    path, _ = write(tmp_path, AWQ_128, **WIDE)
    roots = []
    for algo in (None, "W4A16_AWQ", "NO_QUANT"):
        with Harness(path, max_num_tokens=24, quant_config=QuantConfig(quant_algo=algo)) as engine:
            roots.append(engine.manager.open().root)
            assert decoder_of(engine).form == ("plain" if algo == "NO_QUANT" else "int4_groups")
    assert roots[0] == roots[1] != roots[2]  # their KV is another
    assert re.search(r"weights_kept file=awq forms=INT4_GROUPS:\d+ mib=\d+ by=(avx512_vnni|avx2|none)", caplog.text)
    with pytest.raises(ConfigError, match="quant_config.quant_algo: 'W4A16_GPTQ'; the checkpoint is quantized"):
        Harness(path, quant_config=QuantConfig(quant_algo="W4A16_GPTQ"))


def test_act_order_and_groups_of_16_are_dequantized_and_the_log_says_which(tmp_path, caplog):
    caplog.set_level("INFO")
    groups = Layout({**LAYOUTS["gptq"].config, "group_size": 16}, checkpoints.gptq(4, 16))
    for name, layout in (("act_order", LAYOUTS["gptq, act-order"]), ("other_groups", groups)):
        with Harness(write(tmp_path / name, layout)[0], max_num_tokens=24) as engine:
            assert decoder_of(engine).form == "plain"
            assert len(engine.run([request(PROMPTS[0], 4)])[0]) == 4
        assert re.search(
            rf"weights_dequantized type={name} count=\d+ first=model.layers.0.self_attn.q_proj", caplog.text
        )
