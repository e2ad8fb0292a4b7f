from __future__ import annotations

import re

import numpy as np
import pytest

from bireme import specs
from bireme.request import read_tensors
from bireme.specs import MODELS, PIPELINES, STAGES
from bireme.types import Inputs

DATA_TYPES = {"INT32", "INT64", "UINT8", "UINT32", "UINT64", "FP16", "FP32", "BYTES", "BOOL"}


def test_every_model_is_listed_once():
    assert len(MODELS) == len(STAGES) + len(PIPELINES)


def test_every_spec_of_the_module_is_in_the_table():
    found = {value.name for value in vars(specs).values() if isinstance(value, specs.ModelSpec)}
    assert found == set(MODELS)


@pytest.mark.parametrize("spec", MODELS.values(), ids=lambda spec: spec.name)
def test_tensors_are_well_formed_and_unique(spec):
    for tensors in (spec.inputs, spec.outputs):
        names = [tensor.name for tensor in tensors]
        assert len(names) == len(set(names)) > 0
        for tensor in tensors:
            assert re.fullmatch(r"[a-z][a-z0-9_]*", tensor.name)
            assert tensor.data_type in DATA_TYPES
            assert tensor.dims and all(dim == -1 or dim > 0 for dim in tensor.dims)


@pytest.mark.parametrize("spec", MODELS.values(), ids=lambda spec: spec.name)
def test_every_input_is_optional_because_http_does_not_notice_a_missing_one(spec):
    assert all(tensor.optional for tensor in spec.inputs)


def test_the_kinds_of_the_models_are_those_of_the_design():
    decoupled = {spec.name for spec in MODELS.values() if spec.decoupled}
    assert decoupled == {"decode", "video_diffusion", "generate", "chat", "video", "tensorrt_llm_bls", "ensemble"}


def test_completion_is_generate_without_stream():
    names = {tensor.name for tensor in MODELS["generate"].inputs} - {"stream"}
    assert names == {tensor.name for tensor in MODELS["completion"].inputs}
    assert MODELS["generate"].outputs == MODELS["completion"].outputs


def test_sampling_means_the_same_in_every_model():
    for name in ("prefill", "decode", "generate", "completion"):
        assert set(specs.SAMPLING) <= set(MODELS[name].inputs)


def test_an_input_is_found_by_name():
    assert MODELS["decode"].input("top_k").data_type == "INT32"
    assert MODELS["decode"].input("nope") is None


def test_numbers_that_are_no_text_are_read_as_arrays_and_bytes_as_bytes():
    inputs = [tensor for spec in MODELS.values() for tensor in spec.inputs]
    assert {tensor.data_type for tensor in inputs if tensor.kind == "bytes"} == {"BYTES"}
    assert {tensor.data_type for tensor in inputs if tensor.kind == "array"} == {"INT32", "UINT8"}


def test_an_input_is_read_as_its_spec_says():
    images = read_tensors(Inputs({"images": np.array([b"\xff", b"a"], object)}), MODELS["multimodal_encoder"])
    assert images == {"images": [b"\xff", b"a"]}
    commands = read_tensors(Inputs({"commands": np.array([1], np.uint8)}), MODELS["decode"])["commands"]
    assert isinstance(commands, np.ndarray)
