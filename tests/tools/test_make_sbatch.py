"""What tools/make_sbatch.py writes and refuses; tests/services/test_slurm.py submits it."""

import re
import subprocess

import pytest

from bireme.config import CHECKOUT
from tools import make_sbatch

NETWORK = ("--network", "127.0.0.0/8")
PAGE = CHECKOUT / "docs" / "operations.md"


def written(tmp_path, *arguments):
    out = tmp_path / "job.sbatch"
    assert make_sbatch.main([*arguments, "--out", str(out)]) == 0
    subprocess.run(["bash", "-n", str(out)], check=True)
    return out.read_text()


def steps(script):
    return [line for line in script.splitlines() if line.startswith("start ")]


def test_one_server_needs_one_node_and_no_network(tmp_path):
    script = written(tmp_path, "recipes/mocker")
    assert "#SBATCH --nodes=1" in script and "--discovery" not in script
    assert len(steps(script)) == 1 and "--admin-key-file" in steps(script)[0]
    assert "#SBATCH --no-kill" not in script and "\nstand_by\n" not in script


def test_servers_have_nodes_and_ports_of_their_own_and_find_each_other(tmp_path):
    script = written(tmp_path, "recipes/mocker", "--servers", "3", *NETWORK, "--first-port", "23000")
    assert "#SBATCH --nodes=3" in script
    assert [re.search(r"--relative (\d)", line)[1] for line in steps(script)] == ["0", "1", "2"]
    assert [re.search(r"--openai-port (\d+)", line)[1] for line in steps(script)] == ["23004", "23014", "23024"]
    assert all('--discovery "$BIREME_SHARED" --grpc-host 127.0.0.0/8' in line for line in steps(script))
    assert "#SBATCH --no-kill" in script and "\nstand_by\n" in script


def test_prefill_and_decode_over_nodes_are_steps_of_their_own(tmp_path):
    script = written(tmp_path, "recipes/qwen3-disagg", "--apart", *NETWORK, "--gpus-per-node", "8")
    assert "#SBATCH --nodes=2" in script and "#SBATCH --gpus-per-node=8" in script
    prefill, decode = steps(script)
    assert "workers.decode.replicas=0" in prefill and "workers.prefill.replicas=0" in decode


def test_jobs_that_join_have_discovery_and_admin_key_of_one_folder(tmp_path):
    joined = (*NETWORK, "--join", str(tmp_path / "joined"))
    first, second = (written(tmp_path, "recipes/mocker-disagg", *joined, *more) for more in ((), ("--stage", "decode")))
    assert (tmp_path / "joined" / "admin.key").stat().st_mode & 0o777 == 0o600
    for script in (first, second):
        assert f"--discovery {tmp_path}/joined/discovery --grpc-host" in script and "BIREME_KEY=" not in script
        assert f'cat {tmp_path}/joined/admin.key > "$BIREME_SHARED/admin.key"' in script
    assert "--openai-port 8004" in first and "replicas" not in first
    assert "--openai-port 0 --set workers.prefill.replicas=0 --set workers.decode.replicas=1" in second


def test_an_engine_over_nodes_has_a_rank_a_gpu(tmp_path):
    script = written(tmp_path, "recipes/deepseek-r1-wide-ep", "--apart", *NETWORK, "--gpus-per-node", "4")
    (step,) = steps(script)
    assert "#SBATCH --nodes=4" in script and "--mpi pmix" in step
    assert "--nodes 4 --ntasks 16 --ntasks-per-node 4" in step and "trtllm-llmapi-launch" in step


def test_what_the_page_of_operations_shows_can_be_written(tmp_path):
    (command,) = re.findall(r"^python tools/make_sbatch\.py (.*) --out job\.sbatch$", PAGE.read_text(), re.MULTILINE)
    assert len(steps(written(tmp_path, *command.split()))) == 4


def test_a_sweep_is_an_array_with_a_task_for_each_combination(tmp_path):
    sweep = ("--sweep", "limits.max_n=1,2", "--sweep", "limits.max_tokens=5,6,7")
    script = written(tmp_path, "recipes/mocker", *sweep, "--run", "true")
    assert "#SBATCH --array=0-5" in script and "%x-%A_%a.log" in script
    assert "'limits.max_n=2 limits.max_tokens=6'" in script


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("recipes/nowhere",), "recipes/nowhere"),
        (("recipes/mocker", "--servers", "2"), "--network: missing"),
        (("recipes/qwen3-disagg", "--apart"), "--network: missing"),
        (("recipes/qwen3-disagg", "--join", "/tmp"), "--network: missing"),
        (("recipes/qwen3-disagg", "--stage", "decode"), "--stage: it serves nobody by itself; name --join"),
        (
            ("recipes/mocker", "--stage", "prefill", "--join", "/tmp", *NETWORK),
            "recipes/mocker has no prefill workers, but decode; where decode computes prompts as well,"
            " plan.py takes --aggregated",
        ),
        (("recipes/tiny", "--apart", *NETWORK), "its KV goes through the shared memory of one host"),
        (("recipes/mocker", "--time", "soon"), "--time soon: write it as Slurm does"),
        (("recipes/mocker", "--sweep", "limits.max_n"), "--sweep limits.max_n: write KEY=VALUE,VALUE"),
        (("recipes/mocker", "--sweep", "limits.max_n=1,,2"), "write KEY=VALUE,VALUE"),
        (("recipes/mocker", "--sweep", "limits.max_n=1,0"), "limits.max_n"),
        (("recipes/mocker", "--set", "limits.max_m=1"), "max_m"),
    ],
)
def test_what_no_cluster_can_run_is_refused_before_it_queues(tmp_path, capsys, arguments, told):
    out = tmp_path / "job.sbatch"
    assert make_sbatch.main([*arguments, "--out", str(out)]) == make_sbatch.WRONG
    assert told in capsys.readouterr().err and not out.exists()


def test_a_script_that_cannot_be_written_is_told(tmp_path, capsys):
    assert make_sbatch.main(["recipes/mocker", "--out", str(tmp_path / "no" / "job")]) == make_sbatch.WRONG
    assert "can't be written" in capsys.readouterr().err
