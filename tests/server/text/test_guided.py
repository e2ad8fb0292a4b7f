"""Guided decoding through Triton: tensors and JSON, streaming and not, aggregated and disaggregated."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from tests.engines.torch.schemas import make_schemas
from tests.server.triton_client import Client

pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.server
COUNTS = [12, pytest.param(64, marks=pytest.mark.soak)]
SHARED = {
    "aggregated": "torch_text",
    "disaggregated": "torch_text_pair",
    "trtllm_aggregated": "trtllm_text",
    "trtllm_disaggregated": "trtllm_text_pair",
}


@pytest.fixture(scope="module", params=SHARED)
def client(request, shared):
    return Client(shared(SHARED[request.param]).grpc)


def sampling(guide, **more):
    return json.dumps({"guided_decoding": guide, "max_tokens": 300, "temperature": 1.0, "seed": 3} | more)


def ask(client, guide, is_streaming, **more):
    values = {
        "text_input": "Once upon a time",
        "sampling_parameters": sampling(guide, **more),
        "return_finish_reason": True,
    }
    if is_streaming:
        return client.generate(stream=True, **values)
    return client.infer("completion", exclude_input_in_output=True, **values)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("is_streaming", [True, False])
def test_answers_to_random_schemas_are_valid(client, is_streaming, count):
    schemas = make_schemas(count, seed=7)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda schema: ask(client, {"json": schema}, is_streaming), schemas))
    for schema, answer in zip(schemas, answers, strict=True):
        assert answer["finish_reason"] == "stop"
        jsonschema.validate(json.loads(answer["text_output"]), schema)


@pytest.mark.parametrize("is_streaming", [True, False])
def test_streaming_does_not_change_an_answer(client, is_streaming):
    guide = {"regex": "[a-f]{8}(-[0-9]{4}){3}"}
    first, second = ask(client, guide, True), ask(client, guide, is_streaming)
    assert first["text_output"] == second["text_output"]
    assert re.fullmatch(guide["regex"], first["text_output"])


@pytest.mark.parametrize(
    ("kind", "guide", "pattern"),
    [
        ("json_schema", json.dumps({"enum": ["red", "blue"]}), '"(red|blue)"'),
        ("regex", "[0-9]{5}", "[0-9]{5}"),
        ("ebnf_grammar", 'root ::= "yes" | "no"', "yes|no"),
    ],
)
def test_tensorrtllm_backend_s_tensors_are_understood(client, kind, guide, pattern):
    answer = client.generate(
        text_input="Hello", max_tokens=60, guided_decoding_guide_type=kind, guided_decoding_guide=guide
    )
    assert re.fullmatch(pattern, answer["text_output"])


@pytest.mark.parametrize(
    ("guide", "words"),
    [
        ({"regex": "a(b"}, "INVALID_ARGUMENT: guided_decoding.regex"),
        ({"json": {"type": "strange"}}, "INVALID_ARGUMENT: guided_decoding.json"),
        ({"regex": "a", "json": {}}, "exactly one of"),
        ({"regex": "a" * 300_000}, "limits.max_guide_bytes"),
    ],
)
def test_a_wrong_guide_is_the_client_s_mistake(client, guide, words):
    with pytest.raises(InferenceServerException, match="INVALID_ARGUMENT") as caught:
        ask(client, guide, True)
    assert words in str(caught.value)
    assert ask(client, {"choice": ["fine"]}, True)["text_output"] == "fine"
