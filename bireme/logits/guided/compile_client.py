"""The parent's end of a helper process: one question at a time, each with a time limit.

A helper that is late, dead or answers nonsense is killed; the next question starts a new one.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from typing import Any

from bireme.errors import BiremeError, RequestError
from bireme.logits.guided.compile_process import U32

logger = logging.getLogger("bireme.logits")
_START_S = 60.0  # a machine under load imports slowly


class CompileClient:
    """Owned by one thread; `kill` may be called from any."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0  # when the process was started
        self._is_ready = False
        self._views: set[str] = set()  # vocabularies that the process has opened
        self._is_closed = False

    def begin(self) -> None:
        """Have the process start while its first question is made. Raises OSError."""
        if self._process is None:
            self._launch()

    def compile(self, request: dict[str, Any], info: str, seconds: float, max_bytes: int) -> bytes:
        """Return the grammar's JSON. Raises RequestError when it can't be had within the limits."""
        process = self._running()
        view = request["view"]
        text = json.dumps({**request, "seconds": seconds, "info": None if view in self._views else info})
        try:
            _write(process, text.encode())
            answer = _read(process, time.monotonic() + seconds, max_bytes)
        except _LateError:
            self._end()
            raise RequestError(
                f"guided_decoding: compiling it took more than {seconds:g} s"
                " (guided_decoding_config.compile_timeout_s); simplify it, for example with smaller repeats or enums"
            ) from None
        except _LargeError as error:
            self._end()
            raise RequestError(
                f"guided_decoding: compiled it has {error} bytes; guided_decoding_config.max_compiled_bytes is"
                f" {max_bytes}; simplify it"
            ) from None
        except (OSError, EOFError):
            raise RequestError(f"guided_decoding: compiling it ended with {self._end()}; simplify it") from None
        if answer[:1] != b"+":
            raise RequestError(f"guided_decoding.{request['kind']}: {answer[1:].decode(errors='replace')}")
        self._views.add(view)  # not before: it may be the view that could not be opened
        return answer[1:]

    def kill(self) -> None:
        """End process and question; no other is started."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        self.kill()
        self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._launch()
        assert self._process is not None
        if not self._is_ready:
            self._wait_for_start(self._process)
        return self._process

    def _launch(self) -> None:
        self._end()
        self._began = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bireme.logits.guided.compile_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            close_fds=True,
        )

    def _wait_for_start(self, process: subprocess.Popen[bytes]) -> None:
        try:
            _read(process, self._began + _START_S, 1)
        except (OSError, EOFError, _LateError) as error:
            raise BiremeError(f"guided_decoding: its compiler did not start ({self._end()})") from error
        if self._is_closed:
            self._end()
            raise BiremeError("guided_decoding: the engine is stopping")
        self._is_ready = True
        logger.info("guide_compiler_started pid=%d start_s=%.2f", process.pid, time.monotonic() - self._began)

    def _end(self) -> str:
        """Kill the process and say how it had ended."""
        process, self._process, self._is_ready = self._process, None, False
        self._views.clear()
        if process is None:
            return "no process"
        ended = process.poll()
        if ended is None:
            # It closed its pipe, so it is about to exit: its own exit code says more than our signal.
            try:
                ended = process.wait(0.2) if _has_hung_up(process) else None
            except subprocess.TimeoutExpired:
                ended = None
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            try:
                stream.close()
            except OSError:  # what was buffered can't be written any more
                pass
        return "its time limit" if ended is None else f"signal {-ended}" if ended < 0 else f"exit status {ended}"


class _LateError(Exception):
    pass


class _LargeError(Exception):
    pass


def _has_hung_up(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None
    poller = select.poll()
    poller.register(process.stdout.fileno(), 0)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(U32.pack(len(data)) + data)
    process.stdin.flush()


def _read(process: subprocess.Popen[bytes], deadline: float, max_bytes: int) -> bytes:
    (length,) = U32.unpack(_read_exactly(process, 4, deadline))
    if length > max_bytes + 1:
        raise _LargeError(length)
    return _read_exactly(process, length, deadline + 5.0)  # it is there, and only has to pass the pipe


def _read_exactly(process: subprocess.Popen[bytes], length: int, deadline: float) -> bytes:
    assert process.stdout is not None
    descriptor, parts = process.stdout.fileno(), []
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while length:
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise _LateError
        part = os.read(descriptor, min(length, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
