"""Embeddings, scores and rankings over fake workers, whose embedding of a text says what its tokens were."""

import asyncio
import base64
import hashlib
import json

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.discovery.records import WorkerRecord
from bireme.errors import EngineStalledError, UnavailableError
from bireme.messages import Capacity
from bireme.metrics import Registry
from bireme.observability.traces import Traces
from bireme.openai.app import Frontend
from bireme.openai.keys import ApiKeys, KeyEntry
from bireme.openai.openapi import RERANK_PATHS, SCORE_PATHS
from bireme.openai.text.embedding_model import EmbeddingModel, EmbeddingModels
from bireme.openai.text.served_model import Models, ServedModel
from bireme.pipelines import embedding_service
from bireme.workers.fake import FakeWorkers, embedding_of
from tests.observability.span_trees import check_tree, shown
from tests.openai.api_keys import bearer, keys_of
from tests.openai.batch.forms import ask as of_batch
from tests.openai.batch.forms import upload
from tests.openai.conftest import letters

ENDED = ("completed", "failed")
PROMPTS = {"prompts": {"query": "q:", "document": ""}, "default_prompt_name": None}


def recipe(name, **fields):
    return convert({"model": "none", "name": name, **fields}, Recipe, name)


@pytest.fixture
async def embedder(bench_of):
    """A frontend with the embedding model `vectors`, beside the language model `test`."""
    apps = []

    async def make(keys=None, replicas=1, capacity=None, files_folder=None, traces=None, **fields):
        workers, metrics = FakeWorkers(), Registry("frontend")
        entry = {"engine": "torch", "replicas": replicas}
        vectors = recipe("vectors", workers={"embedding": entry}, **fields)
        text = recipe("test", workers={"decode": {"engine": "mocker"}})
        model = EmbeddingModel(vectors, workers, letters(), metrics)
        if capacity is not None:
            workers.capacities["embedding"] = capacity
        app = Frontend(
            Models([ServedModel(text, FakeWorkers(), letters(), metrics)]), metrics, vectors.frontend, keys,
            files_folder=files_folder, embedders=EmbeddingModels([model]), traces=traces,
        )  # fmt: skip
        await app.start()
        apps.append(app)
        return bench_of(app, workers)

    yield make
    for app in apps:
        await app.stop()


async def ask(bench, path="/v1/embeddings", headers=None, **fields):
    return await bench.call("POST", path, {"model": "vectors", **fields}, headers).end()


@pytest.mark.parametrize("given", ["hi", ["hi"], [104, 105], [[104, 105]]])
async def test_texts_and_their_ids_are_embedded_alike(embedder, given):
    reply = await ask(await embedder(), input=given)
    CreateEmbeddingResponse.model_validate_json(reply.data, strict=True)
    assert reply.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": np.float32(embedding_of([104, 105])).tolist()}],
        "model": "vectors",
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }


async def test_texts_are_charged_to_their_key(embedder):
    bench = await embedder(keys_of("alice", operator=True))
    await ask(bench, input=["hi", "hello"], headers=bearer("alice"))
    page = (await bench.call("GET", "/metrics", None, bearer("alice")).end()).data.decode()
    assert 'bireme_key_computed_tokens_total{key="alice",worker="frontend"} 7.0' in page


async def batch_of(bench, body):
    """Run a batch of one line; return it, ended."""
    line = {"custom_id": "one", "method": "POST", "url": "/v1/embeddings", "body": body}
    file = (await upload(bench, json.dumps(line).encode() + b"\n")).json()["id"]
    fields = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    made = (await bench.call("POST", "/v1/batches", fields).end()).json()
    while (shown := (await of_batch(bench, f"/v1/batches/{made['id']}")).json())["status"] not in ENDED:
        await asyncio.sleep(0.01)
    return shown


async def test_lines_of_a_batch_are_embedded_and_their_model_is_checked(embedder, tmp_path):
    bench = await embedder(files_folder=tmp_path)
    embedded = await batch_of(bench, {"model": "vectors", "input": "hi"})
    answer = (await of_batch(bench, f"/v1/files/{embedded['output_file_id']}/content")).json()
    assert answer["response"]["body"]["usage"]["total_tokens"] == 2
    refused = await batch_of(bench, {"model": "test", "input": "hi"})
    assert (refused["status"], refused["errors"]["data"][0]["code"]) == ("failed", "wrong_endpoint")


