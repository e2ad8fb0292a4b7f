"""Embeddings equal those of transformers computed text by text, whatever shares a pass with them."""

import json
import threading
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel

from bireme.canary_mark import new_mark
from bireme.config import EngineConfig, Limits, SchedulerConfig
from bireme.engines.base import EngineContext
from bireme.engines.child.lost_device import leave_if_lost
from bireme.engines.child.validate import Gate
from bireme.engines.torch.embedding import text_embedding
from bireme.engines.torch.embedding.text_embedding import TorchEmbeddingEngine
from bireme.errors import ConfigError, RequestError, ResourceExhaustedError
from bireme.messages import EmbedRequest
from bireme.metrics import Registry
from models.training.topic_world import meanings

TRAINED = "models/tiny-embedding"
VOCAB, SIZE, LIMIT, WAIT_S = 300, 32, 100, 60
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": SIZE, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 1,
    "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
SMALL = {"distilbert": {"dim": SIZE, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}}
MODERN = {"modernbert": {"global_attn_every_n_layers": 2, "local_attention": 16, "cls_token_id": 0, "sep_token_id": 2}}
WAYS = {
    "qwen3": "lasttoken", "bert": "cls", "roberta": "mean", "xlm-roberta": "cls", "mpnet": "mean", "distilbert": "mean",
    "modernbert": "cls", "qwen2": "lasttoken", "llama": "mean", "mistral": "max",
}  # fmt: skip
FLAGS = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}
GENERATOR = np.random.default_rng(7)
TEXTS = [GENERATOR.integers(3, VOCAB, length).astype(np.int32) for length in (5, 1, 40, 17, 90, 2, 33, 8)]


def write_model(folder, family="bert", pooling="mean", normalize=True, **settings):
    config = AutoConfig.for_model(family, **SHAPE | SMALL.get(family, {}) | MODERN.get(family, {}))
    torch.manual_seed(3)
    model = AutoModel.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": at, "path": f"{at}_{kind}" if at else "", "type": f"sentence_transformers.models.{kind}"}
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooled = {f"pooling_mode_{FLAGS[pooling]}": True, "pooling_mode_weightedmean_tokens": False} | settings
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooled))
    return folder


def alone(folder, texts, pooling):
    """Each text through transformers by itself, at length 1."""
    model, rows = AutoModel.from_pretrained(folder).eval(), []
    for text in texts:
        with torch.inference_mode():
            hidden = model(input_ids=torch.from_numpy(text.astype(np.int64))[None]).last_hidden_state[0]
        row = {"cls": hidden[0], "mean": hidden.mean(0), "max": hidden.amax(0), "lasttoken": hidden[-1]}[pooling]
        rows.append((row / row.norm()).numpy())
    return np.stack(rows)


class Bench:
    def __init__(self, folder, **config):
        self.finishes = {}
        self._ended = threading.Condition()
        context = EngineContext("embedding", "embedding", str(folder), EngineConfig(**config), Registry("embedding"))
        self.engine = TorchEmbeddingEngine(context)
        self.gate = Gate("embedding", self.engine.start(self._emit), Limits(max_embedding_inputs=LIMIT), b"k" * 32)

    def _emit(self, step, deltas, plain=None):
        with self._ended:
            self.finishes |= {delta.key[1]: delta for delta in deltas}
            self._ended.notify_all()

    def embed(self, number, texts, **fields):
        request = EmbedRequest(prompts=tuple(text.tobytes() for text in texts), **fields)
        self.engine.embed((0, number), self.gate.admit_texts(request))

    def rows(self, number, size=SIZE):
        with self._ended:
            assert self._ended.wait_for(lambda: number in self.finishes, WAIT_S)
        delta = self.finishes[number]
        assert delta.finish.reason == "stop", delta.finish
        return np.frombuffer(delta.embedded, "<f4").reshape(-1, size)


@pytest.fixture
def bench():
    made = []

    def make(*given, **config):
        made.append(Bench(*given, **config))
        return made[-1]

    yield make
    for one in made:
        one.engine.stop()


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """One engine for what does not depend on the model."""
    one = Bench(write_model(tmp_path_factory.mktemp("bert") / "model"))
    yield one
    one.engine.stop()


@pytest.mark.parametrize("family", WAYS)
def test_texts_of_many_lengths_embed_as_each_does_alone(family, tmp_path, bench):
    pooling = WAYS[family]
    folder = write_model(tmp_path / "model", family, pooling)
    engine = bench(folder, max_num_tokens=128, max_batch_size=4)
    engine.embed(1, TEXTS[:3])
    engine.embed(2, TEXTS[3:])
    rows = np.concatenate([engine.rows(1), engine.rows(2)])
    np.testing.assert_allclose(rows, alone(folder, TEXTS, pooling), atol=2e-5)


