"""docker/Dockerfile built without a daemon on a base of Debian's packages, and what it made served (make image)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from bireme.config import CHECKOUT
from tests.docker.daemonless import BASE, NEEDED_MB, BuilderError, Container, Store, why_not

pytestmark = [pytest.mark.soak, pytest.mark.timeout(5400)]
DOCKERFILE = CHECKOUT / "docker" / "Dockerfile"
IMAGE = "localhost/bireme"
READY_S = 900.0
ASK = """
import json, sys, urllib.request
body = {"model": "tiny-chat", "max_tokens": 16, "temperature": 0, "messages": [{"role": "user", "content": "Hello"}]}
url = "http://127.0.0.1:9000/v1/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=120).read().decode())
"""


def torch_index():
    """Return an index that has torch without CUDA: the Dockerfile's own, or none where pip here has such a wheel."""
    text = DOCKERFILE.read_text()
    (version,) = re.findall(r"^ARG TORCH_VERSION=(.*)$", text, re.M)
    (index,) = re.findall(r"^ARG TORCH_INDEX=(.*)$", text, re.M)
    asked = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet"]
    if subprocess.run([*asked, f"torch=={version}+cpu"], capture_output=True, check=False).returncode == 0:
        return "https://pypi.org/simple"
    try:
        urllib.request.urlopen(index, timeout=20).close()
    except OSError as error:
        pytest.skip(f"torch without CUDA is not within reach: {index}: {error}")
    return index


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("images")
    if (free := shutil.disk_usage(folder).free >> 20) < NEEDED_MB:
        pytest.skip(f"{free} MB are free at {folder}, {NEEDED_MB} MB are needed")
    store = Store(folder)
    try:
        try:
            store.make_base()
        except BuilderError as error:
            if re.search("Could not resolve|Failed to fetch|Unable to connect", str(error)):
                pytest.skip(f"no archive of Debian can be reached: {error}")
            raise
        took = store.build(DOCKERFILE, IMAGE, BASE=BASE, TORCH_INDEX=torch_index())
        print(f"built in {took:.0f} s, {store.image(IMAGE)['Size']}")
        yield store
    finally:
        store.remove()


@pytest.fixture(scope="module")
def container(store, tmp_path_factory):
    container = Container(store, IMAGE, tmp_path_factory.mktemp("container") / "log")
    try:
        container.wait_healthy(READY_S)
        yield container
    finally:
        container.remove()


def test_the_image_answers_a_chat_with_prefill_and_decode_apart(container):
    done = container.call(["python", "-c", ASK])
    answer = json.loads(done.stdout or "{}")
    assert answer.get("choices") and answer["choices"][0]["message"]["content"], done.stderr + container.log[-2000:]
    commands = [" ".join(process.cmdline()) for process in container.processes()]
    assert all(any(f"--worker {stage}" in one for one in commands) for stage in ("prefill", "decode")), commands


def test_nothing_in_it_is_root_or_has_a_right(container):
    processes = container.processes()
    assert len(processes) > 4 and {process.uids().real for process in processes} == {10001}
    for process in processes:
        status = dict(re.findall(r"^(\w+):\t(.*)$", Path(f"/proc/{process.pid}/status").read_text(), re.M))
        rights = (int(status["CapEff"], 16), status["NoNewPrivs"], status["Seccomp"])
        assert rights == (0, "1", "2"), process.cmdline()


def test_its_root_can_not_be_written_and_its_volume_can(container):
    written = "import pathlib, sys; pathlib.Path(sys.argv[1], 'new').write_text('')"
    for folder, is_writable in (
        ("/opt/bireme", False),
        ("/home/bireme", False),
        ("/home/bireme/.cache", True),
        ("/tmp", True),
    ):
        done = container.call(["python", "-c", written, folder])
        assert (done.returncode == 0) is is_writable, (folder, done.stderr)
        assert is_writable or "Read-only file system" in done.stderr
    assert "compiled_code_not_kept" not in container.log


def test_nixl_and_every_extra_of_the_image_are_imported(container):
    modules = "nixl_cu12, torch, transformers, numba, etcd3gw, nats, uvicorn, PIL, av, diffusers, opentelemetry.sdk"
    assert container.call(["python", "-c", f"import {modules}"]).returncode == 0


def test_nothing_of_the_build_is_left(container):
    patterns = ("var/lib/apt/lists/*_*", "var/cache/apt/archives/*.deb", "root/.cache/pip/*", "opt/bireme/.git")
    assert [found for pattern in patterns for found in container.root.glob(pattern)] == []
    assert (
        container.call(["python", "-c", "import bireme.config as c; print(c.CHECKOUT)"]).stdout.strip() == "/opt/bireme"
    )


def test_it_ends_in_order_by_sigterm(container):
    """The last: it ends the container that the others ask."""
    assert container.stop() == 0, container.log[-3000:]
