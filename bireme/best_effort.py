"""Requests that take nobody's time: those of priority 0, as all lines of batches are.

Alone in an engine they run like any others. Beside others, and in the second after those, they keep to a share of the
engine's time: a step with them is followed by a rest of theirs. A step that computes another's prompt is without them.
So a prompt that comes finds a step with them under way in at most that share of cases, and waits for its rest alone.
"""

from __future__ import annotations

import math

PRIORITY = 0.0
QUIET_S = 1.0  # after the last of the others: the next one of a conversation comes soon
LONGEST_REST_S = 10.0  # a supervisor takes an engine that rests for longer for one that hangs
_PATIENCE_S = 1.0  # longer than their rest they wait for no prompts: of these there may always be one
_CHUNK_PARTS = 32  # beside others a step takes this part of its tokens from their prompts: it stays short


class BestEffortShare:
    """Says when they take part; an engine's thread asks before each step. Times are of one clock."""

    def __init__(self, share: float) -> None:
        """`share`: of the engine's time, above 0; 1: they rest in steps with others' prompts alone."""
        self._rest_per_s = 1 / share - 1
        self._others_at = -math.inf
        self._ran_at: float | None = None  # when the last step with them was begun, until its length is known
        self._rests_until = -math.inf
        self._waits_since: float | None = None
        self.num_rests = 0  # steps that they sat out

    def plan(self, now: float, has_others: bool, is_running: bool = False) -> None:
        """A step is planned, as one is whenever another has ended. `is_running`: one with them has not ended."""
        if self._ran_at is not None and not is_running:
            self._rests_until = now + min((now - self._ran_at) * self._rest_per_s, LONGEST_REST_S)
            self._ran_at = None
        if has_others:
            self._others_at = now

    def may_run(self, now: float, has_prompt: bool = False) -> bool:
        """Return whether they may take part in the step that was planned for. `has_prompt`: it computes another's."""
        if not self.is_beside_others(now):
            return True
        if self._ran_at is not None and self._rest_per_s:
            return False
        if self._waits_since is None:
            self._waits_since = now
        if has_prompt:
            return now >= max(self._rests_until, self._waits_since) + _PATIENCE_S
        return now >= self._rests_until

    def ran(self, now: float) -> None:
        """They take part."""
        self._ran_at, self._waits_since = now, None

    def is_beside_others(self, now: float) -> bool:
        return now - self._others_at < QUIET_S

    @property
    def wakes_at(self) -> float:
        """When they may run again, if no prompt comes."""
        return min(self._rests_until, self._others_at + QUIET_S)

    def most_prompt_tokens(self, now: float, max_num_tokens: int) -> int:
        """Return how many tokens of their prompts a step computes, of those that it has room for."""
        return max(1, max_num_tokens // _CHUNK_PARTS) if self.is_beside_others(now) else max_num_tokens
