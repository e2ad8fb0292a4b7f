"""The first requests of a torch engine on a GPU: are they answered as fast as later ones, or do they meet what is late?

Each start is a process of its own with random weights (bf16) of a known model's shape, the engine in it, no server:

* `alone`: a prompt of 16, 128 and 512 tokens, one after the other from the moment it is ready, then a hundred more of
  each. `ratio` is a first one's time to its first token over the median of the hundred.
* `load`: requests at random, 20 a second, from the moment it is ready. Told are the largest gaps between tokens of a
  stream, with the moment of each: of the first five seconds, and of each later five, in which prompts meet as well.

With each come seconds to ready and where they went, the graphs made before and after, and steps by path.

    python benchmarks/first_requests_gpu.py                      # 8B shape, three starts of each, four minutes
    python benchmarks/first_requests_gpu.py --shape tiny --quick  # also without a GPU, to see that it runs

The table comes first, then one line of JSON, then the aims.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.options import numbers

BEGAN_AT = time.perf_counter()
AIM_RATIO = 1.3  # of a first request's time to its first token over a later one's
AIM_GAP = 1.5  # of the largest gap over the median of those of later spans as long
LATER_S = 5.0  # from then on a load's gaps are later ones
_MOST_TOLD = 5
_EVENTS = ("first_graphs_made", "decode_graph_made", "mixed_graph_made", "prompt_graph_made", "graphs_made", "fa3_off",
           "graph_off", "mixed_graph_off", "prompt_graph_off", "mixed_off", "fused_off")  # fmt: skip


class Told(logging.Handler):
    """What the engine's log says of its start and its graphs, with the moment."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.events: list[tuple[float, str]] = []
        self.lines: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        name, _, rest = record.getMessage().partition(" ")
        if name in _EVENTS:
            self.events.append((time.perf_counter(), record.getMessage()))
        elif name in ("load_seconds", "step_paths", "prompt_attention"):
            self.lines[name] = rest


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(one_start(options)))
        return
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    for start in range(options.starts):
        for way in options.ways:
            found[way].append(in_a_process(way, start, options))
            tell(way, start, found[way][-1])
    device = next(row["device"] for rows in found.values() for row in rows)
    print(json.dumps({"benchmark": "first_requests_gpu", "device": device, "options": vars(options), "starts": found}))
    if device != "CPU" and options.shape == "8b":
        tell_aims(found)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8b", help="of benchmarks/engine_gpu.py")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=("alone", "load"), default=["alone", "load"])
    parser.add_argument("--lengths", type=numbers(int), default=[16, 128, 512])
    parser.add_argument("--later", type=int, default=100, help="requests of each length after the first")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the load")
    parser.add_argument("--quick", action="store_true", help="one start of few short requests, no figures worth having")
    parser.add_argument("--child", choices=("alone", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.starts, options.lengths, options.later, options.rate, options.seconds = 1, [8], 3, 20.0, 1.0
    options.gap = 0.0  # what arrivals_gpu.py reads
    return options


def in_a_process(way: str, start: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a new process finds: nothing is loaded there yet."""
    command = [sys.executable, __file__, "--child", way, "--seed", str(start), "--shape", options.shape]
    command += ["--lengths", ",".join(map(str, options.lengths)), "--later", str(options.later)]
    command += ["--rate", str(options.rate), "--seconds", str(options.seconds), *(["--quick"] * options.quick)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{way}, start {start + 1} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def one_start(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from benchmarks.arrivals_gpu import Running
    from benchmarks.engine_gpu import write_config
    from bireme.own_process import freeze_gc

    told, engine_log = Told(), logging.getLogger("bireme.engines.torch")
    engine_log.addHandler(told)
    engine_log.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        write_config(folder, options.shape)
        engine = Running(folder, options, is_prepared=False)
        freeze_gc()  # as an engine's process does when it is ready
        found = alone(engine, options) if options.child == "alone" else load(engine, options)
        engine.stop()
    counters = engine.metrics.take_delta().counters
    return found | {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "host": platform.processor(),
        "ready_s": round(engine.ready_s, 3),
        "process_s": round(engine.ready_at - BEGAN_AT, 3),
        "events": [[round(at - engine.ready_at, 3), event] for at, event in told.events],
        "log": told.lines,
        "steps": {labels[-1]: count for name, labels, count in counters if name == "bireme_engine_steps_total"},
    }


def alone(engine: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return ms to the first token, and to the end, of each length's first request and of later ones."""

    def ask(length: int) -> tuple[float, float]:
        asked = engine.submit(length, 4)
        assert asked.is_over.wait(60) and not asked.error, asked.error
        return 1e3 * asked.ttft, 1e3 * (asked.times[-1] - asked.began_at)

    first = {length: ask(length) for length in options.lengths}
    later: dict[int, list[tuple[float, float]]] = {length: [] for length in options.lengths}
    for _ in range(options.later):
        for length, times in later.items():
            times.append(ask(length))
    rows = []
    for length, times in later.items():
        ttfts, ends = zip(*times, strict=True)
        row = {"tokens": length, "first_ms": first[length][0], "median_ms": float(np.median(ttfts))}
        row |= {"worst_ms": max(ttfts), "first_end_ms": first[length][1], "median_end_ms": float(np.median(ends))}
        rows.append({name: round(value, 2) for name, value in row.items()})
    return {"rows": rows}


def load(engine: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the largest gaps of streams under requests at random, and what is usual later."""
    random, scale = np.random.default_rng(7 + options.seed), 0.05 if options.quick else 1.0
    asked, at = [], 0.0
    while (at := at + random.exponential(1 / options.rate)) < options.seconds:
        inputs, outputs = (
            int(np.clip(random.lognormal(np.log(mean * scale) - 0.32, 0.8), 4, 1500 * scale)) for mean in (235, 200)
        )
        time.sleep(max(0.0, engine.ready_at + at - time.perf_counter()))
        asked.append(engine.submit(inputs, outputs))
    for one in asked:
        assert one.is_over.wait(60) and not one.error, one.error
    gaps = [
        (after - engine.ready_at, 1e3 * (after - before))
        for one in asked
        for before, after in zip(one.times, one.times[1:], strict=False)
    ]
    edge = min(LATER_S, options.seconds / 2)
    early, later = ([gap for at, gap in gaps if (at >= edge) is is_later] or [0.0] for is_later in (False, True))
    spans = [
        [gap for at, gap in gaps if begin <= at < begin + edge] for begin in np.arange(edge, options.seconds, edge)
    ]
    seen, largest = set(), []
    for at, gap in sorted(gaps, key=lambda item: -item[1]):  # one of each step
        if round(at, 2) not in seen:
            seen.add(round(at, 2))
            largest.append([round(at, 2), round(gap, 1)])
    ttfts = [(one.began_at - engine.ready_at, 1e3 * one.ttft) for one in asked]
    return {
        "requests": len(asked),
        "early_max_ms": round(max(early), 1),
        "later_spans_max_ms": [round(max(span, default=0.0), 1) for span in spans],
        "later_p99_ms": round(float(np.percentile(later, 99)), 1),
        "later_p50_ms": round(float(np.percentile(later, 50)), 1),
        "largest": largest[:_MOST_TOLD],
        "early_ttft_p50_max_ms": quantiles([ttft for at, ttft in ttfts if at < edge]),
        "later_ttft_p50_max_ms": quantiles([ttft for at, ttft in ttfts if at >= edge]),
    }


def quantiles(values: list[float]) -> list[float]:
    return [round(float(np.median(values)), 1), round(max(values), 1)] if values else []


def tell(way: str, start: int, found: dict[str, Any]) -> None:
    print(
        f"{way}, start {start + 1} on {found['device']}: ready after {found['ready_s']:.2f} s ("
        f"{found['process_s']:.2f} of the process); {found['log']}"
    )
    for row in found.get("rows", ()):
        print(
            f"  {row['tokens']:>5} tokens: first {row['first_ms']:7.1f} ms, later {row['median_ms']:7.1f} (worst"
            f" {row['worst_ms']:.1f}), ratio {row['first_ms'] / row['median_ms']:.2f}; with three tokens more"
            f" {row['first_end_ms']:.1f}, later {row['median_end_ms']:.1f}"
        )
    if way == "load":
        print(
            f"  {found['requests']} requests: largest gap of the first {LATER_S:g} s {found['early_max_ms']} ms, of"
            f" later {LATER_S:g} s {found['later_spans_max_ms']}, later p99 {found['later_p99_ms']}, p50"
            f" {found['later_p50_ms']}; the largest, [second, ms]: {found['largest']}"
        )
        print(f"  TTFT p50 and largest: {found['early_ttft_p50_max_ms']}, later {found['later_ttft_p50_max_ms']} ms")
    print(f"  steps {found['steps']}")
    for at, event in found["events"]:
        print(f"  {at:+8.3f} s {event}")
    sys.stdout.flush()


def tell_aims(found: dict[str, list[dict[str, Any]]]) -> None:
    """The worst of all starts counts."""
    rows = [row for start in found.get("alone", ()) for row in start["rows"]]
    for length in dict.fromkeys(row["tokens"] for row in rows):
        ratio = max(row["first_ms"] / row["median_ms"] for row in rows if row["tokens"] == length)
        aim(f"first request of {length} tokens over the median of later ones", ratio, AIM_RATIO)
    if loads := found.get("load"):
        gap = max(start["early_max_ms"] / float(np.median(start["later_spans_max_ms"])) for start in loads)
        aim("largest gap of the first seconds over those of later spans, their median", gap, AIM_GAP)


def aim(what: str, found: float, asked: float) -> None:
    print(f"aim: {what} {found:.2f}, {asked:g} asked for: {'ok' if found <= asked else 'BELOW'}")


if __name__ == "__main__":
    main()
