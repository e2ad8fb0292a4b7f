"""Every recipe that runs on this machine, under tools/serve.py: it becomes ready, canaries come through every way, and
readiness knows at once when any one of its processes stands still or is gone.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from bireme.errors import ConfigError
from bireme.launch import free_port, processes
from bireme.launch.admin_client import DoorClient
from bireme.launch.preflight import check_engines, check_model
from bireme.launch.run_folder import SHM, default_base
from bireme.recipe_files import load_recipe
from tests.server.conftest import CHECKOUT
from tests.server.generations.changed_model import changed_model
from tests.server.openai_served import five_ports
from tests.server.watch import PATIENCE
from tools import sleep

pytestmark = [pytest.mark.server, pytest.mark.flaky(reruns=1)]

RECIPES = sorted(path.parent.name for path in CHECKOUT.glob("recipes/*/recipe.yaml"))
LIMIT_S = 180  # of any wait: a hang fails the test, the time itself is no claim
NOTICED_S = 5.0 * PATIENCE  # this one is a claim: 5 s on a machine that does nothing else
SERVER = "tritonserver"
SHARES_WEIGHTS = "tiny-chat-disagg"  # with the memory service
EMBEDS = "tiny-embedding"
KEY = "the-operator-s-own-key"
SERIES = re.compile(r"^(bireme_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
LOAD = {
    *("bireme_requests_total", "bireme_http_requests_total", "bireme_request_seconds_count", "bireme_routed_total"),
    *("bireme_prompt_tokens_total", "bireme_generated_tokens_total", "bireme_queue_seconds_count"),
    *("bireme_time_to_first_token_seconds_count", "bireme_inter_token_latency_seconds_count"),
}
TRANSFERS = {"bireme_kv_transfer_bytes_total", "bireme_kv_transfer_seconds_count"}  # of pictures they are shown
# What each of the others shows is shown by one of these, and most are served by tests of their own too.
IN_EVERY_RUN = ("mocker", SHARES_WEIGHTS, EMBEDS, "tiny-vlm-epd")


class Served:
    """A launch, looked at from outside."""

    def __init__(self, process, log, ports):
        self.process, self.log, self.ports = process, log, ports

    def report(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["health"], timeout=LIMIT_S)
        try:
            connection.request("GET", "/health/ready")
            return dict(json.loads(connection.getresponse().read()))
        except OSError:
            return {"status": "unreachable"}
        finally:
            connection.close()

    def is_ready(self):
        return bool(self.report()["status"] == "ready")

    def wait_for(self, condition, limit_s=LIMIT_S):
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{self.report()}\n{self.log.read_text()}"
            time.sleep(0.05)

    def serves_every_way(self):
        """Has a canary come through each path?"""
        report = self.report()
        return report["status"] == "ready" and all(path["canaries"] for path in report["paths"].values())

    def pids(self):
        """Return name -> pid of every process of the launch but serve.py itself."""
        found = {}
        for pid in processes.descendants(self.process.pid):
            arguments = processes.command_line(pid)
            if model := processes.stub_name(arguments):
                found[model] = pid
            elif "bireme.engines.worker" in arguments:
                found["engine of " + arguments[arguments.index("--worker") + 1]] = pid
            elif "bireme.engines.memory.service" in arguments:
                found["memory service"] = pid
            elif "bireme.openai" in arguments:
                member = arguments[arguments.index("--member") + 1][0] if "--member" in arguments else ""
                found[f"frontend{member}"] = pid
            elif arguments and arguments[0].endswith(SERVER):
                found[SERVER] = pid
        return found

    def is_replaced(self, name, pid):
        return self.pids().get(name) not in (None, pid)

    def run_folder(self):
        return next(default_base().glob(f"{self.process.pid}-*"))

    def lose_run_folder(self):
        """Remove it, whatever its owners write there meanwhile."""
        folder, is_gone = self.run_folder(), False
        while not is_gone:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
                is_gone = True


@contextlib.contextmanager
def serving(recipe, log, *options):
    ports = five_ports()
    command = [sys.executable, "tools/serve.py", f"recipes/{recipe}", "--canary-interval=1", *options]
    command += [f"--{name}-port={port}" for name, port in ports.items()]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=CHECKOUT)
    served = Served(process, log, ports)
    try:
        served.wait_for(served.is_ready)
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)  # the second one: at once; the last test ends one in order
            process.wait(LIMIT_S)


def skip_unless_it_runs_here(name):
    try:
        recipe = load_recipe(CHECKOUT / "recipes" / name)
        problems = [*check_engines(recipe), *check_model(recipe)]
        folders = [recipe.worker_model_path(stage) for stage in recipe.workers]
    except ConfigError as error:
        pytest.skip(str(error))
    problems += [f"{folder} is to be fetched" for folder in folders if not Path(folder).is_dir()]
    if problems:
        pytest.skip("; ".join(problems))


def stop_each(served):
    """Let one process after the other stand still for a moment: readiness tells, and nobody shoots it."""
    for name, pid in served.pids().items():
        os.kill(pid, signal.SIGSTOP)
        try:
            served.wait_for(lambda: not served.is_ready(), NOTICED_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        served.wait_for(served.is_ready)
        assert served.pids()[name] == pid, f"{name} was shot after a moment"


def kill_each(served):
    """Kill one process after the other: each is missed or replaced at once, and back before the next one is killed."""
    for name, pid in served.pids().items():
        killed = served.pids().get(name, pid)
        os.kill(killed, signal.SIGKILL)
        replaced = functools.partial(served.is_replaced, name, killed)
        served.wait_for(lambda replaced=replaced: not served.is_ready() or replaced(), NOTICED_S)
        served.wait_for(lambda replaced=replaced: served.is_ready() and replaced())


assert set(IN_EVERY_RUN) <= set(RECIPES)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else [pytest.mark.soak]) for name in RECIPES]
)
def test_a_recipe_becomes_ready_and_serves_every_way(name, tmp_path, sample_model):
    sample_model("llama")
    skip_unless_it_runs_here(name)
    has_service = name == SHARES_WEIGHTS
    options = [f"--set=memory_service.enabled={str(has_service).lower()}"]
    if name == EMBEDS:
        options.append(f"--discovery={tmp_path / 'shared'}")
    with serving(name, tmp_path / "log", *options) as served:
        served.wait_for(served.serves_every_way)
        assert "canary_refused" not in served.log.read_text()
        nobody_has_asked(served, LOAD | (TRANSFERS if name == SHARES_WEIGHTS else set()))
        if has_service:
            engines_map_weights_that_outlive_them(served)
        if name == EMBEDS:
            both_doors_embed_alike(served)
            vectors_of_a_request_are_of_one_generation(served, tmp_path)


def nobody_has_asked(served, load):
    """Canaries are no load, in Triton's metrics and in the frontend's."""
    pages = [page(served.ports[name]) for name in ("metrics", "openai")]
    counts = {(match[1], match[2]): float(match[3]) for text in pages for match in SERIES.finditer(text)}
    assert sum(value for (name, _), value in counts.items() if name == "bireme_canaries_total") > 0
    shown = {series for series, value in counts.items() if value and series[0] in load}
    assert {series for series in shown if "/health" not in series[1]} == set()


def page(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as reply:
        return reply.read().decode()


def both_doors_embed_alike(served):
    """Through the frontend and by the Triton model; a chat is refused by name, and neighbors make sense."""
    fields = {"model": EMBEDS, "input": ["Two banks of oars", "x"], "dimensions": 8}
    status, reply = post(served.ports["openai"], "/v1/embeddings", fields)
    tensors = {"text_input": "Two banks of oars", "dimensions": 8}
    own = post(served.ports["http"], "/v2/models/embedding/generate", tensors)[1]
    assert (status, reply["usage"]["prompt_tokens"] > own["num_tokens"]) == (200, True)
    assert reply["data"][0]["embedding"] == pytest.approx(own["embedding"], abs=1e-5)
    status, reply = post(served.ports["openai"], "/v1/chat/completions", {"model": EMBEDS, "messages": []})
    assert (status, reply["error"]["code"]) == (400, "wrong_endpoint")
    documents = ["The dog naps on the hay.", "The captain drops the anchor.", "The ship crosses the sea."]
    asked = {"model": EMBEDS, "query": "The vessel sails over the ocean.", "documents": documents}
    ranked = post(served.ports["openai"], "/v1/rerank", asked)[1]["results"]
    assert [one["index"] for one in ranked] == [2, 1, 0] and ranked[0]["relevance_score"] > 0.8


def vectors_of_a_request_are_of_one_generation(served, folder):
    """Another server joins, of the next generation and another revision: its weight decides, request by request."""
    texts = [f"The captain drops anchor {number}." for number in range(4)]

    def embed():
        status, reply = post(served.ports["openai"], "/v1/embeddings", {"model": EMBEDS, "input": texts})
        assert status == 200, reply
        return np.array([one["embedding"] for one in reply["data"]])

    def are_of(vectors):
        """Return whether a request's are these."""
        return bool(np.allclose(embed(), vectors, atol=1e-3))

    before, door = embed(), free_port()
    model = changed_model(CHECKOUT / "models" / EMBEDS, folder / "new", "norm.weight")
    (folder / "key").write_text(KEY)
    of_next = ["--generation=1", "--weight=0", f"--admin-port={door}", f"--admin-key-file={folder / 'key'}"]
    shared = [f"--discovery={folder / 'shared'}", f"--set=model={model}"]
    with serving(EMBEDS, folder / "new.log", *shared, *of_next):
        new = DoorClient(f"http://127.0.0.1:{door}", KEY)
        served.wait_for(lambda: served.report()["discovery"]["workers_elsewhere"] == 1)
        assert are_of(before)
        new.post("/weight", weight=1.0)
        served.wait_for(lambda: not are_of(before))
        after = embed()
        assert np.abs(after - before).max(axis=1).min() > 0.1
        new.post("/weight", weight=0.5)
        for vectors in (before, after, before):
            while not np.allclose(found := embed(), vectors, atol=1e-3):
                assert any(np.allclose(found, one, atol=1e-3) for one in (before, after))
        new.post("/weight", weight=0.0)
        served.wait_for(lambda: all(are_of(before) for _ in range(8)))


