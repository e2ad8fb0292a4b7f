"""Engine processes that die or hang in mid-stream: streams through generate go on exactly."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from typing import Any

import pytest

from bireme.engines.mocker.tokens import expected_tokens, printable_ids
from tests.server.faults.conftest import KINDS
from tests.server.shared_deployments import recipe_of
from tests.server.triton_client import Client
from tests.server.watch import PATIENCE, is_idle, total, until
from tests.servers import start_server

pytestmark = [pytest.mark.server, pytest.mark.flaky(reruns=1)]

PROMPT = list(range(400, 480))
STREAMS = 8
LENGTH = 100
PAIRS = ["mocker", "trtllm"]
disaggregated = pytest.mark.parametrize("kind", PAIRS, indirect=True)


@pytest.fixture(scope="module")
def server_without_migration(sample_model, write_recipe):
    recipe = recipe_of(KINDS["mocker"], migration_limit=0)
    with start_server(write_recipe(sample_model("llama"), **recipe)) as server:
        yield server


class Run:
    """Streams under way on threads: what each delivered, or the error that ended it, and when."""

    def __init__(self, server, model, count=STREAMS, **values):
        self.answers: list[Any] = [None] * count
        self.ended_at = [0.0] * count
        self.tokens = [0] * count
        self._threads = [threading.Thread(target=self._read, args=(server, model, i, values)) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _read(self, server, model, i, values):
        ids: list[int] = []
        try:
            for answer in Client(server.grpc).stream(model, input_ids=[*PROMPT, 300 + i], **values):
                ids += answer.get("output_ids", [])
                self.tokens[i] = len(ids)
            self.answers[i] = ids
        except Exception as error:
            self.answers[i] = error
        self.ended_at[i] = time.monotonic()

    def join(self):
        for thread in self._threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads), "a stream hangs"
        return self.answers


@pytest.fixture(scope="module")
def expected(kind, sample_model, reference):
    """Return a function: length -> what each of the streams must deliver."""
    if kind.startswith("trtllm"):
        model = reference("llama")
        return lambda length: [model.greedy([*PROMPT, 300 + i], length) for i in range(STREAMS)]
    ids, _ = printable_ids(str(sample_model("llama")))
    return lambda length: [expected_tokens([*PROMPT, 300 + i], length, ids) for i in range(STREAMS)]


def _hit(server, worker, sig):
    pid = server.engine_pid(worker)
    os.kill(pid, sig)
    return pid


def _engine_pid(server, worker):
    try:
        return int(server.engine_pid(worker))
    except Exception:
        return None  # between two lives


def _is_up_again(server, worker, pid):
    return _engine_pid(server, worker) not in (None, pid) and total(server, "bireme_engine_up", worker=worker) == 1


HITS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "ended": signal.SIGTERM}
signals = pytest.mark.parametrize("sig", HITS.values(), ids=HITS)


@signals
def test_streams_of_generate_finish_exactly(server, expected, sig):
    _assert_streams_finish(server, expected, "decode", sig)


@disaggregated
@signals
def test_streams_of_generate_finish_exactly_when_prefill_is_hit(server, expected, sig):
    _assert_streams_finish(server, expected, "prefill", sig)


def _assert_streams_finish(server, expected, worker, sig):
    run = Run(server, "generate", max_tokens=LENGTH, stream=True)
    until(lambda: all(count > 10 for count in run.tokens), 20, "streams under way")
    pid = _hit(server, worker, sig)
    assert run.join() == expected(LENGTH)
    until(lambda: _is_up_again(server, worker, pid), 90, "engine started again")
    until(lambda: is_idle(server), 20, "nothing left behind")
    again = Client(server.grpc).generate("generate", input_ids=[*PROMPT, 300], max_tokens=5, stream=True)
    assert again["output_ids"] == expected(5)[0]


def test_new_requests_right_after_a_kill_are_served(kind, server, expected):
    _hit(server, "prefill" if kind in PAIRS else "decode", signal.SIGKILL)
    run = Run(server, "generate", max_tokens=20, stream=True)
    assert run.join() == expected(20)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_requests_that_come_while_the_only_decode_engine_goes_wait_for_its_return(server, expected, sig):
    runs = [Run(server, "generate", max_tokens=5, stream=True) for _ in range(3)]
    pid = _hit(server, "decode", sig)
    for _ in range(12):
        runs.append(Run(server, "generate", max_tokens=5, stream=True))
        time.sleep(0.1)  # they come one after the other, through drain, exit and start
    assert [run.join() for run in runs] == [expected(5)] * len(runs)
    until(lambda: _is_up_again(server, "decode", pid), 90, "decode up again")


def _is_removed(folder):
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def test_a_deleted_run_folder_is_made_again_and_nothing_fails_meanwhile(kind, server, expected):
    if kind != "mocker":
        pytest.skip("only bireme's own transfer uses files there")
    until(lambda: _is_removed(server.run_folder.path), 20, "run folder deleted")  # files come to be there meanwhile
    pid = _hit(server, "decode", signal.SIGKILL)  # the next engine life needs its sockets there
    assert Run(server, "generate", max_tokens=5, stream=True).join() == expected(5)
    until(lambda: _is_up_again(server, "decode", pid), 90, "decode up again")
    until(lambda: (server.run_folder.path / "prefill.json").exists(), 20, "prefill is found again")
    before = total(server, "bireme_kv_transfer_bytes_total", worker="decode")

    def moves_again():  # prefill, whose sockets were gone, is passed by for a moment
        assert Run(server, "generate", max_tokens=5, stream=True).join() == expected(5)
        return total(server, "bireme_kv_transfer_bytes_total", worker="decode") > before

    until(moves_again, 60, "KV moves again")


def test_direct_decode_streams_end_with_unavailable(server):
    run = Run(server, "decode", max_tokens=LENGTH)
    until(lambda: all(count > 3 for count in run.tokens), 20, "streams under way")
    began = time.monotonic()
    pid = _hit(server, "decode", signal.SIGKILL)
    answers = run.join()
    assert all("UNAVAILABLE" in str(answer) for answer in answers)
    assert max(run.ended_at) - began < 5 * PATIENCE
    until(lambda: _is_up_again(server, "decode", pid), 90, "decode up again")


def test_past_the_migration_limit_a_stream_ends_with_unavailable(server_without_migration):
    server = server_without_migration
    run = Run(server, "generate", max_tokens=LENGTH, stream=True)
    until(lambda: all(count > 10 for count in run.tokens), 20, "streams under way")
    _hit(server, "decode", signal.SIGKILL)
    assert all("UNAVAILABLE" in str(answer) for answer in run.join())
    until(lambda: is_idle(server), 20, "nothing left behind")
