"""Runs in the Python that has aiconfigurator-core, which wants a numpy that bireme's servers can't have.

A line of JSON asks for a time, a line answers: {"layout": {...}, "prefill": tokens} or {"layout": {...}, "rows": ...,
"context": ...} -> {"ms": ...} or {"error": ...}. Imports nothing of bireme.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the library prints
    try:
        from aiconfigurator_core import sdk
    except ImportError as error:
        answers.write(json.dumps({"error": f"aiconfigurator-core can't be imported: {error}"}) + "\n")
        return
    answers.write(json.dumps({"ready": True}) + "\n")
    engines: dict[str, Any] = {}
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            answer = {"ms": _time(sdk, engines, json.loads(line))}
        except Exception as error:  # whatever the library raises for a layout, the next may have its tables
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def _time(sdk: Any, engines: dict[str, Any], asked: dict[str, Any]) -> float:
    key = json.dumps(asked["layout"], sort_keys=True)
    if key not in engines:
        engines[key] = sdk.EngineHandle.compile(backend="trtllm", **asked["layout"])
    if "prefill" in asked:
        return float(engines[key].predict_prefill_latency(1, asked["prefill"]))
    return float(engines[key].predict_decode_latency(asked["rows"], asked["context"]))


if __name__ == "__main__":
    main()
