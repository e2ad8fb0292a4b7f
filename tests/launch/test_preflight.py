"""Each missing prerequisite has one clear message with its remedy."""

import errno
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from bireme.config import EngineConfig, Recipe, WorkerEntry
from bireme.errors import ConfigError
from bireme.kv.compile import KERNELS
from bireme.launch import installation, preflight
from bireme.launch.installation import Installation, find_installation
from bireme.launch.ports import Listener
from bireme.observability import otlp
from bireme.observability.otlp import check_traces
from bireme.recipe_files import load_recipe

Usage = namedtuple("Usage", "total used free")
MIB = 1 << 20


def only(problems):
    assert len(problems) == 1
    return problems[0]


def listening(ports, host="127.0.0.1"):
    return {option: Listener("--triton-host", host, port) for option, port in ports.items()}


def test_an_unsupported_python_is_named_with_the_supported_ones():
    message = only(preflight.check_python((3, 13)))
    assert "Python 3.13" in message and "3.11 to 3.12" in message and "make PYTHON=" in message


@pytest.mark.parametrize("minor", [11, 12])
def test_supported_pythons_pass(minor):
    assert preflight.check_python((3, minor)) == []


def test_numpy_2_with_the_wheels_stub_is_refused_with_the_command():
    assert "pip install 'numpy>=1.26,<2'" in only(preflight.check_numpy("2.2.1"))
    assert preflight.check_numpy("1.26.4") == []


def test_a_missing_libpython_names_the_package(monkeypatch):
    monkeypatch.setattr(installation, "_library_folders", list)
    with pytest.raises(ConfigError, match=r"apt-get install libpython3\.11"):
        installation.find_libpython("3.11")


def test_a_small_shm_says_how_to_enlarge_it(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 * MIB, 0, 64 * MIB))
    message = only(preflight.check_shared_memory(128, tmp_path))
    assert "holds 64 MiB; 128 MiB" in message and "--shm-size=1g" in message


def test_a_full_shm_says_what_is_free(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1024 * MIB, 1020 * MIB, 4 * MIB))
    assert "4 of 1024 MiB are free" in only(preflight.check_shared_memory(128, tmp_path))


def test_a_full_disk_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1024 * MIB, 1023 * MIB, MIB))
    message = only(preflight.check_disk(tmp_path / "not" / "yet", 32))
    assert str(tmp_path) in message and "1 MiB are free, 32 MiB" in message


def test_a_taken_port_is_named_with_its_holder():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        message = only(preflight.check_ports(listening({"--http-port": port})))
    assert f"port {port}" in message and f"pid {os.getpid()}" in message and "--http-port" in message


def test_one_port_given_twice_is_refused():
    assert "more than one" in only(preflight.check_ports(listening({"--http-port": 23399, "--grpc-port": 23399})))


def test_a_port_out_of_range_is_refused():
    assert "70000 is not a port" in only(preflight.check_ports(listening({"--http-port": 70000})))


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("203.0.113.5", "Cannot assign requested address"),
        ("nosuchhost.invalid", ""),  # by whether there is a network
        ("a..b", "label empty"),
    ],
)
def test_a_host_that_is_not_this_machine_is_named_once_and_no_port_is_called_taken(host, reason):
    message = only(preflight.check_ports(listening({"--http-port": 23399, "--grpc-port": 23398}, host)))
    assert (
        message.startswith(f"--triton-host {host}: ")
        and reason in message
        and "give an address of this machine" in message
    )


def test_a_port_that_this_user_may_not_listen_on_is_named(monkeypatch):
    def refuse(port, host):
        if port:
            raise PermissionError(errno.EACCES, "Permission denied")
        return True

    monkeypatch.setattr(preflight, "is_free", refuse)
    message = only(preflight.check_ports(listening({"--http-port": 80})))
    assert "port 80 of 127.0.0.1" in message and "Permission denied" in message and "--http-port" in message


def test_a_missing_sample_model_names_the_command_that_makes_it():
    recipe = Recipe(model="models/tiny-nobody", workers={}, folder="/")
    assert "make models" in only(preflight.check_model(recipe))


def test_a_folder_without_config_is_no_model(tmp_path):
    recipe = Recipe(model=str(tmp_path), workers={}, folder="/")
    assert "no config.json" in only(preflight.check_model(recipe))