def test_sentences_of_the_trained_sample_lie_next_to_those_that_mean_the_same(bench):
    """With meanings that it never saw in training, each in two wordings."""
    engine, tokenizer, rng = (
        bench(TRAINED, dtype="float32"),
        Tokenizer.from_file(f"{TRAINED}/tokenizer.json"),
        Random(5),
    )
    held = meanings(held_out=True)
    wordings = [meaning.say(rng) for _ in range(2) for meaning in held]
    engine.embed(1, [np.array(tokenizer.encode(text).ids, np.int32) for text in wordings])
    rows = engine.rows(1, size=96)
    likeness = rows[: len(held)] @ rows[len(held) :].T
    assert (likeness.argmax(1) == np.arange(len(held))).mean() > 0.8
    np.fill_diagonal(likeness, -1)
    nearest = [held[at].topic for at in likeness.argmax(1)]
    assert np.mean([topic == meaning.topic for topic, meaning in zip(nearest, held, strict=True)]) > 0.95


def test_fewer_dimensions_are_the_first_ones_at_length_one_again(bert):
    bert.embed(1, TEXTS[:2])
    bert.embed(2, TEXTS[:2], dimensions=8)
    whole, short = bert.rows(1), bert.rows(2, size=8)
    cut = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(short, cut, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"prompts": ()}, "input: empty"),
        ({"prompts": (b"\0\0\0\0",) * 101}, "input: 101 entries; limits.max_embedding_inputs is 100"),
        ({"prompts": (b"\0\0\0\0", b"")}, r"input\[1\]: 0 bytes"),
        ({"prompts": (np.full(129, 4, np.int32).tobytes(),)}, r"input\[0\]: 129 tokens; the model's limit is 128"),
        ({"prompts": (np.full(2, VOCAB, np.int32).tobytes(),)}, r"input\[0\]: token id 300; ids of this model"),
        ({"prompts": (b"\0\0\0\0",), "dimensions": 33}, "dimensions: 33; this model has 1 to 32"),
    ],
)
def test_the_gate_refuses_by_name(request_fields, message, bert):
    with pytest.raises(RequestError, match=message):
        bert.gate.admit_texts(EmbedRequest(**request_fields))


def test_a_full_queue_a_late_request_and_an_abort_end_by_name(tmp_path, bench):
    engine = bench(write_model(tmp_path / "model"), scheduler_config=SchedulerConfig(max_queue_size=3))
    with engine.engine._changed:  # no pass begins before all of them wait
        engine.embed(1, TEXTS)
        engine.embed(2, TEXTS, timeout_ms=1)
        engine.embed(3, TEXTS)
        with pytest.raises(ResourceExhaustedError, match="max_queue_size is 3"):
            engine.embed(4, TEXTS)
        engine.engine._jobs[1].arrived_at -= 1
        engine.engine.abort((0, 3))
    assert len(engine.rows(1)) == len(TEXTS)
    assert [engine.finishes[number].finish.reason for number in (2, 3)] == ["timeout", "cancelled"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling_mode_cls_token": True}, "mean, cls; one of"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_weightedmean_tokens": True}, "weightedmean_tokens; one of"),
        ({"include_prompt": False}, "include_prompt false"),
    ],
)
def test_a_pooling_that_is_not_served_is_refused_at_the_start(settings, message, tmp_path, bench):
    folder = write_model(tmp_path / "model", **settings)
    with pytest.raises(ConfigError, match=message):
        bench(folder)


def test_a_process_whose_gpu_is_lost_ends_itself(tmp_path, bench, monkeypatch):
    """Its passes fail quickly, which looks like work to the supervisor."""
    ended = threading.Event()

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    write_model(tmp_path)
    one = bench(tmp_path)
    monkeypatch.setattr(one.engine._model, "embed", lambda texts: lost())
    monkeypatch.setattr(text_embedding, "leave_if_lost", lambda worker: leave_if_lost(worker, lambda code: ended.set()))
    one.embed(1, [np.arange(3, dtype="<i4")])
    with one._ended:
        assert one._ended.wait_for(lambda: 1 in one.finishes, WAIT_S)
    assert one.finishes[1].finish.error.startswith("INTERNAL") and not ended.wait(0.5)  # the device is well, or a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    one.embed(2, [np.arange(3, dtype="<i4")])
    assert ended.wait(WAIT_S) and 2 in one.finishes


def test_canaries_are_counted_apart_from_load(bert, monkeypatch):
    monkeypatch.setenv("BIREME_KEY", "ab" * 32)
    metrics = bert.engine._context.metrics
    metrics.take_delta()
    bert.embed(901, [np.arange(5, 9, dtype=np.int32)], canary=new_mark("ab" * 32))
    assert bert.rows(901).shape[0] == 1
    delta = metrics.take_delta()
    assert [name for name, *_ in delta.counters] == ["bireme_canaries_total"]
    assert {name for name, *_ in delta.histograms} <= {"bireme_engine_step_seconds"}
