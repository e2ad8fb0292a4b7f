"""An outlet that writes down what a stream asks of Triton, and objects to what kills the real one."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from bireme.types import Response, Tensors


@dataclass
class Words:
    words: list[str]
    is_last: bool = False
    is_urgent: bool = False
    num_bytes: int = 10

    def merge(self, later: Response) -> Response | None:
        return Words(self.words + later.words) if isinstance(later, Words) else None

    def tensors(self) -> Tensors:
        return {"words": np.array(self.words, object)}


class Recorder:
    """Events: ("send", words, is_final), ("fail", text), ("close",)."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.gone = False
        self.error: Exception | None = None
        self.is_open = threading.Event()
        self.is_open.set()
        self.is_sending = threading.Event()
        self.ended = threading.Event()
        self.num_polls = 0

    def send(self, response: Response, is_final: bool) -> None:
        self.is_sending.set()
        self.is_open.wait(10)
        if self.error is not None:
            raise self.error
        self._note(("send", list(response.tensors()["words"]), is_final), is_final)

    def fail(self, error: BaseException) -> None:
        self._note(("fail", str(error)), True)

    def close(self) -> None:
        self._note(("close",), True)

    def is_cancelled(self) -> bool:
        assert not self.ended.is_set(), "is_cancelled() after the final flag: the server is dead"
        self.num_polls += 1
        return self.gone

    def _note(self, event: tuple[Any, ...], is_final: bool) -> None:
        assert not self.ended.is_set(), f"{event} after the final flag"
        self.events.append(event)
        if is_final:
            self.ended.set()
