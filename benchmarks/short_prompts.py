"""What a short prompt pays for a disaggregated recipe: its TTFT over that of the same model aggregated.

Both are served at once; requests go to one and the other in turns, one at a time, each with a prompt of its own. A
prompt that is shorter than its transfer is worth stays with decode (`router.transfer_ms`), so there should be little.

    python benchmarks/short_prompts.py
    python benchmarks/short_prompts.py --prompt-tokens 60 --starts 1

The table comes first, then the aim; the last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.load.meter import percentile
from benchmarks.routing import ask, prompt_of
from bireme.launch import Server, start_server
from bireme.workers.grpc import GrpcChannel

RECIPES = ("recipes/tiny-agg", "recipes/tiny")
AIM = 1.1  # the second's TTFT p50 over the first's
WARM_UP = 20  # requests of each


def main() -> None:
    options = parse()
    rows = []
    for start in range(options.starts):
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(start_server(recipe)) for recipe in RECIPES]
            aggregated, apart = asyncio.run(measure(servers, options, start))
        ratio = apart / aggregated
        rows.append({"aggregated_ms": aggregated, "disaggregated_ms": apart, "ratio": ratio})
        print(f"start {start + 1}  aggregated {aggregated:6.2f} ms  disaggregated {apart:6.2f} ms  {ratio:.3f}")
    worst = max(row["ratio"] for row in rows)
    what = f"TTFT p50 of {options.prompt_tokens} tokens over aggregated's, worst start"
    print(f"aim: {what} {worst:.3f}, at most {AIM} asked for: {'ok' if worst <= AIM else 'BELOW'}")
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps({"benchmark": "short_prompts", "rows": rows} | machine))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=20)
    parser.add_argument("--requests", type=int, default=300, help="of each recipe and start")
    parser.add_argument("--starts", type=int, default=3)
    return parser.parse_args()


async def measure(servers: list[Server], options: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Return each server's TTFT p50 in ms."""
    draw = np.random.default_rng(seed)
    channels = [GrpcChannel(server.grpc) for server in servers]
    ttfts: list[list[float]] = [[] for _ in servers]
    try:
        for _ in range(WARM_UP + options.requests):
            for channel, seen in zip(channels, ttfts, strict=True):
                seen.append((await ask(channel, prompt_of(options.prompt_tokens, draw), 2)).ttft_s * 1000)
    finally:
        for channel in channels:
            await channel.close()
    aggregated, apart = (percentile(sorted(seen[WARM_UP:]), 0.5) for seen in ttfts)
    assert aggregated is not None and apart is not None
    return aggregated, apart


if __name__ == "__main__":
    main()
