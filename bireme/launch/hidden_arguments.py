"""Arguments of a program that no other user of this host can read.

/proc/PID/cmdline is open to everybody, and tritonserver takes its keys as arguments alone. So it starts with others,
and the keys in its environment. The kernel holds it at its first instruction (`own_process.py`); there the pointers of
its arguments are turned to the environment. /proc goes on showing the bytes of the start.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
from collections.abc import Sequence
from pathlib import Path

from bireme.errors import ConfigError
from bireme.own_process import NOT_HELD

_VARIABLE = "BIREME_ARGUMENT_"
_SHOWN = "(hidden)"
_PTRACE_CONT, _PTRACE_DETACH = 7, 17
_WORD = struct.calcsize("P")
# Of /proc/PID/stat, counted behind the program's name: where the stack begins, with the number of arguments.
_START_STACK = 25


class NotHiddenError(ConfigError):
    """Kernel or container forbid tracing, or a look into a child's memory."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "Triton's keys would be readable by every user of this host: they can be given as arguments alone, which"
            f" can't be hidden here: {reason}; allow ptrace (`sysctl kernel.yama.ptrace_scope=1`, in a container a"
            " seccomp profile with ptrace, no tracer around serve.py), or start with --visible-keys where all users"
            " are trusted"
        )


class HiddenArguments:
    """A program's arguments, some of which nobody may read."""

    def __init__(self, arguments: Sequence[str], secret: Sequence[str]) -> None:
        """`secret`: starts of the arguments (`--flag`) to hide."""
        self.shown: list[str] = []
        self.environment: dict[str, str] = {}
        self._names: list[str | None] = []  # of the variable that holds the argument
        for argument in arguments:
            flag, has_value, _ = argument.partition("=")
            name = f"{_VARIABLE}{len(self.environment)}" if has_value and flag in secret else None
            self._names.append(name)
            self.shown.append(f"{flag}={_SHOWN}" if name else argument)
            if name:
                self.environment[name] = argument

    def hand_over(self, pid: int, program: Path) -> None:
        """Give a held child, started with `shown` and `environment`, its arguments, and let it run.

        On the thread that started it; harmless when it has ended. Raises NotHiddenError, and ConfigError when it is
        not `program` that runs.
        """
        if not _wait_held(pid):
            return
        if not os.path.samefile(f"/proc/{pid}/exe", program):
            raise ConfigError(
                f"{program} is run by {os.readlink(f'/proc/{pid}/exe')}, which would show Triton's keys to every user"
                " of this host; set BIREME_TRITONSERVER to the program itself, .../bin/tritonserver"
            )
        try:
            with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
                _Stack(memory.fileno(), _start_of_stack(pid)).redirect(self._names)
            _ptrace(_PTRACE_DETACH, pid)
        except OSError as error:
            raise NotHiddenError(f"the memory of process {pid}: {error}") from error


class _Stack:
    """The number of arguments, their addresses, 0, those of the environment, 0."""

    def __init__(self, memory: int, start: int) -> None:
        self._memory = memory
        (num_arguments,) = self._words(start, 1)
        self._arguments = start + _WORD
        self._variables = self._arguments + _WORD * (num_arguments + 1)
        self._end = self._arguments + _WORD * num_arguments

    def redirect(self, names: Sequence[str | None]) -> None:
        """The last arguments become what these variables hold; nobody inherits them."""
        variables = self._read_variables()
        kept = next(address for name, address in variables if not name.startswith(_VARIABLE))
        for index, (variable, _) in enumerate(variables):
            if variable.startswith(_VARIABLE):  # a copy of another one; the list must keep its length
                self._write(self._variables + _WORD * index, kept)
        values = {name: address + len(os.fsencode(name)) + 1 for name, address in variables}
        for index, name in enumerate(names, -len(names)):
            if name is not None:
                self._write(self._end + _WORD * index, values[name])

    def _read_variables(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        while address := self._words(self._variables + _WORD * len(found), 1)[0]:
            found.append((self._text(address).partition("=")[0], address))
        return found

    def _text(self, address: int) -> str:
        return os.fsdecode(os.pread(self._memory, 64, address).partition(b"\0")[0])

    def _words(self, address: int, count: int) -> tuple[int, ...]:
        words = os.pread(self._memory, count * _WORD, address)
        if len(words) < count * _WORD:
            raise OSError(errno.ESRCH, "it has ended while it was held")
        return struct.unpack(f"{count}P", words)

    def _write(self, address: int, word: int) -> None:
        os.pwrite(self._memory, struct.pack("P", word), address)


def _start_of_stack(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[_START_STACK])


def _wait_held(pid: int) -> bool:
    """False: it has ended. Raises NotHiddenError."""
    while True:
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        assert state is not None
        if state.si_code == os.CLD_EXITED and state.si_status == NOT_HELD:
            raise NotHiddenError("ptrace is forbidden")
        if state.si_code != os.CLD_TRAPPED:
            return False
        if state.si_status == signal.SIGTRAP:
            return True
        _ptrace(_PTRACE_CONT, pid, state.si_status)


def _ptrace(request: int, pid: int, data: int = 0) -> None:
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    call.restype = ctypes.c_long
    if call(request, pid, None, data) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
