"""Read a server's /metrics and wait for what they should say."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bireme.launch import Server

PATIENCE = 5  # machines that others use, too, have been that much slower for an hour


def total(server: Any, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that carry these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(server.metrics_text())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def until(condition: Callable[[], bool], usual_s: float, what: str) -> float:
    """Wait; return the seconds it took. Fails the test when it has not come true after several times the `usual_s`."""
    began, limit_s = time.monotonic(), PATIENCE * usual_s
    while not condition():
        assert time.monotonic() - began < limit_s, f"{what}: not within {limit_s:.0f} s"
        time.sleep(0.05)
    return time.monotonic() - began


def held(server: Any) -> float:
    """Return KV blocks referenced and leases open, over all workers."""
    return total(server, "bireme_kv_blocks_used") + total(server, "bireme_kv_leases")


def is_idle(server: Any) -> bool:
    running = total(server, "bireme_requests_running") + total(server, "bireme_requests_waiting")
    return held(server) == 0 and running == 0


@contextlib.contextmanager
def outliving_a_killed_stub(server: Server) -> Iterator[None]:
    """For a test that kills a stub: tritonserver 2.51 aborts where the stub held a lock just then, and is started again
    (docs/troubleshooting.md). No test can choose the moment, so that this failure is expected, and no other.
    """
    try:
        yield
    except Exception as error:
        if server.returncode == -signal.SIGABRT:
            pytest.xfail(f"tritonserver aborted over a lock of the stub that was killed: {error}")
        raise
