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


ETCD = "etcd://head:2379"
NETWORK = ("--grpc-host", "10.1.0.0/16")


def server_commands(*arguments, recipe="recipes/deepseek-r1-disagg"):
    own = [] if "--" in arguments else ["--", *NETWORK]
    options = serve_nodes.parse([recipe, "--discovery", ETCD, *arguments, *own])
    return [shlex.join(words) for words in serve_nodes.server_plans(load_recipe(recipe, ""), options)]


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv("BIREME_KEY", "ab" * 32)


def test_prefill_and_decode_have_a_server_each_on_nodes_of_their_own(key):
    prefill, decode = server_commands()
    assert "--relative 0 --nodes 1 --ntasks 1" in prefill and "--relative 1 --nodes 1 --ntasks 1" in decode
    assert "workers.prefill.replicas=1 --set workers.decode.replicas=0 --grpc-host 10.1.0.0/16" in prefill
    assert "workers.decode.replicas=1 --set workers.prefill.replicas=0" in decode
    assert f"--discovery {ETCD}" in prefill and "trtllm-llmapi-launch" not in prefill


def test_engines_that_span_nodes_are_led_each_by_its_rank_0(key):
    prefill, decode = server_commands("--gpus-per-node", "2")
    for text, first in ((prefill, 0), (decode, 2)):
        assert f"--relative {first} --nodes 2 --ntasks 4 --ntasks-per-node 2" in text
        assert "trtllm-llmapi-launch" in text and "supervisor.max_restarts=0" in text


def test_hosts_are_shared_out_in_their_order(key, monkeypatch):
    prefill, decode = server_commands("--with", "mpirun", "--hosts", "a,b")
    assert prefill.startswith("mpirun -np 1 --host a:1 -x BIREME_KEY ")
    assert decode.startswith("mpirun -np 1 --host b:1 -x BIREME_KEY ")


def test_servers_that_would_not_reach_each_other_are_refused(key):
    with pytest.raises(ConfigError, match="--grpc-host: missing.*10.1.0.0/16"):
        server_commands("--", "--host", "0.0.0.0")


def test_replicas_that_fit_a_node_share_its_server(key, tmp_path):
    override = '{"workers": {"decode": {"replicas": 3}}}'
    recipe = load_recipe("recipes/llama-3.1-8b-disagg", override)
    parts = serve_nodes.server_parts(recipe, 2)
    assert [(part.stage, part.replicas, part.num_nodes) for part in parts] == [
        ("prefill", 1, 1),
        ("decode", 2, 1),
        ("decode", 1, 1),
    ]


def test_hosts_must_be_as_many_as_the_servers_take(key):
    with pytest.raises(ConfigError, match="3 nodes; the servers of deepseek-r1-disagg take 2"):
        server_commands("--with", "mpirun", "--hosts", "a,b,c")


def test_servers_without_one_key_are_refused(monkeypatch):
    monkeypatch.delenv("BIREME_KEY", raising=False)
    with pytest.raises(ConfigError, match="BIREME_KEY: not set"):
        server_commands()


def test_kv_in_shared_memory_keeps_a_recipe_on_one_host(key):
    with pytest.raises(ConfigError, match=r"workers\.prefill\.engine: torch; .* use engine: trtllm"):
        server_commands(recipe="recipes/tiny-chat-disagg")


def test_when_one_command_ends_the_others_are_ended_and_it_is_named(capsys):
    waits = ["python3", "-c", "import time; time.sleep(600)"]
    assert serve_nodes.run_together([waits, ["python3", "-c", "raise SystemExit(3)"]]) == 3
    assert "server 2 of 2 has ended with exit code 3, so all are ended: python3 -c " in capsys.readouterr().err
