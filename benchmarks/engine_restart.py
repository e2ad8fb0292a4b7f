"""How long a killed engine takes to its next token: with weights of its own, mapped, and with a process that waits.

Engine processes under their supervisor, without a server: killed while they serve, and asked again as soon as they
are ready. `ready` and `first token` are seconds from the kill. `load` is what the engine process takes from its
start, or as a standby from the moment it is told to begin.

    python benchmarks/engine_restart.py                     # 8B shape of random weights, for a GPU: 16 GB
    python benchmarks/engine_restart.py --shape 1b --kills 2
    python benchmarks/engine_restart.py --model models/tiny-llama   # a checkpoint

The table comes first, then one line of JSON, then the aims.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.engine_gpu import SHAPES, write_config
from bireme.discovery import run_folder
from bireme.engines.memory.service import MemoryService
from bireme.engines.memory.wire import socket_path
from bireme.engines.stub.client import EngineClient
from bireme.errors import UnavailableError
from bireme.messages import EngineRequest, Finish, SamplingParams
from bireme.metrics import Registry
from bireme.recipe_files import load_recipe

AIM_S = 2.0
MODES = {  # name -> memory service, standby
    "own weights": (False, False),
    "mapped": (True, False),
    "own weights, standby": (False, True),
    "mapped, standby": (True, True),
}
_LIMIT_S = 300.0


class FirstToken:
    """A sink that notes when the first token comes."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.error = ""

    def push(self, tokens: Any, logprobs: Any = None, prompt_logprobs: Any = None) -> None:
        self.came.set()

    def finish(self, finish: Finish) -> None:
        self.error = finish.error
        self.came.set()


def main() -> None:
    options = parse()
    os.environ.setdefault("BIREME_ENGINE_PYTHON", sys.executable)
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        model = options.model or str(Path(folder) / "model")
        if not options.model:
            write_config(model, options.shape)
        rows = [measure(Path(folder), model, mode, options) for mode in options.modes]
    report(rows, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="of random weights")
    parser.add_argument("--model", default="", help="folder of a checkpoint instead")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--max-batch-size", type=int, default=64)
    return parser.parse_args()


def measure(folder: Path, model: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    has_service, has_standby = MODES[mode]
    run_dir = folder / f"run-{mode.replace(' ', '-').replace(',', '')}"
    run_dir.mkdir(mode=0o700)
    config = {
        "load_format": "auto" if options.model else "dummy",
        "max_batch_size": options.max_batch_size,
        "max_seq_len": 4096 if not options.model else None,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.5, "max_tokens": None if options.shape == "8b" else 8192},
        "guided_decoding_backend": None,
    }
    recipe_file = {
        "model": model,
        "workers": {"decode": {"engine": "torch", "engine_config": config}},
        "supervisor": {"restart_backoff_s": 0.0, "standby": has_standby, "max_restarts": options.kills + 1},
        "memory_service": {"enabled": has_service},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe_file))
    service = MemoryService(socket_path(run_dir), run_folder.deployment_key(run_dir)) if has_service else None
    if service is not None:
        service.start()
    metrics, began = Registry("decode"), time.perf_counter()
    client = EngineClient(load_recipe(folder, override=""), "decode", metrics, logging.getLogger("bench"), run_dir)
    try:
        client.start()
        first_start_s = time.perf_counter() - began
        first_token(client)
        found = []
        for _ in range(options.kills):
            if has_standby:
                wait_for_standby(client)
            found.append(restart(client))
    finally:
        client.stop()
        if service is not None:
            service.stop()
    ready, tokens, loads = (statistics.median(column) for column in zip(*found, strict=True))
    row = {"mode": mode, "first_start_s": first_start_s, "ready_s": ready, "first_token_s": tokens, "load_s": loads}
    return row | {"worst_first_token_s": max(token for _, token, _ in found)}


def wait_for_standby(client: EngineClient) -> None:
    """Wait until the process that waits has loaded its libraries: its CPU time stands still."""
    supervisor: Any = client._supervisor
    pid, before = supervisor._standby.process.pid, -1
    while True:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        used = int(fields[11]) + int(fields[12])
        if used == before and fields[0] == "S":
            return
        before = used
        time.sleep(0.5)


def restart(client: EngineClient) -> tuple[float, float, float]:
    """Kill the engine; return seconds to ready, to the first token, and of its load."""
    life, began = client.life, time.perf_counter()
    os.kill(client.pid, signal.SIGKILL)
    while client.life in (0, life):
        if time.perf_counter() - began > _LIMIT_S:
            raise SystemExit(f"the engine is not back: {client.state}")
        time.sleep(0.001)
    ready_s = time.perf_counter() - began
    load_s = client.capacity.load_s
    first_token(client)
    return ready_s, time.perf_counter() - began, load_s


def first_token(client: EngineClient) -> None:
    prompt = np.arange(10, 138, dtype="<i4").tobytes()
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    sink, deadline = FirstToken(), time.monotonic() + _LIMIT_S
    while True:
        try:
            client.submit(EngineRequest(prompt=prompt, sampling=sampling), sink)
            break
        except UnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)
    if not sink.came.wait(_LIMIT_S) or sink.error:
        raise SystemExit(f"no token: {sink.error or 'none came'}")


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    what = options.model or f"{options.shape} shape, random weights"
    print(f"{what}; {options.kills} kills each, medians\n")
    print(f"{'':22}{'first start s':>14}{'ready s':>10}{'first token s':>15}{'worst s':>10}{'load s':>9}")
    for row in rows:
        figures = (row["ready_s"], row["first_token_s"], row["worst_first_token_s"], row["load_s"])
        columns = zip(figures, (10, 15, 10, 9), strict=True)
        print(
            f"{row['mode']:22}{row['first_start_s']:14.2f}{''.join(f'{value:{width}.2f}' for value, width in columns)}"
        )
    print(json.dumps({"what": what, "rows": rows}))
    for row in rows:
        if row["mode"] == "mapped, standby":
            seconds = row["first_token_s"]
            word = "ok" if seconds <= AIM_S else "BELOW"
            print(f"aim: first token after a kill, {row['mode']} {seconds:.2f} s, {AIM_S:g} s asked for: {word}")


if __name__ == "__main__":
    main()
