"""Another user of the host reads nothing of a launch, opens none of its sockets and has Triton load or map nothing."""

import contextlib
import hashlib
import json
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from bireme.errors import BiremeError
from bireme.launch import free_port, processes
from bireme.launch.admin import AdminClient
from bireme.launch.console import Console
from bireme.launch.deployment import Deployment
from bireme.launch.run_folder import SHM, RunFolder
from tests.listening import family, unix_listeners
from tools import serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(os.getuid() != 0, reason="to be another user takes root"),
]

NOBODY = 65534
PROMPT = "Two banks of oars, said nobody"
PORTS = ("openai", "http", "grpc", "metrics", "health")
SECRETS = ("BIREME_KEY", "BIREME_CANARY_KEY", "BIREME_ARGUMENT_")


@pytest.fixture(scope="module")
def seen():
    """Every command line that a process of this launch has shown, from its start on."""
    return set()


@pytest.fixture(scope="module")
def launch(sample_model, tmp_path_factory, seen):
    sample_model("llama")
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(f"keys:\n  - {{name: alice, sha256: {hashlib.sha256(b'key').hexdigest()}}}\n")
    run_folder, has_ended = RunFolder(), threading.Event()
    options = ["recipes/tiny", "--api-keys", str(keys), *(f"--{name}-port={free_port()}" for name in PORTS)]
    watcher = threading.Thread(target=watch, args=(seen, has_ended))
    watcher.start()
    try:
        with Deployment(serve.settings_of(serve.parse(options), run_folder), Console("warning"), run_folder) as launch:
            yield launch
            launch.kill()
    finally:
        has_ended.set()
        watcher.join()


def watch(seen, has_ended):
    while not has_ended.wait(0.002):
        for pid in processes.descendants(os.getpid()):
            seen.add(" ".join(processes.command_line(pid)))


def as_nobody(work):
    """Return what `work` returns in a process of another user, as JSON has it."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writes, json.dumps(work()).encode())
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def opened(paths):
    """Return those that this user can open, for reading or for writing."""
    found = []
    for path in paths:
        for how in (os.O_RDONLY, os.O_WRONLY):
            with contextlib.suppress(OSError):
                os.close(os.open(path, how | os.O_NONBLOCK))
                found.append(path)
    return found


def connected(paths):
    found = []
    for path in paths:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client, contextlib.suppress(OSError):
            client.connect(path)
            found.append(path)
    return found


def files_of(pids):
    """Return what the processes have mapped or open and other users could have a use for."""
    found = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {line.split(maxsplit=5)[5] for line in lines if "/" in line}
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    found.add(os.readlink(link))
    return {path for path in found if path.startswith("/") and os.path.isfile(path)}


def test_no_process_of_a_launch_shows_a_secret_in_its_arguments(launch, seen):
    environments = [line for pid in family(os.getpid()) for line in processes.environment(pid)]
    values = {line.partition("=")[2] for line in environments if line.startswith(SECRETS)}
    secrets = {value.rpartition("=")[2] for value in values} | {launch.server.admin_key}
    assert [line for line in seen if any(secret in line for secret in secrets)] == []
    assert len(secrets) == 6  # the launch's two, and one for each list of Triton's
    assert any("--http-restricted-api=(hidden)" in line for line in seen)


def test_nobody_sees_the_memory_and_the_environment_of_its_processes(launch):
    files = [f"/proc/{pid}/{name}" for pid in processes.descendants(os.getpid()) for name in ("environ", "mem", "maps")]
    assert files and as_nobody(lambda: opened(files)) == []


def test_nobody_opens_its_shared_memory_databases_and_logs(launch):
    ask(launch)
    own = {path for path in files_of(family(os.getpid())) if path.startswith((f"{SHM}/", f"{launch.run_folder.path}/"))}
    own |= {str(path) for path in launch.run_folder.path.rglob("*") if path.is_file()}
    assert any(path.startswith(f"{SHM}/") for path in own) and any(path.endswith(".sqlite") for path in own)
    assert as_nobody(lambda: opened(own)) == []


def test_nobody_writes_what_its_processes_read(launch):
    paths = files_of(family(os.getpid()))
    assert as_nobody(lambda: [path for path in paths if os.access(path, os.W_OK)]) == []


def test_nobody_connects_to_its_unix_sockets(launch):
    paths = unix_listeners(family(os.getpid()))
    assert paths and as_nobody(lambda: connected(paths)) == []


def test_nobody_attaches_its_segments_of_system_v(launch):
    pids = set(family(os.getpid()))
    rows = [row.split() for row in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    assert [row for row in rows if int(row[4]) in pids and int(row[2], 8) & 0o77] == []


def test_without_a_key_triton_loads_and_maps_nothing(launch):
    server = launch.server
    with pytest.raises(BiremeError, match="restricted"):
        AdminClient(server.http, server.metrics, "").load("decode")
    client = grpcclient.InferenceServerClient(server.grpc)
    calls = (
        lambda: client.load_model("evil", config="{}", files={"file:1/model.py": b"pass"}),
        lambda: client.unload_model("decode"),
        lambda: client.register_system_shared_memory(
            "r", f"/{next(SHM.glob(launch.run_folder.shm_prefix + '*')).name}", 64
        ),
        lambda: client.update_trace_settings(settings={"trace_level": ["TENSORS"]}),
        lambda: client.update_log_settings({"log_file": "/tmp/log"}),
    )
    for call in calls:
        with pytest.raises(InferenceServerException, match="restricted"):
            call()
    with pytest.raises(InferenceServerException, match="restricted"):
        client.load_model("decode", headers={"triton-grpc-protocol-bireme-admin-key": server.admin_key})
    client.close()


def ask(launch):
    """Have a prompt go through the regions."""
    client = grpcclient.InferenceServerClient(launch.server.grpc)
    text = grpcclient.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([PROMPT.encode()], object))
    client.infer("completion", [text])
    client.close()
