"""Triton's stubs and the engine processes on Python environments of their own, as where no image has both."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

import pytest

from bireme.launch import processes
from tests.docker.dockerfile_steps import Build, StepError, base_environment
from tests.docker.made_environments import make_engine_environment, make_triton_environment
from tests.pythons import python_of
from tests.server.openai_served import five_ports

pytestmark = pytest.mark.server
CHECKOUT = Path(__file__).resolve().parents[2]
NEWER = "3.12"  # another version than most machines' python3
LIMIT_S = 180
PROMPT = list(range(400, 440))


@pytest.fixture(scope="module")
def triton_python(tmp_path_factory):
    return make_triton_environment(tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def engine_python(tmp_path_factory):
    return make_engine_environment(tmp_path_factory.mktemp("engine"))


def packages_of(python, *modules):
    code = "import sys, importlib.util as u; print(*(int(u.find_spec(m) is not None) for m in sys.argv[1:]))"
    found = subprocess.run([python, "-c", code, *modules], cwd="/", capture_output=True, text=True, check=True)
    return [word == "1" for word in found.stdout.split()]


def worker():
    config = {"dtype": "float32", "max_seq_len": 256, "enable_chunked_prefill": True}
    config |= {"disable_overlap_scheduler": True, "cache_transceiver_config": {"backend": "DEFAULT"}}
    return {"engine": "trtllm", "num_threads": 1, "engine_config": config}


@contextlib.contextmanager
def running(command, environment, log, folder=CHECKOUT):
    """Run serve.py by `command` until the block ends; it is ready when the block begins."""
    ports = five_ports()
    options = [*(f"--{name}-port={port}" for name, port in ports.items()), "--canary-interval=0"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BIREME"))}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, *options], cwd=folder, env=inherited | environment, stdout=stream, stderr=stream
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not is_ready(ports["health"]):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
            time.sleep(0.1)
        yield Launch(process.pid, ports["http"])
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0, log.read_text()[-5000:]


def is_ready(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=10) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Launch:
    pid: int
    http_port: int

    def complete(self, prompt, max_tokens):
        body = {"input_ids": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        url = f"http://127.0.0.1:{self.http_port}/v2/models/completion/generate"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            found: list[int] = json.loads(reply.read())["output_ids"]
            return found

    def engine_of(self, model):
        """Return the engine process below the stub of `model`."""
        server = next(pid for pid in processes.descendants(self.pid) if "tritonserver" in command_name(pid))
        return processes.engines(processes.stubs(server)[model][0])[0]

    def environment_of(self, pid):
        words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        return dict(word.split("=", 1) for word in words if "=" in word)


def command_name(pid):
    return Path((processes.command_line(pid) or [""])[0]).name


def test_stubs_without_the_engine_s_libraries_are_served_by_tensorrt_llm_in_its_own_environment(
    triton_python, engine_python, sample_model, write_recipe, reference, tmp_path
):
    modules = ("tensorrt_llm", "torch", "transformers", "pytriton")
    assert packages_of(triton_python, *modules) == [False, False, False, True]
    assert packages_of(engine_python, *modules) == [True, True, True, False]
    recipe = write_recipe(sample_model("llama"), {"prefill": worker(), "decode": worker()})
    environment = {"BIREME_ENGINE_PYTHON": engine_python, "LD_LIBRARY_PATH": "/opt/of/the/image"}
    with running([triton_python, "tools/serve.py", str(recipe)], environment, tmp_path / "log") as launch:
        assert launch.complete(PROMPT, 12) == reference("llama").greedy(PROMPT, 12)
        engine = launch.engine_of("decode")
        found = launch.environment_of(engine)
        assert processes.command_line(engine)[0] == engine_python
        assert found["LD_LIBRARY_PATH"] == "/opt/of/the/image"
        assert found["PATH"].startswith(str(Path(engine_python).parent))


def test_workers_of_one_recipe_run_on_pythons_of_their_own(
    triton_python, engine_python, sample_model, write_recipe, reference, tmp_path
):
    workers = {"decode": worker() | {"env": {"BIREME_ENGINE_PYTHON": engine_python}}}
    recipe = write_recipe(sample_model("llama"), workers)
    with running([triton_python, "tools/serve.py", str(recipe)], {}, tmp_path / "log") as launch:
        assert launch.complete(PROMPT, 8) == reference("llama").greedy(PROMPT, 8)


@pytest.mark.soak
def test_stubs_and_engines_may_be_of_different_python_versions(triton_python, write_recipe, sample_model, tmp_path):
    python = newer_python(tmp_path / "newer")
    config = {"mocker": {"vocab_size": 1000}, "cache_transceiver_config": {"backend": "DEFAULT"}}
    workers = dict.fromkeys(("prefill", "decode"), {"engine": "mocker", "engine_config": config})
    recipe = write_recipe(sample_model("llama"), workers)
    with running(
        [triton_python, "tools/serve.py", str(recipe)], {"BIREME_ENGINE_PYTHON": python}, tmp_path / "log"
    ) as launch:
        assert len(launch.complete(PROMPT, 20)) == 20
        engine = launch.engine_of("decode")
        assert Path(f"/proc/{engine}/exe").resolve().name == "python3.12"


@pytest.mark.soak
def test_what_the_release_image_s_steps_make_serves_tensorrt_llm(
    engine_python, sample_model, write_recipe, reference, tmp_path
):
    dockerfile = CHECKOUT / "docker" / "Dockerfile.trtllm-release"
    image = base_environment(Path(engine_python).parents[1])
    build = Build(dockerfile, tmp_path / "image", image, ENGINE_PYTHON=engine_python)
    try:
        build.run()
    except StepError as error:
        if "No matching distribution" in str(error):
            pytest.skip("packages can't be fetched")
        raise
    recipe = write_recipe(sample_model("llama"), {"prefill": worker(), "decode": worker()})
    python, program, *options = build.commands["ENTRYPOINT"]
    command = [build.place(python), program, str(recipe), *options, "--host=127.0.0.1"]
    with running(command, build.environment, tmp_path / "log", build.folder) as launch:
        assert launch.complete(PROMPT, 12) == reference("llama").greedy(PROMPT, 12)
        assert processes.command_line(launch.engine_of("decode"))[0] == engine_python


def newer_python(folder):
    """Return the python of an environment of version 3.12 that has bireme's requirements; skips where there is none."""
    found = python_of(NEWER)
    if found is None or sys.version_info[:2] == (3, 12):
        pytest.skip("no other Python than this one; install python3.12")
    subprocess.run([found, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    requirements = [name for name in requires("bireme") or () if "extra ==" not in name]
    done = subprocess.run([python, "-m", "pip", "install", "-q", *requirements], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"bireme's requirements can't be fetched: {done.stderr.strip()[-200:]}")
    return python