async def test_base64_holds_the_same_numbers_in_the_order_of_the_texts(embedder):
    reply = (await ask(await embedder(), input=["hi", "ahoi"], encoding_format="base64", dimensions=2)).json()
    rows = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() for one in reply["data"]]
    assert rows == [[209.0, 2.0], [417.0, 4.0]] and reply["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"input": []}, 400, "input", "empty"),
        ({"input": ""}, 400, "input", "empty"),
        ({"input": ["a", ""]}, 400, "input[1]", "empty"),
        ({"input": ["a", 5]}, 400, "input[1]", "a token id among texts"),
        ({"input": [[5, 2000]]}, 400, "input[0]", "token id 2000"),
        ({"input": ["a", "x" * 9]}, 400, "input[1]", "9 tokens; the model's limit is 8"),
        ({"input": ["a"] * 4}, 400, "input", "limits.max_embedding_inputs is 3"),
        ({"input": "a", "dimensions": 5}, 400, "dimensions", "1 to 4"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions", "at least 1"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "int8"),
        ({"input": "a", "truncate_prompt_tokens": 3}, 400, "truncate_prompt_tokens", "not cut here"),
        ({"input": "a", "prompt_name": "query"}, 400, "prompt_name", "it has none"),
        ({"input": "a", "model": "test"}, 400, "model", "makes text, no embeddings"),
        ({"input": "a", "model": "else"}, 404, None, "does not exist"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(embedder, fields, status, param, message):
    capacity = Capacity(
        max_seq_len=8, max_batch_size=1, max_num_tokens=8, max_queue_size=1, tokens_per_block=0, num_blocks=0,
        vocab_size=1000, embedding_size=4,
    )  # fmt: skip
    reply = await ask(await embedder(capacity=capacity, limits={"max_embedding_inputs": 3}), **fields)
    error = reply.json()["error"]
    assert (reply.status, message in error["message"]) == (status, True), error
    assert param is None or error["param"] == param


async def test_a_chat_with_an_embedding_model_is_told_where_to_go(embedder):
    bench = await embedder()
    reply = await bench.chat(model="vectors").end()
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "wrong_endpoint", "model")
    assert "vectors makes embeddings, no text; send it to POST /v1/embeddings" in error["message"]
    shown = (await bench.call("GET", "/v1/models/vectors").end()).json()
    assert shown["bireme"] == {"input_modalities": ["text"], "output_modalities": ["embedding"]}


async def test_a_worker_that_is_down_is_passed_over_until_all_are(embedder):
    bench = await embedder(replicas=2)
    bench.workers.down["embedding"] = UnavailableError("engine starts")
    assert (await ask(bench, input="hi")).status == 200
    bench.workers.down["embedding_1"] = UnavailableError("engine starts")
    assert (await ask(bench, input="hi")).status == 503
    assert (await bench.call("GET", "/health/ready").end()).status == 503


async def test_all_parts_of_a_request_go_to_one_generation_and_to_another_where_that_fails(monkeypatch):
    monkeypatch.setattr(embedding_service, "_PART_BYTES", 16)  # a text each
    workers, metrics = FakeWorkers(), Registry("frontend")
    model = EmbeddingModel(recipe("vectors", workers={"embedding": {"engine": "torch"}}), workers, letters(), metrics)
    records = [
        WorkerRecord(worker="embedding", server=server, generation=at) for at, server in enumerate(("a:1", "b:1"))
    ]
    model.services.set_workers({one.id: one for one in records})
    texts = [np.array([1, 2], np.int32)] * 3
    await model.embeddings.embed(texts)
    assert workers.log == ["embedding@b:1 embed 1"] * 3
    workers.down["embedding@b:1"] = UnavailableError("it is down")
    await model.embeddings.embed(texts)
    assert workers.log[-3:] == ["embedding@a:1 embed 1"] * 3
    workers.down["embedding@a:1"] = UnavailableError("it is down")
    with pytest.raises(UnavailableError, match="it is down"):
        await model.embeddings.embed(texts)


async def test_texts_in_two_stalls_are_given_to_no_third_engine(embedder):
    bench = await embedder(replicas=3)
    for worker in ("embedding", "embedding_1", "embedding_2"):
        bench.workers.down[worker] = EngineStalledError("its engine stood still")
    assert (await ask(bench, input="hi")).status == 503
    assert len(bench.workers.log) == 2


async def test_many_large_embeddings_come_in_parts_and_in_order(embedder, monkeypatch):
    monkeypatch.setattr(embedding_service, "_PART_BYTES", 16)
    bench = await embedder(replicas=2)
    reply = (await ask(bench, input=["a", "b", "c"], dimensions=2)).json()
    assert [one["embedding"][0] for one in reply["data"]] == [97, 98, 99]
    assert sorted(bench.workers.log) == ["embedding embed 2", "embedding_1 embed 1"]


async def until(condition):
    async def wait():
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), 60)


