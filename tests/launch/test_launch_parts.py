"""The small parts of a launch: ports, model links, command lines, log lines, series, recipes of one model."""

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import astuple
from subprocess import PIPE

import pytest

from bireme.config import Recipe, WorkerEntry
from bireme.engines.trtllm.config import llm_arguments
from bireme.errors import BiremeError, ConfigError, UnavailableError
from bireme.launch import free_ports, processes
from bireme.launch.admin import AdminClient
from bireme.launch.console import Console
from bireme.launch.ports import Hosts, host_in, is_free, is_loopback, listen_flags, own_host
from bireme.launch.quick_recipe import write_recipe
from bireme.launch.repository import link_models, python_models, used_models
from bireme.launch.series import WorkerSeries, total, worker_series
from bireme.launch.tritonserver import THREAD_POOL_SIZE, ServerOptions, address, failed_models, thread_pool_size
from bireme.recipe_files import load_recipe

STUB = "/run/backends/python/triton_python_backend_stub"


def recipe(**workers):
    entries = {stage: WorkerEntry(engine="mocker", replicas=count) for stage, count in workers.items()}
    return Recipe(model="m", workers=entries)


@pytest.fixture
def checkout(tmp_path):
    for path in (
        "model_repository/tokenizer",
        "model_repository/prefill",
        "model_repository/decode",
        "ensembles/generate",
    ):
        (tmp_path / path / "1").mkdir(parents=True)
        (tmp_path / path / "config.pbtxt").touch()
        (tmp_path / path / "1" / "model.py").touch()
    (tmp_path / "ensembles" / "generate" / "1" / "model.py").unlink()
    return tmp_path


def test_free_ports_can_be_bound_and_are_given_once():
    """Until a server listens on one, seconds may pass."""
    given = [port for _ in range(30) for port in astuple(free_ports())]
    assert len(set(given)) == 90 and all(map(is_free, given))


def test_no_other_process_gets_the_free_ports_of_one_that_lives():
    code = "from bireme.launch import free_port; print(*(free_port() for _ in range(600)), flush=True); open(0).read()"
    others = [subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, text=True) for _ in range(2)]
    try:
        given = [other.stdout.readline().split() for other in others]
    finally:
        for other in others:
            other.communicate()
    assert len(set(given[0])) == 600 and not set(given[0]) & set(given[1])


def test_a_fork_gives_other_ports_than_the_process_that_it_was():
    begun = "import os; from bireme.launch import free_port; free_port(); forked = os.fork()"
    code = f"{begun}; os.write(1, b'%d ' % free_port()); forked and os.waitpid(forked, 0)"
    command = [sys.executable, "-c", code]
    mine, other = subprocess.run(command, capture_output=True, check=True).stdout.split()
    assert mine != other


def test_a_port_that_is_listened_on_is_not_free():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        assert not is_free(holder.getsockname()[1])


def test_an_address_of_another_machine_is_not_taken():
    with pytest.raises(OSError, match="Cannot assign requested address"):
        is_free(9000, "203.0.113.5")


