"""TensorRT-LLM's MultimodalEncoder behind the encoder stage: its handles become our rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bireme.engines.base import EngineContext
from bireme.engines.torch.images.encoder_engine import make_encoder
from bireme.engines.torch.images.vision_tower import load_vision_tower
from bireme.engines.torch.weights.checkpoint import open_checkpoint
from bireme.engines.trtllm import create
from bireme.engines.trtllm.encoder import HandleEncoder, TrtllmEncoderEngine, handles_of, make_multimodal_encoder
from bireme.errors import BiremeError, ConfigError
from bireme.metrics import Registry
from tests.contract.trtllm_harness import engine_config

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-vlm"


@pytest.fixture
def context(profile):
    config = engine_config({"dtype": "float32", "max_batch_size": 4})
    return EngineContext(
        worker="multimodal_encoder",
        stage="multimodal_encoder",
        model_path=str(MODEL),
        config=config,
        metrics=Registry("multimodal_encoder"),
    )


@pytest.fixture
def encoder(context):
    return HandleEncoder(make_multimodal_encoder(context), open_checkpoint(str(MODEL)), context)


def pictures(count):
    rng = np.random.default_rng(5)
    return [rng.integers(0, 255, (40 + 9 * at, 52, 3), dtype=np.uint8) for at in range(count)]


def test_embeddings_are_those_of_the_torch_engine(encoder):
    checkpoint = open_checkpoint(str(MODEL))
    own = make_encoder(load_vision_tower(checkpoint, "float32", torch.device("cpu")), checkpoint, "float32")
    expected = own.encode([own.prepare(one) for one in pictures(2)])
    found = encoder.encode([encoder.prepare(one) for one in pictures(2)])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.tensor, theirs.tensor, rtol=1e-4, atol=1e-5)
    assert encoder.layout == own.layout
    assert encoder.name_of(b"x") == own.name_of(b"x")


def test_handles_are_found_where_a_release_puts_them():
    params = SimpleNamespace(multimodal_embedding_handles=({"a": 1},))
    empty = SimpleNamespace(disaggregated_params=None)
    results = [
        SimpleNamespace(outputs=[empty], disaggregated_params=params),
        SimpleNamespace(outputs=[SimpleNamespace(disaggregated_params=params)], disaggregated_params=None),
        SimpleNamespace(outputs=[empty], disaggregated_params=None, mm_embedding_handle={"a": 1}),
    ]
    assert [handles_of(result) for result in results] == [[{"a": 1}]] * 3
    assert handles_of(SimpleNamespace(outputs=[empty])) == []


def test_each_handle_is_opened_once(encoder, monkeypatch):
    opened = []
    plain = encoder._container.from_dict
    monkeypatch.setattr(encoder._container, "from_dict", lambda handle: (opened.append(str(handle)), plain(handle))[1])
    encoder.encode([encoder.prepare(one) for one in pictures(3)])
    assert len(opened) == len(set(opened)) == 3


def test_embeddings_of_another_shape_are_an_error_with_the_way_out(encoder):
    prepared = encoder.prepare(pictures(1)[0])
    with pytest.raises(BiremeError, match="engine: torch"):
        encoder.encode([dataclasses.replace(prepared, num_tokens=prepared.num_tokens + 1)])


def test_the_encoder_stage_has_its_own_engine(context):
    assert isinstance(create(context), TrtllmEncoderEngine)


def test_one_process_for_all_is_refused(context, monkeypatch):
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    with pytest.raises(ConfigError, match="can't be opened by the process that made them"):
        create(context).start(lambda step, deltas: None)


def test_an_architecture_without_an_encoder_is_refused_by_name(context, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Llama4ForConditionalGeneration"]}')
    with pytest.raises(ConfigError, match="Llama4ForConditionalGeneration: TensorRT-LLM has no encoder"):
        create(dataclasses.replace(context, model_path=str(tmp_path))).start(lambda step, deltas: None)
