"""A load in a process of its own: python -m benchmarks.load PATH --target HOST:PORT [options]

Events go to stdout, one JSON object a line: measuring, progress (with --progress-s), measured, and last the
report. Exit code 1 when anything was not as it should be.

    python -m benchmarks.load decode --target 127.0.0.1:8001 --streams 64 --seconds 10
    python -m benchmarks.load http --target 127.0.0.1:8000 --streams 64
    python -m benchmarks.load sse --target 127.0.0.1:9000 --streams 64
    python -m benchmarks.load engine --step-ms 5 --streams 64
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from typing import Any

from benchmarks.load.clients import PATHS, ClientOptions, make_client, mocker_workload
from benchmarks.load.meter import Meter
from benchmarks.load.runner import LoadPlan, Runner


def main() -> int:
    arguments = parse_arguments()
    meter = _event_loop_run(run(arguments))
    say("report", **meter.report().as_dict())
    return 1 if meter.errors else 0


async def run(arguments: argparse.Namespace) -> Meter:
    workload = mocker_workload(
        model_path=arguments.tokenizer,
        num_prompts=max(arguments.streams, 64),
        prompt_tokens=arguments.prompt_tokens,
        max_tokens=arguments.max_tokens,
        has_chats=arguments.path == "sse",
    )
    options = ClientOptions(
        target=arguments.target,
        stream_per_request=arguments.stream_per_request or arguments.drop > 0,
        model_path=arguments.tokenizer,
        step_ms=arguments.step_ms,
        step_log=arguments.step_log,
    )
    plan = LoadPlan(
        streams=arguments.streams,
        seconds=arguments.seconds,
        warmup_s=arguments.warmup_s,
        stall_s=arguments.stall_s,
        drop_share=arguments.drop,
        stagger=arguments.stagger,
    )
    runner = Runner(make_client(arguments.path, options), workload, plan)
    progress = asyncio.create_task(report_progress(runner.meter, arguments.progress_s))
    try:
        return await runner.run(lambda: say("measuring"), lambda: say("measured"))
    finally:
        progress.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await progress


async def report_progress(meter: Meter, interval_s: float) -> None:
    while interval_s > 0:
        await asyncio.sleep(interval_s)
        say(
            "progress",
            tokens=meter.tokens,
            requests=meter.requests,
            dropped=meter.dropped,
            errors=sum(meter.errors.values()),
        )


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description="Load one path and check it.")
    parser.add_argument("path", choices=PATHS)
    parser.add_argument("--target", default="127.0.0.1:8001", help="gRPC address; HTTP for `http` and `sse`")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warmup-s", type=float, default=1.5)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--tokenizer", default="models/tiny-llama", help="model folder: the ids' range and their text")
    parser.add_argument("--drop", type=float, default=0.0, help="share of requests that the client leaves")
    parser.add_argument("--stall-s", type=float, default=30.0, help="a request without news for so long has failed")
    parser.add_argument("--stream-per-request", action="store_true", help="gRPC: a stream of its own for each request")
    parser.add_argument("--stagger", action="store_true", help="requests don't start and end together")
    parser.add_argument("--progress-s", type=float, default=0.0)
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the engine in process")
    parser.add_argument("--step-log", default="", help="file for the step times of the engine in process")
    return parser.parse_args()


def _event_loop_run(coroutine: Any) -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


if __name__ == "__main__":
    sys.exit(main())
