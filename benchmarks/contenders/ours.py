"""bireme: tritonserver with the workers of a recipe, and the OpenAI frontend before it, as tools/serve.py runs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.contenders.endpoint import Endpoint
from benchmarks.load.processes import roles
from bireme.launch import Ports, start_server
from bireme.launch.console import Console
from bireme.launch.frontend import FrontendProcess, FrontendSettings


def ours(
    model: Path, step_ms: float, first_port: int, tokenizer: str, arguments: tuple[str, ...] = ()
) -> AbstractContextManager[Endpoint]:
    """One mocker with this pace."""
    settings = {"engine_config": {"mocker": {"step_ms": step_ms}}}
    override = {"model": str(model), "tokenizer_backend": tokenizer, "workers": {"decode": settings}}
    return served("mocker", override, first_port, arguments)


@contextmanager
def served(name: str, override: dict[str, Any], first_port: int, arguments: tuple[str, ...] = ()) -> Iterator[Endpoint]:
    """A recipe by its name. Four ports from `first_port`; `arguments` go to python -m bireme.openai."""
    recipe, settings = f"recipes/{name}", json.dumps(override)
    ports = Ports(*range(first_port, first_port + 3))
    with start_server(recipe, ports=ports, override=settings) as server:
        frontend = FrontendSettings(
            recipe=recipe,
            grpc=server.grpc,
            port=first_port + 3,
            drain_timeout_s=5,
            arguments=("--no-access-log", "--log-level", "warning", *arguments),
            environment={"BIREME_OVERRIDE": settings},
        )
        with FrontendProcess(frontend, Console("warning")) as process:
            names = {**roles(server.pid), **process.roles()}
            yield Endpoint("bireme", f"127.0.0.1:{first_port + 3}", name, names)
