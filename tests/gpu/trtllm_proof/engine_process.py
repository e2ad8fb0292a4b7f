"""One engine's process: takes names of rows from the program, and answers each with its outcome.

    python -m tests.gpu.trtllm_proof.engine_process LIFE FOLDER SOCKET

It sets no time limits: the program ends it, and has it say first where it hangs (SIGUSR1).
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from bireme.engines.trtllm.launchers import drop_launchers
from bireme.own_process import load_with_little_gc
from tests.gpu.trtllm_proof.bench import Bench, Failed, Skipped
from tests.gpu.trtllm_proof.lives import LIVES, Row

_TAIL = 12  # lines of a traceback


def main() -> None:
    name, folder, descriptor = sys.argv[1:]
    load_with_little_gc()  # as bireme's own engine processes
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    drop_launchers(os.environ)  # before a row imports tensorrt_llm
    channel = socket.socket(fileno=int(descriptor))
    channel.set_inheritable(False)  # TensorRT-LLM's own processes must not keep it open
    life = LIVES[name]
    bench = Bench(Path(folder), life.stage, life.yaml)
    with channel.makefile("r") as asked, channel.makefile("w") as told:
        for line in asked:
            row = line.strip()
            outcome = run(life.rows[row], bench)
            told.write(json.dumps(outcome) + "\n")
            told.flush()
            if row == "start" and outcome["outcome"] == "ok":
                threading.Thread(target=end_with, args=(bench,), daemon=True).start()
    bench.stop()


def run(row: Row, bench: Bench) -> dict[str, Any]:
    """Return the outcome in the report's form."""
    began = time.monotonic()
    bench.warnings = []
    trace: list[str] = []
    try:
        outcome, reason = "ok", row(bench)
    except Skipped as why:
        outcome, reason = "skipped", str(why)
    except Exception as error:
        outcome, reason = "fail", str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        trace = traceback.format_exc().splitlines()[-_TAIL:]
    seconds = round(time.monotonic() - began, 2)
    return {"outcome": outcome, "seconds": seconds, "reason": reason, "warnings": bench.warnings, "traceback": trace}


def end_with(bench: Bench) -> None:
    """The engine ends its process when TensorRT-LLM is at fault: so does this one, whatever row is waiting."""
    bench.engine.has_exited.wait()
    os._exit(bench.engine.exits[-1])


if __name__ == "__main__":
    main()
