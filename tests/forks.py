"""`--forks N` runs the tests in N forks of the process that has collected them, so that nothing is imported N times.

A process of pytest-xdist imports and collects by itself, for 9 s of CPU and 700 MB. A fork has all that from the start,
and shares the memory. So importing a test module must neither start threads, for whose work a fork would wait for ever
(it is refused), nor ask for a GPU: where there is one, the Makefile takes pytest-xdist instead.

A fork that dies is its test's failure, also of a test that is to be run again when it fails (`--reruns`, or
`@pytest.mark.flaky`): pytest-xdist would run it again. What a test ends the session for (`--session-timeout`,
`pytest.exit`), its fork tells, and the other forks finish the tests that they are in.

Every other fork begins with tests that mostly wait, so that neither all forks wait nor all want a core. What took long
in the last run of all tests comes first, so that all end at the same time.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple, NoReturn

import pytest
from _pytest.outcomes import Exit

from bireme import own_process
from bireme.child_process import describe_exit
from tests.warm_children import WarmChildren

_LEAVE_S = 10.0
_SECONDS = "bireme/seconds"  # in pytest's cache
_SHARED = "transformers.models.llama.modeling_llama"  # nearly each fork would import it, for 2.5 s of CPU


class _Warned(NamedTuple):
    message: str
    category: str  # its name, which is all that is shown: a class local to a test can't be sent
    filename: str
    line: int
    when: str
    nodeid: str


class _Ran(NamedTuple):
    """One test: its place in the session's items, and its reports in the form of pytest's own hook."""

    index: int
    reports: list[dict[str, Any]]
    seconds: float


class _Stopped(NamedTuple):
    """Why a fork runs no more tests: `session.shouldfail`, `session.shouldstop`, or what `pytest.exit` has raised."""

    fail: bool | str = False
    stop: bool | str = False
    exit: Exit | None = None


class _Fork:
    """One process. It asks with None for tests that go together: the answer is their places, or None for the end."""

    def __init__(self, pid: int, pipe: Connection, begins_waiting: bool) -> None:
        self.pid, self.pipe = pid, pipe
        self.begins_waiting = begins_waiting  # with tests that mostly do
        self.watch = os.pidfd_open(pid)  # a child of a test may hold the pipe open
        self.open: deque[int] = deque()  # tests that it was given and has not reported

    def give(self, unit: list[int] | None) -> None:
        self.open.extend(unit or ())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, as `watch` tells
            self.pipe.send(unit)

    def reap(self) -> int:
        """Return how it has ended: the status, or the negative signal."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.watch)
        self.pipe.close()
        return os.waitstatus_to_exitcode(status)


