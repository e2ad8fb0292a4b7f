"""The LLM object: made, measured, watched, and shut down in bounded time."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from bireme.engines.trtllm import processes
from bireme.engines.trtllm.api import Api
from bireme.engines.trtllm.arguments import Arguments
from bireme.engines.trtllm.unions import choose_classes
from bireme.errors import ConfigError, UnavailableError

logger = logging.getLogger("bireme.engines.trtllm")

EXIT_BROKEN = 70  # EX_SOFTWARE of sysexits.h

_CONFIG_FAULTS = (ValueError, TypeError, KeyError, NotImplementedError, AssertionError, OSError)
HEALTH_INTERVAL_S = 2.0
HEALTH_TIMEOUT_S = 30.0  # one check; a worker that is stuck in a collective answers none
# A part of the 5 s that a stub has for its end, and less than its supervisor waits between SIGTERM and SIGKILL.
# TensorRT-LLM itself takes seconds to minutes, for the futures of its ranks and their pool.
SHUTDOWN_S = 3.5


def make_llm(api: Api, arguments: Arguments) -> Any:
    """Takes minutes. Raises ConfigError for what this release refuses, else UnavailableError."""
    began = time.monotonic()
    try:
        llm = api.llm(**choose_classes(arguments.values))
    except (ValueError, TypeError, NotImplementedError) as error:  # pydantic's ValidationError is a ValueError
        raise ConfigError(f"TensorRT-LLM {api.version} refuses the engine's arguments: {error}") from error
    except RuntimeError as error:  # "Executor worker returned error": the reason is its cause, or in the worker's log
        cause = error.__cause__
        reason = f"{error}: {cause}" if cause is not None else f"{error}; TensorRT-LLM's log above says why"
        text = f"TensorRT-LLM {api.version} could not load {arguments.values.get('model')}: {reason}"
        if isinstance(cause, _CONFIG_FAULTS):
            raise ConfigError(text) from error
        raise UnavailableError(
            f"{text}; GPU memory that others hold, or too large a model, are the usual ones"
        ) from error
    load_s = time.monotonic() - began
    logger.info("llm_loaded version=%s backend=%s load_s=%.1f", api.version, arguments.backend, load_s)
    return llm


def num_blocks(llm: Any, arguments: Arguments) -> int:
    """0: unknown before the first iteration (releases before 1.3)."""
    ask = getattr(llm, "get_kv_cache_capacity", None)
    if ask is not None:
        try:
            return int(ask().get("maxNumBlocks") or 0)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            logger.info("kv_capacity_unknown reason=%s", error)
    max_tokens = arguments.block("kv_cache_config").get("max_tokens")
    return int(max_tokens) // arguments.tokens_per_block if max_tokens else 0


def shut_down(llms: Sequence[Any], limit_s: float = SHUTDOWN_S) -> bool:
    """Side by side; false: not in time, as with a dead rank one may block forever."""
    threads = [threading.Thread(target=_shut_down, args=(one,), name="trtllm-shutdown", daemon=True) for one in llms]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _shut_down(llm: Any) -> None:
    try:
        llm.shutdown()
    except Exception:
        logger.exception("llm_shutdown_failed")


def leave(reason: str) -> None:
    """For TensorRT-LLM's fault: the supervisor fails the open requests and starts another."""
    logger.critical("engine_broken reason=%s", reason)
    processes.kill(processes.workers_below())
    os._exit(EXIT_BROKEN)


class LlmMonitor:
    """Checks on a thread of its own whether the LLM is healthy and its worker processes live.

    TensorRT-LLM may call itself healthy when a rank was killed, so its processes are checked as well.
    """

    def __init__(self, llm: Any, fail: Callable[[str], None], interval_s: float = HEALTH_INTERVAL_S) -> None:
        self._llm = llm
        self._fail = fail
        self._interval_s = interval_s
        self._stops = threading.Event()
        self.members = processes.workers_below()  # pid -> start time
        self._thread = threading.Thread(target=self._run, name="trtllm-health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stops.set()

    def _run(self) -> None:
        while not self._stops.wait(self._interval_s):
            try:
                reason = self._look()
            except (OSError, RuntimeError) as error:  # no descriptor or thread is left: nothing is known
                logger.warning("health_unknown error=%s", error)
                continue
            if reason and not self._stops.is_set():
                self._fail(reason)
                return

    def _look(self) -> str:
        gone = [pid for pid, started in self.members.items() if processes.has_ended(pid, started)]
        if gone:
            return f"worker process {gone[0]} of TensorRT-LLM has ended"
        check = getattr(self._llm, "_check_health", None)
        if check is None:
            return ""
        answers: list[bool | Exception] = []
        thread = threading.Thread(target=_ask, args=(check, answers), name="trtllm-health-check", daemon=True)
        thread.start()
        thread.join(HEALTH_TIMEOUT_S)
        if not answers:
            return f"no answer to a health check in {HEALTH_TIMEOUT_S:g} s"
        if answers[0] is True:
            return ""
        cause = getattr(getattr(self._llm, "_executor", None), "_fatal_error", None)
        return f"the health check says no: {cause or answers[0]!r}"


def _ask(check: Callable[[], bool], answers: list[bool | Exception]) -> None:
    try:
        answers.append(bool(check()))
    except Exception as error:
        answers.append(error)
