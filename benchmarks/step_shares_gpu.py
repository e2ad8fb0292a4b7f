"""Where a decode step's time goes, what a logits processor costs it, and what attention windows save of it.

An engine with its thread in this process's child, on random weights (bf16) of a known model's shape, without a server.

* shares: GPU time of a step by kernels, of rows that decode alone and of rows that prompts join at random, by torch's
  profiler. Nsight Systems shows the same beside what the host does where BIREME_NVTX=1 is set (docs/tuning.md).
* processors: a step of rows without one, with the cheapest one (it sets one score) on one row and on all, and with the
  built-in penalties of `logits_processors`. A step of such rows is not started ahead.
* windows: a step of long contexts where five of six layers see the last 512 tokens, of one where all see all, and
  bytes of KV that the engine holds for them.

    python benchmarks/step_shares_gpu.py                       # 8B shape, two minutes
    python benchmarks/step_shares_gpu.py --shape tiny --quick  # also without a GPU, to see that it runs

The table comes first, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

CHEAPEST = "bench_cheapest"
PENALTY = ({"name": "repetition_penalty", "args": {"penalty": 1.2}},)
WINDOW, PERIOD = 512, 6  # one of so many layers sees all
_GROUPS = (  # by what kernels' names have
    ("attention", ("_split_kernel", "_attention_kernel", "_join", "_prefill_kernel", "_chunk_kernel", "flash")),
    ("products", ("_linear_kernel", "_rows_kernel", "gemm", "nvjet", "cutlass", "splitk", "cublas")),
    ("norms, gate, positions", ("_norm_kernel", "_gate_kernel", "_rotate_kernel", "_cap_kernel")),
    ("draw", ("_draw_kernel",)),
    ("copies", ("memcpy", "memset", "_copy_kernel")),
)


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(one(options)))
        return
    found = {child: in_a_process(child, options) for child in ("whole", "windows")}
    report(found, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", default="8b", help="of benchmarks/engine_gpu.py")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=1000, help="tokens of each row's prompt")
    parser.add_argument("--long", type=int, default=8000, help="the same, where windows are compared")
    parser.add_argument("--long-rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=150, help="measured a cell")
    parser.add_argument("--quick", action="store_true", help="few rows and steps, no figures worth having")
    parser.add_argument("--child", choices=("whole", "windows"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rows, options.context, options.long, options.long_rows, options.steps = 2, 20, 600, 2, 10
    options.gap = 0.0  # what arrivals_gpu.py reads
    return options


def in_a_process(child: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", child, "--shape", options.shape, *(["--quick"] * options.quick)]
    for name in ("rows", "context", "long", "long_rows", "steps"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{child} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def one(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a new process finds, which has the GPU to itself."""
    import torch

    from benchmarks.arrivals_gpu import Running
    from benchmarks.engine_gpu import write_config
    from bireme.logits import registry
    from bireme.own_process import freeze_gc

    registry.register(CHEAPEST, lambda context: SetOne())
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        config = write_config(folder, options.shape)
        windows = [WINDOW] * (PERIOD - 1) + [0x7FFFFFFF] if options.child == "windows" else None
        engine = Running(folder, options, windows=windows)
        freeze_gc()
        found: dict[str, Any] = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"}
        found["layers"] = config.num_hidden_layers
        if options.child == "whole":
            found["steps"] = steps_with_processors(engine, options)
            if torch.cuda.is_available():
                found["shares"] = {name: shares(engine, options, name == "joined") for name in ("alone", "joined")}
        found["long"] = long_steps(engine, options)
        engine.stop()
    return found


class SetOne:
    """The cheapest processor that there can be."""

    reads_token_ids = False

    def __call__(self, token_ids: Any, logits: Any) -> None:
        logits[7] = 1.0