def post(port, path, fields):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("POST", path, json.dumps(fields), {"content-type": "application/json"})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def engines_map_weights_that_outlive_them(served):
    """Kill the memory service, then the engine that has read the weights: the other one's copy serves it again."""
    log = served.log.read_text()
    assert log.count("weights_kept") == 1 and "weights_not_shared" not in log
    before = served.pids()
    os.kill(before["memory service"], signal.SIGKILL)
    served.wait_for(lambda: served.log.read_text().count("memory_service_again") == 2)
    os.kill(before["engine of prefill"], signal.SIGKILL)
    served.wait_for(lambda: served.is_replaced("engine of prefill", before["engine of prefill"]))
    served.wait_for(lambda: served.serves_every_way() and served.report()["workers"]["prefill"]["ready"])
    assert "weights_not_shared" not in served.log.read_text()
    assert served.log.read_text().count("weights_kept") == 2  # handed over once more, read from files only once


@pytest.mark.soak
@pytest.mark.parametrize("name", RECIPES)
def test_each_process_of_a_recipe_that_stands_still_or_is_killed_is_noticed(name, tmp_path, sample_model):
    sample_model("llama")
    skip_unless_it_runs_here(name)
    with serving(name, tmp_path / "log") as served:
        stop_each(served)
        kill_each(served)


