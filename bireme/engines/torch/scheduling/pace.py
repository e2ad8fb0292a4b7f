"""When the next step is to be started: shortly before the one under way ends, so that what arrives until then joins it.

Started at once it would leave out whoever comes during the step before it: such a request would wait for one and a half
steps, and not for half of one.
"""

from __future__ import annotations

from bireme.engines.torch.forward.forward import StepPath

_LEAST_S = 4e-3  # of a step: less to wait for gains nobody anything
_MARGIN_S = 1e-3  # by which a thread may wake too late
_ROWS = 16  # steps of about as many rows take about as long
_GROWTH = 1.02  # of an estimate that was exceeded: one that is too long leaves the GPU idle


class StepPace:
    def __init__(self) -> None:
        self._seconds: dict[tuple[StepPath, int], float] = {}
        self._start_s = 0.0  # that starting a step takes

    def started(self, seconds: float) -> None:
        self._start_s = max(seconds, self._start_s * 0.9)

    def landed(self, path: StepPath, num_rows: int, seconds: float) -> None:
        key = path, num_rows // _ROWS
        known = self._seconds.get(key, seconds)
        self._seconds[key] = min(seconds, known * _GROWTH)

    def starts_next_at(self, path: StepPath, num_rows: int, began_at: float) -> float:
        """Return until when the start of the step after this one, which began then, can wait; 0: not at all."""
        seconds = self._seconds.get((path, num_rows // _ROWS), 0.0)
        return began_at + seconds - self._start_s - _MARGIN_S if seconds >= _LEAST_S else 0.0
