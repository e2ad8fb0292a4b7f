"""What a streamed chat costs the OpenAI frontend in instructions, beside another checkout: no quiet machine is needed.

On a machine that others use, or whose clock wanders, requests/s and CPU time of the same code differ by a tenth and
more from run to run. Instructions do not: callgrind counts those of the frontend's process, while tritonserver and the
mocker run as they are. They don't tell the time that memory, the kernel and waiting take: `frontend.py` does.

- chats of 32 tokens, 1 or several at a time; those of warming up are not counted, and what an idle frontend does is
  taken off
- range: of the rounds

    python benchmarks/instructions.py                          # this checkout alone
    python benchmarks/instructions.py --against ../before      # a worktree of the code before, with its own .venv
    python benchmarks/instructions.py --with '{"observability": {"timelines": {"max_entries": 1000}}}'  # beside without

Needs valgrind, as Debian's package has it. Progress goes to stderr; a table comes first, the very last line is one
JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
AIM = 1.03
_NUM_TOKENS = 32
_START_S, _ANSWER_S, _IDLE_S = 300.0, 120.0, 10.0
_CHAT = {
    "model": "mocker",
    "messages": [{"role": "user", "content": "Tell a story of a ship with two banks of oars and its crew of many."}],
    "max_tokens": _NUM_TOKENS,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.count:
        print(json.dumps(count(options)))
        return 0
    if shutil.which("valgrind") is None:
        print("valgrind is not installed; apt-get install valgrind", file=sys.stderr)
        return 2
    runs = [(CHECKOUT, options.settings)]
    if options.against:
        runs.append((options.against.resolve(), options.settings))
    elif options.settings:
        runs.append((CHECKOUT, {}))
    found = [counted_in(tree, settings, options) for tree, settings in runs]
    for streams in options.streams:
        here, *before = [statistics.median(one[str(streams)]) for one in found]
        low, high = min(found[0][str(streams)]), max(found[0][str(streams)])
        print(f"{streams:>3} at a time: {here / 1e6:.3f} million a chat ({low / 1e6:.3f} to {high / 1e6:.3f})")
        if before:
            word = "ok" if here / before[0] <= AIM else "BELOW"
            other = "the code before" if options.against else "without the settings"
            print(f"aim: {streams} at a time {here / before[0]:.3f} x {other}, {AIM:g} at most asked for: {word}")
    print(json.dumps({str(tree): one for tree, one in zip(("here", "before"), found, strict=False)}))
    return 0


def counted_in(tree: Path, settings: dict[str, Any], options: argparse.Namespace) -> dict[str, list[float]]:
    """Count in a process of the checkout's own Python: streams -> instructions a chat, of each round."""
    python = tree / ".venv" / "bin" / "python"
    program = [str(python if python.exists() else sys.executable), __file__, "--count", "--chats", str(options.chats)]
    program += ["--rounds", str(options.rounds), "--streams", ",".join(map(str, options.streams))]
    program += ["--with", json.dumps(settings)]
    print(f"counting in {tree.name}{f' with {settings}' if settings else ''}", file=sys.stderr, flush=True)
    output = subprocess.run(program, cwd=tree, stdout=subprocess.PIPE, text=True, check=True).stdout
    counted: dict[str, list[float]] = json.loads(output.splitlines()[-1])
    return counted


def count(options: argparse.Namespace) -> dict[int, list[float]]:
    """Serve the checkout that is the working folder, and count."""
    found: dict[int, list[float]] = {streams: [] for streams in options.streams}
    with (
        tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder,
        frontend(Path(folder), options.settings) as (port, counter),
    ):
        asyncio.run(chats(port, 40, 1))
        counter.switch_on()
        asyncio.run(chats(port, 16, 1))
        counter.take()
        began = time.monotonic()
        time.sleep(_IDLE_S)
        idle = counter.take() / (time.monotonic() - began)
        for _ in range(options.rounds):
            for streams, counted in found.items():
                began = time.monotonic()
                asyncio.run(chats(port, options.chats, streams))
                took_s = time.monotonic() - began
                counted.append((counter.take() - idle * took_s) / (options.chats // streams * streams))
                print(f"{streams} at a time: {counted[-1]:,.0f} a chat", file=sys.stderr, flush=True)
    return found


@contextlib.contextmanager
def frontend(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[int, Counter]]:
    """Serve the mocker without a pace, and the frontend under callgrind."""
    sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "tools")]
    from make_sample_model import make

    from bireme.launch import free_port, free_ports, start_server

    model = make(Path("models/tiny-llama").resolve(), "llama")
    engine = {"workers": {"decode": {"engine_config": {"mocker": {"step_ms": 0.0}}}}}
    override = json.dumps({"model": str(model), "pipeline": {"stall_timeout_s": 60}, **engine, **settings})
    port = free_port()
    with start_server("recipes/mocker", ports=free_ports(), override=override) as server:
        process = subprocess.Popen(
            [
                *("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counts"),
                *(sys.executable, "-m", "bireme.openai", "--recipe", "recipes/mocker", "--grpc", server.grpc),
                *("--port", str(port), "--no-access-log", "--log-level", "warning"),
            ],
            env={**os.environ, "BIREME_OVERRIDE": override, "PYTHONHASHSEED": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_ready(process, port)
            yield port, Counter(process.pid, folder)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Raises RuntimeError."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=30):
            return
        time.sleep(0.5)
    raise RuntimeError(f"the frontend was not ready within {_START_S:g} s, exit status {process.poll()}")


class Counter:
    """Instructions of a process under callgrind."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._pid, self._folder = pid, folder
        self._seen: set[Path] = set()

    def switch_on(self) -> None:
        self._control("-i", "on")

    def take(self) -> int:
        """Return how many there were since the last time."""
        self._control("-d")
        new = set(self._folder.glob("counts.*")) - self._seen
        self._seen |= new
        lines = [line for path in new for line in path.read_text().splitlines() if line.startswith("totals:")]
        return sum(int(line.split()[1]) for line in lines)

    def _control(self, *arguments: str) -> None:
        program = shutil.which("callgrind_control") or "callgrind_control"
        subprocess.run([program, *arguments, str(self._pid)], check=True, capture_output=True)


async def chats(port: int, num_chats: int, streams: int) -> None:
    """Ask for so many, each stream's on one connection. Raises AssertionError for an answer that is not whole."""
    body = json.dumps(_CHAT).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
    request = f"{head}{len(body)}\r\n\r\n".encode() + body

    async def stream() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        for _ in range(num_chats // streams):
            writer.write(request)
            answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), _ANSWER_S)
            assert answer.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in answer, answer[:500]
        writer.close()

    await asyncio.gather(*(stream() for _ in range(streams)))


def parse(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, counted as well")
    parser.add_argument(
        "--with", dest="settings", type=json.loads, default={}, metavar="JSON", help="settings over the recipe"
    )
    parser.add_argument("--streams", type=lambda text: [int(item) for item in text.split(",")], default=[1, 16])
    parser.add_argument("--chats", type=int, default=128, help="of each round, at least as many as streams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)  # the child's part
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
