"""Pictures whose embeddings TensorRT-LLM's encoder makes: the answers are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract import stand_in_workers
from tests.server.picture_questions import answers_of_transformers, chat_messages, held_out
from tests.server.triton_client import Client

pytestmark = pytest.mark.server
MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-vlm"
QUESTIONS = held_out(4)


@pytest.fixture(scope="module")
def server(write_recipe, start):
    config = {"dtype": "float32", "max_seq_len": 2048, "kv_cache_config": {"max_tokens": 16384}}
    engine = {
        "engine": "torch",
        "num_threads": 1,
        "engine_config": config | {"cache_transceiver_config": {"backend": "DEFAULT"}},
    }
    workers = {
        "multimodal_encoder": stand_in_workers.worker({"dtype": "float32", "max_batch_size": 4}),
        "prefill": engine,
        "decode": dict(engine),
    }
    return start(write_recipe(MODEL, workers, sampling={"temperature": 0}))


def test_questions_about_pictures_are_answered_as_by_transformers(server):
    client, answers = Client(server.grpc), []
    for question in QUESTIONS:
        body = {"model": "tiny-vlm", "messages": chat_messages(question), "max_tokens": 100}
        (answer,) = list(client.stream("chat", request=json.dumps(body)))
        answers.append(json.loads(answer["response"])["choices"][0]["message"]["content"])
    assert answers == answers_of_transformers(QUESTIONS)
    assert server.engine_pid("multimodal_encoder")
