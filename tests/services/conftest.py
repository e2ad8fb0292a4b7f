"""A browser, a deployment of tiny-chat, and a frontend whose answers a test writes; each starts once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.stand_in_workers import STAND_IN
from tests.server.conftest import write_recipe
from tests.server.openai_served import Served, served
from tests.services.playground_page import Page
from tests.services.playground_servers import DOOR, PORTS, RECIPE, URL, ScriptedFrontend
from tests.services.slurm_cluster import Cluster, cluster
from tools.screenshots import browser

__all__ = ["write_recipe"]  # a fixture


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.services)


@pytest.fixture(scope="package")
def driver() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture(scope="package")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # What a lone worker's recipe leaves out, and what is off unless asked for
    settings = ["--set=router.mode=kv", "--set=observability.timelines.max_entries=100"]
    folder = tmp_path_factory.mktemp("services")
    (folder / "key").write_text(DOOR.key)
    door = [f"--admin-port={DOOR.address.rpartition(':')[2]}", f"--admin-key-file={folder / 'key'}"]
    with served(RECIPE, folder / "log", *settings, *door, ports=PORTS) as running:
        yield running


@pytest.fixture
def visit(driver: Any) -> Iterator[Callable[[str], Page]]:
    """Return a function: address -> page. At the end no page may have complained, or asked anybody else."""
    pages: list[Page] = []

    def make(url: str) -> Page:
        pages.append(Page(driver, url))
        return pages[-1]

    Page(driver, "").complaints()
    Page(driver, "").requested()
    yield make
    homes = tuple(page.url for page in pages)
    assert pages[-1].complaints() == []
    asked = {url for url in pages[-1].requested() if url.startswith(("http", "ws", "ftp"))}
    assert {url for url in asked if not url.startswith(homes)} == set() and asked


@pytest.fixture
def page(deployment: Served, visit: Callable[[str], Page]) -> Page:
    """The page of the real deployment, opened."""
    return visit(URL).open()


@pytest.fixture(scope="package")
def scripted_frontend() -> Iterator[ScriptedFrontend]:
    with ScriptedFrontend() as running:
        yield running


@pytest.fixture
def scripted(scripted_frontend: ScriptedFrontend) -> ScriptedFrontend:
    scripted_frontend.pieces, scripted_frontend.pause_s, scripted_frontend.releases = [], 0.0, None
    scripted_frontend.requests.clear()
    return scripted_frontend


@pytest.fixture(scope="package")
def slurm(tmp_path_factory: pytest.TempPathFactory, sample_model: Callable[[str], Path]) -> Iterator[Cluster]:
    """A Slurm cluster whose nodes have TensorRT-LLM's stand-in and its launcher."""
    sample_model("llama")
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        made.add_program("trtllm-llmapi-launch", sys.executable, str(STAND_IN / "launch.py"))
        yield made
