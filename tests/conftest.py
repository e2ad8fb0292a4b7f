"""Shared by all tests: sample models are made once, property tests repeat."""

from __future__ import annotations

import collections
import compileall
import contextlib
import gc
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
os.environ.setdefault("BIREME_OPENAI_PORT", "0")  # launches of tests share the machine; who wants it names a port
# Test processes share the cores: threads of torch that wait by spinning take four times the CPU of those that sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# numpy and scipy start theirs when they are imported, and forks (--forks) have none: whatever the shell says.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
if not Path("/dev/nvidiactl").exists():  # Triton's language looks at this when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same code gets the same verdict. `make fuzz` looks for what these examples miss.
# However long an example takes: on a busy machine that is no failure.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("fuzz", derandomize=False, print_blob=True, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True)
def settings_as_started() -> Iterator[None]:
    """What a test has an operator change in this process does not outlive it, nor how a program logs that it runs."""
    root_level = logging.root.level
    yield
    if logging.root.level != root_level:  # setting it has all loggers forget what they are to log
        logging.root.setLevel(root_level)
    live = sys.modules.get("bireme.discovery.live_settings")
    if live is not None:
        live._followed = live._Followed()
    if (ours := logging.getLogger("bireme")).level != logging.NOTSET:
        ours.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True, scope="module")
def variables_as_started() -> Iterator[None]:
    """No variable of ours that a module's servers start with outlives it."""
    before = {name: value for name, value in os.environ.items() if name.startswith("BIREME_")}
    yield
    for name in [name for name in os.environ if name.startswith("BIREME_")]:
        if name not in before:
            del os.environ[name]
    os.environ.update(before)


# Modules that share servers, or what they have parsed, by the start of their paths: with `-n` each row runs in one
# process, every other module by itself. The rows come first, being the longest, then other servers, then small tests.
ONE_PROCESS = (
    ("tests/server/text/",),
    ("tests/server/faults/",),
    ("tests/server/chats/",),
    ("tests/server/openai/",),
    ("tests/server/generations/",),
    ("tests/services/test_playground_", "tests/services/test_screenshots"),
    ("tests/services/test_alerts",),
    ("tests/services/test_dashboards_of_a_deployment",),
    ("tests/triton/test_adapter_", "tests/triton/test_show_config"),
    ("tests/repository/",),
)
# Tests of servers mostly wait and small tests mostly compute: this process begins at the other end, so that neither all
# wait for a core nor all leave it idle.
COMPUTES = "gw0"
# Of tests without servers, those that mostly wait: every other fork (--forks) begins with them.
MOSTLY_WAIT = (
    "tests/benchmarks/test_chaos_",
    "tests/benchmarks/test_load",
    "tests/contract/test_trtllm_engine",
    "tests/contract/test_trtllm_features",
    "tests/contract/test_trtllm_proof",
    "tests/discovery/",
    "tests/docker/",
    "tests/engines/memory/",
    "tests/engines/mocker/",
    "tests/engines/stub/",
    "tests/kv/following/test_feed",
    "tests/kv/publishing/",
    "tests/kv/transfer/",
    "tests/launch/",
    "tests/observability/",
    "tests/openai/",
    "tests/pipelines/",
    "tests/scaling/",
    "tests/stages/test_bus",
    "tests/workers/",
)


_OF_SERVERS = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.server\b", re.MULTILINE)


def _row(module: str) -> int:
    """Return the number of its row, or how many there are."""
    return next((number for number, row in enumerate(ONE_PROCESS) if module.startswith(row)), len(ONE_PROCESS))


def _together(nodeid: str) -> str:
    """Return the name of the tests that run in one process with this one."""
    module = nodeid.partition("::")[0]
    row = _row(module)
    return module if row == len(ONE_PROCESS) else f"row {row}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run tests in N forks (tests/forks.py)")


@pytest.hookimpl(optionalhook=True)  # environments of engines may lack pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _together(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            if node.gateway.id == COMPUTES:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False  # not by how many tests they have
    return ByServer(config, log)


@pytest.hookimpl(trylast=True)  # after pytest has put together what shares a parameter
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (_row(item.nodeid), not _is_of_servers(item)))
    elif config.option.forks:
        items.sort(key=lambda item: _row(item.nodeid))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module of servers alone is not imported to leave out all of its tests: `make unit` looks at the others."""
    if "not server" in config.option.markexpr.split(" and ") and collection_path.name.startswith("test_"):
        return bool(_OF_SERVERS.search(collection_path.read_text())) or None
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Processes that begin together find everything compiled: of a new checkout each would compile all by itself."""
    if sys.dont_write_bytecode:
        return
    for folder in ("bireme", "tools", "benchmarks"):
        compileall.compile_dir(CHECKOUT / folder, quiet=2)
    for module in modules_of(config):
        with contextlib.suppress(OSError, SyntaxError):  # which who imports it tells
            keep_rewritten(module, config)


