"""On a GPU, greedy output of every family that the fused decoder has equals transformers' generate, in float32:
prompts in chunks, blocks reused, windows, preemption, with graphs and without."""

from __future__ import annotations

import pytest
import torch

from tests.engines.torch.conftest import TinyModel
from tests.engines.torch.tiny_models import SETTINGS
from tests.engines.torch.torch_harness import MIXED, Harness, make_prompts, request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CPUs have another decoder")
FAMILIES = "mistral ministral seed_oss qwen2 qwen3_moe mixtral gemma gemma2 gemma3_text gpt_oss".split()
PROMPTS = make_prompts(*MIXED[:10])
PREEMPTING = {"queue": {"capacity_scheduler_policy": "MAX_UTILIZATION"}, "max_tokens": 320, "max_num_tokens": 64}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    model = TinyModel(tmp_path_factory.mktemp("models"), request.param, **SETTINGS[request.param])
    model.module.set_attn_implementation("eager")  # transformers' others leave out Gemma 2's softcap
    return model


@pytest.mark.parametrize(
    "settings",
    [{"max_num_tokens": 40}, {"cuda_graph_config": None}, PREEMPTING],
    ids=["chunks and graphs", "no graphs", "preempted"],
)
def test_ten_requests_at_once_equal_generate_twice(model, settings):
    expected = model.expect(PROMPTS, 40)
    with Harness(model.path, tokens_per_block=8, **settings) as engine:
        assert engine.core._parts.forward.resident is not None
        for _ in range(2):
            assert engine.run([request(prompt, 40) for prompt in PROMPTS]) == expected
        assert engine.core.scheduler.num_preemptions > 0 or settings is not PREEMPTING
