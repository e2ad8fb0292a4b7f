"""The command that starts an engine over several nodes."""

from __future__ import annotations

import shlex

import pytest

from bireme.errors import ConfigError
from bireme.recipe_files import load_recipe
from tools import serve_nodes

WIDE = "recipes/deepseek-r1-wide-ep"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in serve_nodes.PASSED_ON:
        monkeypatch.delenv(name, raising=False)


def command(*arguments, recipe=WIDE):
    return shlex.join(serve_nodes.plan(load_recipe(recipe, ""), serve_nodes.parse([recipe, *arguments])))


def test_srun_starts_one_task_for_each_gpu_of_the_world():
    start = "srun --mpi pmix --nodes 4 --ntasks 16 --ntasks-per-node 4 --kill-on-bad-exit=1 trtllm-llmapi-launch "
    assert command().startswith(start)


def test_the_leader_runs_the_server_once_and_passes_its_options_on():
    assert command("--", "--host", "0.0.0.0").endswith(
        "deepseek-r1-wide-ep --set supervisor.max_restarts=0 --host 0.0.0.0"
    )


def test_mpirun_names_the_hosts_and_hands_variables_on(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "rc")
    text = command("--with", "mpirun", "--hosts", "a,b,c,d")
    assert text.startswith("mpirun -np 16 --host a:4,b:4,c:4,d:4 -x UCX_TLS trtllm-llmapi-launch ")


def test_the_number_of_hosts_must_fit():
    with pytest.raises(ConfigError, match="2 nodes; 16 GPUs at 4 a node are 4"):
        command("--with", "mpirun", "--hosts", "a,b")


def test_gpus_of_a_node_come_from_the_option_first():
    assert "--nodes 2 --ntasks 16 --ntasks-per-node 8" in command("--gpus-per-node", "8")


def test_an_engine_of_one_node_needs_no_launcher(capsys):
    assert serve_nodes.main(["recipes/deepseek-r1", "--dry-run"]) == serve_nodes.WRONG
    assert "TensorRT-LLM starts its ranks itself; run python tools/serve.py" in capsys.readouterr().err


def test_two_engines_over_nodes_are_refused():
    with pytest.raises(ConfigError, match="prefill and decode of deepseek-r1-disagg both span nodes"):
        command("--gpus-per-node", "2", recipe="recipes/deepseek-r1-disagg")


def test_arguments_with_blanks_are_refused_because_the_launcher_would_split_them():
    with pytest.raises(ConfigError, match="splits its command at blanks"):
        command("--", "--set", "chat={tool_parser: hermes}")


def test_what_tensorrt_llm_would_refuse_is_told_before_the_job_queues(tmp_path, capsys):
    tree = "model: m\nworkers: {decode: {engine: trtllm, engine_config: {tensor_parallel_size: 16, gpus_per_node: 0}}}"
    (tmp_path / "recipe.yaml").write_text(tree)
    assert serve_nodes.main([str(tmp_path), "--dry-run"]) == serve_nodes.WRONG
    assert "gpus_per_node: 0; a whole number, 1 or more" in capsys.readouterr().err


def test_a_dry_run_prints_the_command_and_runs_nothing(capsys):
    assert serve_nodes.main([WIDE, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("srun --mpi pmix")
