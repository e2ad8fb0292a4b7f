"""What is wrong with an engine YAML: place, value, reason, remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Path = tuple[str, ...]  # keys from the top of the engine YAML
NOTHING = object()  # value of a key that is missing
_LONGEST_VALUE = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. An error keeps TensorRT-LLM from starting or serving; a warning is a known trap."""

    path: Path
    value: Any
    reason: str
    remedy: str
    severity: Literal["error", "warning"] = "error"
    worker: str = ""  # which worker's YAML, where several are looked at together
    is_by_release: bool = False  # a key or value that the contract does not list: another release may know it

    @property
    def key(self) -> str:
        return ".".join(self.path)

    def __str__(self) -> str:
        where = f"workers.{self.worker}: {self.key}" if self.worker else self.key
        shown = "" if self.value is NOTHING else f": {show(self.value)}"
        return f"{where}{shown}; {self.reason}; {self.remedy}"


def show(value: Any) -> str:
    """As YAML shows it, cut where it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def errors(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.severity == "error"]


def warnings(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.severity == "warning"]
