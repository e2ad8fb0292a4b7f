"""Stubs of models that are being loaded: Triton 2.51 waits for ever for one that is killed as soon as it is there."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bireme.launch import processes

_UNNOTICED_S = 10.0  # Triton itself notices the death of others within a second


class LoadingStubs:
    """Looked at while a server loads models."""

    def __init__(self, server_pid: int, models: Mapping[str, str]) -> None:
        """`models`: of each stub's name. The server's children of now are none of the loads."""
        self._server_pid = server_pid
        self._models = models
        self._former = set(processes.children(server_pid))
        self._seen: dict[int, str] = {}  # pid -> model: a zombie's command line is gone
        self._dead_since: dict[int, float] = {}

    def is_one_lost(self, loading: Collection[str], now: float) -> bool:
        """Return whether a stub, which may be one of the models that are still loaded, has been dead for long."""
        children = [pid for pid in processes.children(self._server_pid) if pid not in self._former]
        for pid in children:
            if pid not in self._seen and (name := processes.stub_name(processes.command_line(pid))) in self._models:
                self._seen[pid] = self._models[str(name)]
        dead = [pid for pid in children if self._seen.get(pid) in (None, *loading) and processes.state(pid) == "Z"]
        self._dead_since = {pid: self._dead_since.get(pid, now) for pid in dead}
        return any(now - since >= _UNNOTICED_S for since in self._dead_since.values())
