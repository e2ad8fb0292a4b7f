"""The logits_processor model on a real tritonserver."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from bireme.logits.application import LogitsJob, apply
from bireme.messages import ProcessorCall
from tests.server.triton_client import Client, inputs_of

pytestmark = pytest.mark.server
VOCAB = 40
CALLS = [
    {"name": "repetition_penalty", "args": {"penalty": 1.4}},
    {"name": "temperature", "args": {"temperature": 0.7}},
    {"name": "top_p", "args": {"top_p": 0.8}},
]


@pytest.fixture(scope="module")
def server(sample_model, write_recipe, start):
    engine = {
        "engine": "torch",
        "num_threads": 1,
        "engine_config": {
            "dtype": "float32",
            "max_batch_size": 4,
            "max_seq_len": 128,
            "kv_cache_config": {"max_tokens": 1024},
            "cache_transceiver_config": {"backend": "DEFAULT"},
        },
    }
    return start(write_recipe(sample_model("llama"), {"prefill": engine, "decode": engine}))


def _rows(count):
    return np.random.default_rng(count).normal(0, 2, (count, VOCAB)).astype(np.float32)


def _ask(server, logits, calls, **ids):
    values = {"logits": logits, "processors": json.dumps(calls), **ids}
    with grpcclient.InferenceServerClient(server.grpc) as client:
        return client.infer("logits_processor", inputs_of("logits_processor", values)).as_numpy("logits")


def _refusal(server, *args, **ids):
    with pytest.raises(InferenceServerException) as refused:
        _ask(server, *args, **ids)
    return str(refused.value.message())


def test_a_batch_comes_back_as_the_engine_s_classes_make_it(server):
    histories, logits = [[1, 2, 3], [], [9, 9]], _rows(3)
    job = LogitsJob(
        processors=tuple(ProcessorCall(**call) for call in CALLS),
        logits=logits.tobytes(),
        vocab_size=VOCAB,
        histories=tuple(np.array(ids, np.int32).tobytes() for ids in histories),
        num_prompt_tokens=(0, 0, 0),
    )
    answer = _ask(server, logits, CALLS, input_ids=sum(histories, []), input_lengths=[3, 0, 2])
    assert answer.dtype == np.float32 and np.array_equal(answer, apply(job))


def test_one_row_is_a_batch_of_one(server):
    assert _ask(server, _rows(1), CALLS, input_ids=[1, 2]).shape == (1, VOCAB)


def test_triton_refuses_a_row_without_its_batch_dimension(server):
    assert "unexpected shape for input 'logits'" in _refusal(server, _rows(1)[0], CALLS)


def test_http_serves_it_too(server):
    logits = httpclient.InferInput("logits", [2, VOCAB], "FP32")
    logits.set_data_from_numpy(_rows(2))
    processors = httpclient.InferInput("processors", [1], "BYTES")
    processors.set_data_from_numpy(np.array([json.dumps(CALLS).encode()], object))
    with httpclient.InferenceServerClient(server.http) as client:
        answer = client.infer("logits_processor", [logits, processors]).as_numpy("logits")
    assert answer.shape == (2, VOCAB)


@pytest.mark.parametrize(
    ("calls", "ids", "message"),
    [
        (
            [{"name": "temperatur"}],
            {},
            "INVALID_ARGUMENT: logits processor temperatur does not exist; did you mean temperature",
        ),
        ([{"name": "top_k"}], {}, "INVALID_ARGUMENT: logits processor top_k: missing a required argument"),
        ([{"name": "top_k", "args": {"top_k": 0}}], {}, "INVALID_ARGUMENT: top_k: 0; at least 1"),
        ([], {"input_ids": [VOCAB]}, "INVALID_ARGUMENT: input_ids: 40 is not in the vocabulary"),
        ({}, {}, "INVALID_ARGUMENT: processors: "),
    ],
)
def test_errors_name_processor_value_and_remedy(server, calls, ids, message):
    assert message in _refusal(server, _rows(1), calls, **ids)


def test_the_example_of_the_documentation_forces_its_sequence(server):
    """Run as written, but for the address."""
    doc = Path(__file__).resolve().parents[2] / "docs" / "logits_processor.md"
    code = re.search(r"```python\n(.*?)```", doc.read_text(), re.DOTALL).group(1).replace("127.0.0.1:8001", server.grpc)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[0] == "[5, 6, 7, 0]", done.stderr


def test_the_same_processor_forces_its_sequence_in_a_disaggregated_generation(server):
    calls = json.dumps([{"name": "forced_sequence", "args": {"token_ids": [10, 11, 12]}}])
    answer = Client(server.grpc).generate("generate", input_ids=[400, 401], max_tokens=9, logits_processors=calls)
    assert answer["output_ids"][:3] == [10, 11, 12] and len(answer["output_ids"]) <= 4
    assert answer["finish_reason"] == "stop"
    assert json.loads(answer["usage"])["prefill_worker"] == "prefill"
