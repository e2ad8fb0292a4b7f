"""Whole configurations: Triton reads in them what it would otherwise ask the models for."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from bireme.config import CHECKOUT, PipelineConfig, PipelineInstances, Recipe, WorkerEntry
from bireme.launch.model_configs import are_whole, whole_config
from bireme.launch.repository import link_models, used_models
from bireme.launch.tritonserver import start_server
from bireme.specs import MODELS

INSTANCES = PipelineConfig(instances=PipelineInstances(generate=3))
PLAIN = 'backend: "python"\ninstance_group [{ kind: KIND_MODEL count: 1 }]\n'


def parsed(text):
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)
def test_a_whole_configuration_says_what_the_spec_says(spec):
    config = parsed(whole_config(PLAIN, spec))
    assert config.backend == "python" and config.instance_group[0].count == 1
    assert config.max_batch_size == spec.max_batch_size
    assert config.model_transaction_policy.decoupled == spec.decoupled
    for found, wanted in ((config.input, spec.inputs), (config.output, spec.outputs)):
        assert [tensor.name for tensor in found] == [tensor.name for tensor in wanted]
        assert [tuple(tensor.dims) for tensor in found] == [tensor.dims for tensor in wanted]
        kinds = [model_config_pb2.DataType.Name(tensor.data_type) for tensor in found]
        assert kinds == [tensor.triton_type for tensor in wanted]
    assert [tensor.optional for tensor in config.input] == [tensor.optional for tensor in spec.inputs]


@pytest.mark.parametrize("own", ["max_batch_size: 0", 'input [{ name: "x" data_type: TYPE_INT32 dims: [ 1 ] }]'])
def test_a_configuration_that_says_a_part_by_itself_is_left_to_triton(own, tmp_path):
    text = PLAIN + own
    assert whole_config(text, MODELS["decode"]) == text
    (tmp_path / "decode").mkdir()
    (tmp_path / "decode" / "config.pbtxt").write_text(text)
    assert not are_whole(tmp_path)


def test_the_recipe_s_number_of_instances_stands_in_the_configuration(tmp_path):
    recipe = Recipe(model="m", workers={"decode": WorkerEntry(engine="mocker")}, pipeline=INSTANCES)
    link_models(tmp_path, recipe)
    configs = {name: parsed((tmp_path / name / "config.pbtxt").read_text()) for name in ("generate", "chat", "decode")}
    counts = {name: config.instance_group[0].count for name, config in configs.items()}
    assert counts == {"generate": 3, "chat": 1, "decode": 1}
    assert recipe.instances("generate") == ("generate", "generate_1", "generate_2")


def test_a_comment_that_names_a_key_is_none():
    assert "max_batch_size: 0" in whole_config("# input and output come from the specs\n" + PLAIN, MODELS["decode"])


@pytest.mark.parametrize("is_wanted", [True, False])
def test_the_models_for_tensorrtllm_backend_s_clients_are_there_when_the_recipe_asks(tmp_path, is_wanted):
    pipeline = PipelineConfig(tensorrtllm_backend_models=is_wanted)
    recipe = Recipe(model="m", workers={"decode": WorkerEntry(engine="mocker")}, pipeline=pipeline)
    names = {"tensorrt_llm_bls", "ensemble"}
    assert names & set(link_models(tmp_path, recipe)) == names & set(used_models(recipe)[1])
    assert names & {path.name for path in tmp_path.iterdir()} == (names if is_wanted else set())


def test_all_models_of_this_checkout_become_whole(tmp_path):
    link_models(tmp_path, Recipe(model="m", workers={"decode": WorkerEntry(engine="mocker", replicas=2)}))
    assert are_whole(tmp_path) and (tmp_path / "decode_1" / "config.pbtxt").is_file()
    assert not are_whole(CHECKOUT / "model_repository")


@pytest.mark.server
@pytest.mark.parametrize("more", [(), ("--model-repository={}",)])
def test_triton_asks_only_where_it_may_have_to(more, tmp_path):
    """A user's own models beside ours may rely on it."""
    arguments = tuple(argument.format(tmp_path) for argument in more)
    with start_server("recipes/mocker", models=("tokenizer",), arguments=arguments) as server:
        command = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode().split("\0")
        assert ("--disable-auto-complete-config" in command) == (not more)
        assert server.admin.is_ready()