def modules_of(config: pytest.Config) -> Iterator[Path]:
    """Yield the modules below the run's arguments whose tests it collects."""
    for argument in config.args:
        path = CHECKOUT / argument.partition("::")[0]
        for module in path.rglob("test_*.py") if path.is_dir() else [path]:
            is_elsewhere = any(CHECKOUT / name in module.parents for name in config.getini("norecursedirs"))
            if not is_elsewhere and module.is_file() and not pytest_ignore_collect(module, config):
                yield module


def keep_rewritten(module: Path, config: pytest.Config) -> None:
    """Keep a module with its asserts rewritten where pytest, importing it, looks for that."""
    from _pytest.assertion import rewrite

    folder = rewrite.get_cache_dir(module)
    kept = folder / (module.name.removesuffix(".py") + rewrite.PYC_TAIL)
    if rewrite._read_pyc(module, kept) is None and rewrite.try_makedirs(folder):
        found, code = rewrite._rewrite_test(module, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, found, kept)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests and what they import stay: the collector looks through them neither now nor later.

    Nor, after every few tests, through what the tests before have made: that takes up to a quarter of a module's time.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def _is_of_servers(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("server", "services"))


LONG_S, TRIES = 30, 2
_OF_UCX = {"UCX_TLS", "UCX_MM_ERROR_HANDLING"} - os.environ.keys()  # bireme.kv.transfer.nixl
_long_failures: collections.Counter[str] = collections.Counter()  # by module


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What failed to be set up after a long time, twice, is not tried again by each test of the module."""
    if _long_failures[item.location[0]] >= TRIES:
        pytest.skip(f"setting up took minutes and failed {TRIES} times in this module")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "setup" and call.excinfo is not None and call.duration > LONG_S:
        _long_failures[item.location[0]] += 1


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """What NIXL within one host has set in this process is not for the servers and hosts of later tests."""
    for name in _OF_UCX:
        os.environ.pop(name, None)


def _tell_less(config: pytest.Config) -> None:
    """A worker of pytest-xdist leaves out what nobody is shown: each message takes a fifth of a millisecond of CPU at
    both ends, and a test has six.
    """
    if config.option.durations is not None or config.option.xmlpath:  # which count what sets up and tears down
        return
    found = (one for one in config.pluginmanager.get_plugins() if type(one).__name__ == "WorkerInteractor")
    for interactor in found:
        send = interactor.sendevent

        def send_shown(name: str, send: Callable[..., None] = send, **about: Any) -> None:
            report = about.get("data", {}) if name == "testreport" else {}
            is_of_no_test = report.get("when") in ("setup", "teardown") and report["outcome"] == "passed"
            if name != "logstart" and not is_of_no_test:
                send(name, **about)

        interactor.sendevent = send_shown


def _catch_at_the_root() -> None:
    """Have pytest catch what reaches the root's logger, as it did before release 9. That release looks six times a test
    for loggers that hand nothing on, finds torch's 42, and takes longer to catch theirs than most tests take.
    """
    from _pytest.logging import catching_logs

    if "attached_loggers" not in getattr(catching_logs, "__slots__", ()):
        return

    def catch(self: Any) -> logging.Handler:
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = logging.root.level
            logging.root.setLevel(min(self.orig_level, self.level))
        logging.root.addHandler(self.handler)
        self.attached_loggers.append(logging.root)
        handler: logging.Handler = self.handler
        return handler

    catching_logs.__enter__ = catch


class FailuresAtOnce:
    """Tells of a failure or a rerun when it happens: a run that is cut off has still said what failed."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if str(report.outcome) in ("failed", "rerun"):
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else report.longreprtext
            told = f"{report.outcome} in {report.when} after {report.duration:.0f} s: {report.nodeid}"
            self._terminal.write(f"\n-- {told}\n{reason[:600]}\n")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    _catch_at_the_root()
    if hasattr(config, "workerinput"):
        _tell_less(config)
        return
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(FailuresAtOnce(terminal))
    if config.option.forks:
        from tests.forks import Forks

        forks = Forks(config, config.option.forks, _together, lambda nodeid: nodeid.startswith(MOSTLY_WAIT))
        config.pluginmanager.register(forks)


@pytest.fixture(scope="session")
def sample_model() -> Callable[[str], Path]:
    """Return the folder of a small random model by its architecture: llama, qwen3 or gemma3."""
    from tools.make_sample_model import make

    return lambda arch="llama": make(CHECKOUT / "models" / f"tiny-{arch}", arch)
