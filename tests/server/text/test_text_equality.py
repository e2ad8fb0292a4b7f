"""Greedy output through Triton equals transformers' generate, token by token, in fp32."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from tests.contract import stand_in_workers
from tests.server.triton_client import Client
from tests.servers import start_server

pytestmark = pytest.mark.server

MODES = {
    "aggregated": {"decode": 32},
    "other_block_sizes": {"prefill": 32, "decode": 16},
    "no_reuse": {"prefill": 16, "decode": 32},
    "trtllm_disaggregated": {"prefill": 32, "decode": 32},  # on the stand-in of tests/contract
}
CASES = [(arch, mode) for arch in ("llama", "qwen3", "gemma3") for mode in ("aggregated", "other_block_sizes")]
CASES += [("llama", "disaggregated"), ("gemma3", "no_reuse")]  # the last with other block sizes too
CASES += [("llama", "trtllm"), ("llama", "trtllm_disaggregated"), ("gemma3", "trtllm_disaggregated")]
# What is theirs alone is in the engine, whose tests compare it too (engines/torch/test_equality.py).
SOAK = {(arch, mode) for arch in ("qwen3", "gemma3") for mode in ("aggregated", "other_block_sizes")}
SOAK |= {("llama", "other_block_sizes"), ("gemma3", "trtllm_disaggregated")}
SHARED = {
    ("llama", "aggregated"): "torch_text",
    ("llama", "disaggregated"): "torch_text_pair",
    ("llama", "trtllm"): "trtllm_text",
    ("llama", "trtllm_disaggregated"): "trtllm_text_pair",
}


@dataclass
class Deployment:
    client: Client
    reference: Any
    mode: str
    vocab_size: int


def _workers(mode):
    def engine(tokens_per_block):
        config = {
            "dtype": "float32",
            "max_batch_size": 32,
            "max_num_tokens": 256,  # long prompts are prefilled in chunks
            "max_seq_len": 1024,
            "kv_cache_config": {
                "tokens_per_block": tokens_per_block,
                "max_tokens": 32768,
                "enable_block_reuse": mode != "no_reuse",
            },
            "cache_transceiver_config": {"backend": "DEFAULT"},
        }
        if mode == "trtllm_disaggregated":
            config["guided_decoding_backend"] = "xgrammar"
            return stand_in_workers.worker(config, profile="1.3")
        return {"engine": "torch", "num_threads": 1, "engine_config": config}

    return {stage: engine(size) for stage, size in MODES[mode].items()}


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=[pytest.mark.soak] if case in SOAK else []) for case in CASES],
    ids=lambda case: "-".join(case),
)
def deployment(request, sample_model, reference, write_recipe, shared):
    arch, mode = request.param
    model = reference(arch)
    if request.param in SHARED:
        server = shared(SHARED[request.param])
        yield Deployment(Client(server.grpc), model, mode, model.model.config.vocab_size)
        return
    with start_server(write_recipe(sample_model(arch), _workers(mode))) as server:
        yield Deployment(Client(server.grpc), model, mode, model.model.config.vocab_size)


def _prompts(deployment, lengths, seed):
    rng = random.Random(seed)
    return [[rng.randrange(300, deployment.vocab_size) for _ in range(length)] for length in lengths]


def test_one_request_alone_streamed_and_not(deployment):
    (prompt,) = _prompts(deployment, [45], seed=1)
    expected = deployment.reference.greedy(prompt, 24)
    assert len(set(expected)) > 6  # a model that repeats one token would prove nothing
    streamed = deployment.client.generate("generate", input_ids=prompt, max_tokens=24, stream=True)
    whole = deployment.client.infer("completion", input_ids=prompt, max_tokens=24)
    assert streamed["output_ids"] == expected
    assert whole["output_ids"] == expected
    assert whole["text_output"] == streamed["text_output"]


def test_sixteen_requests_of_mixed_lengths_side_by_side(deployment):
    lengths = [1, 2, 7, 15, 16, 17, 31, 32, 33, 50, 64, 90, 128, 200, 300, 400]
    prompts = _prompts(deployment, lengths, seed=2)
    budgets = [8 + i for i in range(16)]
    expected = [deployment.reference.greedy(*pair) for pair in zip(prompts, budgets, strict=True)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(
                lambda pair: deployment.client.generate("generate", input_ids=pair[0], max_tokens=pair[1], stream=True),
                zip(prompts, budgets, strict=True),
            )
        )
    assert [answer["output_ids"] for answer in answers] == expected


def test_a_reused_prefix_changes_nothing(deployment):
    (prefix,) = _prompts(deployment, [150], seed=3)
    tails = _prompts(deployment, [5, 40], seed=4)
    for tail in tails:
        expected = deployment.reference.greedy(prefix + tail, 12)
        first, second = (
            deployment.client.generate("generate", input_ids=prefix + tail, max_tokens=12, stream=True)
            for _ in range(2)
        )
        assert first["output_ids"] == second["output_ids"] == expected
        cached = json.loads(second["usage"])["cached_tokens"]
        assert cached == 0 if deployment.mode == "no_reuse" else cached >= 128


def test_text_is_what_the_tokenizer_makes_of_the_ids(deployment):
    answer = deployment.client.generate("generate", text_input="def main():\n", max_tokens=40, stream=True)
    ids = deployment.client.infer("tokenizer", text_input="def main():\n")["input_ids"]
    assert answer["output_ids"] == deployment.reference.greedy(ids, 40)
    assert json.loads(answer["usage"])["prompt_tokens"] == len(ids)


def test_a_logits_processor_forces_its_sequence_wherever_the_engine_runs_any(deployment):
    calls = json.dumps([{"name": "forced_sequence", "args": {"token_ids": [310, 311, 312]}}])
    request = {"input_ids": [400, 401], "max_tokens": 9, "logits_processors": calls, "stream": True}
    if deployment.mode == "trtllm_disaggregated":
        with pytest.raises(InferenceServerException, match="INVALID_ARGUMENT: .*together with disaggregated serving"):
            deployment.client.generate("generate", **request)
        return
    answer = deployment.client.generate("generate", **request)
    assert (answer["output_ids"], answer["finish_reason"]) == ([310, 311, 312], "stop")


def test_a_guided_answer_follows_its_guide(deployment):
    pytest.importorskip("xgrammar")
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]{5}"}
    answer = deployment.client.generate("generate", text_input="Hello", max_tokens=30, stream=True, **guide)
    assert re.fullmatch("[0-9]{5}", answer["text_output"]) and answer["finish_reason"] == "stop"
