"""Load a server for a while; every token is checked, memory and processes are watched.

Starts a server on the mocker (--recipe, --step-ms), or loads a running one (--grpc, --http, --metrics, --pid).
Fails, with exit code 1, on an error, a lost, repeated or reordered token, a text that is not that of the tokens,
a process that died, memory that grows, or KV blocks, leases and streams left behind at the end.

    python tools/soak.py --paths generate,decode --streams 64 --seconds 60        # 64 of each at once
    python tools/soak.py --paths generate --streams 256 --seconds 300
    python tools/soak.py --paths http --streams 64 --seconds 60 --step-ms 20
    python tools/soak.py --paths sse --streams 256 --seconds 60                   # through the OpenAI frontend
    python tools/soak.py --paths generate --streams 200 --seconds 30 --drop 0.5 --recipe recipes/mocker-disagg

Progress goes to stderr, then a table; the very last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.load.load_process import LoadProcess
from benchmarks.load.memory import Growth, MemoryLog
from benchmarks.load.metrics_page import left_behind, read_page
from benchmarks.load.processes import alive, roles
from benchmarks.options import chosen
from bireme.launch import Ports, Server, free_port, free_ports, start_server
from bireme.launch.console import Console
from bireme.launch.frontend import FrontendProcess, FrontendSettings
from bireme.recipe_files import load_recipe

PATHS = ("generate", "decode", "http", "bus", "sse")
IDLE_WITHIN_S = 15.0  # after the load, blocks, leases and streams must be gone
PROGRESS_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    grpc: str
    http: str
    metrics: str
    pid: int | None  # of tritonserver; None: unknown, its processes are not watched
    shm_prefix: str = ""  # "": all of /dev/shm is counted
    openai: str = ""  # the frontend's address
    others: Mapping[str, int] = field(default_factory=dict)  # role -> pid of processes that are not tritonserver's

    def address(self, path: str) -> str:
        return {"http": self.http, "sse": self.openai}.get(path, self.grpc)


class Load:
    """One load process and a thread that reads it."""

    def __init__(self, path: str, target: Target, arguments: argparse.Namespace) -> None:
        self.path = path
        self.progress: dict[str, Any] = {}
        self.report: dict[str, Any] = {}
        self.problem = ""
        options = {
            "target": target.address(path),
            "streams": arguments.streams,
            "seconds": arguments.seconds,
            "prompt_tokens": arguments.prompt_tokens,
            "max_tokens": arguments.max_tokens,
            "tokenizer": arguments.tokenizer,
            "drop": arguments.drop or None,
            "stall_s": arguments.stall_s,
            "stagger": arguments.stagger,
            "progress_s": 1,
        }
        self.process = LoadProcess(path, options)
        self._thread = threading.Thread(target=self._read, name=f"load-{path}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self.process.__exit__(None, None, None)

    def _read(self) -> None:
        try:
            for event in self.process.events():
                if event["event"] == "progress":
                    self.progress = event
                elif event["event"] == "report":
                    self.report = event
        except (RuntimeError, ValueError) as error:
            self.problem = str(error)


def main() -> int:
    arguments = parse_arguments()
    with ExitStack() as stack:
        target = stack.enter_context(started(arguments)) if arguments.pid is None else given(arguments)
        loads, memory, deaths = soak(target, arguments)
        behind = wait_until_idle(target.metrics)
    growth = memory.growth(arguments.max_growth_mb)
    problems = find_problems(loads, growth, deaths, behind)
    print_result(loads, growth, problems)
    document = {
        "paths": arguments.paths,
        "streams": arguments.streams,
        "seconds": arguments.seconds,
        "drop": arguments.drop,
        "loads": {load.path: load.report for load in loads},
        "memory": {role: item.as_dict() for role, item in growth.items()},
        "left_behind": behind,
        "problems": problems,
    }
    print(json.dumps(document, separators=(",", ":")))
    return 1 if problems else 0


@contextmanager
def started(arguments: argparse.Namespace) -> Iterator[Target]:
    """Run a server of our own on the recipe, its mockers at the given pace."""
    pace = {"engine_config": {"mocker": {"step_ms": arguments.step_ms}}}
    override = json.dumps({"workers": dict.fromkeys(load_recipe(arguments.recipe).workers, pace)})
    ports = Ports(*range(arguments.port, arguments.port + 3)) if arguments.port else free_ports()
    with start_server(arguments.recipe, ports=ports, override=override) as server, ExitStack() as stack:
        openai, others = "", {}
        if "sse" in arguments.paths:
            port = arguments.port + 3 if arguments.port else free_port()
            frontend = stack.enter_context(
                FrontendProcess(frontend_settings(arguments, port, server), Console("warning"))
            )
            openai, others = f"127.0.0.1:{port}", frontend.roles()
        yield Target(server.grpc, server.http, server.metrics, server.pid, server.run_folder.shm_prefix, openai, others)


def frontend_settings(arguments: argparse.Namespace, port: int, server: Server) -> FrontendSettings:
    options = ("--no-access-log", "--log-level", "warning", "--processes", str(arguments.frontend_processes))
    return FrontendSettings(recipe=arguments.recipe, grpc=server.grpc, port=port, drain_timeout_s=5, arguments=options)


def given(arguments: argparse.Namespace) -> Target:
    return Target(arguments.grpc, arguments.http, arguments.metrics, arguments.pid or None, openai=arguments.openai)


def soak(target: Target, arguments: argparse.Namespace) -> tuple[list[Load], MemoryLog, list[str]]:
    """Run the loads to their end; returns what was seen of memory, and the roles that died."""
    processes = (roles(target.pid) if target.pid else {}) | dict(target.others)
    memory = MemoryLog(processes, target.shm_prefix)
    began_at = reported_at = time.monotonic()
    loads = [Load(path, target, arguments) for path in arguments.paths]
    try:
        while any(load.is_running for load in loads):
            time.sleep(1.0)
            now = time.monotonic()
            if now - began_at > arguments.warmup_s:
                memory.sample()
            if now - reported_at >= PROGRESS_S:
                reported_at = now
                print_progress(now - began_at, loads, memory)
    finally:
        for load in loads:
            load.close()
    return loads, memory, died(processes)


def died(processes: Mapping[str, int]) -> list[str]:
    return sorted(set(processes) - set(alive(processes)))


def wait_until_idle(metrics: str) -> dict[str, float]:
    """Return what is still held IDLE_WITHIN_S after the load; nothing is as it should be."""
    deadline = time.monotonic() + IDLE_WITHIN_S
    while True:
        try:
            behind = left_behind(read_page(metrics))
        except OSError as error:
            return {f"no metrics at {metrics}: {error}": 1.0}
        if not behind or time.monotonic() > deadline:
            return behind
        time.sleep(0.5)


def find_problems(
    loads: list[Load], growth: Mapping[str, Growth], deaths: list[str], behind: Mapping[str, float]
) -> list[str]:
    problems = [f"{load.path}: {load.problem}" for load in loads if load.problem]
    for load in loads:
        problems += [f"{load.path}: {count} x {message}" for message, count in load.report.get("errors", {}).items()]
        if not load.report.get("requests"):
            problems.append(f"{load.path}: no request ended as it should")
    problems += [f"process died: {role}" for role in deaths]
    problems += [f"{role} grows: {item.describe()}" for role, item in growth.items() if not item.is_flat]
    return problems + [f"left behind: {series} = {value:g}" for series, value in behind.items()]


def print_progress(elapsed_s: float, loads: list[Load], memory: MemoryLog) -> None:
    counts = " ".join(
        f"{load.path}.tokens={load.progress.get('tokens', 0)} {load.path}.requests={load.progress.get('requests', 0)}"
        f" {load.path}.dropped={load.progress.get('dropped', 0)} {load.path}.errors={load.progress.get('errors', 0)}"
        for load in loads
    )
    print(f"soak elapsed_s={elapsed_s:.0f} {counts} memory_mb={memory.latest_mb():.0f}", file=sys.stderr, flush=True)


def print_result(loads: list[Load], growth: Mapping[str, Growth], problems: list[str]) -> None:
    for load in loads:
        report = load.report
        if report:
            print(
                f"{load.path:<10} {report['requests']} requests, {report['dropped']} dropped,"
                f" {report['tokens']} tokens ({report['tokens_per_s']:.0f}/s),"
                f" TTFT p50/p99 {report['ttft_p50_ms']}/{report['ttft_p99_ms']} ms,"
                f" ITL p50/p99 {report['itl_p50_ms']}/{report['itl_p99_ms']} ms, longest gap {report['gap_max_ms']} ms"
            )
    for role, item in growth.items():
        print(f"{role:<26} {item.describe()}")
    for problem in problems:
        print(f"PROBLEM {problem}")
    print("soak failed" if problems else "soak passed")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--paths", type=chosen(PATHS), default=["generate"], help=f"loaded at once, of {','.join(PATHS)}"
    )
    parser.add_argument("--streams", type=int, default=64, help="of each path")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warmup-s", type=float, default=10.0, help="memory is not looked at before")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--drop", type=float, default=0.0, metavar="RATE", help="share of requests the client leaves")
    parser.add_argument("--stall-s", type=float, default=30.0, help="a request without news for so long has failed")
    parser.add_argument("--stagger", action="store_true", help="requests don't start and end together")
    parser.add_argument("--max-growth-mb", type=float, default=8.0, help="a process may grow so much, or by 5%%")
    parser.add_argument("--tokenizer", default="models/tiny-llama")
    parser.add_argument("--recipe", default="recipes/mocker", help="for a server of our own")
    parser.add_argument("--step-ms", type=float, default=5.0, help="for a server of our own")
    parser.add_argument("--port", type=int, default=0, help="first of four for a server of our own; 0: any free ones")
    parser.add_argument("--frontend-processes", type=int, default=1, help="for a server of our own")
    parser.add_argument("--pid", type=int, default=None, help="load this running tritonserver (0: pid not known)")
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    parser.add_argument("--http", default="127.0.0.1:8000")
    parser.add_argument("--metrics", default="127.0.0.1:8002")
    parser.add_argument("--openai", default="127.0.0.1:9000")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
