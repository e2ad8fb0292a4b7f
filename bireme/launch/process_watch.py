"""Watches a launch's processes for signs of life, and kills those that hang (vital_signs.py).

A sign is a pulse (discovery/pulse.py), or answers. A process without either is killed only when it is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bireme.discovery.pulse import PulseReader, pulse_path
from bireme.launch import processes
from bireme.launch.vital_signs import VitalSigns

_FIND_S = 2.0
LOOK_S = 0.5

Find = Callable[[], Mapping[str, int]]  # name -> pid
End = Callable[[str, int, str], None]  # name, pid, cause


@dataclass(slots=True)
class _Watched:
    pid: int
    start: int | None
    signs: VitalSigns
    pulse: PulseReader | None = None

    @property
    def has_ended(self) -> bool:
        return not processes.survivors([(self.pid, self.start)])


class ProcessWatch:
    """`turn` every LOOK_S, on one thread; `problems` from any."""

    def __init__(self, find: Find, end: End, pulse_prefix: str, stall_s: float) -> None:
        """`end` kills a process that hangs; called again while it still does."""
        self._find, self._end = find, end
        self._pulse_prefix, self._stall_s = pulse_prefix, stall_s
        self._watched: dict[str, _Watched] = {}
        self._num_turns = 0
        self._signs: dict[str, Callable[[], int]] = {}

    def take_sign(self, name: str, sign: Callable[[], int]) -> None:
        """In place of a pulse: a number that grows with each answer."""
        self._signs[name] = sign

    def turn(self) -> None:
        if self._num_turns % round(_FIND_S / LOOK_S) == 0 or any(one.has_ended for one in self._watched.values()):
            self._update()
        self._num_turns += 1
        for name, one in list(self._watched.items()):
            one.signs.look(self._sign_of(name, one))
            if hung := one.signs.hung:
                self._end(name, one.pid, hung)

    @property
    def num_processes(self) -> int:
        return len(self._watched)

    def problems(self) -> dict[str, str]:
        """None while /proc can't be read."""
        return {name: problem for name, one in list(self._watched.items()) if (problem := _problem(one))}

    def close(self) -> None:
        for name in list(self._watched):
            self._forget(name)

    def _update(self) -> None:
        found = self._find()
        for name in [name for name, one in self._watched.items() if found.get(name) != one.pid or one.has_ended]:
            self._forget(name)
        for name, pid in found.items():
            if name not in self._watched and (start := processes.started_at(pid)) is not None:
                self._watched[name] = _Watched(pid, start, VitalSigns(pid, self._stall_s))

    def _sign_of(self, name: str, one: _Watched) -> int | None:
        if name in self._signs:
            return self._signs[name]()
        if one.pulse is None:
            one.pulse = PulseReader.open(self._pulse_prefix, one.pid)
        return one.pulse.count() if one.pulse else None

    def _forget(self, name: str) -> None:
        one = self._watched.pop(name)
        if one.pulse is not None:
            one.pulse.close()
            if one.has_ended:
                pulse_path(self._pulse_prefix, one.pid).unlink(missing_ok=True)


def _problem(one: _Watched) -> str:
    try:
        return f"process {one.pid} has ended" if one.has_ended else one.signs.problem
    except OSError:  # this process has no descriptor or memory left: no fault of theirs
        return ""