def test_a_model_without_safetensors_is_refused_where_weights_are_needed(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    recipe = Recipe(model=str(tmp_path), workers={"decode": WorkerEntry(engine="torch")}, folder="/")
    assert "no .safetensors" in only(preflight.check_model(recipe))


def test_random_weights_need_no_safetensors(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    entry = WorkerEntry(engine="torch", engine_config=EngineConfig(load_format="dummy"))
    assert preflight.check_model(Recipe(model=str(tmp_path), workers={"decode": entry}, folder="/")) == []


def test_a_damaged_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    recipe = Recipe(model=str(tmp_path), workers={"decode": WorkerEntry(engine="mocker")}, folder="/")
    assert "config.json can't be read" in only(preflight.check_model(recipe))


def test_an_engine_that_is_not_installed_says_how_to_get_it():
    recipe = Recipe(model="m", workers={"decode": WorkerEntry(engine="trtllm", engine_config=EngineConfig())})
    assert "tensorrt_llm" in only(preflight.check_engines(recipe))


def test_an_engine_is_looked_for_where_its_process_will_look(tmp_path):
    (tmp_path / "tensorrt_llm.py").touch()
    worker = WorkerEntry(engine="trtllm", engine_config=EngineConfig())
    elsewhere = WorkerEntry(engine="trtllm", engine_config=EngineConfig(), env={"PYTHONPATH": str(tmp_path)})
    assert preflight.check_engines(Recipe(model="m", workers={"decode": elsewhere})) == []
    only(preflight.check_engines(Recipe(model="m", workers={"decode": elsewhere, "prefill": worker})))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    recipe = Recipe(model="m", workers={"decode": worker, "prefill": worker})
    assert preflight.check_engines(recipe, {"BIREME_ENGINE_PYTHON": str(python)}) == []
    assert "tensorrt_llm" in only(preflight.check_engines(recipe, {"BIREME_ENGINE_PYTHON": sys.executable}))


def test_an_engine_s_python_without_bireme_s_own_requirements_is_refused(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    python = str(tmp_path / "bin" / "python")
    recipe = Recipe(model="m", workers={"decode": WorkerEntry(engine="mocker", env={"BIREME_ENGINE_PYTHON": python})})
    assert "an engine process needs msgspec" in only(preflight.check_engines(recipe))


@pytest.mark.parametrize(("python", "text"), [("/no/python", "not an executable"), ("/bin/false", "is no python")])
def test_a_wrong_python_of_engines_is_refused(python, text):
    recipe = Recipe(model="m", workers={"decode": WorkerEntry(engine="trtllm", engine_config=EngineConfig())})
    assert text in only(preflight.check_engines(recipe, {"BIREME_ENGINE_PYTHON": python}))


def test_a_wrong_tritonserver_variable_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="BIREME_TRITONSERVER: .* is not an executable"):
        find_installation({"BIREME_TRITONSERVER": str(tmp_path)})


def test_no_tritonserver_says_where_it_was_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(installation, "_OPT", tmp_path)
    monkeypatch.setattr(installation, "_wheel_root", lambda: None)
    monkeypatch.setattr(installation, "_OPT", tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"pip install -e \.\[server\]"):
        find_installation({"PATH": str(tmp_path)})


def test_a_named_tritonserver_wins_over_the_path(tmp_path):
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.touch(mode=0o755)
    assert find_installation({"BIREME_TRITONSERVER": str(binary)}) == Installation(binary)


def test_a_wheels_binary_named_by_hand_is_started_as_a_wheels():
    found = find_installation({"PATH": ""})
    if not found.is_wheel:
        pytest.skip("tritonserver is not from the wheel here")
    assert find_installation({"BIREME_TRITONSERVER": str(found.binary)}) == found


def test_backends_beside_a_named_tritonserver_are_used(tmp_path):
    (tmp_path / "backends").mkdir()
    prepared = installation.prepare(
        Installation(tmp_path / "bin" / "tritonserver"), tmp_path / "run", {"PYTHONHOME": "x"}
    )
    assert prepared.arguments == (f"--backend-directory={tmp_path / 'backends'}",)
    assert "PYTHONHOME" not in prepared.environment
    assert prepared.environment["PATH"].startswith(f"{sys.prefix}/bin:")


def test_a_run_folder_too_long_for_sockets_is_refused():
    assert "XDG_RUNTIME_DIR" in only(preflight.check_socket_paths(Path("/" + "x" * 100)))


def test_a_newer_flag_is_passed_only_to_a_server_that_has_it(tmp_path):
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    for text, is_shm_allowed, expected in (
        ("--http-max-input-size <n>", False, 1),
        ("--http-port <n>", True, 0),
        ("--allow-client-shm <boolean>", False, 0),
        ("--allow-client-shm <boolean>", True, 1),
    ):
        binary.write_text(f"#!/bin/sh\necho '{text}'\n")
        binary.chmod(0o755)
        other = Installation(binary)
        prepared = installation.prepare(other, tmp_path, dict(os.environ))
        assert len(installation.newer_flags(other, prepared, is_shm_allowed)) == expected


def test_all_problems_are_reported_at_once():
    recipe = Recipe(model="models/tiny-nobody", workers={"decode": WorkerEntry(engine="trtllm")}, folder="/")
    with pytest.raises(preflight.PreflightError) as caught:
        preflight.check_all(recipe, listening({"--http-port": 70000}), 4, Path("/tmp/run"))
    assert len(str(caught.value).splitlines()) == 3


def test_what_tensorrt_llm_would_refuse_is_told_before_it_starts(caplog):
    config = EngineConfig(llm_args={"max_batch_sise": 3, "cuda_graph_config": {"batch_sizes": "8"}})
    recipe = Recipe(model="m", workers={"decode": WorkerEntry(engine="trtllm", engine_config=config)})
    (kind,) = preflight.check_arguments(recipe)
    assert "workers.decode: max_batch_sise: 3;" in caplog.text and "did you mean max_batch_size?" in caplog.text
    assert kind.startswith("workers.decode: cuda_graph_config.batch_sizes: '8'; a list of")


@pytest.mark.parametrize(("kept", "is_told"), [("package", False), ("home", False), ("own", False), ("", True)])
def test_a_read_only_install_is_told_before_it_compiles_at_every_start(tmp_path, kept, is_told):
    pytest.importorskip("numba")
    for name in ("package", "home"):
        (tmp_path / name).write_text("") if name != kept else (tmp_path / name).mkdir()
    environment = {"HOME": str(tmp_path / "home")} | ({"NUMBA_CACHE_DIR": str(tmp_path)} if kept == "own" else {})
    recipe = Recipe(model="m", workers={"decode": WorkerEntry(engine="mocker", replicas=2)}, name="m")
    message = preflight.unkept_code(recipe, environment, tmp_path / "package")
    assert ("set NUMBA_CACHE_DIR" in message) is is_told


def test_where_compiled_code_is_kept_is_where_it_is_compiled():
    folders = {Path(importlib.util.find_spec(name).origin).parent for name in KERNELS}
    assert folders == {preflight.KERNELS}


def test_where_nobody_routes_by_kv_no_compiled_code_is_missed(tmp_path):
    recipe = Recipe(model="m", workers={"decode": WorkerEntry(engine="mocker")}, name="m")
    assert preflight.unkept_code(recipe, {"NUMBA_CACHE_DIR": "/proc/nobody"}) == ""


def test_a_request_log_that_can_t_be_written_is_named_by_its_key(tmp_path):
    problems = [
        preflight.check_request_log(
            load_recipe("recipes/mocker", json.dumps({"observability": {"request_log": {"path": path}}}))
        )
        for path in (str(tmp_path / "log"), str(tmp_path / "missing" / "log"), "")
    ]
    assert problems[0] == problems[2] == []
    assert re.match(r"observability\.request_log\.path: .*/missing/log: can't be written: No such file", problems[1][0])


def test_traces_without_their_packages_name_the_extra(monkeypatch):
    recipe = load_recipe(None, '{"observability": {"traces": {"endpoint": "http://127.0.0.1:4317"}}}')
    assert check_traces(recipe, {}) == []
    monkeypatch.setattr(otlp.importlib.util, "find_spec", lambda name: None)
    assert "bireme[otel]" in check_traces(recipe, {})[0]
    assert check_traces(recipe, {"OTEL_EXPORT_ENABLED": "0"}) == []
    assert "OTEL_EXPORT_ENABLED" in check_traces(recipe, {"OTEL_EXPORT_ENABLED": "yes"})[0]
