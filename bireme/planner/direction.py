"""Up and down without flapping: what one stage may do next."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Direction:
    """Of one stage: which way it went last, and what it needed lately."""

    reversal_s: float
    window_s: float
    num_reversals: int = 0
    _way: int = 0  # 1 up, -1 down
    _reversed_at: float = float("-inf")
    _began_at: float | None = None
    _paused: bool = False  # it went to the minimum since the load had ended
    _needs: deque[tuple[float, int]] = field(default_factory=deque)

    def needed(self, now: float, count: int) -> None:
        self._began_at = now if self._began_at is None else self._began_at
        self._needs.append((now, count))
        while self._needs[0][0] < now - self.window_s:
            self._needs.popleft()

    def allow(self, now: float, have: int, need: int, is_idle: bool) -> tuple[int, str]:
        """Return how many there may be, and what stands against as many as are needed. Idle ones go at once.

        Load that comes back finds as many as it needed before: one that joins later has no caches, and takes prompts
        from those that do. Faster up than down: whoever turns down can't turn up again for `reversal_s`. So a turn
        takes one worker, and the next ones go when it may turn again.
        """
        if need == have:
            return have, ""
        if need > have and self._paused:
            need = max(need, self._lately)
        may_turn = now - self._reversed_at >= self.reversal_s
        if need < have and not is_idle:
            need, against = self._down(now, have, need, may_turn)
            if against:
                return have, against
        if self._is_reversal(need - have) and not may_turn:
            left_s = self.reversal_s - (now - self._reversed_at)
            return have, f"{need} needed, the direction has just changed: held for {left_s:.0f} s more"
        return need, ""

    def _down(self, now: float, have: int, need: int, may_turn: bool) -> tuple[int, str]:
        if self._began_at is None or now - self._began_at < self.window_s:
            return have, f"{need} would do, seen for less than {self.window_s:.0f} s"
        lately = self._lately
        if lately >= have:
            return have, f"{need} would do, {lately} were needed within {self.window_s:.0f} s"
        if not may_turn and self._way <= 0:
            return have, f"{need} would do, held until it may turn up again"
        return (have - 1 if self._way > 0 else lately), ""

    @property
    def _lately(self) -> int:
        return max(count for _, count in self._needs)

    def went(self, now: float, change: int, is_idle: bool = False) -> None:
        if not change:
            return
        self._paused = is_idle and change < 0
        if self._is_reversal(change):
            self._reversed_at = now
            self.num_reversals += 1
        self._way = 1 if change > 0 else -1

    def _is_reversal(self, change: int) -> bool:
        return change * self._way < 0