class Forks:
    """Runs a session's tests. `together`: a test's node id -> the name of what one process has to run.

    `waits`: whether a test, by its node id, mostly does.
    """

    def __init__(
        self,
        config: pytest.Config,
        number: int,
        together: Callable[[str], str],
        waits: Callable[[str], bool] = lambda _: False,
    ) -> None:
        if processes := getattr(config.option, "numprocesses", None):
            raise pytest.UsageError(
                f"--forks {number} and -n {processes} can't both spread the tests over processes: leave out -n and give"
                f" the number to --forks (make unit JOBS={processes})"
            )
        self._config, self._number, self._together, self._waits = config, number, together, waits
        # Places of tests that go together, and that no fork has been given: those that compute, those that wait.
        self._units: tuple[deque[list[int]], deque[list[int]]] = deque(), deque()
        self._seconds: Counter[str] = Counter()  # of tests that went together
        self._forks: list[_Fork] = []
        self._started = 0
        self._starts_threads = ""  # what was collected when a library's first thread was seen
        self._exit: Exit | None = None
        self._status = int(pytest.ExitCode.INTERNAL_ERROR)  # until the session has ended

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        """The threads of tokenizers would be missing in a fork."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TOKENIZERS_PARALLELISM", "false")
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        report = yield
        self._look_for_threads(collector.nodeid)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or self._config.option.collectonly:
            return None  # as without forks
        if "transformers" in sys.modules:
            importlib.import_module(_SHARED)
            self._look_for_threads(_SHARED)
        if self._starts_threads:
            raise pytest.UsageError(
                f"{self._starts_threads} starts a library's threads (torch, tokenizers) when it is imported, and forks"
                " have no threads: make what starts them a fixture, or run with -n instead of --forks"
            )
        try:
            for _ in range(min(self._number, self._queue(session.items))):
                self._start(session)
            while self._forks:
                self._hear(session)
        finally:
            self._end()
        self._keep_seconds(session)
        if self._exit is not None:
            raise self._exit
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _queue(self, items: Sequence[pytest.Item]) -> int:
        """Return how many units there are."""
        units: dict[str, list[int]] = {}
        for index, item in enumerate(items):
            units.setdefault(self._together(item.nodeid), []).append(index)
        cache = getattr(self._config, "cache", None)  # `-p no:cacheprovider`
        before = cache.get(_SECONDS, {}) if cache is not None else {}
        for name in sorted(units, key=lambda name: -before.get(name, math.inf)):
            self._units[self._waits(items[units[name][0]].nodeid)].append(units[name])
        return len(units)

    def _keep_seconds(self, session: pytest.Session) -> None:
        """Of a run of all tests, for the next."""
        cache, option = getattr(self._config, "cache", None), self._config.option
        is_whole = self._config.args == self._config.getini("testpaths") and not option.keyword
        if cache is not None and is_whole and not (session.shouldfail or session.shouldstop or self._exit):
            cache.set(_SECONDS, {name: round(seconds, 1) for name, seconds in self._seconds.items()})

    def _look_for_threads(self, begun: str) -> None:
        if not self._starts_threads and len(os.listdir("/proc/self/task")) > threading.active_count():
            self._starts_threads = begun

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._status = int(exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if self._started:
            own_process.end_process(self._status)  # triton tells of leaks, for what was frozen (tests/conftest.py)

    def _start(self, session: pytest.Session) -> None:
        folder = self._config._tmp_path_factory.getbasetemp() / f"fork-{self._started}"  # type: ignore[attr-defined]
        folder.mkdir(mode=0o700)
        here, there = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        if (pid := os.fork()) == 0:
            own_process.die_with_parent(parent)
            for fork in self._forks:
                fork.pipe.close()
            here.close()
            self._config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
            _run(session, there)
        there.close()
        self._forks.append(_Fork(pid, here, begins_waiting=self._started % 2 == 0))
        self._started += 1

    def _hear(self, session: pytest.Session) -> None:
        """Wait for news of any, and act on it."""
        stops = bool(session.shouldfail or session.shouldstop)
        news = set(wait([place for fork in self._forks for place in (fork.pipe, fork.watch)]))
        for fork in [fork for fork in self._forks if news & {fork.pipe, fork.watch}]:
            try:
                told = fork.pipe.recv() if fork.pipe.poll() else EOFError
            except (EOFError, ConnectionResetError):
                told = EOFError
            if told is EOFError:
                self._replace(fork, session)
            elif told is None:
                fork.give(None if stops else self._next_unit(fork))
            elif isinstance(told, _Warned):
                self._tell_warning(told)
            elif isinstance(told, _Stopped):
                self._adopt(told, session)
            else:
                fork.open.remove(told.index)
                self._seconds[self._together(session.items[told.index].nodeid)] += told.seconds
                for data in told.reports:
                    self._tell(self._config.hook.pytest_report_from_serializable(config=self._config, data=data))
        if not stops and (session.shouldfail or session.shouldstop):
            for fork in self._forks:
                fork.give(None)

    def _adopt(self, told: _Stopped, session: pytest.Session) -> None:
        if told.fail:
            session.shouldfail = told.fail
        if told.stop:
            session.shouldstop = told.stop
        if told.exit is not None:
            self._exit, session.shouldstop = told.exit, True

    def _next_unit(self, fork: _Fork) -> list[int] | None:
        own, others = self._units[fork.begins_waiting], self._units[not fork.begins_waiting]
        return own.popleft() if own else others.popleft() if others else None

    def _replace(self, fork: _Fork, session: pytest.Session) -> None:
        """A fork has ended. In the middle of a test that is its failure, and another fork goes on after it."""
        self._forks.remove(fork)
        status = fork.reap()
        if session.shouldfail or session.shouldstop or not (status or fork.open):
            return
        ended = describe_exit(status)
        if not fork.open:
            raise RuntimeError(f"a process of --forks that had no test to run ended with {ended}")
        item = session.items[fork.open.popleft()]
        reason = f"the process that ran {item.nodeid} ended with {ended}"
        self._tell(pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call"))
        if fork.open:
            self._units[fork.begins_waiting].appendleft(list(fork.open))
        if any(self._units):
            self._start(session)

    def _tell(self, report: pytest.TestReport) -> None:
        self._config.hook.pytest_runtest_logreport(report=report)

    def _tell_warning(self, told: _Warned) -> None:
        category = type(told.category, (Warning,), {})
        message = warnings.WarningMessage(category(told.message), category, told.filename, told.line)
        self._config.hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": message, "when": told.when, "nodeid": told.nodeid, "location": None}
        )

    def _end(self) -> None:
        """After an interrupt, which forks have got from the terminal, too: those that stay are killed."""
        for fork in self._forks:
            fork.give(None)
        deadline = time.monotonic() + _LEAVE_S
        for fork in self._forks:
            if not wait([fork.watch], timeout=max(0.0, deadline - time.monotonic())):
                os.kill(fork.pid, signal.SIGKILL)
            fork.reap()
        self._forks.clear()


class _Reporter:
    """In a fork: keeps what is told of a test until it has ended."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe
        self._tells_all = config.option.durations is not None or config.option.xmlpath
        self._reports: list[dict[str, Any]] = []
        self._is_told_of_the_past = True  # by pytest, which tells each new plugin of all warnings
        config.pluginmanager.register(self)
        self._is_told_of_the_past = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._tells_all or report.when == "call" or report.outcome != "passed":  # a passed set-up is shown nowhere
            data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
            self._reports.append(data)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        message, of = warning_message, warning_message.category.__name__
        if not self._is_told_of_the_past:
            self._pipe.send(_Warned(str(message.message), of, message.filename, message.lineno, when, nodeid))

    def send(self, index: int, seconds: float) -> None:
        self._pipe.send(_Ran(index, self._reports, seconds))
        self._reports = []


