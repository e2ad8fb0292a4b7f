"""A real tritonserver started and stopped, with a small model of the tests' own."""

import os
import signal
from dataclasses import astuple

import pytest

from bireme.launch import ServerStartError, free_port, free_ports, processes, start_server
from bireme.launch.run_folder import SHM, default_base
from tests.listening import tcp_listeners

pytestmark = pytest.mark.server

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_INT32", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_INT32", "dims": [1]})
        return config

    def initialize(self, args):
        %s

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros(1, np.int32))]) for _ in requests]
"""
CONFIG = 'backend: "python"\ninstance_group [{ kind: KIND_MODEL count: 1 }]\n'


def make_repository(folder, initialize="pass", name="echo"):
    version = folder / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL % initialize)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory, recipe):
    repository = make_repository(tmp_path_factory.mktemp("repository"))
    with start_server(recipe, ports=free_ports(), repositories=(repository,), models=("echo",)) as server:
        yield server


def test_a_started_server_is_ready_and_names_its_stub(server):
    assert server.admin.is_ready()
    assert processes.stub_name(processes.command_line(server.stub_pid("echo"))) == "echo"


def test_metrics_are_reachable(server):
    assert "nv_inference_request_success" in server.metrics_text()


def test_models_load_and_unload_with_the_key(server):
    server.admin.unload("echo")
    server.load("echo")
    assert server.admin.index()["echo"][0] == "READY"


def test_regions_of_a_model_that_is_not_ours_are_shut_once_it_is_loaded(server):
    for _ in range(2):
        paths = list(SHM.glob(f"{server.run_folder.shm_prefix}*"))
        assert paths and [path.name for path in paths if path.stat().st_mode & 0o077] == []
        server.admin.unload("echo")
        server.load("echo")


def test_model_control_is_refused_without_the_key(server):
    other = type(server.admin)(server.http, server.metrics, "")
    with pytest.raises(Exception, match="restricted"):
        other.unload("echo")
    assert server.admin.index()["echo"][0] == "READY"


def test_a_variable_of_vertex_ai_opens_no_port(tmp_path, recipe, monkeypatch):
    monkeypatch.setenv("AIP_MODE", "PREDICTION")
    monkeypatch.setenv("AIP_HTTP_PORT", str(free_port()))
    with start_server(recipe, ports=free_ports(), repositories=(make_repository(tmp_path),)) as server:
        ports = {port for _, port in tcp_listeners([server.pid])}
        assert ports == set(astuple(server.options.ports))


def test_stopping_leaves_no_process_no_shared_memory_and_no_folder(tmp_path, recipe):
    repository = make_repository(tmp_path)
    with start_server(recipe, ports=free_ports(), repositories=(repository,)) as server:
        members = [server.pid, server.stub_pid("echo")]
        run_folder = server.run_folder
        assert list(SHM.glob(f"{run_folder.shm_prefix}*"))
    assert server.returncode == 0
    assert not any(processes.is_alive(pid) for pid in members)
    assert not list(SHM.glob(f"{run_folder.shm_prefix}*"))
    assert not run_folder.path.exists()


@pytest.mark.flaky(reruns=1)
def test_a_killed_server_takes_its_stubs_along(tmp_path, recipe):
    repository = make_repository(tmp_path)
    with start_server(recipe, ports=free_ports(), repositories=(repository,)) as server:
        members = [server.pid, server.stub_pid("echo")]
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait(60)
    assert not any(processes.is_alive(pid) for pid in members)


def test_a_model_that_fails_to_load_is_named_with_its_reason(tmp_path, recipe):
    repository = make_repository(tmp_path, "raise RuntimeError('no such galley')")
    before = set(default_base().glob("*"))
    with pytest.raises(ServerStartError, match="model echo: .*no such galley"):
        with start_server(recipe, ports=free_ports(), repositories=(repository,)):
            pass
    assert not [path for path in set(default_base().glob("*")) - before if path.name.startswith(f"{os.getpid()}-")]
