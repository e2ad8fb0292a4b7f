"""Runs the rows in engine processes of their own, tells the progress on stderr, and writes the report to stdout."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bireme.engines.trtllm import processes
from tests.gpu.trtllm_proof import machine
from tests.gpu.trtllm_proof.lives import LIVES

GOOD, BAD, NOTHING_TO_TRY = 0, 1, 2
LIVES_OF_ONE = 4  # that rows which hang or end their process may take
_TELL_S = 15.0  # how often a row that takes long is told of
_STOP_S = 30.0  # for a life to end in order
_LOG_LINES = 40
_ENVIRONMENT = {
    "TRTLLM_NO_USAGE_STATS": "1",  # late releases report their use to NVIDIA: a proof is nobody's use
    "OMPI_ALLOW_RUN_AS_ROOT": "1",  # containers without a user of their own
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass
class Outcome:
    """One row of the report."""

    name: str
    outcome: Literal["ok", "fail", "skipped"]
    seconds: float = 0.0
    reason: str = ""
    warnings: list[str] = field(default_factory=list)
    traceback: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.outcome:7}  {self.seconds:6.1f} s  {self.name:36}  {' '.join(self.reason.split())[:300]}"


@dataclass(frozen=True)
class Limits:
    start_s: float
    row_s: float

    def of(self, row: str) -> float:
        return self.start_s if row in ("start", "model", "contract") else self.row_s


class EngineProcess:
    """One life, on some GPUs."""

    def __init__(self, life: str, folder: Path, gpus: str | None) -> None:
        self.has_ended = False
        self._log = folder / f"{life}.log"
        ours, theirs = socket.socketpair()
        environment = os.environ | _ENVIRONMENT
        paths = [str(machine.CHECKOUT), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        command = [
            sys.executable,
            "-P",
            "-m",
            "tests.gpu.trtllm_proof.engine_process",
            life,
            str(folder),
            str(theirs.fileno()),
        ]
        with self._log.open("ab") as log:
            self._begins_at = log.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        theirs.close()
        self._socket = ours

    def ask(self, row: str, name: str, limit_s: float) -> Outcome:
        """Have it run a row. A row without an end in time, or that ends its process, is a failure."""
        began = time.monotonic()
        with contextlib.suppress(OSError):
            self._socket.sendall(f"{row}\n".encode())
        told = self._hear(name, limit_s)
        seconds = round(time.monotonic() - began, 2)
        if told is None:
            stacks = self._stacks()
            self.kill()
            return Outcome(name, "fail", seconds, f"no end in {limit_s:g} s", traceback=stacks)
        if not told:
            self.has_ended = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            text = f"the engine's process ended with {self._process.returncode}: {self._last_words()}"
            return Outcome(name, "fail", seconds, text)
        return Outcome(name, **json.loads(told))

    def _hear(self, name: str, limit_s: float) -> bytes | None:
        """Return a line; None: none came in time; empty: the process has ended."""
        began, line = time.monotonic(), b""
        while not line.endswith(b"\n"):
            left_s = began + limit_s - time.monotonic()
            if left_s <= 0:
                return None
            self._socket.settimeout(min(left_s, _TELL_S))
            try:
                more = self._socket.recv(1 << 16)
            except TimeoutError:
                tell(f"    ...  {time.monotonic() - began:6.0f} s  {name}: of {limit_s:g} s")
                continue
            except ConnectionError:
                more = b""
            if not more:
                return b""
            line += more
        return line

    def _stacks(self) -> list[str]:
        """Return where it hangs: each thread's innermost calls."""
        before = self._log.stat().st_size
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while self._log.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)  # the rest of it
        with self._log.open("rb") as log:
            log.seek(before)
            lines = log.read(1 << 20).decode(errors="replace").splitlines()
        heads = [at for at, line in enumerate(lines) if "hread" in line and line.endswith(":")]
        return [line for at in heads for line in lines[at : at + 4]][:60]

    def _last_words(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._begins_at)
            lines = log.read().decode(errors="replace").splitlines()
        told = [line.partition("engine_broken ")[2] for line in lines if "engine_broken " in line]
        return told[-1] if told else " | ".join(lines[-3:]) or "it said nothing"

    def log_tail(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]

    def kill(self) -> None:
        self.has_ended = True
        self.close(limit_s=0.0)

    def close(self, limit_s: float = _STOP_S) -> None:
        """Let it end in order, and not for ever; TensorRT-LLM's ranks would hold a GPU's memory for the next."""
        ranks = processes.workers_below(self._process.pid)
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        processes.kill(ranks)
        self._process.wait()