def steps_with_processors(engine: Any, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return ms of a step, by what its rows have."""
    from bireme.messages import ProcessorCall

    cheapest = (ProcessorCall(CHEAPEST),)
    penalty = tuple(ProcessorCall(call["name"], call["args"]) for call in PENALTY)
    found = {}
    for name, calls, count in (
        ("none", (), 0),
        ("cheapest on one row", cheapest, 1),
        ("cheapest on all", cheapest, options.rows),
        ("repetition_penalty on all", penalty, options.rows),
        ("none, again", (), 0),
    ):
        asked = [
            engine.submit(options.context, 400 + 2 * options.steps, logits_processors=calls if at < count else ())
            for at in range(options.rows)
        ]
        found[name] = watched_ms(engine, asked, options.steps)
    return found


def long_steps(engine: Any, options: argparse.Namespace) -> dict[str, float]:
    asked = [engine.submit(options.long, 400 + 2 * options.steps) for _ in range(options.long_rows)]
    return watched_ms(engine, asked, options.steps)


def watched_ms(engine: Any, asked: list[Any], steps: int) -> dict[str, float]:
    """Return ms between a stream's tokens once all have some, and MiB of KV in use meanwhile."""
    from benchmarks.arrivals_gpu import ms, wait_until

    wait_until(lambda: all(len(one.times) > 8 or one.is_over.is_set() for one in asked))
    first, watched = len(asked[0].times), asked[0]
    wait_until(lambda: len(watched.times) > first + steps or watched.is_over.is_set())
    parts = engine._core._parts
    blocks = zip(parts.manager.pools, parts.accounts._block_bytes, strict=True)
    held = sum(pool.num_referenced * num_bytes for pool, num_bytes in blocks)
    assert not any(one.error for one in asked), [one.error for one in asked]
    engine.abort_all()
    gaps = watched.gaps[first:]
    return {"p50_ms": ms(np.percentile(gaps, 50)), "p99_ms": ms(np.percentile(gaps, 99)), "kv_mib": held >> 20}


def shares(engine: Any, options: argparse.Namespace, is_joined: bool) -> dict[str, Any]:
    """Return GPU ms a step by group and by kernel, of rows that decode; `is_joined`: and that prompts join."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.arrivals_gpu import wait_until

    asked = [engine.submit(options.context, 4000) for _ in range(options.rows)]
    wait_until(lambda: all(len(one.times) > 8 for one in asked))
    ended = threading.Event()

    def join() -> None:
        random = np.random.default_rng(3)
        while not ended.wait(random.exponential(1 / 20)):
            engine.submit(int(random.integers(16, 500)), 1)

    joining = threading.Thread(target=join)
    if is_joined:
        joining.start()
    watched, first = asked[0], len(asked[0].times)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        time.sleep(1.0)
    num_steps = len(watched.times) - first
    ended.set()
    if is_joined:
        joining.join()
    engine.abort_all()
    names: dict[str, float] = defaultdict(float)
    for event in profiled.events():
        if event.device_type.name == "CUDA":
            names[event.name] += event.device_time_total / 1e3 / max(num_steps, 1)
    groups: dict[str, float] = defaultdict(float)
    for name, taken in names.items():
        groups[group_of(name)] += taken
    most = sorted(names.items(), key=lambda item: -item[1])[:8]
    return {
        "steps": num_steps,
        "ms_a_step": round(sum(names.values()), 3),
        "groups": {name: round(taken, 3) for name, taken in sorted(groups.items(), key=lambda item: -item[1])},
        "kernels": {name[:60]: round(taken, 3) for name, taken in most},
    }


def group_of(kernel: str) -> str:
    lower = kernel.lower()
    return next((group for group, parts in _GROUPS if any(part in lower for part in parts)), "others")


def report(found: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    whole, windows = found["whole"], found["windows"]
    print(f"{options.shape} shape, bf16, {whole['device']}, {platform.processor() or 'CPU'}")
    plain = whole["steps"]["none"]["p50_ms"]
    for name, row in whole["steps"].items():
        more = 1e3 * (row["p50_ms"] - plain)
        print(f"processors: {name:27} {row['p50_ms']:.2f} ms p50, {row['p99_ms']:.2f} p99, {more:+.0f} us")
    for name, row in whole.get("shares", {}).items():
        parts = ", ".join(
            f"{group} {taken:.2f} ({taken / row['ms_a_step']:.0%})" for group, taken in row["groups"].items()
        )
        print(f"shares, {options.rows} rows {name}: {row['ms_a_step']:.2f} ms of GPU a step: {parts}")
        for kernel, taken in row["kernels"].items():
            print(f"    {taken:7.3f} ms  {kernel}")
    one, other = whole["long"], windows["long"]
    print(
        f"windows, {options.long_rows} of {options.long}: {one['p50_ms']:.2f} ms, {one['kv_mib']} MiB of KV without,"
        f" {other['p50_ms']:.2f} ms, {other['kv_mib']} MiB with {PERIOD - 1} of {PERIOD} layers at {WINDOW}"
    )
    print(json.dumps({"benchmark": "step_shares_gpu", "options": vars(options), "found": found}))


if __name__ == "__main__":
    main()
