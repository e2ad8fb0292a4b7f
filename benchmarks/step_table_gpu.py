"""A table of what the torch engine's steps take on a GPU, for the simulator and the advice.

An engine with its thread in this process, on random weights (bf16) of a known model's shape, without a server. Prompts
of `--isl` tokens with `--osl` tokens of answer come at random (Poisson), at each of `--rates`; then prompts of several
lengths alone, and a few at once. What is written is the engine's own table of its steps, as a launch leaves it in its
run folder: a launch under your load tells more.

    python benchmarks/step_table_gpu.py step_times.json                     # 8B shape, a minute
    python benchmarks/step_table_gpu.py step_times.json --shape tiny --quick  # also without a GPU, to see that it runs

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.arrivals_gpu import Asked, Running
from benchmarks.engine_gpu import SHAPES, write_config
from benchmarks.options import numbers
from bireme.sizing.step_times import FORMAT, NO_TRANSFER, StepPoint, StepTable, StepTimes, published

ALONE, AT_ONCE = 6, 4  # rounds of prompts of each length, and of each number of them
_ANSWER_S = 120.0


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        write_config(folder, options.shape)
        engine = Running(folder, options)
        for rate in options.rates:
            arrive(engine, rate, options)
        ask_apart(engine, options)
        points = msgspec.convert(msgspec.to_builtins(engine._core._parts.costs.points()), list[StepPoint])
        prompts_by = ", ".join(engine._forward.flash.names) or "torch's own kernels"
        engine.abort_all()
        engine.stop()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    known = StepTimes.read(options.like).table if options.like else None
    beside = f" Planned ahead, transfers: as in {options.like}." if known else ""
    command = f"benchmarks/step_table_gpu.py --isl {options.isl} --osl {options.osl}"
    table = StepTable(
        format=FORMAT,
        engine="torch",
        machine=f"{device}, {SHAPE_NAMES.get(options.shape, options.shape)}, bf16",
        source=f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, `{command}`; prompts by {prompts_by}.{beside}",
        plan_ahead_ms=known.plan_ahead_ms if known else 0.0,
        transfer=known.transfer if known else NO_TRANSFER,
        points=points,
    )
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    error = StepTimes.of(table).error
    print(f"{len(points)} points, of which the rule's are {error:.1%} off in the median, in {options.out}")
    print(json.dumps({"benchmark": "step_table_gpu", "points": len(points), "error": round(error, 4)}))


SHAPE_NAMES = {"8b": "Llama 3.1 8B's shape"}


def arrive(engine: Running, rate: float, options: argparse.Namespace) -> None:
    random, ends_at, asked = np.random.default_rng(3), time.monotonic() + options.seconds, list[Asked]()
    while time.monotonic() < ends_at:
        asked.append(engine.submit(options.isl, options.osl))
        time.sleep(random.exponential(1 / rate))
    wait_for(asked)
    print(f"{rate:g} requests/s: {len(asked)} answers", flush=True)


def ask_apart(engine: Running, options: argparse.Namespace) -> None:
    """Ask prompts alone, of whose steps each computes one, and some that come at once."""
    for length in options.lengths:
        for _ in range(ALONE):
            wait_for([engine.submit(length, 2)])
    for count in (2, 3, 4):
        for _ in range(AT_ONCE):
            wait_for([engine.submit(options.isl, 1) for _ in range(count)])


def wait_for(asked: list[Asked]) -> None:
    for one in asked:
        if not one.is_over.wait(_ANSWER_S) or one.error:
            raise SystemExit(f"a request was not answered: {one.error or f'{_ANSWER_S:g} s have passed'}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="file for the table")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--isl", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--osl", type=int, default=200, help="of an answer")
    parser.add_argument("--rates", type=numbers(float), default=[6.0, 10.0], help="requests a second: 6,10")
    parser.add_argument("--seconds", type=float, default=14.0, help="of each rate")
    parser.add_argument("--lengths", type=numbers(int), default=[500, 1000, 2000, 4000, 8000], help="of prompts alone")
    parser.add_argument("--like", choices=published(), help="a table whose transfers this one takes")
    parser.add_argument("--quick", action="store_true", help="few and short requests, no figures worth having")
    options = parser.parse_args()
    options.gap = 0.0
    if options.quick:
        options.isl, options.osl, options.rates, options.seconds, options.lengths = 40, 10, [4.0], 2.0, [50]
    return options


if __name__ == "__main__":
    main()