class Proof:
    def __init__(self, folder: Path, limits: Limits) -> None:
        self.rows: list[Outcome] = []
        self._folder, self._limits = folder, limits

    def alone(self, life: str, prefix: str = "") -> None:
        """Run a life's rows. One that hangs or ends the process costs its own verdict: the next has a new engine."""
        rows = list(LIVES[life].rows)
        for _ in range(LIVES_OF_ONE):
            with self._process(life, None) as engine:
                while rows and not engine.has_ended:
                    row = rows.pop(0)
                    if not self._run(engine, row, prefix) and row in ("model", "start"):
                        self._skip(rows, prefix, f"there is no engine: see `{prefix}{row}`")
                        return
            if not rows:
                return
            rows = ["start", *rows]
        self._skip(rows[1:], prefix, f"{LIVES_OF_ONE} engines have ended before it")

    def apart(self, prefix: str, gpus: tuple[str | None, str | None]) -> None:
        """Prefill in one process and decode in another: decode comes first, since exported KV waits a minute only."""
        steps = [("decode", "start"), ("decode", "whole")]
        steps += [("prefill", "start"), ("prefill", "export"), ("decode", "transfer")]
        with self._process("decode", gpus[1]) as decode, self._process("prefill", gpus[0]) as prefill:
            engines = {"decode": decode, "prefill": prefill}
            while steps:
                life, row = steps.pop(0)
                if not self._run(engines[life], row, f"{prefix}{life} "):
                    for left, name in steps:
                        self._skip([name], f"{prefix}{left} ", f"see `{prefix}{life} {row}`")
                    return

    def skip_apart(self, prefix: str, reason: str) -> None:
        self._note(Outcome(prefix.strip().rstrip(":"), "skipped", reason=reason))

    @contextlib.contextmanager
    def _process(self, life: str, gpus: str | None) -> Iterator[EngineProcess]:
        engine = EngineProcess(life, self._folder, gpus)
        try:
            yield engine
        finally:
            engine.close()

    def _run(self, engine: EngineProcess, row: str, prefix: str) -> bool:
        name = f"{prefix}{row}"
        outcome = engine.ask(row, name, self._limits.of(row))
        if outcome.outcome == "fail":
            outcome.traceback += ["-- the engine's log:", *engine.log_tail()]
        self._note(outcome)
        return outcome.outcome == "ok"

    def _skip(self, rows: list[str], prefix: str, reason: str) -> None:
        for row in rows:
            self._note(Outcome(f"{prefix}{row}", "skipped", reason=reason))

    def _note(self, outcome: Outcome) -> None:
        self.rows.append(outcome)
        tell(str(outcome))
        for warning in outcome.warnings:
            tell(f"warning             {warning}")


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def devices(gpus: list[dict[str, Any]]) -> list[str]:
    """Return the GPUs by what CUDA_VISIBLE_DEVICES calls them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return given.split(",") if given else [str(at) for at in range(len(gpus))]


def prove(proof: Proof, gpus: list[str]) -> None:
    proof.alone("one")
    if proof.rows[0].outcome == "fail":
        return  # without a model there is nothing to serve
    proof.alone("speculation", "speculation: ")
    proof.apart("apart on one GPU: ", (gpus[0], gpus[0]))
    if len(gpus) > 1:
        proof.apart("apart on two GPUs: ", (gpus[0], gpus[1]))
    else:
        proof.skip_apart("apart on two GPUs: ", "one GPU is here")


def main() -> int:
    options = parse()
    gpus = machine.find_gpus()
    missing = (
        "" if machine.has_tensorrt_llm() else f"{sys.executable} has no tensorrt_llm; name one in BIREME_ENGINE_PYTHON"
    )
    missing = missing or ("" if gpus else "nvidia-smi shows no GPU; docker run needs --gpus all")
    report: dict[str, Any] = {**machine.facts(), "gpus": gpus}
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trtllm-proof-")))
        folder.mkdir(parents=True, exist_ok=True)
        proof = Proof(folder, Limits(options.start_timeout, options.row_timeout))
        began = time.monotonic()
        if missing:
            tell(f"nothing to try: {missing}")
        else:
            prove(proof, devices(gpus))
        report["seconds"] = round(time.monotonic() - began, 1)
    code = NOTHING_TO_TRY if missing else BAD if any(row.outcome == "fail" for row in proof.rows) else GOOD
    report["verdict"] = {GOOD: "nothing failed", BAD: "something failed", NOTHING_TO_TRY: missing}[code]
    report["rows"] = [asdict(row) for row in proof.rows]
    summarize(proof.rows, report["verdict"])
    print(json.dumps(machine.clean(report, folder), indent=1))
    return code


def summarize(rows: list[Outcome], verdict: str) -> None:
    failed = [row for row in rows if row.outcome == "fail"]
    counts = ", ".join(f"{sum(row.outcome == one for row in rows)} {one}" for one in ("ok", "fail", "skipped"))
    tell("\n".join(["", *map(str, failed), f"{counts}: {verdict}"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="trtllm.sh",
        description="Proves what works with the TensorRT-LLM that is installed. Progress goes to stderr, a JSON report,"
        " which can be attached to a bug report, to stdout. Exit codes: 0 nothing failed; 1 something did; 2 there is"
        " no tensorrt_llm or no GPU. Recipe folders as arguments are served instead (trtllm_recipes.py).",
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for model and logs, kept; default: a temporary one")
    parser.add_argument("--start-timeout", type=float, default=900.0, metavar="S", help="for an engine's start")
    parser.add_argument("--row-timeout", type=float, default=120.0, metavar="S", help="for any other row")
    return parser.parse_args()
