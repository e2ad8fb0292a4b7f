"""bireme: tritonserver with one mocker, and the OpenAI frontend before it, as tools/serve.py runs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.contenders.endpoint import Endpoint
from benchmarks.load.processes import roles
from bireme.launch import Ports, start_server
from bireme.launch.console import Console
from bireme.launch.frontend import FrontendProcess, FrontendSettings


@contextmanager
def ours(
    model: Path, step_ms: float, first_port: int, tokenizer: str, arguments: tuple[str, ...] = ()
) -> Iterator[Endpoint]:
    """Four ports from `first_port`; `arguments` go to python -m bireme.openai."""
    settings = {"engine_config": {"mocker": {"step_ms": step_ms}}}
    override = json.dumps({"model": str(model), "tokenizer_backend": tokenizer, "workers": {"decode": settings}})
    ports = Ports(*range(first_port, first_port + 3))
    with start_server("recipes/mocker", ports=ports, override=override) as server:
        frontend = FrontendSettings(
            recipe="recipes/mocker",
            grpc=server.grpc,
            port=first_port + 3,
            drain_timeout_s=5,
            arguments=("--no-access-log", "--log-level", "warning", *arguments),
            environment={"BIREME_OVERRIDE": override},
        )
        with FrontendProcess(frontend, Console("warning")) as process:
            names = {**roles(server.pid), **process.roles()}
            yield Endpoint("bireme", f"127.0.0.1:{first_port + 3}", "mocker", names)
