"""Requests at a steady rate, none of which waits for another one's answer: what a planner's tests size for."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable

LIMIT_S = 180
_OUTPUT_TOKENS = 8


class SteadyLoad:
    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self._answers: list[object] = []
        self._asking: list[threading.Thread] = []

    def send(self, per_s: float, seconds: float = 0.0, until: Callable[[], bool] = lambda: True) -> None:
        """Send so many a second, so long and until that."""
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds or not until():
            assert now < began + LIMIT_S, f"it does not come within {LIMIT_S} s"
            self._asking.append(threading.Thread(target=self._ask, args=(len(self._asking),)))
            self._asking[-1].start()
            time.sleep(max(1 / per_s - (time.monotonic() - now), 0.0))

    def end(self) -> None:
        """Wait for all answers: none failed, none is short."""
        for thread in self._asking:
            thread.join(LIMIT_S)
        assert self._answers == [_OUTPUT_TOKENS] * len(self._asking)

    def _ask(self, number: int) -> None:
        prompt = [3 + (7 * number + at) % 900 for at in range(100)]  # none begins as another one
        body = {"model": self._model, "prompt": prompt, "max_tokens": _OUTPUT_TOKENS, "bireme": {"ignore_eos": True}}
        request = urllib.request.Request(f"{self._url}/v1/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
                self._answers.append(json.load(reply)["usage"]["completion_tokens"])
        except OSError as error:
            self._answers.append(str(error))
