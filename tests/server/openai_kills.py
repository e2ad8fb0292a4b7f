"""Processes of a deployment that are killed in the middle of work that nobody waits for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from bireme.launch import processes
from tests.server.openai_served import Served, engine_of, kill, wait_for

Victim = Callable[[Served], int | None]  # returns the process that has the part now; None: there is none


def server_of(deployment: Served) -> int | None:
    tree = processes.children(deployment.process.pid)
    return next((pid for pid in tree if "tritonserver" in str(processes.command_line(pid))), None)


def oldest_member(deployment: Served) -> int | None:
    """Of the frontend's processes that serve."""
    parent = deployment.frontend_pid()
    return min(processes.descendants(parent), default=None) if parent else None


def engine_pid(deployment: Served) -> int | None:
    with contextlib.suppress(StopIteration, KeyError, IndexError):
        return engine_of(deployment)
    return None


def kill_in_turn(
    deployment: Served, victims: Sequence[Victim], num_done: Callable[[], int], count: int, limit_s: float
) -> None:
    """Kill one process after the other while `count` pieces of work are done, each when its share of them is, and wait
    until another has its part.
    """
    for number, victim in enumerate(victims, 1):
        least = number * count // (len(victims) + 1)
        done = wait_for(lambda least=least: (done := num_done()) >= least and done, limit_s)
        assert done < count, "all was done before the kill"
        old = victim(deployment)
        assert old is not None
        kill(old)
        wait_for(lambda old=old, victim=victim: victim(deployment) not in (None, old), limit_s)
