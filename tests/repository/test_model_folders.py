"""Model folders: thin, named after their stage, and nothing beside them; ensembles agree with the specs."""

from __future__ import annotations

import importlib
import re

import pytest

from bireme.specs import MODELS, PIPELINES, STAGES
from bireme.triton.autocomplete import tensor_config
from tests.repository.house import CHECKOUT, MODEL_FOLDERS, PYTHON_MODELS, parse_pbtxt

MAX_MODEL_LINES = 12
ENSEMBLES = [folder for folder in MODEL_FOLDERS if folder not in PYTHON_MODELS]
by_name = {"ids": lambda folder: folder.name}


def camel(name):
    return "".join(part.capitalize() for part in name.split("_"))


def stage_of(folder):
    part = "stages" if folder.parent.name == "model_repository" else "pipelines"
    return getattr(importlib.import_module(f"bireme.{part}.{folder.name}"), camel(folder.name))


def test_every_spec_has_its_folder():
    assert {folder.name for folder in PYTHON_MODELS if folder.parent.name == "model_repository"} == {
        spec.name for spec in STAGES
    }
    assert {folder.name for folder in PYTHON_MODELS if folder.parent.name == "ensembles"} == {
        spec.name for spec in PIPELINES
    }


@pytest.mark.parametrize("folder", PYTHON_MODELS, **by_name)
def test_a_python_model_s_config_says_only_what_code_can_not(folder):
    config = parse_pbtxt(folder / "config.pbtxt")
    assert config.keys() == {"backend", "instance_group"}
    assert config["backend"] == ["python"]
    assert config["instance_group"] == [{"kind": ["KIND_MODEL"], "count": ["1"]}]


@pytest.mark.parametrize("folder", PYTHON_MODELS, **by_name)
def test_a_model_py_is_thin_and_names_its_stage(folder):
    text = (folder / "1" / "model.py").read_text()
    assert len(text.splitlines()) <= MAX_MODEL_LINES
    part = "stages" if folder.parent.name == "model_repository" else "pipelines"
    assert f"from bireme.{part}.{folder.name} import {camel(folder.name)}\n" in text
    assert f"TritonPythonModel = as_triton_model({camel(folder.name)})\n" in text
    assert "parents[3]" in text and ".resolve()" in text  # replicas are links to this folder


@pytest.mark.parametrize("folder", PYTHON_MODELS, **by_name)
def test_a_folder_has_its_stage_class_with_the_spec_of_its_name(folder):
    assert stage_of(folder).spec is MODELS[folder.name]


@pytest.mark.parametrize("part", ["model_repository", "ensembles"])
def test_a_repository_folder_holds_models_only(part):
    """Triton exits at start when it finds any other folder, __pycache__ included."""
    others = [
        path.name for path in (CHECKOUT / part).iterdir() if path.is_dir() and not (path / "config.pbtxt").exists()
    ]
    assert others == []


@pytest.mark.parametrize("folder", MODEL_FOLDERS, **by_name)
def test_a_config_has_no_placeholders(folder):
    assert "${" not in (folder / "config.pbtxt").read_text()


@pytest.mark.parametrize("folder", ENSEMBLES, **by_name)
def test_an_ensemble_has_an_empty_version_folder(folder):
    assert [path.name for path in (folder / "1").iterdir()] == [".gitkeep"]


def steps_of(folder):
    config = parse_pbtxt(folder / "config.pbtxt")
    return config, config["ensemble_scheduling"][0]["step"]


@pytest.mark.parametrize("folder", ENSEMBLES, **by_name)
def test_an_ensemble_s_maps_use_tensors_that_the_specs_have(folder):
    _, steps = steps_of(folder)
    for step in steps:
        spec = MODELS[step["model_name"][0]]
        assert {pair["key"][0] for pair in step["input_map"]} <= {tensor.name for tensor in spec.inputs}
        assert {pair["key"][0] for pair in step["output_map"]} <= {tensor.name for tensor in spec.outputs}


@pytest.mark.parametrize("folder", ENSEMBLES, **by_name)
@pytest.mark.parametrize(("side", "mapping"), [("input", "input_map"), ("output", "output_map")])
def test_an_ensemble_s_tensors_have_the_types_of_the_specs(folder, side, mapping):
    config, steps = steps_of(folder)
    listed = {tensor["name"][0]: tensor for tensor in config[side]}
    mapped = {}
    for step in steps:
        spec = MODELS[step["model_name"][0]]
        for pair in step[mapping]:
            tensors = spec.inputs if side == "input" else spec.outputs
            mapped[pair["value"][0]] = next(tensor for tensor in tensors if tensor.name == pair["key"][0])
    assert listed.keys() == {name for name in mapped if not name.startswith("_")}  # _ is between the steps
    for name, tensor in listed.items():
        expected = tensor_config(mapped[name])
        assert tensor["data_type"] == [expected["data_type"]]
        assert [int(dim) for dim in tensor["dims"]] == expected["dims"]


@pytest.mark.parametrize("folder", ENSEMBLES, **by_name)
def test_an_ensemble_s_inputs_are_all_optional(folder):
    """HTTP answers a request that lacks a required one with an empty body; the first step can say what is wrong."""
    config, _ = steps_of(folder)
    assert [tensor["name"] for tensor in config["input"] if tensor.get("optional") != ["true"]] == []


@pytest.mark.parametrize("spec", MODELS.values(), ids=lambda spec: spec.name)
def test_a_spec_s_names_are_unique_and_plain(spec):
    for tensors in (spec.inputs, spec.outputs):
        names = [tensor.name for tensor in tensors]
        assert len(names) == len(set(names))
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)
