"""Tritonservers for tests that ask them something: when a test has done so, all processes are killed.

How a server ends in order has tests of its own (launch/test_launch_server.py, launch/test_deployment.py); it takes
seconds, and more with engines that were killed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from bireme import launch
from bireme.launch.console import Console
from bireme.launch.deployment import Deployment, DeploymentSettings
from bireme.launch.tritonserver import ServerDiedError


@contextlib.contextmanager
def start_server(*args: Any, **options: Any) -> Iterator[launch.Server]:
    """As `bireme.launch.start_server`; as in a launch, a server that aborts while it loads is started again, once."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(launch.start_server(*args, **options))
        except ServerDiedError:
            server = stack.enter_context(launch.start_server(*args, **options))
        stack.callback(server.kill)
        yield server


@contextlib.contextmanager
def supervised(settings: DeploymentSettings) -> Iterator[Deployment]:
    """A whole launch in this process, healed as under serve.py until its test has asked; then all is killed."""
    with Deployment(settings, Console("warning")) as running:
        supervisor = threading.Thread(target=running.supervise)
        supervisor.start()
        yield running
        running.request_stop()
        supervisor.join(60)
        running.kill()