@pytest.fixture(scope="module")
def mockers(tmp_path_factory, sample_model):
    """A disaggregated deployment with two frontend processes and two stubs of a pipeline."""
    sample_model("llama")
    several = ("--frontend-processes=2", "--set=pipeline.instances.completion=2")
    with serving("mocker-disagg", tmp_path_factory.mktemp("log") / "log", *several) as served:
        yield served


def test_each_process_that_stands_still_for_a_moment_is_noticed_and_left_alone(mockers):
    stop_each(mockers)


def test_each_killed_process_is_noticed_and_replaced(mockers):
    kill_each(mockers)


def test_a_worker_that_sleeps_has_no_engine_until_it_is_woken(mockers):
    folder = str(mockers.run_folder())
    assert sleep.main(["decode", "--run-folder", folder]) == 0
    mockers.wait_for(lambda: mockers.report()["workers"]["decode"]["reason"] == "asleep")
    assert mockers.report()["status"] == "not_ready"
    assert "engine of decode" not in mockers.pids()
    assert sleep.main(["decode", "--wake", "--run-folder", folder]) == 0
    mockers.wait_for(mockers.is_ready)


def test_what_stands_still_for_good_is_replaced(mockers):
    before = mockers.pids()
    stopped = {name: pid for name, pid in before.items() if name != SERVER}
    for pid in stopped.values():
        os.kill(pid, signal.SIGSTOP)
    mockers.wait_for(lambda: not mockers.is_ready(), NOTICED_S)
    mockers.wait_for(lambda: mockers.is_ready() and stopped.keys() <= mockers.pids().keys())
    assert not set(stopped.values()) & set(mockers.pids().values())