@pytest.mark.parametrize(
    ("host", "http", "grpc"),
    [
        ("0.0.0.0", "0.0.0.0", "0.0.0.0"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("::1", "ipv6:::1", "[::1]"),
        ("::", "ipv6:::", "[::]"),
    ],
)
def test_tritons_servers_are_given_hosts_in_the_forms_that_they_take(ipv6, host, http, grpc):
    hosts = Hosts(host, host, host)
    assert listen_flags(hosts) == (f"--http-address={http}", f"--grpc-address={grpc}", f"--metrics-address={http}")
    assert listen_flags(Hosts(grpc=host))[::2] == ("--http-address=127.0.0.1", "--metrics-address=127.0.0.1")


def test_what_listens_everywhere_is_reached_by_this_machine_s_own_address():
    assert [own_host(host) for host in ("0.0.0.0", "::", "node7")] == ["127.0.0.1", "::1", "node7"]


def test_a_network_stands_for_this_machine_s_address_in_it():
    assert [host_in(host) for host in ("127.0.0.0/8", "127.0.0.1", "node7")] == ["127.0.0.1", "127.0.0.1", "node7"]


@pytest.mark.parametrize(("host", "reason"), [("203.0.113.0/24", "no address in"), ("10.1.0.1/16", "is no network")])
def test_a_network_that_this_machine_is_not_in_is_refused(host, reason):
    with pytest.raises(ConfigError, match=reason):
        host_in(host)


def test_what_only_this_machine_reaches_is_known():
    assert all(map(is_loopback, ("127.0.0.1", "127.0.0.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "203.0.113.5", "nosuchhost.invalid")))


def test_each_replica_is_a_model_folder_of_its_own(checkout):
    names = link_models(checkout / "models", recipe(decode=2), checkout)
    assert set(names) == {"tokenizer", "decode", "decode_1", "generate"}
    assert (checkout / "models" / "decode_1" / "1").resolve() == checkout / "model_repository" / "decode" / "1"


def test_stages_that_are_not_in_the_recipe_are_not_loaded(checkout):
    models, pipelines = used_models(recipe(decode=2), checkout)
    assert models == ("decode", "decode_1", "tokenizer") and pipelines == ("generate",)


def test_a_declarative_ensemble_has_no_stub_to_watch(checkout):
    link_models(checkout / "models", recipe(decode=1), checkout)
    assert python_models(checkout / "models", ("decode", "generate")) == ("decode",)


def test_a_stage_that_is_left_to_other_servers_is_not_there_and_no_ensemble_that_would_load_it(checkout):
    ensemble = checkout / "ensembles" / "text_generation"
    (ensemble / "1").mkdir(parents=True)
    (ensemble / "config.pbtxt").write_text('platform: "ensemble"\nstep [{\n  model_name: "decode"\n}]\n')
    for decode, found in ((1, {"decode", "text_generation"}), (0, set())):
        names = link_models(checkout / f"models{decode}", recipe(prefill=1, decode=decode), checkout)
        models, pipelines = used_models(recipe(prefill=1, decode=decode), checkout)
        assert set(names) == {*models, *pipelines} == {"tokenizer", "prefill", "generate"} | found


def test_a_checkout_without_models_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no model folders"):
        link_models(tmp_path / "models", recipe(decode=1), tmp_path)


def test_a_stub_is_told_by_its_command_line():
    path = "/run/models/decode_1/1/model.py"
    assert processes.stub_name([STUB, path, "prefix_x", "1048576", "decode_1_0_0", "DEFAULT"]) == "decode_1"
    assert processes.stub_name([STUB, path, "prefix_x", "1048576", "decode_1", "DEFAULT"]) is None
    assert processes.stub_name(["vim", path]) is None


def test_stubs_of_a_model_with_several_have_the_instance_s_number():
    path = "/run/models/generate/1/model.py"
    assert processes.stub_name([STUB, path, "prefix_x", "1048576", "generate_0_0", "DEFAULT"]) == "generate"
    assert processes.stub_name([STUB, path, "prefix_x", "1048576", "generate_0_3", "DEFAULT"]) == "generate_3"


def test_what_a_model_s_stubs_have_counted_is_added_up():
    series = {"generate": WorkerSeries(streams=2, served=5), "generate_1": WorkerSeries(streams=1, served=7)}
    both = total(series, ("generate", "generate_1"))
    assert (both.streams, both.served) == (3, 12)
    assert total(series, ("generate", "generate_2")) is series["generate"] and total(series, ("chat",)) is None


def test_killing_spares_a_process_that_has_the_pid_of_a_former_one():
    with subprocess.Popen(["sleep", "60"]) as other:
        assert processes.kill_all([(other.pid, processes.started_at(other.pid) - 1)]) == []
        assert processes.kill_all([(other.pid, processes.started_at(other.pid))]) == [other.pid]


def test_a_zombie_is_not_alive():
    child = subprocess.Popen(["true"])
    deadline = time.monotonic() + 10
    while processes.state(child.pid) != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not processes.is_alive(child.pid)
    child.wait()
    assert processes.started_at(child.pid) is None


def test_descendants_are_found_below_this_process():
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as shell:
        deadline = time.monotonic() + 10
        while len(list(processes.descendants(shell.pid))) != 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        below = list(processes.descendants(shell.pid))
        assert shell.pid in processes.children(os.getpid()) and len(below) == 1
        processes.kill_all((pid, processes.started_at(pid)) for pid in (*below, shell.pid))


def test_failed_models_are_read_out_of_tritons_table():
    table = [
        "+--------+---------+------------------------+",
        "| Model  | Version | Status                 |",
        "| decode | 1       | UNAVAILABLE: Internal: |",
        "|        |         | no such | file         |",
        "| other  | 1       | READY                  |",
        "|        |         | ignored                |",
    ]
    assert failed_models(table) == {"decode": "UNAVAILABLE: Internal: no such | file"}


@pytest.mark.parametrize(("host", "expected"), [("0.0.0.0", "127.0.0.1:8001"), ("::1", "[::1]:8001"), ("h", "h:8001")])
def test_an_address_is_one_that_a_client_can_use(host, expected):
    assert address(host, 8001) == expected


def test_series_are_read_per_worker():
    page = """
# TYPE bireme_engine_up gauge
bireme_engine_up{worker="decode"} 1
bireme_engine_up{worker="decode_1"} 0
bireme_kv_publisher_up{worker="decode"} 1
bireme_kv_publisher_up{worker="decode_1"} 0
bireme_engine_step_seconds_count{worker="decode"} 12
bireme_requests_running{worker="decode"} 2
bireme_requests_waiting{worker="decode"} 3
nv_inference_count{model="decode"} 9
"""
    series = worker_series(page)
    assert series["decode"].engine_up and series["decode"].steps == 12 and series["decode"].queued == 5
    assert series["decode"].publishes and series["decode_1"].publishes is False
    assert series["decode_1"].engine_up is False and series["decode_1"].steps is None


def console_text(line, **options):
    stream = io.StringIO()
    Console(stream=stream, **options).triton_line(line)
    return stream.getvalue()


def test_log_lines_carry_their_source():
    assert "model  | event=loaded" in console_text("event=loaded")
    line = 'E1121 13:15:36.881079 9563 python_be.cc:2249] "failed"'
    assert 'triton | error: python_be.cc:2249] "failed"' in console_text(line)


def test_a_models_own_line_carries_its_name_and_level():
    line = "2026-01-31 12:00:00,000 WARNING decode_1 bireme.engines engine_lost life=2"
    assert "decode_1 | warning: bireme.engines engine_lost life=2" in console_text(line)


def test_an_engines_line_carries_its_worker_and_level():
    assert "decode | error: engine[7] out of memory" in console_text(
        "0131 12:00:00.000 E decode engine[7] out of memory"
    )


def test_tritons_chatter_shows_only_at_debug():
    line = 'I1121 13:15:36.881079 9563 python_be.cc:2249] "hello"'
    assert console_text(line) == "" and "hello" in console_text(line, level="debug")


def test_json_logs_are_one_object_a_line():
    stream = io.StringIO()
    Console(as_json=True, stream=stream).event("loaded", model="decode", seconds=1.5)
    entry = json.loads(stream.getvalue())
    assert (entry["message"], entry["model"], entry["level"]) == ("loaded", "decode", "info")


def test_a_model_folder_becomes_a_recipe(tmp_path):
    (tmp_path / "my: model").mkdir()
    made = load_recipe(write_recipe(tmp_path / "run", str(tmp_path / "my: model"), disaggregated=True), "")
    assert set(made.workers) == {"prefill", "decode"} and made.model == str(tmp_path / "my: model")


@pytest.mark.parametrize("is_disaggregated", [False, True])
def test_a_model_without_a_recipe_suits_tensorrt_llm(tmp_path, is_disaggregated):
    folder = write_recipe(tmp_path, "someone/model-1B", disaggregated=is_disaggregated, engine="trtllm")
    for stage, entry in load_recipe(folder, "").workers.items():
        assert llm_arguments(entry.engine_config, "m", stage)["enable_chunked_prefill"] is True


def test_a_hub_id_becomes_an_aggregated_recipe(tmp_path):
    made = load_recipe(write_recipe(tmp_path, "someone/model-1B"), "")
    assert (made.name, made.model, set(made.workers)) == ("model-1B", "someone/model-1B", {"decode"})


def test_a_model_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        write_recipe(tmp_path, "./nothing")


def test_backend_threads_stay_below_a_containers_process_limit():
    assert thread_pool_size(7, 1 << 20) == THREAD_POOL_SIZE
    assert thread_pool_size(8, 800) == 50
    assert thread_pool_size(8, 100) == 32


@pytest.mark.parametrize(("pool", "calls", "spares"), [(64, 32, 24), (32, 16, 8), (8, 4, 0)])
def test_a_pool_is_shared_by_calls_those_that_replace_lost_ones_and_sends(pool, calls, spares):
    options = ServerOptions(repositories=(), thread_pool_size=pool)
    assert (options.bls_threads, options.bls_spare_threads) == (calls, spares)


def test_a_server_that_ends_within_its_answer_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(status):
            link, _ = listener.accept()
            with link:
                link.recv(4096)
                link.sendall(b"HTTP/1.1 %s\r\nContent-Length: 500\r\n\r\n{" % status)

        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for status, kind in ((b"200 OK", UnavailableError), (b"400 Bad Request", BiremeError)):
            thread = threading.Thread(target=answer, args=(status,))
            thread.start()
            with pytest.raises(kind):
                AdminClient(address, address, "").index()
            thread.join()
