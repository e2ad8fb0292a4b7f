"""A real tritonserver with the tiny stages of adapter_stages.py in a model repository made for the session."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bireme.config import Recipe, WorkerEntry
from bireme.launch import Server
from bireme.launch.installation import find_installation
from tests.servers import start_server
from tests.triton import adapter_stages
from tests.triton.adapter_client import Client

CHECKOUT = Path(__file__).resolve().parents[2]
MODEL = """\
import sys

sys.path.insert(0, {checkout!r})

from bireme.triton import as_triton_model
from tests.triton import adapter_stages

TritonPythonModel = as_triton_model(adapter_stages.{stage})
"""
CONFIG = 'backend: "python"\ninstance_group [{ kind: KIND_MODEL count: 1 }]\n'


def write_repository(folder: Path) -> Path:
    for stage in adapter_stages.STAGES:
        version = folder / stage.spec.name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(CONFIG)
        source = MODEL.format(checkout=str(CHECKOUT), stage=stage.__name__)
        (version / "model.py").write_text(source)
    return folder


def write_recipe(folder: Path) -> Recipe:
    folder.mkdir()
    (folder / "recipe.yaml").write_text(
        f"model: {folder}\nworkers: {{decode: {{engine: mocker}}}}\nlimits: {{max_stream_buffer_bytes: 4194304}}\n"
    )
    return Recipe(
        model=str(folder), workers={"decode": WorkerEntry(engine="mocker")}, name="recipe", folder=str(folder)
    )


def answers(server: Server) -> bool:
    """A crashed server prints stacks and writes its core for seconds before it ends, with its ports closed."""
    try:
        connection = http.client.HTTPConnection(server.http, timeout=20)
        connection.request("GET", "/v2/health/live")
        return connection.getresponse().status == 200
    except OSError:
        return False


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Server]]:
    """Return a function: the server that all tests of this folder share. One that has died, or is about to, is
    replaced, and its last lines are shown: Triton 2.51 crashes now and then where gRPC clients drop (mended in 25.01).
    """
    folder = tmp_path_factory.mktemp("adapter")
    models = tuple(stage.spec.name for stage in adapter_stages.STAGES if stage is not adapter_stages.Unstartable)
    recipe, repository = write_recipe(folder / "recipe"), write_repository(folder / "repository")
    started: list[Server] = []
    with ExitStack() as stack:

        def current() -> Server:
            if started and answers(started[-1]):
                return started[-1]
            if started:
                started[-1].kill()
                print(f"tritonserver died:\n{started[-1].tail()}")
            env = {"BIREME_CHECK_TENSORS": "1", "STEP_MS": "10"}
            server = stack.enter_context(start_server(recipe, repositories=(repository,), models=models, env=env))
            started.append(server)
            return server

        yield current
        if started and not started[-1].is_running:
            pytest.fail(f"tritonserver died:\n{started[-1].tail()}")


@pytest.fixture
def server(running: Callable[[], Server]) -> Server:
    return running()


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.grpc)


@pytest.fixture
def triton_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own module, as far as it exists outside a stub: no Tensor, no InferenceResponse."""
    installation = find_installation()
    root = installation.root or installation.binary.parent.parent
    monkeypatch.syspath_prepend(str(root / "backends" / "python"))