def _run(session: pytest.Session, pipe: Connection) -> NoReturn:
    """Be a fork: run what is given until there is no more."""
    status = 1
    try:
        atexit._clear()  # those of the process that has collected
        WarmChildren().install()
        if "torch" in sys.modules:  # its pool is made anew at the first use: of two at once, one would find none
            torch = importlib.import_module("torch")
            torch.set_num_threads(torch.get_num_threads())
        reporter = _own(session.config, pipe)
        given = _given(pipe)
        index = next(given, None)
        while index is not None and not session.shouldfail and not session.shouldstop:
            following = next(given, None)  # what both need is not torn down between them
            item, nextitem = session.items[index], None if following is None else session.items[following]
            began = time.monotonic()
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            reporter.send(index, time.monotonic() - began)
            index = following
        if session.shouldfail or session.shouldstop:
            pipe.send(_Stopped(session.shouldfail, session.shouldstop))
        session._setupstate.teardown_exact(None)
        status = 0
    except Exit as end:
        pipe.send(_Stopped(exit=end))
        with contextlib.suppress(BaseException):
            session._setupstate.teardown_exact(None)
    except KeyboardInterrupt:
        with contextlib.suppress(BaseException):
            session._setupstate.teardown_exact(None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        own_process.end_process(status)


def _own(config: pytest.Config, pipe: Connection) -> _Reporter:
    """Have what is captured, shown and reported be this process's own."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:  # its files are the parent's
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    terminal: Any = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None:
        terminal._tw._file = open(os.devnull, "w")
    return _Reporter(config, pipe)


def _given(pipe: Connection) -> Iterator[int]:
    """Yield the places of tests; the next ones are asked for before the last that are known has run."""
    while True:
        pipe.send(None)
        try:
            unit = pipe.recv()
        except EOFError:
            return
        if unit is None:
            return
        for index in unit:
            if pipe.poll():  # unasked: the end
                return
            yield index