async def test_a_client_that_leaves_stops_its_work(embedder):
    bench = await embedder()
    bench.workers.hold.add("embedding")
    call = bench.call("POST", "/v1/embeddings", {"model": "vectors", "input": "hi"})
    await until(lambda: bench.workers.waiting)
    call.leave()
    await call.task
    await until(lambda: "embedding abort embed" in bench.workers.log)


async def test_tokens_count_against_the_key(embedder):
    entry = KeyEntry(name="a", sha256=hashlib.sha256(b"key").hexdigest(), tokens_per_minute=5)
    bench = await embedder(keys=ApiKeys((entry,)))
    headers = {"authorization": "Bearer key"}
    statuses = [(await ask(bench, headers=headers, input=text)).status for text in ("four", "four")]
    assert statuses == [200, 429]


async def test_prompts_of_the_model_come_before_texts(embedder, tmp_path):
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
    bench = await embedder(model=str(tmp_path))
    whole = (await ask(bench, input="hi", prompt_name="query")).json()
    assert whole["usage"]["prompt_tokens"] == len("q:hi")
    refused = await ask(bench, input="hi", prompt_name="passage")
    assert refused.json()["error"]["message"] == "prompt_name: passage; prompts of this model: query, document"


@pytest.mark.parametrize("path", SCORE_PATHS)
async def test_scores_are_the_cosines_of_pairs(embedder, path):
    bench = await embedder()
    reply = (await ask(bench, path, text_1="hi", text_2=["hi", "z"])).json()
    first, second = (np.array(embedding_of(tokens), np.float32) for tokens in ([104, 105], [122]))
    cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    assert [one["score"] for one in reply["data"]] == pytest.approx([1.0, cosine], abs=1e-6)
    refused = await ask(bench, "/v1/score", text_1=["a", "b"], text_2=["c"])
    assert refused.json()["error"]["param"] == "text_1"


@pytest.mark.parametrize("path", RERANK_PATHS)
async def test_documents_are_ranked_by_their_likeness(embedder, path):
    bench = await embedder()
    reply = (await ask(bench, path, query="hi", documents=["zzzz", {"text": "hi"}, "a"], top_n=2)).json()
    assert reply["results"][0]["index"] == 1 and len(reply["results"]) == 2
    assert reply["results"][0]["document"] == {"text": "hi"}
    assert (await ask(bench, "/v1/rerank", query="hi", documents=[])).json()["error"]["param"] == "documents"


async def test_a_traced_request_names_the_worker_of_each_part(embedder):
    traces, read = Traces(Registry("frontend"), 1.0), []
    traces.subscribe(read.append)
    bench = await embedder(replicas=2, traces=traces)
    bench.workers.down["embedding"] = UnavailableError("it is starting")
    assert (await ask(bench, input="text")).status == 200
    check_tree(read[0])
    assert shown(read[0]) == ["POST /v1/embeddings", "  embed", "  embed"]
    assert [(span.attributes["worker"], span.error) for span in read[0].spans[1:]] == [
        ("embedding", "UNAVAILABLE: it is starting"),
        ("embedding_1", ""),
    ]
