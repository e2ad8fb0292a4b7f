"""A rolling update by two admin doors.

    hold     the new launch drains until its workers are ready
    compare  the old one's frontend sends copies of requests there
    shift    weights move requests step by step; without a discovery of both, whole entries change places
    retire   the old launch drains until it may be ended

What fails raises NotTakenError; `go_back` is the way back from anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bireme.errors import BiremeError, UnavailableError

_LOOK_S = 0.5
_SETTLE_S = 10.0
_SLACK_MS = 50.0  # a TTFT may be so much later whatever the ratio says
_LEAST_TIMES = 10  # fewer say nothing of percentiles
_ANSWERED = ("same", "different", "sampled", "failed")


class NotTakenError(BiremeError):
    """The new generation is not taken."""

    code = "FAILED_PRECONDITION"


class DoorCalls(Protocol):
    """An admin door, as its client has it."""

    @property
    def address(self) -> str: ...

    def status(self) -> dict[str, Any]:
        """Raises BiremeError."""

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        """Raises BiremeError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """What is asked of the new generation."""

    mirror_url: str = ""  # the new launch's frontend; "": nothing is compared
    mirror_key_file: str = ""
    mirror_ca_file: str = ""
    share: float = 0.2
    min_compared: int = 50
    max_different: float = 0.0  # of the answers compared
    max_failed: float = 0.01  # of the copies, and of its requests
    max_ttft_ratio: float = 1.5
    steps: Sequence[float] = (0.1, 0.5, 1.0)
    pause_s: float = 30.0
    ready_limit_s: float = 900.0
    mirror_limit_s: float = 1800.0
    drain_limit_s: float = 600.0


