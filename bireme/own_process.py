"""Duties of each of our long-lived processes: it ends with its parent, collects little garbage, keeps the memory of its
buffers, and ends soon.

Nothing heavy is imported here. A death signal that is set after slow imports misses a parent that has died meanwhile,
and leaves an orphan with a GPU. As a program it runs another one so, `held`: stopped before its first instruction, for
the thread that has started it to go on (launch/hidden_arguments.py).

    python -I -S own_process.py PARENT held|free PROGRAM ARGUMENT...
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PTRACE_TRACEME = 0
NOT_HELD = 97  # exit status: `be_held` was not allowed
ENGINE_NAME = "bireme-engine"  # of a process that has waited as `standby` and has begun its life
_CHECK_S = 0.5
_LOWER_BY = 10  # of nice: a ninth of the CPU time that a thread beside it gets
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt
_MALLOC = {  # glibc's variables and mallopt's numbers of the same settings, in bytes
    "MALLOC_TRIM_THRESHOLD_": (_M_TRIM_THRESHOLD, 64 << 20),
    "MALLOC_MMAP_THRESHOLD_": (_M_MMAP_THRESHOLD, 8 << 20),
}


def die_with_parent(parent: int) -> None:
    """Get SIGKILL when the thread that started this process ends; exit now if its process is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"parent {parent} has died before this process started")


def be_held() -> None:
    """Have the kernel stop the next program of this process at its start, for the thread that has started the process;
    exit with NOT_HELD where that is forbidden, or somebody traces already.
    """
    if ctypes.CDLL(None).ptrace(_PTRACE_TRACEME, 0, None, None) < 0:
        sys.exit(NOT_HELD)


def watch_parent(on_death: Callable[[], None], parent: int = 0) -> None:
    """Call `on_death` from a thread of its own soon after `parent` (0: the present one) has died.

    For a process whose parent's threads come and go: a death signal follows the thread that forked.
    """
    parent = parent or os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_CHECK_S)
        on_death()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def lower_thread_priority() -> None:
    """Let this thread, and those that it starts, stand behind others where CPUs are short; what blocks is unchanged."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _LOWER_BY))


def load_with_little_gc() -> None:
    """Collect seldom until `freeze_gc`: what imports and a model's loading make stays, and is not worth looking at.

    Collections are a fifth of the CPU that an engine's start takes (torch and transformers).
    """
    gc.set_threshold(50_000, 10, 10)


def freeze_gc(collect_less: bool = False) -> None:
    """Exempt what is loaded by now from all collections. `collect_less`: also not one every 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000 if collect_less else 700, 10, 10)


def reuse_memory() -> None:
    """Keep freed memory for the next buffers, 64 MiB of it, unless the environment has settings of its own.

    glibc maps a buffer of 128 KiB and more anew each time, and gives a free heap's end back: the kernel then clears
    every page that is touched. A prompt of 60,000 tokens is such a buffer ten times on its way.
    """
    with contextlib.suppress(AttributeError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        for variable, (option, num_bytes) in _MALLOC.items():
            if variable not in os.environ:
                set_option(option, num_bytes)


def give_back_memory() -> None:
    """Return the pages of freed memory to the kernel: after a load, which leaves much of it."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def reused_memory_environment() -> dict[str, str]:
    """Return what has a program that is not ours do the same."""
    return {variable: str(num_bytes) for variable, (_, num_bytes) in _MALLOC.items() if variable not in os.environ}


def end_process(status: int) -> NoReturn:
    """Call the exit handlers and leave the rest to the kernel.

    The interpreter would visit every object first, for a second of CPU where torch and transformers are loaded, and
    libraries would report as leaked what was frozen.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    if sys.argv[2] == "held":
        be_held()
    os.execv(sys.argv[3], sys.argv[3:])
