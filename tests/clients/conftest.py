"""A deployment a recipe for all clients, each client's environment, and a table of what came of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.server.openai_served import five_ports, served
from tools import clients

CHECKOUT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
RECIPES = Path(__file__).parent / "recipes"  # that clients alone need
LIMIT_S = 420
_rows = pytest.StashKey[list[tuple[str, str, str, str, float]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_rows] = []


@dataclass
class Client:
    """A client in its environment, and where it finds the server."""

    folder: Path
    out: Path  # for what it writes
    url: str
    triton_http: str
    triton_grpc: str
    model: str
    tokenizer: Path = CHECKOUT / "models" / "tiny-chat"
    more: dict[str, str] = field(default_factory=dict)  # environment variables
    limit_s: float = LIMIT_S

    def program(self, name: str) -> list[str]:
        """Run a program of ours that uses the client's API as its documentation does; return the lines it prints.

        Its last one is `ok`: a program can end with 0 before it has come to its end.
        """
        return self.run("python", str(PROGRAMS / f"{name}.py")).splitlines()

    def node_program(self, name: str) -> list[str]:
        """The same, of a client from npm."""
        self.more["NODE_PATH"] = str(self.folder / "node_modules")
        return self.run("node", str(PROGRAMS / f"{name}.cjs")).splitlines()

    def run(self, command: str, *arguments: str) -> str:
        """Run a command of the environment, or one that it needs; it must end with 0."""
        path = self.folder / "bin"
        program = path / command if (path / command).exists() else command
        variables = {
            **os.environ,
            "PATH": f"{path}:{os.environ['PATH']}",
            "PWD": str(self.out),
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "OPENAI_API_KEY": "none",
            "MODEL": self.model,
            "TRITON_HTTP": self.triton_http,
            "TRITON_GRPC": self.triton_grpc,
            "HF_HOME": str(self.out / "huggingface"),
            "COLUMNS": "200",
            **self.more,
        }
        variables.pop("PYTHONPATH", None)
        done = subprocess.run(
            [str(program), *arguments],
            cwd=self.out, env=variables, capture_output=True, text=True, timeout=self.limit_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="session")
def ports_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, int]]]:
    """Return a function: recipe -> the ports at which it is served, from the first call on."""
    running: dict[str, dict[str, int]] = {}
    with contextlib.ExitStack() as stack:

        def get(recipe: str) -> dict[str, int]:
            if recipe not in running:
                ports = five_ports()
                log = tmp_path_factory.mktemp("clients") / "log"
                own = RECIPES / recipe
                stack.enter_context(served(str(own) if own.exists() else f"recipes/{recipe}", log, ports=ports))
                running[recipe] = ports
            return running[recipe]

        yield get


@pytest.fixture
def client(request: pytest.FixtureRequest, ports_of: Callable[[str], dict[str, int]], tmp_path: Path) -> Client:
    """The client that the test is marked with; skipped with pip's reason where it cannot be installed."""
    marker = request.node.get_closest_marker("client")
    try:
        folder = clients.environment(marker.args[0])
    except clients.NotInstalledError as error:
        pytest.skip(str(error))
    recipe = marker.kwargs.get("recipe", "tiny-chat")
    ports = ports_of(recipe)
    return Client(
        folder,
        tmp_path,
        url=f"http://127.0.0.1:{ports['openai']}",
        triton_http=f"127.0.0.1:{ports['http']}",
        triton_grpc=f"127.0.0.1:{ports['grpc']}",
        model=marker.kwargs.get("model", recipe),
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    marker = item.get_closest_marker("client")
    if marker is not None and (report.when == "call" or not report.passed):
        name = marker.args[0]
        reason = f"skipped: {report.longrepr[2]}" if report.skipped else report.outcome
        what = (item.obj.__doc__ or item.name).strip()  # type: ignore[attr-defined]
        item.config.stash[_rows].append((name, clients.version(name), what, reason, call.duration))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[_rows]
    if rows:
        terminalreporter.write_line("\n| client | version | what was run | outcome | seconds |\n|---|---|---|---|---|")
    for name, version, what, outcome, seconds in rows:
        terminalreporter.write_line(f"| {name} | {version} | {what} | {outcome} | {seconds:.1f} |")