class RollingUpdate:
    """`run` once, or `go_back`."""

    def __init__(
        self, old: DoorCalls, new: DoorCalls, plan: UpdatePlan, tell: Callable[[str], object],
        check_start: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`check_start`: raises NotTakenError once the command that was to start the new launch has ended."""
        self._old, self._new, self._plan, self._tell, self._check_start = old, new, plan, tell, check_start
        self._failed_before = self._served_before = 0

    def run(self) -> dict[str, Any]:
        """Return the result, with is_old_safe. Raises NotTakenError, and BiremeError where a door is not there."""
        self._old.status()
        self._hold()
        has_weights = self._has_weights()
        self._tell(
            "both find each other: weights move requests"
            if has_weights
            else "they share no workers: the new entry takes the old one's place"
        )
        compared = self._compare(has_weights) if self._plan.mirror_url else None
        self._shift(has_weights)
        self._old.post("/mirror", url=None)
        return {"taken": True, "by": "weights" if has_weights else "entries", "compared": compared, **self._retire()}

    def go_back(self) -> list[str]:
        """Have the old launch take everything again; return what could not be done, by door."""
        problems = []
        for door, path, fields in (
            (self._old, "/undrain", {}),
            (self._new, "/weight", {"weight": 0.0}),
            (self._new, "/drain", {}),
            (self._old, "/mirror", {"url": None}),
        ):
            try:
                door.post(path, **fields)
                if path == "/undrain" and (state := self._settled(door)):  # else nobody is ready for a moment
                    problems.append(f"{path} at {door.address}: it is {state}")
            except BiremeError as error:
                problems.append(f"{path} at {door.address}: {error}")
        return problems

    def _hold(self) -> None:
        """Wait until the new launch is ready, without anything sent to it."""
        deadline, is_held, last = time.monotonic() + self._plan.ready_limit_s, False, "its admin door does not answer"
        while True:
            self._check_start()
            try:
                if not is_held:
                    self._new.post("/drain")
                    self._new.post("/weight", weight=0.0)
                    is_held = True
                    self._tell("the new generation is held back until it is ready")
                status = self._new.status()
                if not (last := _not_ready(status)):
                    self._note_counts(status)
                    self._tell("the new generation is ready")
                    return
            except UnavailableError as error:
                last = str(error)
            if time.monotonic() >= deadline:
                raise NotTakenError(f"the new generation was not ready within {self._plan.ready_limit_s:g} s: {last}")
            time.sleep(_LOOK_S)

    def _has_weights(self) -> bool:
        """Whether the old launch's routers know the new one's workers."""
        old, new = self._old.status(), self._new.status()
        return new["generation"] > old["generation"] and str(new["generation"]) in old["elsewhere"]

    def _compare(self, has_weights: bool) -> dict[str, Any]:
        plan = self._plan
        generation = self._new.status()["generation"] if has_weights else None
        trusted = {"ca_file": plan.mirror_ca_file} if plan.mirror_ca_file else {}  # older launches don't know it
        self._old.post("/mirror", url=plan.mirror_url, share=plan.share, key_file=plan.mirror_key_file,
                       generation=generation, **trusted)  # fmt: skip
        deadline, told = time.monotonic() + plan.mirror_limit_s, -1
        while True:
            found = self._look()
            if found["compared"] >= plan.min_compared:
                self._tell(_compared(found))
                return found
            if time.monotonic() >= deadline:
                raise NotTakenError(
                    f"only {found['compared']} of {plan.min_compared} answers could be compared within"
                    f" {plan.mirror_limit_s:g} s ({_compared(found)}), send more requests with temperature 0 or a seed"
                )
            if found["compared"] * 10 // plan.min_compared != told:
                told = found["compared"] * 10 // plan.min_compared
                self._tell(_compared(found))
            time.sleep(_LOOK_S)

    def _shift(self, has_weights: bool) -> None:
        self._new.post("/undrain")
        if state := self._settled(self._new):
            raise NotTakenError(f"the new generation is no longer ready: {state}")
        for weight in self._plan.steps if has_weights else (1.0,):
            self._new.post("/weight", weight=weight)
            self._tell(f"weight {weight:g}" if has_weights else "the new entry takes requests")
            self._watch(self._plan.pause_s)

    def _settled(self, door: DoorCalls) -> str:
        """Wait until a launch that no longer drains is ready; return what else it is. Its health goes from `draining`
        by `not_ready`, for a moment.
        """
        deadline = time.monotonic() + min(_SETTLE_S, self._plan.ready_limit_s)
        while (state := str(door.status()["status"])) not in ("ready", "degraded"):
            if time.monotonic() >= deadline:
                return state
            time.sleep(_LOOK_S)
        return ""

    def _watch(self, seconds: float) -> None:
        """Raises NotTakenError."""
        until = time.monotonic() + seconds
        while True:
            self._look()
            if time.monotonic() >= until:
                return
            time.sleep(_LOOK_S)

    def _look(self) -> dict[str, Any]:
        """Return what was compared so far. Raises NotTakenError."""
        plan = self._plan
        self._check_start()
        try:
            status = self._new.status()
        except UnavailableError as error:
            raise NotTakenError(f"the new generation is gone: {error}") from error
        if reason := _not_ready(status):
            raise NotTakenError(f"the new generation is no longer ready: {reason}")
        self._check_failures(status["requests"])
        found: dict[str, Any] = self._old.status()["mirror"] or {}
        if found:
            check_compared(found, plan)
        return found

    def _note_counts(self, status: Mapping[str, Any]) -> None:
        requests = status["requests"]
        self._served_before, self._failed_before = requests["served"], requests["failed"]

    def _check_failures(self, requests: Mapping[str, int]) -> None:
        failed, served = requests["failed"] - self._failed_before, requests["served"] - self._served_before
        if failed > max(self._plan.max_failed * (failed + served), 0):
            raise NotTakenError(f"{failed} of {failed + served} requests have failed at the new generation")

    def _retire(self) -> dict[str, Any]:
        self._old.post("/drain")
        self._tell("the old generation drains")
        deadline = time.monotonic() + self._plan.drain_limit_s
        while True:
            status = self._old.status()
            if status["safe_to_delete"] or time.monotonic() >= deadline:
                return {"is_old_safe": status["safe_to_delete"], "left": status["reasons"]}
            time.sleep(_LOOK_S)


def check_compared(found: Mapping[str, Any], plan: UpdatePlan) -> None:
    """Raises NotTakenError once the answers differ more, fail more often or come later than the plan allows."""
    example = f", {_example(found)}" if found["examples"] else ""
    num_answered = max(sum(found[name] for name in _ANSWERED), plan.min_compared)
    if found["different"] > plan.max_different * max(found["compared"], plan.min_compared):
        raise NotTakenError(
            f"the new generation answers differently: {found['different']} of {found['compared']} answers{example}"
        )
    if found["failed"] > plan.max_failed * num_answered:
        raise NotTakenError(f"{found['failed']} of {num_answered} copies failed at the new generation{example}")
    name, what = ("ttft_ms", "first tokens") if found["ttft_ms"]["count"] >= _LEAST_TIMES else ("latency_ms", "answers")
    times = found[name]
    if found["compared"] < plan.min_compared or times["count"] < _LEAST_TIMES:
        return
    old, new = times["old"]["p90"], times["new"]["p90"]
    if new > plan.max_ttft_ratio * old + _SLACK_MS:
        raise NotTakenError(
            f"the new generation's {what} come later: p90 {new:g} ms, of the old one {old:g} ms"
            f" (--max-ttft-ratio {plan.max_ttft_ratio:g})"
        )


def _example(found: Mapping[str, Any]) -> str:
    first = found["examples"][0]
    return f"such as request {first['request_id']} ({first['path']}: {first['reason']})"


def _compared(found: Mapping[str, Any]) -> str:
    counts = " ".join(f"{name}={found[name]}" for name in (*_ANSWERED, "dropped", "left_out") if found[name])
    return f"{found['compared']} answers compared, {counts or 'no copies so far'}"


def _not_ready(status: Mapping[str, Any]) -> str:
    """Return what is missing."""
    missing = [f"{name}: {one['state']}" for name, one in status["workers"].items() if one["state"] != "ready"]
    if missing or not status["workers"]:
        return ", ".join(missing) or "it has no workers yet"
    return "" if status["status"] in ("ready", "degraded", "draining") else status["status"]