def test_a_server_that_stands_still_is_replaced(mockers):
    before = mockers.pids()[SERVER]
    os.kill(before, signal.SIGSTOP)
    mockers.wait_for(lambda: not mockers.is_ready(), NOTICED_S)
    mockers.wait_for(mockers.is_ready)
    assert mockers.pids()[SERVER] != before


def test_a_removed_run_folder_is_made_again_and_all_goes_on(mockers):
    mockers.wait_for(mockers.serves_every_way)
    before, folder = mockers.pids(), mockers.run_folder()
    entries = {path.name for path in folder.glob("*.*") if path.suffix in (".json", ".sock")}
    mockers.lose_run_folder()
    mockers.wait_for(lambda: entries <= {path.name for path in folder.glob("*.*")}, NOTICED_S)
    mockers.wait_for(mockers.is_ready)
    assert mockers.pids() == before
    os.kill(before["engine of decode"], signal.SIGKILL)  # its successor finds all that it needs, to fetch KV as well
    mockers.wait_for(lambda: not mockers.is_ready(), NOTICED_S)
    mockers.wait_for(mockers.is_ready)
    os.kill(before["generate"], signal.SIGKILL)
    mockers.wait_for(lambda: not mockers.is_ready(), NOTICED_S)
    mockers.wait_for(mockers.is_ready)


def test_a_server_that_dies_without_its_run_folder_is_started_again(mockers):
    before = mockers.pids()[SERVER]
    mockers.lose_run_folder()
    os.kill(before, signal.SIGKILL)
    mockers.wait_for(lambda: not mockers.is_ready(), NOTICED_S)
    mockers.wait_for(mockers.is_ready)
    assert mockers.pids()[SERVER] != before


def test_sigterm_ends_in_order_whatever_was_lost_before(mockers):
    """The last one: it ends the launch."""
    log = mockers.log.read_text()
    assert f"http=127.0.0.1:{mockers.ports['http']} grpc=127.0.0.1:{mockers.ports['grpc']}" in log
    members = [(pid, processes.started_at(pid)) for pid in processes.descendants(mockers.process.pid)]
    run = mockers.run_folder()
    os.kill(mockers.pids()["decode"], signal.SIGKILL)
    mockers.wait_for(lambda: not mockers.is_ready(), NOTICED_S)
    mockers.wait_for(mockers.is_ready)
    mockers.process.send_signal(signal.SIGTERM)
    assert mockers.process.wait(LIMIT_S) == 0, mockers.log.read_text()
    assert processes.survivors(members) == [] and not run.exists()
    assert not list(SHM.glob(f"bireme_{run.name}_*"))
