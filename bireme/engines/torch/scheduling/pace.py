"""When the next step is to be started: shortly before the one under way ends, so that what arrives until then joins it.

Started at once it would leave out whoever comes during the step before it: such a request would wait for one and a half
steps, and not for half of one. How long steps take is told to StepCosts here: one that follows another at once is
measured from that one's end, as a stream sees it.
"""

from __future__ import annotations

from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork

_LEAST_S = 4e-3  # of a step: less to wait for gains nobody anything
_MOST_S = 0.25  # that is believed: who waits for longer measures no less, and never learns of an exception
_MARGIN_S = 1e-3  # by which a thread may wake too late


class StepPace:
    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._start_s = 0.0  # that starting a step takes
        self._ended_at = 0.0  # of the step before, if the next one follows at once
        self._unseen: list[StepWork] = []  # steps whose ends nobody has waited for
        self._unseen_from = 0.0

    def started(self, seconds: float) -> None:
        self._start_s = max(seconds, self._start_s * 0.9)

    def landed(
        self,
        work: StepWork,
        began_at: float,
        now: float,
        is_seen: bool = True,
        costs: StepCosts | None = None,
        drafting_s: float = 0.0,
    ) -> None:
        """`is_seen`: it has ended by now. `costs`: of steps of its kind, which is seen; None: the usual ones.

        `drafting_s`: of that time, what is not the step's own.
        """
        if not self._unseen:
            self._unseen_from = self._ended_at or began_at
        elif costs is not None:  # of two kinds together nobody knows what each took
            self._unseen, self._ended_at = [], now
            return
        self._unseen.append(work)
        if is_seen:
            (costs or self._costs).landed(self._unseen, now - self._unseen_from - drafting_s)
            self._unseen, self._ended_at = [], now

    def rest(self) -> None:
        """The next step follows none."""
        self._ended_at = 0.0
        self._unseen = []

    def starts_next_at(self, work: StepWork, began_at: float) -> float:
        """Return until when the start of the step after this one, the first to land, can wait; 0: not at all."""
        seconds = min(self._costs.least_s(work), _MOST_S)
        return (self._ended_at or began_at) + seconds - self._start_s - _MARGIN_S if seconds >= _LEAST_S else 0.0
