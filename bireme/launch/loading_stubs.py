"""Stubs of models that are being loaded, for which Triton 2.51 would wait for ever.

One is killed as soon as it is there, and Triton does not notice. Or one gets no CPU for a second while it starts:
Triton gives it up then, and waits for its end, while the stub gets well and waits for requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bireme.discovery.pulse import pulse_path
from bireme.launch import processes

_UNNOTICED_S = 10.0  # Triton itself notices the death of others within a second
_GIVEN_UP_S = 20.0  # Triton itself goes on at once, to the model's next stub or to the end of the load

GIVEN_UP = "tritonserver does not see that its stub has started"


class LoadingStubs:
    """Looked at while a server loads models."""

    def __init__(self, server_pid: int, models: Mapping[str, str], pulse_prefix: str) -> None:
        """`models`: of each stub's name. The server's children of now are none of the loads."""
        self._server_pid = server_pid
        self._models = models
        self._pulse_prefix = pulse_prefix
        self._former = set(processes.children(server_pid))
        self._seen: dict[int, str] = {}  # pid -> model: a zombie's command line is gone
        self._dead_since: dict[int, float] = {}
        self._started_since: dict[str, float] = {}  # model -> since when all its stubs of now have started
        self.given_up: set[str] = set()  # models whose stubs were ended

    def is_one_lost(self, loading: Collection[str], now: float) -> bool:
        """Return whether a stub, which may be one of the models that are still loaded, has been dead for long."""
        dead = [pid for pid in self._children() if self._seen.get(pid) in (None, *loading)]
        dead = [pid for pid in dead if processes.state(pid) == "Z"]
        self._dead_since = {pid: self._dead_since.get(pid, now) for pid in dead}
        return any(now - since >= _UNNOTICED_S for since in self._dead_since.values())

    def end_given_up(self, loading: Collection[str], now: float) -> list[str]:
        """End the stubs of models whose load goes on although all of them started long ago; return these models.

        Their loads fail then, and can be tried again.
        """
        alive: dict[str, list[int]] = {}
        for pid in self._children():
            if (model := self._seen.get(pid)) in loading and processes.state(pid) != "Z":
                alive.setdefault(str(model), []).append(pid)
        started = [model for model, pids in alive.items() if all(map(self._has_started, pids))]
        self._started_since = {model: self._started_since.get(model, now) for model in started}
        given_up = [model for model, since in self._started_since.items() if now - since >= _GIVEN_UP_S]
        self.given_up.update(given_up)
        for model in given_up:
            processes.kill_all([(pid, processes.started_at(pid)) for pid in alive[model]])
        return given_up

    def _children(self) -> list[int]:
        children = [pid for pid in processes.children(self._server_pid) if pid not in self._former]
        for pid in children:
            if pid not in self._seen and (name := processes.stub_name(processes.command_line(pid))) in self._models:
                self._seen[pid] = self._models[str(name)]
        return children

    def _has_started(self, pid: int) -> bool:
        """Whether its stage runs: then it has a pulse."""
        return pulse_path(self._pulse_prefix, pid).exists()
